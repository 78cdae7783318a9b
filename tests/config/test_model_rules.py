from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS

MIXTRAL = PRESETS["tiny-mixtral"]
DEEPSEEK = PRESETS["tiny-deepseek-v3"]
LLAMA = PRESETS["tiny-llama"]
GPT2 = PRESETS["tiny-gpt2"]


@pytest.mark.parametrize(
    ("model", "changes", "key", "remedy"),
    [
        (LLAMA, {"num_experts_per_tok": 2}, "num_experts_per_tok", "set num_experts"),
        (LLAMA, {"first_k_dense_replace": 1}, "first_k_dense_replace", "set num_experts"),
        (LLAMA, {"scoring_func": "sigmoid"}, "scoring_func", "set num_experts"),
        (MIXTRAL, {"num_experts_per_tok": 5}, "num_experts_per_tok", "usual"),
        (MIXTRAL, {"num_experts_per_tok": 0}, "num_experts_per_tok", "usual"),
        (MIXTRAL, {"moe_intermediate_size": 0}, "moe_intermediate_size", "width"),
        (MIXTRAL, {"first_k_dense_replace": 2}, "first_k_dense_replace", "every layer"),
        (MIXTRAL, {"n_group": 2, "topk_group": 2}, "n_group", "topk_method"),
        (DEEPSEEK, {"n_group": 3, "topk_group": 1}, "n_group", "no groups"),
        (DEEPSEEK, {"topk_group": 5}, "topk_group", "Use 4"),
        (DEEPSEEK, {"topk_group": 1, "num_experts_per_tok": 3}, "num_experts_per_tok", "Raise topk_group"),
        (DEEPSEEK, {"routed_scaling_factor": 0.0}, "routed_scaling_factor", "usual"),
        (DEEPSEEK, {"head_dim": 32}, "head_dim", "Use 48"),
        (DEEPSEEK, {"num_key_value_heads": 2}, "num_key_value_heads", "Use 4"),
        (DEEPSEEK, {"v_head_dim": 0}, "v_head_dim", "usual"),
        (DEEPSEEK, {"qk_norm": True}, "qk_norm", "Leave it out"),
        (LLAMA, {"q_lora_rank": 8}, "q_lora_rank", "kv_lora_rank"),
        (LLAMA, {"v_head_dim": 8}, "v_head_dim", "kv_lora_rank"),
        (LLAMA, {"qk_norm_whole": True}, "qk_norm_whole", "set both"),
        (LLAMA, {"sliding_window_interval": 2}, "sliding_window_interval", "set both"),
        (LLAMA, {"partial_rotary_factor": 1.5}, "partial_rotary_factor", "0.5"),
        (LLAMA, {"partial_rotary_factor": 0.1}, "partial_rotary_factor", "0.5"),
        (GPT2, {"partial_rotary_factor": 0.5}, "partial_rotary_factor", "rotary"),
        (GPT2, {"hidden_act": "silu"}, "hidden_act", "Leave it out"),
        (LLAMA, {"num_experts": -1}, "num_experts", "range"),
    ],
)
def test_fields_that_do_not_go_together_are_refused_by_key(model, changes, key, remedy):
    (problem,) = replace(model, **changes).problems()
    assert problem.key == f"model.{key}"
    assert remedy in problem.remedy


def test_the_activation_follows_the_gate_unless_it_is_named():
    assert (LLAMA.activation, GPT2.activation) == ("silu", "gelu_pytorch_tanh")
    assert (PRESETS["gpt-oss-20b"].activation, PRESETS["nemotron-4-15b"].activation) == ("swigluoai", "relu2")


def test_leading_layers_may_be_dense_among_experts():
    assert [DEEPSEEK.is_moe(layer) for layer in range(3)] == [False, True, True]
    assert [LLAMA.is_moe(layer) for layer in range(2)] == [False, False]


def test_latent_attention_turns_its_own_part_of_a_head_and_nemotron_a_half():
    assert (PRESETS["deepseek-v3"].rotary_dim, PRESETS["deepseek-v3"].value_head_dim) == (64, 128)
    assert (PRESETS["nemotron-4-15b"].rotary_dim, PRESETS["llama-3-8b"].rotary_dim) == (64, 128)
