from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.architecture.weights import layer_kinds, layer_weights, num_parameters, weights


def shapes(name, layer):
    return {w.name.removeprefix(f"layers.{layer}."): w.shape for w in layer_weights(PRESETS[name], layer)}


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny")])
def test_counting_by_kinds_of_layers_gives_the_sum_over_all_weights(name):
    model = PRESETS[name]
    prediction = model.num_nextn_predict_layers * sum(w.numel for w in layer_weights(model, model.num_hidden_layers))
    assert num_parameters(model) + prediction == sum(w.numel for w in weights(model))
    assert len({w.name for w in weights(model)}) == len(list(weights(model)))


def test_experts_are_one_weight_a_projection_beside_a_router_and_what_every_token_visits():
    found = shapes("deepseek-v3", 3)
    assert found["mlp.router.weight"] == (256, 7168)
    assert found["mlp.experts.gate_proj.weight"] == (256, 2048, 7168)
    assert found["mlp.experts.down_proj.weight"] == (256, 7168, 2048)
    assert found["mlp.shared_experts.up_proj.weight"] == (2048, 7168)
    assert "mlp.router.weight" not in shapes("deepseek-v3", 2)


def test_latent_attention_is_made_of_narrow_projections():
    found = shapes("deepseek-v3", 0)
    assert {name: shape for name, shape in found.items() if name.endswith("proj.weight") and "attn" in name} == {
        "self_attn.q_a_proj.weight": (1536, 7168), "self_attn.q_b_proj.weight": (128 * 192, 1536),
        "self_attn.kv_b_proj.weight": (128 * 256, 512), "self_attn.o_proj.weight": (7168, 128 * 128),
    }  # fmt: skip
    assert found["self_attn.kv_a_proj_with_mqa.weight"] == (512 + 64, 7168)
    assert shapes("deepseek-v2-lite", 0)["self_attn.q_proj.weight"] == (16 * 192, 2048)


def test_gpt_oss_has_biases_everywhere_and_a_sink_a_head():
    found = shapes("gpt-oss-20b", 0)
    assert found["mlp.experts.up_proj.bias"] == (32, 2880)
    assert found["mlp.router.bias"] == (32,)
    assert found["self_attn.sinks"] == (64,)


def test_a_prediction_block_joins_two_tokens_and_keeps_the_last_kind_of_block():
    found = shapes("deepseek-v3", 61)
    assert found["eh_proj.weight"] == (7168, 2 * 7168)
    assert "mlp.experts.up_proj.weight" in found


def test_layers_with_the_same_weights_are_counted_together():
    assert layer_kinds(PRESETS["deepseek-v3"]) == [(0, 3), (3, 58)]
    assert layer_kinds(PRESETS["mixtral-8x7b"]) == [(0, 32)]
    assert layer_kinds(PRESETS["llama-3-8b"]) == [(0, 32)]


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_tensor_parallel_ranks_hold_equal_shares_of_projections_and_copies_of_norms(tp):
    model = PRESETS["llama-3-8b"]
    rows = list(layer_weights(model, 0))
    norms = sum(w.numel for w in rows if w.part == "norm")
    whole = sum(w.numel for w in rows)
    assert sum(w.local_numel(tp=tp) for w in rows) == (whole - norms) // tp + norms


def test_more_ranks_than_key_value_heads_hold_copies_of_them():
    by_name = {w.name.split(".")[-2]: w for w in layer_weights(PRESETS["llama-3-8b"], 0)}
    assert by_name["k_proj"].local_numel(tp=16) == by_name["k_proj"].numel // 8
    assert by_name["q_proj"].local_numel(tp=16) == by_name["q_proj"].numel // 16


def test_experts_are_cut_by_expert_axes_and_everything_else_is_not():
    for weight in layer_weights(PRESETS["mixtral-8x7b"], 0):
        cut = weight.numel / weight.local_numel(ep=4, expert_tp=2)
        assert cut == (8 if weight.is_expert else 1)
        assert weight.is_expert == (".experts." in weight.name)


def test_a_row_parallel_bias_is_on_every_rank_and_a_column_parallel_one_is_cut():
    by_name = {w.name.partition("self_attn.")[2]: w for w in layer_weights(PRESETS["gpt-oss-20b"], 0)}
    assert by_name["o_proj.bias"].tp_dim is None
    assert by_name["q_proj.bias"].tp_dim == 0


def test_dense_models_may_predict_several_tokens_too():
    model = replace(PRESETS["tiny-llama"], num_nextn_predict_layers=2)
    d = model.hidden_size
    block = sum(w.numel for w in layer_weights(model, 0))
    assert sum(w.numel for w in weights(model)) - num_parameters(model) == 2 * (block + 2 * d * d + 3 * d)


@pytest.mark.parametrize("name", ["tiny-gpt2", "llama-3-8b", "gpt-oss-20b", "deepseek-v3"])
def test_what_writes_to_the_residual_stream_starts_smaller_by_the_root_of_twice_the_blocks(name):
    model = PRESETS[name]
    every = [weight for weight in weights(model) if weight.init_std is not None]
    writes = [weight for weight in every if weight.name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert {weight.layer for weight in writes} == set(range(model.num_hidden_layers + model.num_nextn_predict_layers))
    deep = pytest.approx(model.initializer_range / (2 * model.num_hidden_layers) ** 0.5)
    assert all(weight.init_std == (deep if weight in writes else model.initializer_range) for weight in every)
