"""Seconds of one block for one micro-batch on one rank, by pass and kind of work, for every distinct shape of a layout table.

Walks the operations of `work.work` once per shape and adds up their prices: GEMMs and attention from `plan.laws.compute`,
element-wise work by its bytes, collectives of tp, cp and ep from `plan.laws.collectives` in one vectorised call per kind.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from ultrascale.catalogue.stacks.stack import Kernels
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW
from ultrascale.description.recomputed import SELECTIVE
from ultrascale.plan.constants import Constants
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.laws.compute import attention_seconds, columns_seconds, elementwise_seconds, matmul_seconds
from ultrascale.plan.layouts import CHOICES, Floats, Indices, LayoutTable
from ultrascale.plan.split_backward import HALVES, Half, is_deferrable, sent_in_half
from ultrascale.plan.time.attention_choice import attention_kernel
from ultrascale.plan.workload import Workload
from ultrascale.work.op_builders import without_fp8
from ultrascale.work.ops import Collective, Op, Scores, Shape
from ultrascale.work.recompute import recomputed_ops, resolved
from ultrascale.work.work import block_work, embedding_work, head_work, prediction_work

Sent = tuple[str, tuple[Collective, ...]]
"""Name of an operation, and some of its collectives."""
SHAPE_FIELDS = (
    "micro_batch_size", "precision", "tp", "sequence_parallel", "cp", "cp_method", "cp_heads", "ep", "expert_tp", "mlp_chunks",
    "partition_checkpoints", "fp8_scaling", "gathers_fp8",
)  # fmt: skip
PASSES = ("forward", "backward")
OVER_TP = ("tp", "expert_tp")
"""Axes whose traffic is reported under tp."""
HEAD_MULTIPLE = 8
"""The vocabulary columns of a rank (16-bit logits) must be a multiple of this for aligned rows."""
WIDE_BYTES, NARROW_BYTES, CAST_BYTES = 2, 3, 4
"""Bytes of memory traffic per element: read in bf16; read and written in fp8; read and written in both orders (transposed)."""
COLUMN_BYTES = WIDE_BYTES + NARROW_BYTES
"""Bytes of memory traffic per element with one scale per column: it is read twice, the first time for the amax."""
ROWWISE_OVER_TENSORWISE = 1.05
"""Time of an fp8 GEMM with row-wise scales (CUTLASS) over that with one scale (cuBLAS): most shapes reach 90 to 100 percent of
the rate (pytorch issue 147971, H100, 2025)."""
PRODUCT_DERATES = {("b200", "bf16"): 1.1, ("b200", "fp16"): 1.1}
"""Time of GEMMs of one dtype in training beyond `Constants.device_derates`. In bf16 SimuMax's products take 1.32 times NVIDIA's
table (docs/compute-model.md), runs of it and torchtitan 1.3; in fp8 those of NVIDIA, MaxText and torchtitan 1.1 to 1.25."""


@dataclass
class PartSeconds:
    """Seconds of a part of the model (a kind of block, the embedding, the head), an element per distinct shape."""

    product: Floats
    """GEMMs of the forward pass."""
    attention: Floats
    elementwise: Floats
    input_gradient: Floats
    """Input-gradient GEMMs of the backward pass, and attention's whole backward pass."""
    input_elementwise: Floats
    """Element-wise work of the backward pass, besides that of weight gradients."""
    weight_gradient: Floats
    weight_elementwise: Floats
    """Element-wise work of weight gradients: accumulation, and casts of their inputs."""
    weight_gradient_in_i: Floats
    """Part of `weight_gradient` that is not deferred to W in split backward passes."""
    weight_elementwise_in_i: Floats
    tp_forward: Floats
    tp_backward: Floats
    tp_beside: Floats
    """Part of `tp_backward` that can overlap with the two GEMMs of a column-parallel layer's backward pass: the input is
    all-gathered again during the input gradient, whose reduce-scatter runs during the weight gradient (Megatron)."""
    tp_split_input: Floats
    """tp traffic of I in split backward passes: `tp_backward` without the all-gathers of column-parallel inputs."""
    tp_split_sums: Floats
    """Part of `tp_split_input`: reductions of input gradients, with which no GEMM of I can overlap."""
    tp_split_weight: Floats
    """All-gathers of W in split backward passes: column-parallel inputs, and row-parallel output gradients once more."""
    cp_forward: Floats
    """Part of cp before attention: the all-to-all of heads, or the all-gather of keys and values."""
    cp_backward: Floats
    ring_forward: Floats
    """Part of cp that overlaps with attention."""
    ring_backward: Floats
    ep_forward: Floats
    ep_backward: Floats
    grouped_product: Floats
    """Part of `product` in experts, whose results torchtitan's recomputation policy does not keep."""
    last_product: Floats
    """Part of `product`: the last GEMM of a dense block without tp, before which torch's recomputation stops."""
    chosen_products: Floats
    """GEMMs and attention that selective recomputation by modules runs again (`work.recompute.selective_modules`)."""
    chosen_elementwise: Floats
    num_ops: Floats
    """Operations launched in a forward pass."""
    num_collectives: Floats
    """Collectives in a forward pass."""
    num_backward_collectives: Floats

    @property
    def forward(self) -> Floats:
        """Compute seconds of the forward pass."""
        return self.product + self.attention + self.elementwise


class Compute(NamedTuple):
    """Compute columns of `PartSeconds`, of one shape (or of all, an element each)."""

    product: Any
    attention: Any
    elementwise: Any
    input_gradient: Any
    input_elementwise: Any
    weight_gradient: Any
    weight_elementwise: Any
    weight_gradient_in_i: Any
    weight_elementwise_in_i: Any
    grouped_product: Any
    last_product: Any
    num_ops: Any

    def total(self, derate: float) -> float:
        """Seconds of both passes, with GEMMs and attention slower by the factor `derate`."""
        elementwise = self.elementwise + self.input_elementwise + self.weight_elementwise
        return elementwise + derate * (self.product + self.attention + self.input_gradient + self.weight_gradient)


@dataclass(frozen=True)
class Blocks:
    """Prices of all parts for all distinct shapes of a table."""

    shapes: list[Shape]
    shape_of: Indices
    """For each layout, the index of its shape."""
    kinds: tuple[int, ...]
    """One layer of each kind of block."""
    kind_of_layer: tuple[int, ...]
    prices: Floats
    """[parts, columns of `PartSeconds`, shapes]: a block of each kind, the embedding, the head, and the extra input layers of
    a multi-token prediction block."""

    def part(self, number: int) -> PartSeconds:
        """Prices of one part."""
        return PartSeconds(*self.prices[number])


def distinct_shapes(workload: Workload, table: LayoutTable) -> tuple[list[Shape], Indices]:
    """Distinct shapes of one micro-batch on one rank in `table`, and for each layout the index of its shape."""
    columns = [getattr(table, name) for name in SHAPE_FIELDS]
    if len(table) == 1:
        return [_shape(workload, [column.item() for column in columns])], np.zeros(1, dtype=np.intp)
    key = np.zeros(len(table), dtype=np.int64)
    for column in columns:
        key = key * (int(column.max(initial=0)) + 1) + column
    _, first, shape_of = np.unique(key, return_index=True, return_inverse=True)
    fields = zip(*(column[first].tolist() for column in columns), strict=True)
    return [_shape(workload, values) for values in fields], shape_of


def price_blocks(workload: Workload, table: LayoutTable) -> Blocks:
    """Prices of every distinct shape of `table`; cached for later tables of the same workload."""
    shapes, shape_of = distinct_shapes(workload, table)
    kinds, kind_of_layer = kinds_of_layers(workload.model)
    cache_prices(workload, shapes)
    return Blocks(shapes, shape_of, kinds, kind_of_layer, _by_part([workload.priced_shapes[shape] for shape in shapes]))


def cache_prices(workload: Workload, shapes: list[Shape]) -> None:
    """Price these shapes in one call, and cache them for `price_blocks`."""
    known = workload.priced_shapes
    if new := [shape for shape in shapes if shape not in known]:
        known.update(zip(new, _price_shapes(workload, kinds_of_layers(workload.model)[0], new), strict=True))


def price_kept_blocks(workload: Workload, blocks: Blocks) -> Floats:
    """[kinds, columns, shapes]: prices of blocks that stay in bf16 in an fp8 run."""
    shapes = [without_fp8(shape) for shape in blocks.shapes]
    cache_prices(workload, list(dict.fromkeys(shapes)))
    return _by_part([workload.priced_shapes[shape] for shape in shapes])[: len(blocks.kinds)]


def _by_part(known: list[Floats]) -> Floats:
    """[parts, columns, shapes] from the prices of each shape."""
    return known[0][:, :, None] if len(known) == 1 else np.stack(known, axis=-1)


def _price_shapes(workload: Workload, kinds: Sequence[int], shapes: list[Shape]) -> Floats:
    """[shapes, parts, columns of `PartSeconds`]; parts as in `Blocks.prices`."""
    model = workload.model
    parts = [_price_blocks_of(workload, shapes, layer) for layer in kinds]
    parts.append(_price(workload, shapes, [embedding_work(model, shape) for shape in shapes]))
    parts.append(_price(workload, shapes, [head_work(model, shape) for shape in shapes], head=True))
    predicts = model.num_nextn_predict_layers > 0
    parts.append(_price(workload, shapes, [prediction_work(model, shape) if predicts else () for shape in shapes]))
    return np.array([list(vars(part).values()) for part in parts]).transpose(2, 0, 1)


def _price_blocks_of(workload: Workload, shapes: list[Shape], layer: int) -> PartSeconds:
    """Prices of a block of the kind of `layer`."""
    works = [block_work(workload.model, layer, shape) for shape in shapes]
    part = _price(workload, shapes, works)
    if workload.stack.selective == "modules":
        seconds = []
        for shape, ops in zip(shapes, works, strict=True):
            again = recomputed_ops(resolved(SELECTIVE, workload.model, layer, shape), ops, reruns_last=False)
            seconds.append(compute_seconds(workload, shape, again, False))
        part.chosen_products = np.array([compute.product + compute.attention for compute in seconds])
        part.chosen_elementwise = np.array([compute.elementwise for compute in seconds])
    return part


@lru_cache(maxsize=64)
def kinds_of_layers(model: Model) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """A first layer of each kind of block (dense or experts, windowed or not), and the kind of every layer."""
    known: dict[tuple[bool, int | None], int] = {}
    first: list[int] = []
    kind_of_layer = []
    for layer in range(model.num_hidden_layers):
        kind = (model.is_moe(layer), model.window(layer))
        if kind not in known:
            known[kind] = len(known)
            first.append(layer)
        kind_of_layer.append(known[kind])
    # A block of multi-token prediction is one more of the last kind (DeepSeek-V3, section 2.2).
    kind_of_layer += kind_of_layer[-1:] * model.num_nextn_predict_layers
    return tuple(first), tuple(kind_of_layer)


def price_ops(workload: Workload, shape: Shape, ops: tuple[Op, ...]) -> PartSeconds:
    """Seconds of these operations, as one part of the model, for one shape."""
    return _price(workload, [shape], [ops])


def _shape(workload: Workload, fields: Sequence[int]) -> Shape:
    return _known_shape(
        workload.sequence_length, workload.documents, workload.expert_imbalance, workload.stack.kernels, tuple(fields)
    )  # fmt: skip


@lru_cache(maxsize=1 << 16)
def _known_shape(
    sequence_length: int, documents: bool, expert_imbalance: float, kernels: Kernels, fields: tuple[int, ...]
) -> Shape:  # fmt: skip
    """The single `Shape` object with these values of `SHAPE_FIELDS`, so that caches find it by identity."""
    values: dict[str, Any] = dict(zip(SHAPE_FIELDS, fields, strict=True))
    values |= {name: CHOICES[name][values[name]] for name in ("precision", "cp_method", "fp8_scaling")}
    values["sequence_parallel"] = bool(values["sequence_parallel"]) and values["tp"] > 1
    values["partition_checkpoints"] = bool(values["partition_checkpoints"])
    values["fp8_gathered"] = bool(values.pop("gathers_fp8"))
    documents = documents and not (kernels.own_fp8 and values["cp"] > 1)  # `plan.memory.replay.rank_shape`
    return Shape(
        sequence_length=sequence_length, documents=documents, device="cuda", expert_imbalance=expert_imbalance,
        kernels=kernels, **values,
    )  # fmt: skip


def _price(workload: Workload, shapes: list[Shape], works: list[tuple[Op, ...]], *, head: bool = False) -> PartSeconds:
    compute = np.array([compute_seconds(workload, shape, ops, head) for shape, ops in zip(shapes, works, strict=True)])
    columns = Compute(*compute.reshape(len(shapes), len(Compute._fields)).T)
    traffic, counts = _traffic(workload, shapes, _sent(works))
    over_tp = [[op for op in ops if any(collective.axis in OVER_TP for collective in op.collectives)] for ops in works]
    of_columns = [[op for op in ops if _is_of_column(op)] for ops in over_tp]
    beside = _over_tp(workload, shapes, _sent(of_columns))
    of_input, of_weight = (_halves(shapes, over_tp, half) for half in HALVES)
    sums = _halves(shapes, of_columns, "input")
    axes = {f"{axis}_{when}": traffic[axis, when] for axis in ("tp", "cp", "ring", "ep") for when in PASSES}
    return PartSeconds(
        **columns._asdict(),
        **axes,
        tp_beside=np.minimum(beside, columns.input_gradient + columns.weight_gradient),
        tp_split_input=_over_tp(workload, shapes, of_input),
        tp_split_sums=_over_tp(workload, shapes, sums),
        tp_split_weight=_over_tp(workload, shapes, of_weight),
        chosen_products=np.zeros(len(shapes)),
        chosen_elementwise=np.zeros(len(shapes)),
        num_collectives=counts[0],
        num_backward_collectives=counts[1],
    )


def product_derate(workload: Workload, constants: Constants) -> float:
    """Factor on the seconds of GEMMs and attention in training."""
    derate = constants.device_derates.get(workload.accelerator.kind, 1.0)
    return constants.compute_derate * derate * workload.overheads.products


def compute_seconds(workload: Workload, shape: Shape, ops: Iterable[Op], head: bool) -> Compute:
    """Compute seconds of operations on a rank, forward and backward, for one micro-batch, without overlap of kernels.

    In fp8, other trainers share casts between GEMMs: an input is cast once for all its readers, before the tp all-gather, and
    an output gradient once for both GEMMs of the backward pass. Each is cast in both orders (transposed too), since Hopper's
    GEMM reads both factors by rows (Transformer Engine's cast_transpose and grad_output_preprocess); an input saved in high
    precision (`Kernels.rounds_again`) is cast in one order per pass. Weights gathered in every pass are cast in every pass
    (torchao's Float8Linear), others once a step. With row-wise scales (`Kernels.fp8_scaling`) each order has its own scales and
    its own kernel where it is read: rows for the forward and the input-gradient GEMM, columns for the weight-gradient GEMM and
    for weights in the backward pass. In our trainer every GEMM casts its factors itself.
    """
    accelerator, stack = workload.accelerator, workload.stack
    moving = partial(elementwise_seconds, accelerator)
    product = attention = elementwise = inputs = weights = grouped = last = count = at_once = 0.0
    around_inputs = around_weights = around_at_once = 0.0
    # A fused weight-gradient GEMM reads and writes the summed gradient; otherwise it is written, then added in another kernel.
    gradient_bytes = 2.0 * stack.gradient_bytes if stack.fuses_gradient_accumulation else float(shape.itemsize)
    added_bytes = 0 if stack.fuses_gradient_accumulation else 2 * stack.gradient_bytes + shape.itemsize
    dtype = "bf16" if head and shape.precision in NARROW else shape.precision
    shares = dtype in NARROW and not shape.kernels.own_fp8
    by_row = shares and dtype == "fp8" and shape.kernels.fp8_scaling == "row"
    slower = PRODUCT_DERATES.get((accelerator.kind, dtype), 1.0) * (ROWWISE_OVER_TENSORWISE if by_row else 1.0)
    cast_bytes = CAST_BYTES + (0 if shape.kernels.fp8_scaling == "delayed" else WIDE_BYTES)
    weight_cast_bytes = cast_bytes - 1 if shares and stack.gathers == "buckets" else 0  # in one order
    wide = "bf16" if shape.precision in NARROW else shape.precision
    for op in ops:
        count += 1
        of_weights = around = 0.0
        if op.inside:
            piece, remade = (compute_seconds(workload, shape, inner_ops, head) for inner_ops in (op.inside, op.inside[:-1]))
            product, elementwise = product + op.pieces * piece.product, elementwise + op.pieces * piece.elementwise
            inputs += op.pieces * (piece.input_gradient + remade.product)
            around_inputs += op.pieces * (piece.input_elementwise + remade.elementwise)
            of_weights += op.pieces * piece.weight_gradient
            around += op.pieces * piece.weight_elementwise
            count += op.pieces * piece.num_ops
        if op.product is not None:
            m, n, k, copies = op.product
            if head and n % HEAD_MULTIPLE:  # logits; some trainers pad the vocabulary
                n = -(-n // stack.pads_vocab_to) * stack.pads_vocab_to
            gemm = partial(matmul_seconds, accelerator, m, n, k, dtype=dtype, count=copies, casts=not shares, derate=slower)
            forward = gemm()
            product += forward * op.forward_products
            grouped += forward if op.name.startswith("mlp.experts.") else 0.0
            last += forward if op.name == "mlp.down_proj" and shape.tp == 1 else 0.0
            inputs += gemm(kind="input-gradient")
            if by_row:
                around_inputs += moving(m * n * copies * NARROW_BYTES)
                around += columns_seconds(accelerator, m * n * copies * COLUMN_BYTES)
                if weight_cast_bytes:
                    elementwise += moving(n * k * copies * NARROW_BYTES)
                    around_inputs += columns_seconds(accelerator, n * k * copies * COLUMN_BYTES)
            elif shares:
                around_inputs += moving(m * n * copies * cast_bytes)
                cast = moving(n * k * copies * weight_cast_bytes) if weight_cast_bytes else 0.0
                elementwise, around_inputs = elementwise + cast, around_inputs + cast
            of_weights += gemm(kind="weight-gradient", output_bytes=gradient_bytes)
            if added_bytes:
                around += moving(n * k * copies * added_bytes)
        if op.scores is not None:
            scores, pieces = op.scores._asdict(), 1
            if shape.rings:  # one kernel for each ring position, on that position's keys
                pieces = shape.cp_grid[0]
                scores["keys"] = -(-op.scores.keys // pieces)
                elementwise += moving((pieces - 1) * _merge_bytes(op.scores))
            kernel, over = attention_kernel(workload, shape, op.scores), workload.overheads.attention
            attend = partial(attention_seconds, accelerator, **scores, dtype=wide, kernel=kernel)
            attention += pieces * over * attend(backward=False)
            inputs += pieces * over * attend(backward=True)
        weights, around_weights = weights + of_weights, around_weights + around
        if of_weights and not is_deferrable(op):
            at_once, around_at_once = at_once + of_weights, around_at_once + around
        over = 1.0 if op.kind == "loss" else workload.overheads.elementwise  # the table counts every pass of a loss
        if op.name.endswith(".quantise"):  # the law of fp8 products was measured with the cast
            orders = cast_bytes - (1 if op.backward_moved_bytes else 0)  # one order per pass, or both in the forward pass
            passes = [moving(moved * orders / NARROW_BYTES) if shares and moved else 0.0
                      for moved in (op.moved_bytes, op.backward_moved_bytes)]  # fmt: skip
            if by_row:
                passes = (
                    moving(op.moved_bytes),
                    columns_seconds(accelerator, op.moved_bytes * COLUMN_BYTES / NARROW_BYTES),
                )
            elementwise, around_weights = elementwise + passes[0], around_weights + passes[1]
            continue
        if op.moved_bytes:
            elementwise += over * moving(op.moved_bytes)
        if op.backward_moved_bytes:
            around_inputs += over * moving(op.backward_moved_bytes)
    return Compute(
        product, attention, elementwise, inputs, around_inputs, weights, around_weights, at_once, around_at_once, grouped, last,
        count,
    )  # fmt: skip


def _sent(works: Sequence[Iterable[Op]]) -> list[list[Sent]]:
    return [[(op.name, op.collectives) for op in ops if op.collectives] for ops in works]


def _halves(shapes: list[Shape], works: Sequence[Iterable[Op]], half: Half) -> list[list[Sent]]:
    return [[(op.name, sent_in_half(op, half, shape)) for op in ops] for shape, ops in zip(shapes, works, strict=True)]


def _over_tp(workload: Workload, shapes: list[Shape], sent: list[list[Sent]]) -> Floats:
    """Seconds of these collectives over tp in backward passes, [shapes]."""
    return _traffic(workload, shapes, sent)[0]["tp", "backward"]


def _is_of_column(op: Op) -> bool:
    """True if an operation's backward traffic is that of a column-parallel layer."""
    sends_over_tp = any(item.axis == "tp" and item.when == "backward" and item.kind != "all_gather" for item in op.collectives)
    return sends_over_tp and op.kind != "elementwise"  # elementwise: latent attention's shared key, no GEMM overlaps with it


def _sent_share(workload: Workload, shape: Shape, name: str, when: str) -> float:
    """Fraction of the bytes of topk bf16 copies of each token that a dispatcher sends.

    alltoall sends every copy. A deduplicating dispatcher sends one copy to each destination (node, or rank of one node) hit by
    topk uniform draws; node-limited routing has fewer nodes to draw from (DeepSeek-V3, section 3.2.2), and a benchmark's gate
    may fix their number.
    """
    model, stack, ranks = workload.model, workload.stack, shape.ep * shape.expert_tp
    if stack.dispatcher == "alltoall" or ranks == 1:
        return 1.0
    nodes = -(-ranks // workload.cluster.node.num_accelerators)
    allowed = stack.token_nodes or -(-nodes * model.topk_group // model.n_group)
    places = min(nodes, allowed) if nodes > 1 else shape.ep
    share = places * (1 - (1 - 1 / places) ** model.num_experts_per_tok) / model.num_experts_per_tok
    in_fp8 = stack.sends_tokens_in_fp8 and shape.precision in NARROW and "dispatch" in name and when == "forward"
    return share / 2 if in_fp8 else share


def _merge_bytes(scores: Scores) -> int:
    """Bytes of memory traffic of a ring step's merge: reads the accumulated and the new result in fp32, writes the merged."""
    return 3 * 4 * scores.batch * scores.queries * scores.heads * scores.value_head_dim


def _traffic(workload: Workload, shapes: list[Shape], sent: list[list[Sent]]) -> tuple[dict[tuple[str, str], Floats], Floats]:
    """Seconds of collectives by (axis, pass), and the number of collectives in each pass, [2, shapes]."""
    seconds = {(axis, when): np.zeros(len(shapes)) for axis in ("tp", "cp", "ring", "ep") for when in PASSES}
    counts = np.zeros((2, len(shapes)))
    by_kind: dict[tuple[str, str, str], list[tuple[int, float, int, int]]] = defaultdict(list)
    for index, (shape, sent_of_shape) in enumerate(zip(shapes, sent, strict=True)):
        places, swap = shape.cp_grid
        groups = {
            "tp": (shape.tp, 1),
            "cp": (places, shape.tp * swap),
            "ep": (shape.ep, shape.expert_tp),
            "expert_tp": (shape.expert_tp, 1),
        }
        for name, collectives in sent_of_shape:
            for item in collectives:
                axis, num_bytes = item.axis, item.num_bytes
                size, stride = (swap, shape.tp) if axis == "cp" and item.kind == "all_to_all" else groups[axis]
                if item.axis == "ep" and item.kind == "all_to_all":
                    num_bytes *= _sent_share(workload, shape, name, item.when)
                row = "tp" if axis == "expert_tp" else "ring" if item.hideable == "attention" else axis
                by_kind[item.kind, row, item.when].append((index, num_bytes, size, stride))
    for (kind, axis, when), items in by_kind.items():
        index, num_bytes, size, stride = (np.array(column) for column in zip(*items, strict=True))
        durations = collective_seconds(workload.cluster, kind, num_bytes.astype(float), size=size, stride=stride)
        np.add.at(seconds[axis, when], index, durations)
        counts[PASSES.index(when)] += np.bincount(index, minlength=len(shapes))
    return seconds, counts
