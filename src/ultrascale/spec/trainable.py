"""What the trainer runs so far, of all that can be described and planned. Whoever starts something refuses the rest."""

from __future__ import annotations

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError

TRAINED_FAMILIES = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3")
_PLANNED = "`ultrascale plan` handles it."
# Field of `Layout`: the only value that runs, and the nearest thing that works.
_LAYOUT: dict[str, tuple[object, str]] = {
    "tp": (1, "zero_stage = 3 cuts the parameters over dp ranks"),
    "cp": (1, "micro_batch_size = 1 with recompute = \"full\" fits the longest sequences"),
    "pp": (1, "zero_stage = 3 cuts the parameters over dp ranks"),
    "ep": (1, "1, which dense models need"),
    "expert_tp": (1, "1, which dense models need"),
    "offload_activations": (False, "recompute = \"full\" or a smaller micro_batch_size saves activations"),
    "offload_optimizer": (False, "zero_stage = 1 cuts optimizer state over dp ranks"),
}  # fmt: skip
_PRECISIONS = ("fp64", "fp32", "bf16")
# Field of `Model`: the only value that runs, what the field brings, and the nearest thing that works.
_LEFT_OUT = "leave it out"
_MODEL: dict[str, tuple[object, str, str]] = {
    "num_experts": (0, "experts", "a dense model"),
    "kv_lora_rank": (None, "latent attention", "grouped-query attention (num_key_value_heads)"),
    "num_nextn_predict_layers": (0, "multi-token prediction", _LEFT_OUT),
    "attention_sinks": (False, "attention sinks", _LEFT_OUT),
    "partial_rotary_factor": (1.0, "heads that turn in part", _LEFT_OUT),
    "sliding_window_interval": (1, "layers with and without a window by turns", _LEFT_OUT),
    "qk_norm_whole": (False, "a norm over all heads of queries and keys together", "qk_norm alone, a norm over each head"),
}


def untrainable_layout(layout: Layout) -> list[Problem]:
    """Why the trainer cannot run `layout` yet, one problem per field; empty if it can. Planning is not affected."""
    found = [
        Problem(f"layout.{key}", f"the trainer runs {key} = {_toml(only)} only so far, is {_toml(value)}", _remedy(nearest))
        for key, (only, nearest) in _LAYOUT.items()
        if (value := getattr(layout, key)) != only
    ]
    for key in ("precision", "reduce_dtype"):
        if getattr(layout, key) not in (*_PRECISIONS, None):
            rule = f"the trainer runs {', '.join(_PRECISIONS)} only so far, is {getattr(layout, key)}"
            found.append(Problem(f"layout.{key}", rule, _remedy("bf16 is as fast as fp16 and needs no loss scaling")))
    return found


def untrainable_model(model: Model) -> list[Problem]:
    """Why the trainer cannot run `model` yet, one problem per feature; empty if it can. Planning is not affected."""
    found = [
        Problem(f"model.{key}", f"brings {what}, which the trainer does not run so far", _remedy(nearest))
        for key, (only, what, nearest) in _MODEL.items()
        if getattr(model, key) != only
    ]
    usual = "silu" if model.gated_mlp else "gelu_pytorch_tanh"
    if model.activation != usual:
        rule = f"the trainer runs {usual} only so far{' with' if model.gated_mlp else ' without'} a gate, is {model.activation}"
        found.append(Problem("model.hidden_act", rule, _remedy(_LEFT_OUT)))
    scaling = model.rope_scaling
    if (
        scaling is not None
        and not model.latent_attention
        and not (scaling.truncate and scaling.mscale is None and scaling.mscale_all_dim is None)
    ):
        rule = "the trainer runs yarn with truncate = true and without mscale only so far"
        found.append(Problem("model.rope_scaling", rule, _remedy("leave them out")))
    if not found and model.model_type not in TRAINED_FAMILIES:
        rule = f"the trainer runs {', '.join(TRAINED_FAMILIES)} only so far, is {model.model_type}"
        found.append(Problem("model.model_type", rule, _remedy("choose one of them")))
    return found


def expect_trainable(model: Model, layout: Layout | None = None) -> None:
    """Raises SpecError with everything in `model` and `layout` that can be planned but not run."""
    problems = untrainable_model(model) + (untrainable_layout(layout) if layout is not None else [])
    if problems:
        raise SpecError(problems)


def _remedy(nearest: str) -> str:
    return f"{_PLANNED} Nearest that runs: {nearest}."


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
