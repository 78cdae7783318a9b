"""The model of a measured run: its dimensions from the row, and by these rules if a cell is blank.

    blank                 value by rule
    everything            the preset of that name; else the one nearest in size to a name such as 13B
    heads                 divisor of hidden with a head dimension nearest to 128, and a multiple of tp
    kv_heads              heads
    ffn_hidden            4 x hidden, or 8/3 x hidden up to a multiple of 256 if the MLP is gated
    norms, biases, ...    those of the preset of that name, if it is as wide (`_STYLE`)
    vocab                 50304 (GPT-2's, padded), 32000 if the MLP is gated
    tied_embeddings       tied unless the MLP is gated

Values filled in by a rule are reported with the prediction.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import lru_cache

from ultrascale.catalogue.models.model_names import normal_name
from ultrascale.catalogue.models.model_presets import ALIASES, PRESETS
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.validation.rows import RunConfig

_SIZE = re.compile(r"(?<![\w.])(\d+(?:\.\d+)?)\s*([MBT])(?![a-z])|[-_ ](\d+(?:\.\d+)?)([mbt])(?![a-z0-9])", re.IGNORECASE)
_SCALE = {"m": 1e6, "b": 1e9, "t": 1e12}
_GATED_NAMES = re.compile(
    r"llama|mistral|mixtral|qwen|deepseek|moonlight|kimi|olmo|smollm|gemma|yi-|phi-3|gpt-oss|grok|internlm", re.I
)
GPT2_PADDED_VOCAB = 50304
LLAMA_VOCAB = 32000
USUAL_HEAD_DIM = 128
FFN_MULTIPLE = 256
_V3 = {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
"""DeepSeek-V3's latent attention (arXiv 2412.19437, section 4.2); `mla0` is V2-Lite's, without `q_lora_rank`."""
GPT_OSS_WINDOW = 128
DEEPSEEK_V3_LAYERS = 61

# The playbook does not state dimensions. Its FLOPs per token (MFU x 989.5e12 / tokens per second per GPU: 9.66, 11.27, 25.67,
# 28.09, 59.6, 455 and 512e9) match these shapes to 0.3 percent, with 4,096 tokens and a vocabulary of 131,072, embedding and
# head counted separately if untied: 1B and 3B tie them unless there is a pipeline, which cannot; 80B has 8 key/value heads in
# the runs without ZeRO, all heads in the others.
_PLAYBOOK = {
    "1B": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn_hidden": 8192},
    "3B": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 24, "ffn_hidden": 8192},
    "8B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 14336},
    "80B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn_hidden": 28672},
}
_PLAYBOOK_VOCAB, _PLAYBOOK_SEQUENCE = 131072, 4096
_PLAYBOOK_TIES = ("1B", "3B")


_STYLE = (
    "norm", "norm_placement", "zero_centered_norm", "hidden_act", "position_embedding", "partial_rotary_factor", "qkv_bias",
    "attention_output_bias", "mlp_bias", "qk_norm", "qk_norm_whole", "attention_sinks", "sliding_window",
    "sliding_window_interval", "max_window_layers", "full_attention_interval",
)  # fmt: skip
"""Fields of a model known by its name that no column states."""


class UnrepresentableError(ValueError):
    """A row that the planner cannot represent; the text gives the reason."""


class UnrunnableError(UnrepresentableError):
    """A row that no framework can run as given: the prediction is that it does not run."""


GPT_OSS_PARTS = {
    name: getattr(PRESETS["gpt-oss-20b"], name)
    for name in ("hidden_act", "attention_sinks", "qkv_bias", "mlp_bias", "attention_output_bias")
}
"""Attention sinks, biases of its projections, experts and router, and a clamped SwiGLU."""


def fill_playbook(config: RunConfig) -> tuple[RunConfig, tuple[str, ...]]:
    """A row of the playbook's scan with the dimensions found for its model, and the assumptions made."""
    known = _PLAYBOOK.get(config.model.strip().upper())
    if known is None or config.hidden is not None:
        return config, ()
    shape = dict(known)
    if config.model.upper() == "80B" and config.zero_stage.strip() in ("0", "0.0", ""):
        shape["kv_heads"] = 8
    tied = config.model.upper() in _PLAYBOOK_TIES and (config.pp or 1) == 1
    filled = replace(
        config, **shape, vocab=config.vocab or _PLAYBOOK_VOCAB, seq_len=config.seq_len or _PLAYBOOK_SEQUENCE, gated_mlp=True,
        tied_embeddings=tied if config.tied_embeddings is None else config.tied_embeddings,
        flash_attention=True, recompute=config.recompute or "none", sp=True if config.sp is None else config.sp,
        flops_def=config.flops_def or "model_full_allparams",
    )  # fmt: skip
    return filled, ("dimensions, vocabulary and sequence length are those inferred for the playbook's model of this name",)


def model_of(config: RunConfig, *, predicts_further: bool) -> tuple[Model, tuple[str, ...]]:
    """The row's model, and the assumptions made. `predicts_further`: its program trains DeepSeek-V3's multi-token prediction.

    Raises UnrepresentableError.
    """
    assumed: list[str] = []
    preset = _preset_for(config, assumed)
    gated = _gated(config, preset)
    hidden = config.hidden or (preset.hidden_size if preset else None)
    layers = config.layers or (preset.num_hidden_layers if preset else None)
    if hidden is None or layers is None:
        raise UnrepresentableError(f"layers and hidden are blank, and no model is known by the name {config.model!r}")
    same_width = preset is not None and preset.hidden_size == hidden
    shape = preset if same_width else None
    heads = config.heads or (
        shape.num_attention_heads if shape else _filled(assumed, "heads", _heads(hidden, config.head_dim, config.tp or 1))
    )
    model = Model(
        vocab_size=config.vocab or (shape.vocab_size if shape else _filled(assumed, "vocab", _usual_vocab(gated))),
        hidden_size=hidden,
        intermediate_size=_ffn(config, shape, hidden, gated, assumed),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=config.kv_heads or (shape.num_key_value_heads if shape and not config.heads else heads),
        head_dim=_head_dim(config, shape, hidden, heads),
        max_position_embeddings=max(config.seq_len or 2048, 1),
        name=config.model,
        tie_word_embeddings=_tied(config, shape, gated),
        **(_style(config, gated) | _style_of(shape, gated) | _attention(config)),
        **_experts(config, shape, predicts_further, assumed),
    )  # fmt: skip
    if problems := model.problems():
        raise UnrepresentableError("; ".join(f"{problem.key} {problem.rule}" for problem in problems))
    return model, tuple(assumed)


@lru_cache(maxsize=512)
def named_preset(name: str) -> Model | None:
    """Preset for a published name: case, spaces, underscores and notes in brackets are ignored."""
    key = re.sub(r"\(.*?\)", "", name).strip().lower().replace(" ", "-").replace("_", "-")
    key = re.sub(r"^(meta-|the-)", "", key)
    for candidate in (key, normal_name(key), key.replace("llama-3.0", "llama-3")):
        candidate = ALIASES.get(candidate, candidate)
        if candidate in PRESETS:
            return PRESETS[candidate]
    return None


@lru_cache(maxsize=512)
def _preset_of_size(name: str) -> Model | None:
    """Dense Llama-like preset nearest to the number of parameters in a name."""
    match = _SIZE.search(name)
    if match is None:
        return None
    size = float(match[1] or match[3]) * _SCALE[(match[2] or match[4]).lower()]
    presets = [model for key, model in PRESETS.items() if key.startswith(("llama", "smollm", "megatron", "gpt"))]
    return min(presets, key=lambda model: abs(num_parameters(model) / size - 1))


def _preset_for(config: RunConfig, assumed: list[str]) -> Model | None:
    named = named_preset(config.model)
    if named is not None or (config.layers and config.hidden):
        return named
    nearest = _preset_of_size(config.model)
    if nearest is not None:
        assumed.append(f"dimensions of {nearest.name}, which is nearest in size to {config.model!r}")
    return nearest


def _filled(assumed: list[str], name: str, value: int) -> int:
    assumed.append(f"{name} = {value}")
    return value


def _gated(config: RunConfig, preset: Model | None) -> bool:
    if config.gated_mlp is not None:
        return config.gated_mlp
    return preset.gated_mlp if preset else bool(_GATED_NAMES.search(config.model))


def _usual_vocab(gated: bool) -> int:
    return LLAMA_VOCAB if gated else GPT2_PADDED_VOCAB


def _heads(hidden: int, head_dim: int | None, tp: int) -> int:
    if head_dim:
        return max(1, hidden // head_dim)
    widths = [width for width in range(2, 4 * USUAL_HEAD_DIM + 1, 2) if hidden % width == 0]  # RoPE rotates halves: even
    dividing = [width for width in widths if hidden // width % tp == 0] or widths or [hidden]
    return hidden // min(dividing, key=lambda width: abs(math.log(width / USUAL_HEAD_DIM)))


def _head_dim(config: RunConfig, shape: Model | None, hidden: int, heads: int) -> int:
    if config.attn_kind.lower().startswith("mla"):
        return _V3["qk_nope_head_dim"] + _V3["qk_rope_head_dim"]
    return config.head_dim or (shape.head_dim if shape and not config.heads else hidden // heads)


def _ffn(config: RunConfig, shape: Model | None, hidden: int, gated: bool, assumed: list[str]) -> int:
    if config.ffn_hidden:
        return config.ffn_hidden
    if config.experts:  # every layer has experts: the dense width is unused
        return config.expert_ffn or hidden
    if shape is not None:
        return shape.intermediate_size
    usual = -(-8 * hidden // 3 // FFN_MULTIPLE) * FFN_MULTIPLE if gated else 4 * hidden
    return _filled(assumed, "ffn_hidden", usual)


def _tied(config: RunConfig, shape: Model | None, gated: bool) -> bool:
    if config.tied_embeddings is not None:
        return config.tied_embeddings
    return shape.tie_word_embeddings if shape else not gated


def _style(config: RunConfig, gated: bool) -> dict:
    """Norms and positions, by family: their cost is small, their memory is not."""
    style: dict = {"gated_mlp": gated}
    if not gated:
        style["norm"] = "layernorm"
        if "nemotron" in config.model.lower():
            style["hidden_act"] = "relu2"
        else:
            style["position_embedding"] = "learned"
    if "qwen3" in config.model.lower():
        style["qk_norm"] = True
    if config.experts and re.search(r"gpt-?oss", config.model, re.IGNORECASE):
        style |= GPT_OSS_PARTS
    return style


def _style_of(preset: Model | None, gated: bool) -> dict:
    """Fields of `_STYLE` of the model that the row's name means; none if its MLP is of another kind."""
    if preset is None or preset.gated_mlp != gated:
        return {}
    return {name: getattr(preset, name) for name in _STYLE}


def _attention(config: RunConfig) -> dict:
    kind = config.attn_kind.lower()
    if kind.startswith("mla"):
        shape = dict(_V3, q_lora_rank=None) if kind == "mla0" else dict(_V3)
        return shape
    if "swa" in kind:
        return {"sliding_window": GPT_OSS_WINDOW, "sliding_window_interval": 2}
    return {}


def _experts(config: RunConfig, shape: Model | None, predicts_further: bool, assumed: list[str]) -> dict:
    if not config.experts:
        if shape is None or not shape.num_experts or config.layers:
            return {}
        return {
            name: getattr(shape, name)
            for name in (
                "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
                "first_k_dense_replace",
            )
        }  # fmt: skip
    fields = {
        "num_experts": config.experts,
        "num_experts_per_tok": config.topk or _filled(assumed, "topk", min(2, config.experts)),
        "moe_intermediate_size": config.expert_ffn or config.ffn_hidden or 4 * (config.hidden or 0),
        "shared_expert_intermediate_size": config.shared_expert_ffn or 0,
        "first_k_dense_replace": min(config.dense_layers or 0, config.layers or 0),
    }
    if shape is not None and shape.n_group > 1 and shape.num_experts == config.experts:  # no column has the node limit
        fields |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "topk_method")}
    if predicts_further and "deepseek-v3" in config.model.lower() and config.layers == DEEPSEEK_V3_LAYERS:
        fields["num_nextn_predict_layers"] = 1
        assumed.append("one block of multi-token prediction")
    return fields
