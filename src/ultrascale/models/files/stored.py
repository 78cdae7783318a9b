"""Mapping of our weights to the tensors of a Hugging Face folder, by model family, in both directions.

    most           one tensor per weight, with the prefix `model.`
    gpt2           query, key and value in one, and projections transposed ("Conv1D")
    experts        one tensor per expert and projection: `mlp.experts.7.up_proj.weight`; Mixtral calls them w1, w3, w2
    gpt_oss        all experts in one tensor [X, D, 2F]: transposed, gate and up interleaved
    deepseek_v3, glm4_moe   prediction blocks contain copies of embedding and head

Experts' tensors have the form of published files, which transformers 4 and 5 read and write (5 merges them on loading).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, score_biases, weights

_GPT2_NAMES = {
    "embed_tokens": "wte", "embed_positions": "wpe", "norm": "ln_f", "input_layernorm": "ln_1",
    "self_attn.o_proj": "attn.c_proj", "post_attention_layernorm": "ln_2",
    "mlp.up_proj": "mlp.c_fc", "mlp.down_proj": "mlp.c_proj",
}  # fmt: skip
_MIXTRAL_NAMES = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


@dataclass(frozen=True)
class StoredTensor:
    """Contents of one tensor of a file: weights concatenated along dim 0, then possibly transposed."""

    names: tuple[str, ...]
    expert: int | None = None
    """Expert of each weight that the tensor holds; None: all."""
    transposed: bool = False
    """True if the last two dimensions are swapped."""
    interleaved: bool = False
    """True if the weights [X, F, ...] are interleaved along F instead of concatenated."""
    keeps_dtype: bool = False
    """True if it keeps its dtype when the others are cast."""
    is_copy: bool = False
    """True if it is a copy of another tensor."""

    def join(self, state: Mapping[str, Tensor]) -> Tensor:
        """Build the tensor from weights by name."""
        parts = [state[name] if self.expert is None else state[name][self.expert] for name in self.names]
        whole = (
            torch.stack(parts, dim=2).flatten(1, 2) if self.interleaved else torch.cat(parts) if len(parts) > 1 else parts[0]
        )
        return whole.transpose(-2, -1) if self.transposed else whole

    def split(self, whole: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, weight or one expert of it) for each part of the tensor."""
        whole = whole.transpose(-2, -1) if self.transposed else whole
        if self.interleaved:
            parts = whole.unflatten(1, (-1, len(self.names))).unbind(2)
        else:
            parts = whole.split([shapes[name][0] for name in self.names]) if len(self.names) > 1 else (whole,)
        yield from zip(self.names, parts, strict=True)

    def shape(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        """Shape of the tensor, from shapes of weights by name."""
        return tuple(self.join({name: torch.empty(shapes[name], device="meta") for name in self.names}).shape)


def weight_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights, and of the routers' load-balancing biases, by our names."""
    return {weight.name: weight.shape for weight in (*weights(model), *score_biases(model))}


def stored_weights(model: Model) -> dict[str, StoredTensor]:
    """Every tensor of `model` by its Hugging Face name, with the weights of ours that it holds."""
    table: dict[str, StoredTensor] = {}
    for weight in weights(model):
        if model.model_type == "gpt2":
            name, transposed = _gpt2_name(weight.name), weight.part in ("attention", "mlp") and len(weight.shape) == 2
            earlier = table[name].names if name in table else ()
            table[name] = StoredTensor((*earlier, weight.name), transposed=transposed)
        elif weight.is_expert:
            table |= _stored_experts(weight, model.model_type)
        else:
            prefix = "" if weight.part == "head" else "model."
            table[prefix + _renamed(weight.name, model.model_type)] = StoredTensor((weight.name,))
    for bias in score_biases(model):
        table["model." + _renamed(bias.name, model.model_type)] = StoredTensor((bias.name,), keeps_dtype=True)
    head = "embed_tokens.weight" if model.tie_word_embeddings else "lm_head.weight"
    for layer in range(model.num_hidden_layers, model.num_hidden_layers + model.num_nextn_predict_layers):
        table[f"model.layers.{layer}.embed_tokens.weight"] = StoredTensor(("embed_tokens.weight",), is_copy=True)
        table[f"model.layers.{layer}.shared_head.head.weight"] = StoredTensor((head,), is_copy=True)
    return table


def _stored_experts(weight: Weight, model_type: str) -> dict[str, StoredTensor]:
    block, projection, kind = weight.name.rsplit(".", 2)
    if model_type == "gpt_oss":
        suffix, transposed = ("_bias", False) if kind == "bias" else ("", True)
        if projection == "down_proj":
            return {f"model.{block}.down_proj{suffix}": StoredTensor((weight.name,), transposed=transposed)}
        names = (f"{block}.gate_proj.{kind}", f"{block}.up_proj.{kind}")
        return {f"model.{block}.gate_up_proj{suffix}": StoredTensor(names, transposed=transposed, interleaved=True)}
    if model_type == "mixtral":
        block, projection = block.replace(".mlp.", ".block_sparse_moe."), _MIXTRAL_NAMES[projection]
    return {
        f"model.{block}.{expert}.{projection}.{kind}": StoredTensor((weight.name,), expert=expert)
        for expert in range(weight.shape[0])
    }


def _renamed(name: str, model_type: str) -> str:
    if model_type == "mixtral":
        return name.replace(".mlp.router.", ".block_sparse_moe.gate.")
    return name if model_type == "gpt_oss" else name.replace(".mlp.router.", ".mlp.gate.")


def _gpt2_name(name: str) -> str:
    if name == "lm_head.weight":
        return name
    stem, kind = name.rsplit(".", 1)
    prefix = "transformer."
    if stem.startswith("layers."):
        _, layer, stem = stem.split(".", 2)
        prefix = f"transformer.h.{layer}."
    if stem in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"):
        return f"{prefix}attn.c_attn.{kind}"
    return f"{prefix}{_GPT2_NAMES[stem]}.{kind}"
