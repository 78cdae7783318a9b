import json
import re
from dataclasses import replace
from pathlib import Path

import models.families
import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.architecture.families import FAMILIES, TRAINED, export_problems
from ultrascale.description.architecture.huggingface import from_hf, model_from_config, to_hf
from ultrascale.description.architecture.model import RopeScaling
from ultrascale.description.problems import SpecError

LLAMA_3_1_8B = {  # as published
    "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 128000,
    "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": False, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0, "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.43.0.dev0",
    "use_cache": True, "vocab_size": 128256,
}  # fmt: skip

GEMMA_3_1B = {  # as published
    "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None,
    "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None,
    "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "hidden_size": 1152, "initializer_range": 0.02,
    "intermediate_size": 6912, "max_position_embeddings": 32768, "model_type": "gemma3_text", "num_attention_heads": 4,
    "num_hidden_layers": 26, "num_key_value_heads": 1, "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512,
    "sliding_window_pattern": 6, "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True,
    "vocab_size": 262144,
}  # fmt: skip

OLMO_3_7B = {  # as published
    "architectures": ["Olmo3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "eos_token_id": 100257,
    "hidden_act": "silu", "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 11008,
    "layer_types": (["sliding_attention"] * 3 + ["full_attention"]) * 8, "max_position_embeddings": 65536,
    "model_type": "olmo3", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 32,
    "pad_token_id": 100277, "rms_norm_eps": 1e-06, "rope_scaling": {
        "attention_factor": 1.2079441541679836, "beta_fast": 32, "beta_slow": 1, "factor": 8.0,
        "original_max_position_embeddings": 8192, "rope_type": "yarn",
    },
    "rope_theta": 500000, "sliding_window": 4096, "tie_word_embeddings": False, "use_cache": False, "vocab_size": 100278,
}  # fmt: skip

# grok is planned from its preset only: transformers does not know it.
KNOWN = [name for name, family in FAMILIES.items() if family.architecture]
EXPORTED = [name for name, model in PRESETS.items() if model.model_type in KNOWN]
DEEPSEEK_V3 = {  # as published, without what all configs share
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "aux_loss_alpha": 0.001,
    "bos_token_id": 0, "eos_token_id": 1, "ep_size": 1, "first_k_dense_replace": 3, "hidden_act": "silu", "hidden_size": 7168,
    "initializer_range": 0.02, "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "model_type": "deepseek_v3", "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128, "num_experts_per_tok": 8,
    "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1, "pretraining_tp": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
    "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8"},
    "rms_norm_eps": 1e-06, "rope_scaling": {
        "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096, "type": "yarn",
    },
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
    "tie_word_embeddings": False, "topk_group": 4, "topk_method": "noaux_tc", "torch_dtype": "bfloat16", "use_cache": True,
    "v_head_dim": 128, "vocab_size": 129280,
}  # fmt: skip


def refused(config, **changes):
    """The problems of a config with some keys changed, by key."""
    with pytest.raises(SpecError) as caught:
        model_from_config(config | changes)
    return {problem.key: problem for problem in caught.value.problems}


def tiny(kind, **changes):
    name = f"tiny-{kind.replace('_', '-')}"
    return json.loads(json.dumps(to_hf(PRESETS[name]))) | changes


def as_read(model):
    """A file's coefficient of a balance loss is kept and not applied."""
    return replace(model, router_aux_loss_scope="none") if model.router_aux_loss_coef else model


@pytest.mark.parametrize("name", EXPORTED)
def test_export_then_import_gives_the_same_model(name):
    assert model_from_config(json.loads(json.dumps(to_hf(PRESETS[name]))), name=name) == as_read(PRESETS[name])


@pytest.mark.parametrize("name", EXPORTED)
def test_the_config_that_transformers_writes_after_reading_ours_is_the_same_model(name, tmp_path):
    import transformers

    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text(json.dumps(to_hf(PRESETS[name])))
    transformers.AutoConfig.from_pretrained(tmp_path / name).save_pretrained(tmp_path / name)
    assert from_hf(tmp_path / name) == as_read(PRESETS[name])


def test_a_published_config_is_the_preset():
    assert model_from_config(LLAMA_3_1_8B, name="llama-3.1-8b") == PRESETS["llama-3.1-8b"]


@pytest.mark.parametrize("kind", KNOWN)
def test_missing_keys_take_the_defaults_of_transformers(kind):
    import transformers

    # For which transformers has no default, or one (42, of which 21 would turn) that cannot be.
    given = {"deepseek_v2": {"num_experts_per_tok": 6}, "glm4_moe": {"head_dim": 128}}.get(kind, {})
    theirs = transformers.AutoConfig.for_model(kind, **given)
    assert model_from_config({"model_type": kind} | given) == model_from_config(json.loads(theirs.to_json_string()))


def test_a_published_config_with_experts_is_the_preset_and_kimis_is_another_name_for_it():
    assert model_from_config(DEEPSEEK_V3, name="deepseek-v3") == as_read(PRESETS["deepseek-v3"])
    kimi = DEEPSEEK_V3 | {"model_type": "kimi_k2"}
    assert model_from_config(kimi, name="deepseek-v3") == as_read(PRESETS["deepseek-v3"])


def test_qwens_list_of_dense_layers_becomes_a_number_of_first_ones():
    model = model_from_config(tiny("qwen3_moe", mlp_only_layers=[0]))
    assert [model.is_moe(layer) for layer in range(2)] == [False, True]
    assert model_from_config(to_hf(model)) == model
    assert "mlp_only_layers" in refused(tiny("qwen3_moe"), mlp_only_layers=[1])


def test_gpt_oss_has_a_window_on_every_other_layer():
    model = PRESETS["gpt-oss-20b"]
    assert [model.window(layer) for layer in range(4)] == [128, None, 128, None]
    assert "layer_types" in refused(tiny("gpt_oss"), layer_types=["full_attention", "sliding_attention"])


def test_gemma_3_sees_everything_at_every_sixth_layer_and_turns_there_by_another_base():
    model = PRESETS["gemma-3-4b"]
    assert [layer for layer in range(14) if model.window(layer) is None] == [5, 11]
    assert [layer for layer in range(14) if not model.is_rope_local(layer)] == [5, 11]
    assert "layer_types" in refused(tiny("gemma3_text"), layer_types=["full_attention", "sliding_attention"])
    whole = refused(tiny("gemma3_text"), layer_types=["full_attention"] * tiny("gemma3_text")["num_hidden_layers"])
    assert "n at least 2" in whole["layer_types"].rule
    local = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    key = "rope_parameters.sliding_attention"
    assert key in refused(tiny("gemma3_text"), rope_parameters={"full_attention": None, "sliding_attention": local})
    assert "final_logit_softcapping" in refused(tiny("gemma3_text"), final_logit_softcapping=30.0)


def test_gemma_3_is_read_as_published_with_the_cache_that_its_file_asks_for():
    assert model_from_config(GEMMA_3_1B, name="gemma-3-1b") == PRESETS["gemma-3-1b"]


def test_olmo_3_is_read_as_published_and_its_windowed_layers_are_not_stretched():
    model = PRESETS["olmo-3-7b"]
    assert model_from_config(OLMO_3_7B, name="olmo-3-7b") == model
    plain = {key: value for key, value in OLMO_3_7B.items() if key not in ("layer_types", "rope_theta", "rope_scaling")}
    assert model_from_config(plain | {"sliding_window": 4096}, name="olmo-3-7b") == replace(model, rope_scaling=None)
    assert [layer for layer in range(9) if not model.is_rope_local(layer)] == [3, 7]


def test_olmo_3_has_one_rope_base_that_transformers_4_and_5_read_alike():
    assert "transformers 5" in refused(OLMO_3_7B, rope_theta=10000)["rope_theta"].rule
    tables = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 2e4}}
    model = model_from_config({k: v for k, v in OLMO_3_7B.items() if k[:4] != "rope"} | {"rope_parameters": tables})
    assert (model.rope_theta, model.rope_local_base_freq) == (2e4, 1e4)
    assert {problem.key for problem in export_problems(model)} == {"model.rope_theta", "model.rope_local_base_freq"}


def test_the_new_form_of_rotary_parameters_says_the_same():
    new = {key: value for key, value in LLAMA_3_1_8B.items() if key not in ("rope_theta", "rope_scaling")}
    new["rope_parameters"] = LLAMA_3_1_8B["rope_scaling"] | {"rope_theta": 500000.0}
    assert model_from_config(new, name="llama-3.1-8b") == PRESETS["llama-3.1-8b"]


def test_yarn_is_read_with_its_old_name_for_the_type():
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    model = model_from_config(tiny("qwen2", rope_scaling=scaling))
    assert model.rope_scaling == RopeScaling("yarn", 4.0, 32768)
    assert model_from_config(to_hf(model)) == model


def test_qwens_window_is_off_unless_switched_on():
    assert model_from_config(tiny("qwen2", sliding_window=64, max_window_layers=1)).sliding_window is None
    on = model_from_config(tiny("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1))
    assert [on.window(layer) for layer in range(2)] == [None, 64]
    assert model_from_config(to_hf(on)) == on


def test_qwens_layer_types_say_where_the_window_starts():
    types = ["full_attention", "sliding_attention"]
    model = model_from_config(tiny("qwen3", use_sliding_window=True, sliding_window=8, layer_types=types))
    assert (model.sliding_window, model.max_window_layers) == (8, 1)
    mixed = tiny("qwen3", use_sliding_window=True, sliding_window=8, layer_types=types[::-1])
    assert "layer_types" in refused(mixed)


def test_layer_types_that_transformers_does_not_read_are_refused_and_change_no_window():
    for types in (["full_attention"] * 2, ["full_attention", "sliding_attention"]):
        assert "layer_types" in refused(tiny("mixtral", sliding_window=8, layer_types=types))


def test_mistral_without_the_key_has_transformers_window_and_null_has_none():
    assert model_from_config({"model_type": "mistral"}).sliding_window == 4096
    assert model_from_config(tiny("mistral", sliding_window=None)).sliding_window is None


def test_smollm3_lists_of_rotary_layers_become_an_interval():
    assert model_from_config(tiny("smollm3", no_rope_layers=[1, 0, 1, 0])).no_rope_layer_interval == 2
    assert model_from_config(tiny("smollm3", no_rope_layers=[1, 1, 1, 1])).no_rope_layer_interval is None
    assert "no_rope_layers" in refused(tiny("smollm3"), no_rope_layers=[0, 1, 1, 1])


def test_a_model_of_smollm3_without_bare_layers_comes_back():
    model = replace(PRESETS["tiny-smollm3"], no_rope_layer_interval=None)
    assert model_from_config(to_hf(model), name=model.name) == model


@pytest.mark.parametrize(
    ("kind", "key", "value"),
    [
        ("llama", "hidden_act", "gelu"), ("llama", "rope_scaling", {"rope_type": "dynamic", "factor": 2.0}),
        ("llama", "rope_parameters", {"rope_type": "longrope"}), ("llama", "num_experts", 8),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "quantization_config", {"bits": 4}), ("llama", "use_sliding_window", True),
        ("gpt2", "activation_function", "relu"),
        ("gpt2", "scale_attn_by_inverse_layer_idx", True), ("gpt2", "add_cross_attention", True), ("gpt2", "n_head", 3),
        ("llama", "hidden_size", "4096"), ("llama", "num_hidden_layers", True), ("llama", "rope_theta", -1.0),
        ("smollm3", "use_sliding_window", True), ("llama", "num_key_value_heads", 3), ("llama", "logit_scale", 0.1),
        ("olmoe", "clip_qkv", 8.0), ("mixtral", "router_jitter_noise", 0.1), ("qwen3_moe", "decoder_sparse_step", 2),
        ("deepseek_v2", "topk_method", "noaux_tc"), ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "n_group", 3), ("gpt_oss", "swiglu_limit", 5.0), ("nemotron", "hidden_act", "silu"),
    ],
)  # fmt: skip
def test_what_cannot_be_represented_is_refused_by_key(kind, key, value):
    assert any(found.removeprefix("model.").startswith(key) for found in refused(tiny(kind), **{key: value}))


def test_unknown_rope_keys_are_refused_by_key():
    scaling = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "mscale": 0.7}
    assert list(refused(tiny("llama", rope_scaling=scaling))) == ["rope_scaling.mscale"]


def test_another_model_type_is_refused_with_those_that_work():
    assert "gpt2, llama, mistral, qwen2, qwen3, smollm3, olmo2" in refused({"model_type": "gemma3"})["model_type"].rule


def test_all_refusals_are_told_at_once_with_the_file(tmp_path):
    config = tiny("llama", hidden_act="gelu", num_experts=8, rope_scaling={"rope_type": "dynamic"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(SpecError) as caught:
        from_hf(tmp_path)
    assert {p.key for p in caught.value.problems} == {"hidden_act", "num_experts", "rope_scaling.rope_type"}
    assert {p.where for p in caught.value.problems} == {str(tmp_path / "config.json")}


def test_a_missing_or_broken_file_is_named(tmp_path):
    with pytest.raises(SpecError, match=r"there is no .*config\.json"):
        from_hf(tmp_path)
    (tmp_path / "config.json").write_text("{\n  nonsense")
    with pytest.raises(SpecError, match=r"config\.json:2: is not JSON"):
        from_hf(tmp_path / "config.json")


def test_a_model_its_family_cannot_say_is_not_exported():
    model = replace(PRESETS["tiny-llama"], qk_norm=True)
    (problem,) = export_problems(model)
    assert (problem.key, "model_type = qwen3" in problem.remedy) == ("model.qk_norm", True)
    with pytest.raises(SpecError):
        to_hf(model)


@pytest.mark.parametrize(("key", "value"), [("num_hidden_layers", 10**30), ("layer_types", "x"), ("no_rope_layers", 3)])
def test_values_of_any_kind_are_refused_and_never_worked_through(key, value):
    assert key in refused(tiny("smollm3"), **{key: value})


def test_the_folder_of_a_run_that_stands_for_its_model_is_answered_with_what_it_exported(tmp_path):
    (tmp_path / "first" / "export").mkdir(parents=True)
    (tmp_path / "first" / "export" / "config.json").write_text("{}")
    with pytest.raises(SpecError) as error:
        from_hf(tmp_path / "first")
    assert error.value.problems[0].remedy == f"Give {tmp_path / 'first' / 'export'}, the model that this run exported."


def test_a_key_that_is_there_twice_is_refused_by_its_name(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 64, "hidden_size": 128}')
    with pytest.raises(SpecError, match="hidden_size is there twice"):
        from_hf(tmp_path)


def test_every_family_is_compared_with_transformers_and_named_on_the_pages():
    """A family that the lists of tests lack would be proven by its preset alone."""
    docs = Path(__file__).parents[2] / "docs"
    describe, support = ((docs / name).read_text() for name in ("describe.md", "support.md"))
    assert {model.model_type for model in (models.families.FAMILIES | models.families.EXPERT_FAMILIES).values()} == {*TRAINED}
    assert [kind for kind in KNOWN if not re.search(rf"[` ]{kind}[` ]", describe)] == []
    assert [kind for kind in TRAINED if f"| {kind} |" not in support] == []
