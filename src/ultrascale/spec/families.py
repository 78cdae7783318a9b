"""What each Hugging Face family fixes: the fields of `Model` that its `config.json` cannot say otherwise."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ultrascale.spec.model import Model, ModelType
from ultrascale.spec.problems import Problem

_ROTARY: dict[str, Any] = {"norm": "rmsnorm", "gated_mlp": True, "position_embedding": "rotary"}
_NO_BIAS: dict[str, Any] = {"attention_output_bias": False, "mlp_bias": False}


@dataclass(frozen=True)
class Family:
    """One Hugging Face model type."""

    architecture: str
    """The class name written into `config.json`."""
    fixed: dict[str, Any]
    """Fields of `Model` that always have this value."""


FAMILIES: dict[str, Family] = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {
            "norm": "layernorm", "gated_mlp": False, "position_embedding": "learned", "qkv_bias": True, "mlp_bias": True,
            "attention_output_bias": True, "qk_norm": False, "sliding_window": None, "no_rope_layer_interval": None,
        },
    ),
    "llama": Family(
        "LlamaForCausalLM", _ROTARY | {"qk_norm": False, "sliding_window": None, "no_rope_layer_interval": None}
    ),
    "mistral": Family(
        "MistralForCausalLM",
        _ROTARY | _NO_BIAS | {"qkv_bias": False, "qk_norm": False, "max_window_layers": 0, "no_rope_layer_interval": None},
    ),
    "qwen2": Family(
        "Qwen2ForCausalLM", _ROTARY | _NO_BIAS | {"qkv_bias": True, "qk_norm": False, "no_rope_layer_interval": None}
    ),
    "qwen3": Family("Qwen3ForCausalLM", _ROTARY | {"qk_norm": True, "mlp_bias": False, "no_rope_layer_interval": None}),
    "smollm3": Family("SmolLM3ForCausalLM", _ROTARY | {"qk_norm": False, "sliding_window": None}),
}  # fmt: skip


def family(model_type: ModelType | str) -> Family:
    """The family of a `model_type` that has been checked."""
    return FAMILIES[model_type]


def export_problems(model: Model) -> list[Problem]:
    """Why `model` could not be loaded by transformers as its `model_type`; empty if it could."""
    kind = model.model_type
    found: list[Problem] = []

    def expect(key: str, value: Any) -> None:
        if getattr(model, key) != value:
            rule = f"is {getattr(model, key)!r}, but a Hugging Face {kind} model always has {value!r}"
            found.append(Problem(f"model.{key}", rule, _export_remedy(model, key, value)))

    for key, value in FAMILIES[kind].fixed.items():
        expect(key, value)
    if kind == "gpt2":
        expect("num_key_value_heads", model.num_attention_heads)
    if kind in ("llama", "qwen3", "smollm3"):
        expect("attention_output_bias", model.qkv_bias)
    if kind in ("gpt2", "llama") and model.num_attention_heads and model.hidden_size % model.num_attention_heads:
        rule = f"must divide hidden_size = {model.hidden_size} to be exported as {kind}, is {model.num_attention_heads}"
        found.append(Problem("model.num_attention_heads", rule, "Change one of the two, or set checkpoint.export = false."))
    elif kind == "gpt2":
        expect("head_dim", model.hidden_size // max(1, model.num_attention_heads))
    return found


def _export_remedy(model: Model, key: str, value: Any) -> str:
    wanted = getattr(model, key)
    others = [name for name, other in FAMILIES.items() if key in other.fixed and other.fixed[key] == wanted]
    also = f", model_type = {' or '.join(others)}" if others else ""
    return f"Set it to {value!r}{also}, or set checkpoint.export = false."
