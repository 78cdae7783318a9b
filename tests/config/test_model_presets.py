from typing import Any

import pytest

from ultrascale.catalogue.models.model_presets import ALIASES, PRESETS, preset
from ultrascale.catalogue.models.model_table import read_aliases, read_models
from ultrascale.description.architecture.weights import num_active_parameters, num_parameters, weights
from ultrascale.description.problems import SpecError

# From the models' own pages and papers.
PUBLISHED = {
    "gpt2-small": 124_439_808, "gpt2-xl": 1_557_611_200, "llama-2-7b": 6_738_415_616, "llama-3-8b": 8_030_261_248,
    "llama-3.1-405b": 405_853_388_800, "llama-3.2-1b": 1_235_814_400, "smollm2-135m": 134_515_008, "smollm3-3b": 3_075_098_624,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "mistral-7b-v0.1": 7_241_732_096,
}  # fmt: skip

PUBLISHED |= {
    "gpt-neox-20b": 20_554_567_680, "falcon-40b": 41_303_293_952, "falcon-180b": 179_522_565_120, "olmo-2-7b": 7_298_617_344,
    "olmo-2-1b": 1_484_916_736, "gemma-3-1b": 999_885_952, "gemma-3-4b": 3_880_263_168,
    "gemma-3-12b": 11_766_034_176, "gemma-3-27b": 27_009_346_304,
    "olmo-2-13b": 13_716_198_400, "olmo-2-32b": 32_234_279_936, "olmo-3-7b": 7_298_011_136, "olmo-3-32b": 32_233_522_176,
    "llama-30b": 32_528_943_616, "llama-65b": 65_285_660_672,
    "yi-34b": 34_388_917_248, "phi-3-mini": 3_821_079_552, "phi-4": 14_659_507_200, "mistral-nemo-12b": 12_247_782_400,
    "mistral-small-24b": 23_572_403_200, "mistral-large-2": 122_610_069_504, "opt-1.3b": 1_315_758_080,
    "opt-6.7b": 6_658_473_984, "opt-13b": 12_853_473_280, "opt-30b": 29_974_540_288, "opt-66b": 65_719_701_504,
}  # fmt: skip
"""Of checkpoints on the hub, which count themselves."""
NEARLY = {
    "falcon-7b": 7_217_189_760, "bloom-176b": 176_247_271_424, "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320, "dbrx": 131_596_523_520,
}  # fmt: skip
"""The same, of which some norms or positions are not modelled: within 0.02 percent."""
BILLIONS = {
    "gpt-3-125m": 0.125, "gpt-3-350m": 0.356, "gpt-3-760m": 0.760, "gpt-3-1.3b": 1.32, "gpt-3-2.7b": 2.65, "gpt-3-6.7b": 6.66,
    "gpt-3-13b": 12.85, "gpt-3-175b": 174.6, "opt-175b": 174.6, "megatron-530b": 530, "glm-4.5": 355, "glm-4.5-air": 106,
    "llama-2-70b": 69.0, "llama-3.1-70b": 70.6, "qwen2.5-72b": 72.7, "qwen3-32b": 32.8,
}  # fmt: skip
"""Of papers, in billions, within one percent."""


# (total, active, in billions) as their papers and pages print them. GPT-OSS's active ones leave out the embedding.
EXPERTS = {
    "mixtral-8x7b": (46.7, 12.9), "mixtral-8x22b": (141, 39), "qwen3-30b-a3b": (30.5, 3.3), "qwen3-235b-a22b": (235, 22),
    "olmoe-1b-7b": (6.9, 1.3), "deepseek-v2": (236, 21), "deepseek-v3": (671, 37), "gpt-oss-20b": (20.9, 3.6),
    "gpt-oss-120b": (116.8, 5.1),
}  # fmt: skip


@pytest.mark.parametrize("name", EXPERTS)
def test_total_and_active_parameters_are_those_of_the_papers(name):
    model, (total, active) = preset(name), EXPERTS[name]
    unread = model.vocab_size * model.hidden_size if model.model_type == "gpt_oss" else 0
    assert round(num_parameters(model) / 1e9, 1) == pytest.approx(total, abs=0.5 if total == round(total) else 0.01)
    assert (num_active_parameters(model) - unread) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize(
    ("name", "billions"),
    [("kimi-k2", 1026.4), ("grok-1", 315.7), ("deepseek-v2-lite", 15.7), ("nemotron-4-15b", 15.6), ("nemotron-4-340b", 341.0)],
)
def test_models_whose_papers_round_more_are_counted_too(name, billions):
    assert num_parameters(preset(name)) / 1e9 == pytest.approx(billions, abs=0.05)


def test_multi_token_prediction_of_deepseek_v3_adds_11_5_billion_that_are_its_own():
    # The model's README: 14B of prediction weights, of which 0.9B are the embedding and 0.9B the head once more.
    model = preset("deepseek-v3")
    assert (sum(w.numel for w in weights(model)) - num_parameters(model)) / 1e9 == pytest.approx(11.6, abs=0.05)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_the_published_number_of_parameters(name):
    assert num_parameters(preset(name)) == PUBLISHED[name]


@pytest.mark.parametrize("name", NEARLY)
def test_a_preset_without_some_norms_has_nearly_the_published_number(name):
    assert num_parameters(preset(name)) == pytest.approx(NEARLY[name], rel=2e-4)


@pytest.mark.parametrize("name", BILLIONS)
def test_a_preset_has_the_billions_of_its_paper(name):
    assert num_parameters(preset(name)) / 1e9 == pytest.approx(BILLIONS[name], rel=0.01)


@pytest.mark.parametrize(("name", "active"), [("dbrx", 36), ("glm-4.5", 32), ("glm-4.5-air", 12)])
def test_active_parameters_are_those_of_the_papers_but_for_the_embedding(name, active):
    model = preset(name)
    unread = model.vocab_size * model.hidden_size
    assert (num_active_parameters(model) - unread) / 1e9 == pytest.approx(active, rel=0.07)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"), ("Llama 3 8B", "llama-3-8b"), ("llama3_8b", "llama-3-8b"),
        ("Qwen/Qwen2.5-72B-Instruct", "qwen2.5-72b"), ("mistralai/Mistral-7B-Instruct-v0.1", "mistral-7b-v0.1"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"), ("allenai/OLMo-2-1124-7B", "olmo-2-7b"),
        ("allenai/Olmo-3-1025-7B", "olmo-3-7b"), ("allenai/Olmo-3-1125-32B", "olmo-3-32b"),
        ("deepseek-ai/DeepSeek-V3-Base", "deepseek-v3"), ("google/gemma-2-9b-it", "gemma-2-9b"),
        ("google/gemma-3-27b-pt", "gemma-3-27b"),
        ("bigscience/bloom", "bloom-176b"), ("moonshotai/Kimi-K2-Instruct-0711", "kimi-k2"),
        ("mistralai/Mistral-Small-24B-Instruct-2501", "mistral-small-24b"), ("deepseek-ai/DeepSeek-V3-0324", "deepseek-v3"),
        ("allenai/OLMoE-1B-7B-0924-Instruct", "olmoe-1b-7b"), ("deepseek-ai/DeepSeek-R1-0528", "deepseek-v3"),
        ("HuggingFaceTB/SmolLM3-3B-Base", "smollm3-3b"), ("mistralai/Mistral-Nemo-Instruct-2407", "mistral-nemo-12b"),
        ("GPT-3 13B", "gpt-3-13b"), ("MT-NLG 530B", "megatron-530b"), ("gpt2", "gpt2-small"),
        ("GPT-2 XL", "gpt2-xl"), ("LLaMA-1-7B", "llama-2-7b"), ("Nemotron-15B", "nemotron-4-15b"),
        ("DeepSeekV3", "deepseek-v3"),
    ],
)  # fmt: skip
def test_names_of_the_hub_are_read(told, name):
    assert preset(told) is PRESETS[name]


@pytest.mark.parametrize(
    ("told", "rule", "remedy"),
    [
        ("40B", "is a size", "falcon-40b (41.3B)"), ("8030000000", "is a size", "llama-3-8b (8.03B)"),
        ("/nowhere/config.json", "there is no file or folder", "config.json"), ("llama-40b", "no model", "Did you mean llama-"),
        ("llama-3-8b-4x", "no model", "llama-3-8b"), ("moonshotai/Kimi-K2-Instruct-0905", "no model", "kimi-k2"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "no model", "qwen3-30b-a3b"),  # longer positions, turned otherwise
        ("9" * 400, "no model", "config.json"),
    ],
)  # fmt: skip
def test_what_is_no_name_is_never_taken_for_the_nearest(told, rule, remedy):
    with pytest.raises(SpecError) as error:
        preset(told)
    (problem,) = error.value.problems
    assert rule in problem.rule and remedy in problem.remedy


@pytest.mark.parametrize(
    ("name", "norm_eps", "rope_theta", "positions"),
    [
        ("llama-3-8b", 1e-5, 5e5, 8192), ("qwen2.5-14b", 1e-5, 1e6, 131072), ("qwen2.5-7b", 1e-6, 1e6, 131072),
        ("qwen3-8b", 1e-6, 1e6, 40960), ("smollm2-1.7b", 1e-5, 1.3e5, 8192), ("smollm3-3b", 1e-6, 5e6, 65536),
        ("mistral-7b-v0.3", 1e-5, 1e6, 32768),
    ],
)  # fmt: skip
def test_what_no_count_can_see_is_as_published(name, norm_eps, rope_theta, positions):
    model = preset(name)
    assert (model.norm_eps, model.rope_theta, model.max_position_embeddings) == (norm_eps, rope_theta, positions)


@pytest.mark.parametrize(
    ("name", "vocabulary", "theta", "window"),
    [("v0.1", 32000, 1e4, 4096), ("v0.2", 32000, 1e6, None), ("v0.3", 32768, 1e6, None), (None, 32768, 1e6, None)],
)
def test_versions_of_mistral_7b_differ_and_the_name_without_one_is_the_newest(name, vocabulary, theta, window):
    model = preset("mistral-7b" if name is None else f"mistralai/Mistral-7B-Instruct-{name}")
    assert (model.vocab_size, model.rope_theta, model.sliding_window) == (vocabulary, theta, window)


@pytest.mark.parametrize("name", [n for n, m in PRESETS.items() if m.model_type == "gpt2"])
def test_gpt2_shapes_follow_the_seed_formula_plus_positions(name):
    model = PRESETS[name]
    h, layers, v = model.hidden_size, model.num_hidden_layers, model.vocab_size
    assert num_parameters(model) == h * v + layers * (12 * h**2 + 13 * h) + 2 * h + model.max_position_embeddings * h


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_breaks_no_rule_and_knows_its_name(name):
    assert (PRESETS[name].problems(), PRESETS[name].name) == ([], name)


def test_names_are_read_in_any_case_and_short_names_lead_to_presets():
    assert preset("Llama-3-8B") is PRESETS["llama-3-8b"]
    assert set(ALIASES.values()) <= set(PRESETS)


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(SpecError, match=r"llama-3-8bb.*Did you mean llama-3-8b"):
        preset("llama-3-8bb")


@pytest.mark.parametrize("name", [name for name, model in PRESETS.items() if model.model_type not in ("grok", "other")])
def test_transformers_counts_the_same_parameters(name):
    import torch
    import transformers

    from ultrascale.description.architecture.huggingface import to_hf

    config = transformers.AutoConfig.for_model(**to_hf(PRESETS[name]))
    with torch.device("meta"):
        theirs = transformers.AutoModelForCausalLM.from_config(config)
    assert theirs.num_parameters() == num_parameters(PRESETS[name])


FAMILY: dict[str, Any] = {
    "columns": ["vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "max_position_embeddings"],
    "sizes": "small 100 64 2 4 128\nsmall-wide 100 128 2 4 128\n",
    "differences": [{"models": ["small*"], "norm_eps": 1e-6}, {"models": ["small"], "qk_norm": True}],
}


def test_a_family_s_later_differences_win_and_a_name_without_a_star_is_that_model_alone() -> None:
    later = {"models": ["small-wide"], "norm_eps": 1e-4}
    models = read_models("m.toml", {"family": FAMILY | {"differences": [*FAMILY["differences"], later]}})
    assert {name: (model.norm_eps, model.qk_norm, model.intermediate_size) for name, model in models.items()} == {
        "small": (1e-6, True, 256), "small-wide": (1e-4, False, 512),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sices": ""}, "m.toml: family.sices: is no key of such an entry"),
        ({"columns": ["vocab_size", "width"]}, "m.toml: family.columns.width: is no field of a model"),
        ({"common": {"norm_epsilon": 1}}, "m.toml: family.common.norm_epsilon: is no field of a model. Did you mean norm_eps?"),
        ({"common": {"of": ["small"]}}, "m.toml: family.common.of: is no field of a model"),
        ({"sizes": "small 100 64 2 4\n"}, "m.toml: family.sizes: small: has 4 numbers for 5 columns"),
        (
            {"columns": ["hidden_size", "num_attention_heads"], "sizes": "small 64 4\n"},
            "m.toml: family.sizes: small: is no model",
        ),
        ({"sizes": "small 100 64 2 four 128\n"}, "m.toml: family.sizes: small: is not all numbers"),
        ({"sizes": FAMILY["sizes"] * 2}, "m.toml: family.sizes: small is there twice"),
        ({"differences": [{"norm_eps": 1}]}, "m.toml: family.differences[0].models: is missing"),
        ({"differences": [{"models": ["large*"]}]}, "m.toml: family.differences[0].models: 'large*' is the name of no model"),
        ({"differences": [{"models": ["small"], "of": 1}]}, "m.toml: family.differences[0].of: is no field of a model"),
        (
            {"differences": [{"models": ["small"], "rope_scaling": {"kind": "linear"}}]},
            "m.toml: family.differences[0].rope_scaling.kind: is no field of a model",
        ),
    ],
)
def test_a_mistake_in_the_table_of_models_is_named_with_file_table_and_key(change, message) -> None:
    with pytest.raises(SpecError) as error:
        read_models("m.toml", {"family": FAMILY | change})
    assert message in str(error.value)


def test_other_names_of_models_are_those_of_models_that_are_there() -> None:
    models = read_models("m.toml", {"family": FAMILY})
    for aliases, message in (
        ({"tiny": "small-2"}, "m.toml: aliases.tiny: is 'small-2', which is no model's name"),
        ({"small": "small-wide"}, "m.toml: aliases.small: is the name of a model itself"),
    ):
        with pytest.raises(SpecError) as error:
            read_aliases("m.toml", aliases, models)
        assert message in str(error.value)
