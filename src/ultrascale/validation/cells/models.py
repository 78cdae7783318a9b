"""The model of a measured run: its dimensions as the row tells them, and by stated rules where a cell is blank.

    blank                 taken instead
    everything            the preset of that name; else the one nearest in size to a name such as 13B
    heads                 what divides hidden into heads nearest to 128 wide, and tp into ranks
    kv_heads              heads
    ffn_hidden            4 x hidden, or 8/3 x hidden up to a multiple of 256 if the MLP is gated
    vocab                 50304 (GPT-2's, padded), 32000 if the MLP is gated
    tied_embeddings       tied unless the MLP is gated

What a rule filled in is told with the prediction.
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
from ultrascale.validation.rows import Asked

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
# 28.09, 59.6, 455 and 512e9) are those of these shapes to 0.3 percent, with 4,096 tokens and a vocabulary of 131,072, embedding
# and head both counted where they are two: 1B and 3B tie them unless there is a pipeline, which cannot; 80B has 8 key/value
# heads in the runs without ZeRO, all heads in the others.
_PLAYBOOK = {
    "1B": {"layers": 16, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn_hidden": 8192},
    "3B": {"layers": 28, "hidden": 3072, "heads": 24, "kv_heads": 24, "ffn_hidden": 8192},
    "8B": {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 32, "ffn_hidden": 14336},
    "80B": {"layers": 80, "hidden": 8192, "heads": 64, "kv_heads": 64, "ffn_hidden": 28672},
}
_PLAYBOOK_VOCAB, _PLAYBOOK_SEQUENCE = 131072, 4096
_PLAYBOOK_TIES = ("1B", "3B")


class UnrepresentableError(ValueError):
    """A row that the planner cannot describe; the text says why."""


class UnrunnableError(UnrepresentableError):
    """A row that no trainer can run as it stands: its prediction is that it does not."""


GPT_OSS_PARTS = {
    name: getattr(PRESETS["gpt-oss-20b"], name)
    for name in ("hidden_act", "attention_sinks", "qkv_bias", "mlp_bias", "attention_output_bias")
}
"""Sinks beside attention's scores, biases of its projections, its experts and its router, and a clamped SwiGLU."""


def fill_playbook(asked: Asked) -> tuple[Asked, tuple[str, ...]]:
    """A row of the playbook's scan with the dimensions its model was found to have, and what was assumed."""
    known = _PLAYBOOK.get(asked.model.strip().upper())
    if known is None or asked.hidden is not None:
        return asked, ()
    shape = dict(known)
    if asked.model.upper() == "80B" and asked.zero_stage.strip() in ("0", "0.0", ""):
        shape["kv_heads"] = 8
    tied = asked.model.upper() in _PLAYBOOK_TIES and (asked.pp or 1) == 1
    filled = replace(
        asked, **shape, vocab=asked.vocab or _PLAYBOOK_VOCAB, seq_len=asked.seq_len or _PLAYBOOK_SEQUENCE, gated_mlp=True,
        tied_embeddings=tied if asked.tied_embeddings is None else asked.tied_embeddings,
        flash_attention=True, recompute=asked.recompute or "none", sp=True if asked.sp is None else asked.sp,
        flops_def=asked.flops_def or "model_full_allparams",
    )  # fmt: skip
    return filled, ("dimensions, vocabulary and sequence length are those inferred for the playbook's model of this name",)


def model_of(asked: Asked, *, predicts_further: bool = False) -> tuple[Model, tuple[str, ...]]:
    """The row's model and what had to be assumed. `predicts_further`: its program trains DeepSeek-V3's multi-token prediction.

    Raises UnrepresentableError.
    """
    assumed: list[str] = []
    preset = _preset_for(asked, assumed)
    gated = _gated(asked, preset)
    hidden = asked.hidden or (preset.hidden_size if preset else None)
    layers = asked.layers or (preset.num_hidden_layers if preset else None)
    if hidden is None or layers is None:
        raise UnrepresentableError(f"layers and hidden are blank, and no model is known by the name {asked.model!r}")
    same_width = preset is not None and preset.hidden_size == hidden
    shape = preset if same_width else None
    heads = asked.heads or (
        shape.num_attention_heads if shape else _filled(assumed, "heads", _heads(hidden, asked.head_dim, asked.tp or 1))
    )
    model = Model(
        vocab_size=asked.vocab or (shape.vocab_size if shape else _filled(assumed, "vocab", _usual_vocab(gated))),
        hidden_size=hidden,
        intermediate_size=_ffn(asked, shape, hidden, gated, assumed),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=asked.kv_heads or (shape.num_key_value_heads if shape and not asked.heads else heads),
        head_dim=_head_dim(asked, shape, hidden, heads),
        max_position_embeddings=max(asked.seq_len or 2048, 1),
        name=asked.model,
        tie_word_embeddings=_tied(asked, shape, gated),
        **_style(asked, gated),
        **_attention(asked),
        **_experts(asked, shape, predicts_further, assumed),
    )  # fmt: skip
    if problems := model.problems():
        raise UnrepresentableError("; ".join(f"{problem.key} {problem.rule}" for problem in problems))
    return model, tuple(assumed)


@lru_cache(maxsize=512)
def named_preset(name: str) -> Model | None:
    """The preset that a published name means: case, spaces, underscores and notes in brackets do not matter."""
    key = re.sub(r"\(.*?\)", "", name).strip().lower().replace(" ", "-").replace("_", "-")
    key = re.sub(r"^(meta-|the-)", "", key)
    for candidate in (key, normal_name(key), key.replace("llama-3.0", "llama-3")):
        candidate = ALIASES.get(candidate, candidate)
        if candidate in PRESETS:
            return PRESETS[candidate]
    return None


@lru_cache(maxsize=512)
def _preset_of_size(name: str) -> Model | None:
    """The dense Llama-like preset nearest to the number of parameters in a name."""
    match = _SIZE.search(name)
    if match is None:
        return None
    size = float(match[1] or match[3]) * _SCALE[(match[2] or match[4]).lower()]
    known = [model for key, model in PRESETS.items() if key.startswith(("llama", "smollm", "megatron", "gpt"))]
    return min(known, key=lambda model: abs(num_parameters(model) / size - 1))


def _preset_for(asked: Asked, assumed: list[str]) -> Model | None:
    named = named_preset(asked.model)
    if named is not None or (asked.layers and asked.hidden):
        return named
    nearest = _preset_of_size(asked.model)
    if nearest is not None:
        assumed.append(f"dimensions of {nearest.name}, which is nearest in size to {asked.model!r}")
    return nearest


def _filled(assumed: list[str], name: str, value: int) -> int:
    assumed.append(f"{name} = {value}")
    return value


def _gated(asked: Asked, preset: Model | None) -> bool:
    if asked.gated_mlp is not None:
        return asked.gated_mlp
    return preset.gated_mlp if preset else bool(_GATED_NAMES.search(asked.model))


def _usual_vocab(gated: bool) -> int:
    return LLAMA_VOCAB if gated else GPT2_PADDED_VOCAB


def _heads(hidden: int, head_dim: int | None, tp: int) -> int:
    if head_dim:
        return max(1, hidden // head_dim)
    widths = [width for width in range(2, 4 * USUAL_HEAD_DIM + 1, 2) if hidden % width == 0]  # halves turn: even
    cut = [width for width in widths if hidden // width % tp == 0] or widths or [hidden]
    return hidden // min(cut, key=lambda width: abs(math.log(width / USUAL_HEAD_DIM)))


def _head_dim(asked: Asked, shape: Model | None, hidden: int, heads: int) -> int:
    if asked.attn_kind.lower().startswith("mla"):
        return _V3["qk_nope_head_dim"] + _V3["qk_rope_head_dim"]
    return asked.head_dim or (shape.head_dim if shape and not asked.heads else hidden // heads)


def _ffn(asked: Asked, shape: Model | None, hidden: int, gated: bool, assumed: list[str]) -> int:
    if asked.ffn_hidden:
        return asked.ffn_hidden
    if asked.experts:  # every layer has experts: the dense width is read by nobody
        return asked.expert_ffn or hidden
    if shape is not None:
        return shape.intermediate_size
    usual = -(-8 * hidden // 3 // FFN_MULTIPLE) * FFN_MULTIPLE if gated else 4 * hidden
    return _filled(assumed, "ffn_hidden", usual)


def _tied(asked: Asked, shape: Model | None, gated: bool) -> bool:
    if asked.tied_embeddings is not None:
        return asked.tied_embeddings
    return shape.tie_word_embeddings if shape else not gated


def _style(asked: Asked, gated: bool) -> dict:
    """Norms and positions, by family: what they cost is small, what they keep is not nothing."""
    style: dict = {"gated_mlp": gated}
    if not gated:
        style["norm"] = "layernorm"
        if "nemotron" in asked.model.lower():
            style["hidden_act"] = "relu2"
        else:
            style["position_embedding"] = "learned"
    if "qwen3" in asked.model.lower():
        style["qk_norm"] = True
    if asked.experts and re.search(r"gpt-?oss", asked.model, re.IGNORECASE):
        style |= GPT_OSS_PARTS
    return style


def _attention(asked: Asked) -> dict:
    kind = asked.attn_kind.lower()
    if kind.startswith("mla"):
        shape = dict(_V3, q_lora_rank=None) if kind == "mla0" else dict(_V3)
        return shape
    if "swa" in kind:
        return {"sliding_window": GPT_OSS_WINDOW, "sliding_window_interval": 2}
    return {}


def _experts(asked: Asked, shape: Model | None, predicts_further: bool, assumed: list[str]) -> dict:
    if not asked.experts:
        if shape is None or not shape.num_experts or asked.layers:
            return {}
        return {
            name: getattr(shape, name)
            for name in (
                "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size",
                "first_k_dense_replace",
            )
        }  # fmt: skip
    fields = {
        "num_experts": asked.experts,
        "num_experts_per_tok": asked.topk or _filled(assumed, "topk", min(2, asked.experts)),
        "moe_intermediate_size": asked.expert_ffn or asked.ffn_hidden or 4 * (asked.hidden or 0),
        "shared_expert_intermediate_size": asked.shared_expert_ffn or 0,
        "first_k_dense_replace": min(asked.dense_layers or 0, asked.layers or 0),
    }
    if shape is not None and shape.n_group > 1 and shape.num_experts == asked.experts:  # no column says how tokens are limited
        fields |= {name: getattr(shape, name) for name in ("n_group", "topk_group", "topk_method")}
    if predicts_further and "deepseek-v3" in asked.model.lower() and asked.layers == DEEPSEEK_V3_LAYERS:
        fields["num_nextn_predict_layers"] = 1
        assumed.append("one block of multi-token prediction")
    return fields
