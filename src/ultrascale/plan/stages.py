"""Who holds what under pipeline parallelism, for a whole table of layouts: layers and parameters of three sorts of ranks.

The model is cut into pp x virtual_stages chunks of equal layers; what is left over goes to the middle chunks first, because
the first holds the embedding and the last the head. Three sorts of ranks tell the whole pipeline: the first, the last, and
those between, which are equal. Rank r holds chunks r, pp + r, 2 pp + r, ...; in V-shaped schedules r and 2 pp - 1 - r.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.blocks import layer_kinds
from ultrascale.plan.layouts import SCHEDULES, LayoutTable
from ultrascale.plan.workload import Workload
from ultrascale.spec.weights import layer_weights, weights_outside_layers

Floats = NDArray[np.float64]
FIRST, MIDDLE, LAST = range(3)
V_SHAPED = tuple(SCHEDULES.index(name) for name in ("zb-v", "dualpipe-v", "dualpipe"))


@dataclass(frozen=True)
class Stages:
    """Columns of shape [3, layouts], or [3, kinds, layouts]: first rank, one between, last rank."""

    layers: Floats
    """By kind of block."""
    chunk_layers: Floats
    """Layers of the largest chunk of such a rank, all kinds together."""
    has_embedding: Floats
    has_head: Floats
    dense_parameters: Floats
    """Of one rank, after tp; tied embeddings are counted on both ends if pp > 1."""
    expert_parameters: Floats
    """Of one rank, after ep and expert_tp."""
    block_parameters: Floats
    """Dense ones of the largest block, after tp: what FSDP gathers at once."""
    root_parameters: Floats
    """Those outside the blocks, after tp."""
    exists: Floats
    """How many ranks of this sort a pipeline has: 1, pp - 2, 1; with pp = 1 the first is the only one."""


def cut_stages(workload: Workload, table: LayoutTable) -> Stages:
    """The stages of every layout of `table`."""
    model = workload.model
    total = model.num_hidden_layers + model.num_nextn_predict_layers
    pp, v = table.pp, table.virtual_stages
    chunks = pp * v
    counts, which = np.unique(chunks, return_inverse=True)
    cuts = np.array([_ends_and_largest(split_layers(workload, int(count))) for count in counts])[which].T
    first_chunk, middle_chunk, last_chunk = cuts

    kinds, kind_of_layer = layer_kinds(workload)
    is_kind = np.array([[k == kind for k in kind_of_layer] for kind in range(len(kinds))])
    upto = np.concatenate([np.zeros((len(kinds), 1)), np.cumsum(is_kind, axis=1)], axis=1)
    whole = upto[:, -1:]
    in_first, in_last = upto[:, first_chunk], whole - upto[:, total - last_chunk]
    rest = np.maximum(total - first_chunk - last_chunk, 1)
    in_middle = (whole - in_first - in_last) / rest * middle_chunk * (chunks > 2)

    v_shaped = np.isin(table.schedule, V_SHAPED) & (v > 1)
    one = pp == 1
    of_first = np.where(one, whole, np.where(v_shaped, in_first + in_last, in_first + (v - 1) * in_middle))
    of_middle = np.where(one, whole, v * in_middle)
    of_last = np.where(one, whole, np.where(v_shaped, v * in_middle, in_last + (v - 1) * in_middle))
    layers = np.stack([of_first, of_middle, of_last])

    ones, none = np.ones(len(table)), np.zeros(len(table))
    embedding = np.stack([ones, np.where(one, 1.0, 0.0), np.where(one, 1.0, 0.0)])
    head = np.stack([np.where(one | v_shaped, 1.0, 0.0), np.where(one, 1.0, 0.0), np.where(v_shaped & ~one, 0.0, 1.0)])

    per_layer, expert = parameters_by_kind(workload, table)
    outside_embedding, outside_head, tied = _outside(workload, table)
    expert_cut = table.ep * table.expert_tp
    dense_parameters = (layers * per_layer).sum(axis=1) + embedding * outside_embedding
    dense_parameters = dense_parameters + head * np.where(tied & (embedding > 0), 0.0, outside_head)
    expert_parameters = (layers * (expert[:, None] / expert_cut)).sum(axis=1)
    root = embedding * outside_embedding + head * np.where(tied & (embedding > 0), 0.0, outside_head)
    chunk_layers = np.stack([np.maximum(first_chunk, middle_chunk * (v > 1)), middle_chunk, np.maximum(last_chunk, 0)])
    return Stages(
        layers=layers,
        chunk_layers=np.where(one, total, chunk_layers).astype(float),
        has_embedding=embedding,
        has_head=head,
        dense_parameters=dense_parameters,
        expert_parameters=expert_parameters,
        block_parameters=np.broadcast_to(per_layer.max(axis=0), (3, len(table))),
        root_parameters=root,
        exists=np.stack([ones, np.maximum(pp - 2, 0), np.where(one, none, ones)]),
    )


def split_layers(workload: Workload, num_chunks: int) -> list[int]:
    """Blocks of each chunk of the pipeline, prediction blocks included.

    Even, what is left over to the chunks after the first; or, where the stack counts the head, as nanotron does: blocks and
    head in a row, each goes to the first chunk whose share of the FLOPs is not used up yet.
    """
    model = workload.model
    total = model.num_hidden_layers + model.num_nextn_predict_layers
    if num_chunks == 1:
        return [total]
    if not workload.stack.stages_count_head:
        base, extra = divmod(total, num_chunks)
        first = max(0, extra - (num_chunks - 2))
        return [base + first, *(base + (i < extra - first) for i in range(num_chunks - 2)), base]
    block = sum(w.numel for w in layer_weights(model, total - 1) if len(w.shape) > 1)
    costs = [float(block)] * total + [float(model.vocab_size * model.hidden_size)]
    layers, done, chunk = [0] * num_chunks, 0.0, 0
    for index, cost in enumerate(costs):
        done += cost
        layers[chunk] += index < total
        if done > sum(costs) * (chunk + 1) / num_chunks and chunk < num_chunks - 1:
            chunk += 1
    return layers


def _ends_and_largest(layers: list[int]) -> tuple[int, int, int]:
    """Blocks of the first chunk, of the largest between, of the last; without any between, the larger of the two."""
    return layers[0], max(layers[1:-1], default=max(layers)), layers[-1]


def parameters_by_kind(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats]:
    """Parameters of one block of each kind: dense ones on one rank of tp, [kinds, layouts]; all routed experts, [kinds]."""
    rows = [list(layer_weights(workload.model, layer)) for layer in layer_kinds(workload)[0]]
    ways, which = np.unique(table.tp, return_inverse=True)
    dense = [[sum(w.local_numel(tp=int(tp)) for w in kind if not w.is_expert) for tp in ways] for kind in rows]
    expert = [sum(w.numel for w in kind if w.is_expert) for kind in rows]
    return np.array(dense, dtype=float)[:, which], np.array(expert, dtype=float)


def _outside(workload: Workload, table: LayoutTable) -> tuple[Floats, Floats, bool]:
    """Parameters of the embedding side and of the head side on one rank, the vocabulary padded and cut over tp."""
    model = workload.model
    multiple = workload.stack.pads_vocab_to * table.tp
    rows = -(-model.vocab_size // multiple) * multiple / table.tp
    other = sum(w.numel for w in weights_outside_layers(model) if model.vocab_size not in w.shape)
    positions = other - model.hidden_size
    table_size = rows * model.hidden_size
    return table_size + max(positions, 0), table_size + model.hidden_size, model.tie_word_embeddings
