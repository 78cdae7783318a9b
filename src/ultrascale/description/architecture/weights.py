"""The table of every weight: global name, shape, initial values, weight decay, and how it may be sharded.

It is the only list of weights: a test compares `models/` with it, `train/` takes initial values and weight-decay groups from
it, `checkpoint/` its names, and `plan/` its sizes. Names are those of Hugging Face's Llama (Qwen 3 MoE, DeepSeek-V3) without
the leading `model.`; the router, called `gate` there, is `router` here. All experts of a layer are one weight, [X, out, in], as
grouped GEMMs read them.

    sharded by         weights
    tp, dim 0          embedding and head (the vocabulary), q k v, gate and up (column parallel)
    tp, dim 1          o, down (row parallel)
    ep, dim 0          experts; expert_tp shards them as tp shards gate, up and down, one dim further
    not by tp          norms, the router, positions, latent attention's narrow projections
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt
from typing import Literal

from ultrascale.description.architecture.model import Model

Part = Literal["embedding", "attention", "mlp", "router", "norm", "head"]


@dataclass(frozen=True)
class Weight:
    """One learned tensor."""

    name: str
    shape: tuple[int, ...]
    part: Part
    layer: int | None
    """Decoder block of the weight; None outside the blocks. Blocks of multi-token prediction follow the last one."""
    init_std: float | None = None
    """Standard deviation of the normal initial values; None: filled with `init_fill`."""
    init_fill: float = 0.0
    decay: bool = True
    """True if weight decay applies: matrices, not norms and biases."""
    tp_dim: int | None = None
    """Dimension that tensor parallelism (for experts, `expert_tp`) shards; None: every rank holds all of it."""
    max_tp_shards: int | None = None
    """Largest number of shards; further ranks hold replicas: heads of keys and values."""
    is_expert: bool = False
    """True if dim 0 counts experts: `ep` shards it, and gradients are reduced over expert data parallelism only."""
    first_column: int = 0
    """Offset of a rank's shard in the last dimension of the unsharded weight; 0 for an unsharded weight."""

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def local_numel(self, *, tp: int = 1, ep: int = 1, expert_tp: int = 1) -> int:
        """Elements of the largest shard; a dimension that does not divide is rounded up."""
        shape = list(self.shape)
        cuts = [(0, ep), (self.tp_dim, expert_tp)] if self.is_expert else [(self.tp_dim, min(tp, self.max_tp_shards or tp))]
        for dim, ranks in cuts:
            if dim is not None:
                shape[dim] = -(-shape[dim] // ranks)
        return prod(shape)


def weights(model: Model) -> Iterator[Weight]:
    """Every weight of `model` in the order of the forward pass. A tied head has no entry: it is `embed_tokens.weight`; and the
    blocks of multi-token prediction, which follow the last one, use the model's embedding and head.

    Initial values: normal with `initializer_range`; the projections that write to the residual stream are divided by sqrt(2 L),
    as in GPT-2 (Radford et al. 2019, section 2.3). Norms start at one, biases at zero.
    """
    std, d = model.initializer_range, model.hidden_size
    yield Weight("embed_tokens.weight", (model.vocab_size, d), "embedding", None, std, tp_dim=0)
    if model.position_embedding == "learned":
        yield Weight("embed_positions.weight", (model.max_position_embeddings, d), "embedding", None, std)
    for layer in range(model.num_hidden_layers + model.num_nextn_predict_layers):
        yield from layer_weights(model, layer)
    yield from _norm(model, "norm", None, d)
    if not model.tie_word_embeddings:
        yield Weight("lm_head.weight", (model.vocab_size, d), "head", None, std, tp_dim=0)


@lru_cache(maxsize=4096)
def layer_weights(model: Model, layer: int) -> tuple[Weight, ...]:
    """Weights of one decoder block, in the order of its forward pass.

    Layers from `num_hidden_layers` on are those of multi-token prediction (DeepSeek-V3, section 2.2): a projection of the next
    token's embedding and the previous block's output, a block like the last one, and a norm before the shared head.
    """
    return tuple(_layer_weights(model, layer))


def _layer_weights(model: Model, layer: int) -> Iterator[Weight]:
    block, d, of_predictions = f"layers.{layer}", model.hidden_size, replace(model, norm="rmsnorm")
    if layer >= model.num_hidden_layers:
        yield from _norm(of_predictions, f"{block}.enorm", layer, d)
        yield from _norm(of_predictions, f"{block}.hnorm", layer, d)
        yield Weight(f"{block}.eh_proj.weight", (d, 2 * d), "mlp", layer, model.initializer_range, tp_dim=0)
    attention = _latent_attention(model, layer) if model.latent_attention else _attention(model, layer)
    mlp = _experts(model, layer) if model.is_moe(layer) else _mlp(model, layer, "mlp", model.intermediate_size)
    names = model.block_norms
    norms = [_norm(model, f"{block}.{name}", layer, d) if name else () for name in names]
    for part in (norms[0], attention, norms[1], norms[2], mlp, norms[3]):
        yield from part
    if layer >= model.num_hidden_layers:
        yield from _norm(of_predictions, f"{block}.shared_head.norm", layer, d)


def is_hidden_matrix(weight: Weight) -> bool:
    """True if Muon updates the weight: matrices inside blocks, expert by expert; not embedding, head, router and vectors."""
    return weight.part in ("attention", "mlp") and len(weight.shape) == (3 if weight.is_expert else 2)


def score_biases(model: Model) -> Iterator[Weight]:
    """Biases that balance the load of experts: state of the model without a gradient (`topk_method = "noaux_tc"`)."""
    if model.num_experts and model.topk_method == "noaux_tc":
        for layer in range(model.num_hidden_layers + model.num_nextn_predict_layers):
            if model.is_moe(layer):
                name = f"layers.{layer}.mlp.router.e_score_correction_bias"
                yield Weight(name, (model.num_experts,), "router", layer, decay=False)


def layer_kinds(model: Model) -> list[tuple[int, int]]:
    """(layer, number of layers with the same weights) for each kind of decoder block: dense ones first, then those with
    experts."""
    dense = min(model.first_k_dense_replace, model.num_hidden_layers) if model.num_experts else model.num_hidden_layers
    kinds = [(0, dense), (dense, model.num_hidden_layers - dense)]
    return [(layer, count) for layer, count in kinds if count]


def num_parameters(model: Model) -> int:
    """Number of parameters by the convention of model names: a tied embedding counts once, multi-token prediction is
    excluded."""
    blocks = sum(count * sum(w.numel for w in layer_weights(model, layer)) for layer, count in layer_kinds(model))
    return sum(w.numel for w in weights_outside_layers(model)) + blocks


def num_active_parameters(model: Model) -> int:
    """Parameters active per token: all but the experts that it does not visit. The whole embedding counts."""
    if not model.num_experts:
        return num_parameters(model)
    idle = model.num_experts - model.num_experts_per_tok
    moe_layers = sum(count for layer, count in layer_kinds(model) if model.is_moe(layer))
    expert = sum(w.numel // model.num_experts for w in _experts(model, model.first_k_dense_replace) if w.is_expert)
    return num_parameters(model) - moe_layers * idle * expert


@lru_cache(maxsize=256)
def weights_outside_layers(model: Model) -> tuple[Weight, ...]:
    """Embeddings, final norm and head: `weights` without the blocks."""
    return tuple(weights(replace(model, num_hidden_layers=0, num_nextn_predict_layers=0)))


def _attention(model: Model, layer: int) -> Iterator[Weight]:
    d, q, kv, std = model.hidden_size, model.query_size, model.key_value_size, model.initializer_range
    block = f"layers.{layer}.self_attn"
    for name, rows, heads in (("q", q, model.num_attention_heads), ("k", kv, model.num_key_value_heads),
                              ("v", kv, model.num_key_value_heads)):  # fmt: skip
        yield from _linear(
            f"{block}.{name}_proj", "attention", layer, rows, d, std, model.qkv_bias, tp_dim=0, max_tp_shards=heads
        )
    if model.qk_norm:
        for name, heads in (("q_norm", model.num_attention_heads), ("k_norm", model.num_key_value_heads)):
            size = heads * model.head_dim if model.qk_norm_whole else model.head_dim
            for norm in _norm(replace(model, norm="rmsnorm"), f"{block}.{name}", layer, size):
                yield replace(norm, tp_dim=0, max_tp_shards=heads) if model.qk_norm_whole else norm
    if model.attention_sinks:
        yield Weight(f"{block}.sinks", (model.num_attention_heads,), "attention", layer, std, decay=False, tp_dim=0)
    yield from _linear(f"{block}.o_proj", "attention", layer, d, q, _residual_std(model), model.attention_output_bias, tp_dim=1)


def _latent_attention(model: Model, layer: int) -> Iterator[Weight]:
    """DeepSeek-V2, section 2.1.2. The narrow projections are replicated, those to the heads are sharded by heads."""
    d, heads, std, bias = model.hidden_size, model.num_attention_heads, model.initializer_range, model.qkv_bias
    block, narrow = f"layers.{layer}.self_attn", model.kv_lora_rank or 0
    if model.q_lora_rank is None:
        yield from _linear(f"{block}.q_proj", "attention", layer, model.query_size, d, std, False, tp_dim=0)
    else:
        yield from _linear(f"{block}.q_a_proj", "attention", layer, model.q_lora_rank, d, std, bias)
        yield from _norm(model, f"{block}.q_a_layernorm", layer, model.q_lora_rank)
        yield from _linear(f"{block}.q_b_proj", "attention", layer, model.query_size, model.q_lora_rank, std, False, tp_dim=0)
    yield from _linear(f"{block}.kv_a_proj_with_mqa", "attention", layer, narrow + model.qk_rope_head_dim, d, std, bias)
    yield from _norm(model, f"{block}.kv_a_layernorm", layer, narrow)
    rows = heads * (model.qk_nope_head_dim + model.v_head_dim)
    yield from _linear(f"{block}.kv_b_proj", "attention", layer, rows, narrow, std, False, tp_dim=0)
    columns, out = heads * model.v_head_dim, _residual_std(model)
    yield from _linear(f"{block}.o_proj", "attention", layer, d, columns, out, model.attention_output_bias, tp_dim=1)


def _mlp(model: Model, layer: int, name: str, width: int) -> Iterator[Weight]:
    d, block = model.hidden_size, f"layers.{layer}.{name}"
    for projection in ("gate_proj", "up_proj") if model.gated_mlp else ("up_proj",):
        yield from _linear(f"{block}.{projection}", "mlp", layer, width, d, model.initializer_range, model.mlp_bias, tp_dim=0)
    yield from _linear(f"{block}.down_proj", "mlp", layer, d, width, _residual_std(model), model.mlp_bias, tp_dim=1)


def _experts(model: Model, layer: int) -> Iterator[Weight]:
    """The router, all experts, and the shared expert."""
    block, count, width, d = f"layers.{layer}.mlp", model.num_experts, model.moe_intermediate_size, model.hidden_size
    yield from _linear(f"{block}.router", "router", layer, count, d, model.initializer_range, model.mlp_bias)
    for weight in _mlp(model, layer, "mlp.experts", width):
        tp_dim = None if weight.tp_dim is None else weight.tp_dim + 1
        yield replace(weight, shape=(count, *weight.shape), tp_dim=tp_dim, is_expert=True)
    if model.shared_expert_intermediate_size:
        yield from _mlp(model, layer, "mlp.shared_experts", model.shared_expert_intermediate_size)


def _residual_std(model: Model) -> float:
    return model.initializer_range / sqrt(2 * model.num_hidden_layers)


def _linear(
    name: str,
    part: Part,
    layer: int,
    rows: int,
    columns: int,
    std: float,
    bias: bool,
    *,
    tp_dim: int | None = None,
    max_tp_shards: int | None = None,
) -> Iterator[Weight]:
    """A projection [rows, columns]; the bias of one sharded along its columns is on every rank."""
    yield Weight(f"{name}.weight", (rows, columns), part, layer, std, tp_dim=tp_dim, max_tp_shards=max_tp_shards)
    if bias:
        bias_tp_dim = 0 if tp_dim == 0 else None
        yield Weight(f"{name}.bias", (rows,), part, layer, decay=False, tp_dim=bias_tp_dim, max_tp_shards=max_tp_shards)


def _norm(model: Model, name: str, layer: int | None, size: int) -> Iterator[Weight]:
    start = 0.0 if model.zero_centered_norm else 1.0
    yield Weight(f"{name}.weight", (size,), "norm", layer, init_fill=start, decay=False)
    if model.norm_bias:
        yield Weight(f"{name}.bias", (size,), "norm", layer, init_fill=0.0, decay=False)
