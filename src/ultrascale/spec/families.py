"""What each Hugging Face family fixes: the fields of `Model` that its `config.json` cannot say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultrascale.spec.model import Model, ModelType
from ultrascale.spec.problems import Problem

_ROTARY: dict[str, Any] = {"norm": "rmsnorm", "gated_mlp": True, "position_embedding": "rotary"}
_NO_BIAS: dict[str, Any] = {"attention_output_bias": False, "mlp_bias": False}
# What most families do not have. Where one of them is fixed, the rules of `Model` fix the fields that go with it.
_WITHOUT: dict[str, Any] = {
    "hidden_act": None, "attention_sinks": False, "partial_rotary_factor": 1.0, "sliding_window_interval": 1,
    "qk_norm_whole": False, "kv_lora_rank": None, "num_nextn_predict_layers": 0,
}  # fmt: skip
_DENSE = _WITHOUT | {"num_experts": 0}
_ALL_SEEN: dict[str, Any] = {"sliding_window": None, "no_rope_layer_interval": None}
_SOFTMAX_ROUTER: dict[str, Any] = {
    "scoring_func": "softmax", "topk_method": "greedy", "routed_scaling_factor": 1.0, "shared_expert_intermediate_size": 0,
}  # fmt: skip
_LATENT = {key: value for key, value in _WITHOUT.items() if key not in ("kv_lora_rank", "num_nextn_predict_layers")}


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type."""

    architecture: str
    """The class name written into `config.json`; empty where transformers has none."""
    fixed: dict[str, Any]
    """Fields of `Model` that always have this value."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        _DENSE | _ALL_SEEN | {
            "norm": "layernorm", "gated_mlp": False, "position_embedding": "learned", "qkv_bias": True, "mlp_bias": True,
            "attention_output_bias": True, "qk_norm": False,
        },
    ),
    "llama": Family("LlamaForCausalLM", _ROTARY | _DENSE | _ALL_SEEN | {"qk_norm": False}),
    "mistral": Family(
        "MistralForCausalLM",
        _ROTARY | _DENSE | _NO_BIAS | {
            "qkv_bias": False, "qk_norm": False, "max_window_layers": 0, "no_rope_layer_interval": None,
        },
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _ROTARY | _DENSE | _NO_BIAS | {"qkv_bias": True, "qk_norm": False, "no_rope_layer_interval": None}
    ),
    "qwen3": Family(
        "Qwen3ForCausalLM", _ROTARY | _DENSE | {"qk_norm": True, "mlp_bias": False, "no_rope_layer_interval": None}
    ),
    "smollm3": Family("SmolLM3ForCausalLM", _ROTARY | _DENSE | {"qk_norm": False, "sliding_window": None}),
    "nemotron": Family(
        "NemotronForCausalLM",
        {key: value for key, value in _DENSE.items() if key != "partial_rotary_factor"} | _ALL_SEEN | {
            "norm": "layernorm", "gated_mlp": False, "position_embedding": "rotary", "hidden_act": "relu2", "qk_norm": False,
        },
    ),
    "mixtral": Family(
        "MixtralForCausalLM",
        _ROTARY | _WITHOUT | _NO_BIAS | _SOFTMAX_ROUTER | {
            "qkv_bias": False, "qk_norm": False, "max_window_layers": 0, "no_rope_layer_interval": None,
            "first_k_dense_replace": 0, "norm_topk_prob": True,
        },
    ),
    "qwen3_moe": Family(
        "Qwen3MoeForCausalLM", _ROTARY | _WITHOUT | _ALL_SEEN | _SOFTMAX_ROUTER | {"qk_norm": True, "mlp_bias": False}
    ),
    "olmoe": Family(
        "OlmoeForCausalLM",
        _ROTARY | _WITHOUT | _ALL_SEEN | _SOFTMAX_ROUTER | {
            "qk_norm": True, "qk_norm_whole": True, "mlp_bias": False, "first_k_dense_replace": 0,
        },
    ),
    "deepseek_v2": Family(
        "DeepseekV2ForCausalLM",
        _ROTARY | _LATENT | _ALL_SEEN | {
            "qk_norm": False, "mlp_bias": False, "scoring_func": "softmax", "num_nextn_predict_layers": 0,
            "norm_topk_prob": False,
        },
    ),
    "deepseek_v3": Family(
        "DeepseekV3ForCausalLM",
        _ROTARY | _LATENT | _ALL_SEEN | {
            "qk_norm": False, "mlp_bias": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        },
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        _ROTARY | _WITHOUT | _SOFTMAX_ROUTER | {
            "qk_norm": False, "mlp_bias": True, "hidden_act": "swigluoai", "attention_sinks": True, "max_window_layers": 0,
            "sliding_window_interval": 2, "no_rope_layer_interval": None, "first_k_dense_replace": 0, "norm_topk_prob": True,
        },
    ),
    "grok": Family("", {}),
    "other": Family("", {}),  # shapes that are planned and nothing else
}  # fmt: skip
WITH_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v3", "gpt_oss")
WITH_LATENT_ATTENTION = ("deepseek_v2", "deepseek_v3")


def family(model_type: ModelType | str) -> Family:
    """The family of a `model_type` that has been checked."""
    return FAMILIES[model_type]


def export_problems(model: Model) -> list[Problem]:
    """Why `model` could not be loaded by transformers as its `model_type`; empty if it could."""
    kind = model.model_type
    if not FAMILIES[kind].architecture:
        rule = f"is {kind}, which transformers does not know"
        return [Problem("model.model_type", rule, "Choose another family, or set checkpoint.export = false.")]
    found: list[Problem] = []

    def expect(key: str, value: Any) -> None:
        if getattr(model, key) != value:
            rule = f"is {getattr(model, key)!r}, but a Hugging Face {kind} model always has {value!r}"
            found.append(Problem(f"model.{key}", rule, _export_remedy(model, key, value)))

    for key, value in FAMILIES[kind].fixed.items():
        expect(key, value)
    if kind == "gpt2":
        expect("num_key_value_heads", model.num_attention_heads)
    if kind not in ("gpt2", "mistral", "qwen2", "mixtral"):
        expect("attention_output_bias", model.qkv_bias)
    if kind in ("mixtral", "olmoe", "gpt_oss"):
        expect("intermediate_size", model.moe_intermediate_size)
    found += _parts_problems(model)
    if kind in ("gpt2", "llama") and model.num_attention_heads and model.hidden_size % model.num_attention_heads:
        rule = f"must divide hidden_size = {model.hidden_size} to be exported as {kind}, is {model.num_attention_heads}"
        found.append(Problem("model.num_attention_heads", rule, "Change one of the two, or set checkpoint.export = false."))
    elif kind == "gpt2":
        expect("head_dim", model.hidden_size // max(1, model.num_attention_heads))
    return found


def _parts_problems(model: Model) -> list[Problem]:
    """Parts that a family cannot be without, or has in whole numbers only."""
    kind, found = model.model_type, []
    remedy = "Choose another model_type, or set checkpoint.export = false."
    for key, kinds in (("num_experts", WITH_EXPERTS), ("kv_lora_rank", WITH_LATENT_ATTENTION)):
        if kind in kinds and not getattr(model, key):
            found.append(Problem(f"model.{key}", f"is missing, but a Hugging Face {kind} model always has it", remedy))
    if model.moe_intermediate_size and model.shared_expert_intermediate_size % model.moe_intermediate_size:
        rule = f"must be a multiple of moe_intermediate_size = {model.moe_intermediate_size}"
        found.append(Problem("model.shared_expert_intermediate_size", rule, remedy))
    return found


def _export_remedy(model: Model, key: str, value: Any) -> str:
    wanted = getattr(model, key)
    others = [name for name, other in FAMILIES.items() if key in other.fixed and other.fixed[key] == wanted]
    also = f", model_type = {' or '.join(others)}" if others else ""
    return f"Set it to {value!r}{also}, or set checkpoint.export = false."
