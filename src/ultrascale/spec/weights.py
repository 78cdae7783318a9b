"""The table of every weight: global name, shape, and how it starts and decays.

Whoever needs to know what weights there are reads this table: `models/` is held to it by a test, `train/` takes initial values
and weight-decay groups from it, `checkpoint/` names by it, and `plan/` sums it.
Names are those of Hugging Face's Llama without the leading `model.`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import prod, sqrt
from typing import Literal

from ultrascale.spec.model import Model

Part = Literal["embedding", "attention", "mlp", "norm", "head"]


@dataclass(frozen=True)
class Weight:
    """One learned tensor."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None
    """The decoder block that owns it; None outside the blocks."""
    init_std: float | None = None
    """Standard deviation of its initial normal values; None: filled with `init_fill`."""
    init_fill: float = 0.0
    decay: bool = True
    """Whether weight decay applies: matrices yes, norms and biases no."""

    @property
    def numel(self) -> int:
        return prod(self.shape)


def weights(model: Model) -> Iterator[Weight]:
    """Every weight of `model` in the order of the forward pass. A tied head has no entry: it is `embed_tokens.weight`.

    Initial values: normal with `initializer_range`, and the two projections that write to the residual stream divided by
    sqrt(2 L), as in GPT-2 (Radford et al. 2019, section 2.3). Norms start at one, biases at zero.
    """
    std, d = model.initializer_range, model.hidden_size
    yield Weight("embed_tokens.weight", (model.vocab_size, d), "embedding", None, std)
    if model.position_embedding == "learned":
        yield Weight("embed_positions.weight", (model.max_position_embeddings, d), "embedding", None, std)
    for layer in range(model.num_hidden_layers):
        yield from layer_weights(model, layer)
    yield from _norm(model, "norm", None, d)
    if not model.tie_word_embeddings:
        yield Weight("lm_head.weight", (model.vocab_size, d), "head", None, std)


def layer_weights(model: Model, layer: int) -> Iterator[Weight]:
    """The weights of one decoder block, in the order of its forward pass."""
    d, q, kv, f = model.hidden_size, model.query_size, model.key_value_size, model.intermediate_size
    std = model.initializer_range
    residual_std = std / sqrt(2 * model.num_hidden_layers)
    block = f"layers.{layer}"
    yield from _norm(model, f"{block}.input_layernorm", layer, d)
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield from _linear(f"{block}.self_attn.{name}", "attention", layer, rows, d, std, model.qkv_bias)
    if model.qk_norm:
        for name in ("q_norm", "k_norm"):
            yield Weight(f"{block}.self_attn.{name}.weight", (model.head_dim,), "norm", layer, init_fill=1.0, decay=False)
    yield from _linear(f"{block}.self_attn.o_proj", "attention", layer, d, q, residual_std, model.attention_output_bias)
    yield from _norm(model, f"{block}.post_attention_layernorm", layer, d)
    for name in ("gate_proj", "up_proj") if model.gated_mlp else ("up_proj",):
        yield from _linear(f"{block}.mlp.{name}", "mlp", layer, f, d, std, model.mlp_bias)
    yield from _linear(f"{block}.mlp.down_proj", "mlp", layer, d, f, residual_std, model.mlp_bias)


def num_parameters(model: Model) -> int:
    """Number of parameters; a tied embedding is counted once."""
    outside = sum(w.numel for w in weights_outside_layers(model))
    return outside + model.num_hidden_layers * sum(w.numel for w in layer_weights(model, 0))


def weights_outside_layers(model: Model) -> Iterator[Weight]:
    """Embeddings, final norm and head: what `weights` gives without its blocks."""
    return weights(replace(model, num_hidden_layers=0))


def _linear(name: str, part: Part, layer: int, rows: int, columns: int, std: float, bias: bool) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (rows, columns), part, layer, std)
    if bias:
        yield Weight(f"{name}.bias", (rows,), part, layer, init_fill=0.0, decay=False)


def _norm(model: Model, name: str, layer: int | None, size: int) -> Iterator[Weight]:
    yield Weight(f"{name}.weight", (size,), "norm", layer, init_fill=1.0, decay=False)
    if model.norm_bias:
        yield Weight(f"{name}.bias", (size,), "norm", layer, init_fill=0.0, decay=False)
