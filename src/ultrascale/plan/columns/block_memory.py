"""Memory of one part of the model (block, embedding, head) on one rank for one micro-batch, by replaying its operations.

    forward     every operation allocates its results; tensors saved by autograd stay, others are freed after their last reader
    backward    last operation first: allocate the gradients of its inputs and weights, free the tensors it saved
    recomputed  a part with recomputation runs forward again before, or in the middle of, its backward pass

The same allocations as in `plan.memory.replay`, which replays a whole step; here once per distinct shape, from which
`plan.columns.footprint` builds whole ranks. A part owns its input (`hidden`), not its result. Shapes with the same operations
that differ only in sizes are replayed together: every number of bytes is a column, [shapes].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, cast

import numpy as np

from ultrascale.catalogue.stacks.stack import Selective, Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights_outside_layers
from ultrascale.description.recomputed import BlockRecompute
from ultrascale.plan.layouts import Column, Floats
from ultrascale.plan.memory.block_walk import BlockWalk, Nothing, Unwinding
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.sharding import Shards
from ultrascale.plan.memory.tally import Tally
from ultrascale.plan.split_backward import is_deferrable, is_row_sum
from ultrascale.work.recompute import recompute_of_mode, regions_of, saved_results
from ultrascale.work.work import Activation, Op, Shape, block_work, embedding_work, head_work

Recompute = str
"""Recomputation of one block, in the words of `description.recomputed`."""
WeightGradients = Literal["held", "momentary", "in place"]
"""Lifetime of a weight's gradient. Held: it stays until the block is done (FSDP). Momentary: it is added to the accumulated
gradient and freed. In place: the GEMM accumulates directly (Megatron's gradient accumulation fusion)."""


class BlockMemory(NamedTuple):
    """Bytes of one part. Peaks include its input and saved tensors, but nothing else that existed before."""

    saved_bytes: int
    """Bytes saved from the forward to the backward pass."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    """Peak of the backward pass, with the gradient of the result and, if they are held, those of the weights."""
    waiting_bytes: int = 0
    """Bytes that I keeps for W, if backward passes are split."""


def block_memory(
    model: Model, layer: int, shape: Shape, *, recompute: Recompute = "none", stack: Stack, splits: bool = False
) -> BlockMemory:
    """Memory of decoder block `layer`. `shape.kernels` are those of `stack`; `recompute` as in `Layout`, without every-k.
    `splits`: the backward pass is I, which keeps inputs and output gradients of linear layers for W."""
    (fields,) = block_columns(model, layer, [shape], recompute=recompute, stack=stack, splits=splits)
    return BlockMemory(*map(int, fields))


def block_columns(
    model: Model, layer: int, shapes: Sequence[Shape], *, recompute: Recompute, stack: Stack, splits: bool
) -> Floats:
    """Fields of `block_memory` of many shapes, [shapes, 4]."""
    works = [block_work(model, layer, shape) for shape in shapes]
    recomputations = [recompute_of_mode(recompute, model, layer, shape, stack) for shape in shapes]
    keys = [
        (recomputation, shape.precision, _moves_of(model, layer, shape))
        for recomputation, shape in zip(recomputations, shapes, strict=True)
    ]
    weights = [local_weights(model, layer, shape.tp, shape.ep, shape.expert_tp) for shape in shapes]
    hidden = _hidden_bytes(model, shapes)
    cut = [shape.partition_checkpoints and recompute == "full" for shape in shapes]
    not_saved = np.where(cut, hidden - -(-hidden // np.array([shape.tp for shape in shapes])), 0)
    table = np.empty((len(shapes), 4))
    for rows in _alike(keys):
        part = _Part(
            [works[row] for row in rows], ("hidden",), hidden[rows], "hidden_out", hidden[rows],
            [weights[row] for row in rows], shapes[rows[0]].itemsize, weight_gradients(stack), splits=splits,
        )  # fmt: skip
        table[rows] = part.measure(recomputations[rows[0]], stack.selective)
    table[:, 0] -= not_saved
    return table


def head_columns(model: Model, shapes: Sequence[Shape], *, stack: Stack) -> Floats:
    """Fields of `block_memory` for the final norm, the head and its loss, [shapes, 4]."""
    hidden = _hidden_bytes(model, shapes)
    works = [head_work(model, shape) for shape in shapes]
    return _outside(model, shapes, works, ("hidden",), "loss", np.zeros_like(hidden), stack)


def embedding_columns(model: Model, shapes: Sequence[Shape], *, stack: Stack) -> Floats:
    """Fields of `block_memory` for the embedding, [shapes, 4]."""
    works = [embedding_work(model, shape) for shape in shapes]
    return _outside(model, shapes, works, (), "hidden", _hidden_bytes(model, shapes), stack)


def _outside(
    model: Model, shapes: Sequence[Shape], works: Sequence[tuple[Op, ...]], inputs: Sequence[str], result: str,
    result_bytes: Column, stack: Stack,
) -> Floats:  # fmt: skip
    table, hidden = np.empty((len(shapes), 4)), _hidden_bytes(model, shapes)
    keys = [(shape.precision, tuple(map(_moves, ops))) for shape, ops in zip(shapes, works, strict=True)]
    for rows in _alike(keys):
        part = _Part(
            [works[row] for row in rows], inputs, hidden[rows], result, result_bytes[rows],
            [_outside_weights(model, shapes[row].tp) for row in rows], shapes[rows[0]].itemsize, weight_gradients(stack),
            is_outside=True,
        )  # fmt: skip
        table[rows] = part.measure(None, stack.selective)
    return table


def _hidden_bytes(model: Model, shapes: Sequence[Shape]) -> Column:
    """Bytes of the residual stream."""
    return np.array([shape.outer_tokens * model.hidden_size * shape.itemsize for shape in shapes], dtype=np.int64)


def _alike(keys: Sequence[object]) -> Iterator[list[int]]:
    """Indices of equal keys."""
    rows: dict[object, list[int]] = {}
    for row, key in enumerate(keys):
        rows.setdefault(key, []).append(row)
    yield from rows.values()


@lru_cache(maxsize=1 << 13)
def _moves_of(model: Model, layer: int, shape: Shape) -> object:
    """Key of the facts of a block's operations that `_Part` uses, without their sizes."""
    return _known_moves(tuple(map(_moves, block_work(model, layer, shape))))


@lru_cache(maxsize=1 << 10)
def _known_moves(moves: tuple[object, ...]) -> object:
    """A single object for equal `moves`, compared by identity."""
    return object()


def _moves(op: Op) -> tuple[object, ...]:
    axes = tuple((collective.axis, collective.kind) for collective in op.collectives)
    made_names = tuple(activation.name for activation in op.makes)
    return op.name, op.kind, op.reads, made_names, op.saves, op.weights, op.hands_on_saved, op.inside != (), axes, op.in_fp8


def weight_gradients(stack: Stack) -> WeightGradients:
    """Lifetime of a weight's gradient in `stack`."""
    if stack.gathers == "buckets":
        return "held"
    return "in place" if stack.fuses_gradient_accumulation else "momentary"


@lru_cache(maxsize=1 << 14)
def dummy_gradient_bytes(model: Model, layers: tuple[int, ...], shape: Shape, *, stack: Stack) -> int:
    """Bytes of dummy gradients: one for every distinct linear-layer shape in blocks of the kinds of `layers`, and of one
    expert."""
    if not stack.keeps_dummy_gradients:
        return 0
    products = [op.product for layer in layers for op in block_work(model, layer, shape) if op.kind == "matmul"]
    return sum(n * k for n, k in {(product.n, product.k) for product in products if product is not None}) * shape.itemsize


@lru_cache(maxsize=1024)
def local_weights(model: Model, layer: int, tp: int, ep: int, expert_tp: int) -> dict[str, int]:
    """Elements of each weight of a block on one rank, by name within the block."""
    prefix = len(f"layers.{layer}.")
    rows = layer_weights(model, layer)
    return {w.name[prefix:]: w.local_numel(tp=tp, ep=ep, expert_tp=expert_tp) for w in rows}


@lru_cache(maxsize=256)
def _outside_weights(model: Model, tp: int) -> dict[str, int]:
    return {w.name: w.local_numel(tp=tp) for w in weights_outside_layers(model)}


class _Columns(Ledger):
    """Total of live bytes of every shape, and its peak; no categories."""

    peak: Any = 0

    def take(self, category: str, label: str, num_bytes: Any) -> Allocation:
        self.total = self.total + num_bytes
        self.peak = np.maximum(self.peak, self.total)
        return Allocation(category, label, num_bytes)

    def touch(self, category: str, label: str, num_bytes: Any) -> None:
        self.peak = np.maximum(self.peak, self.total + num_bytes)

    def _free(self, allocation: Allocation) -> None:
        self.total = self.total - allocation.num_bytes


class _Part(BlockWalk):
    """A part's operations, with the replay of its passes. Local variables, biases added apart and parts of ring attention are
    not counted, which `plan.memory.stage_replay` does."""

    def __init__(
        self,
        works: Sequence[tuple[Op, ...]],
        inputs: Sequence[str],
        hidden: Column,
        result: str,
        result_bytes: Column,
        weights: Sequence[Mapping[str, int]],
        itemsize: int,
        gradients: WeightGradients,
        *,
        is_outside: bool = False,
        splits: bool = False,
    ):
        """`works`, `weights`: operations, and elements of each weight, of every shape. `inputs`: as large as `hidden`."""
        super().__init__(_Columns(), cast(Tally, Nothing()), cast(Shards, Nothing()), cast(int, hidden))
        self.plain_ops, self.inputs, self.result, self.result_bytes = works[0], inputs, result, result_bytes
        self.itemsize, self.gradients, self.is_outside, self.splits = itemsize, gradients, is_outside, splits
        self.waiting: dict[int, Allocation] = {}
        """Tensors kept for W, by identity."""
        self._columns: dict[str, tuple[Any, ...]] = {}
        """Bytes of an operation's results by name, its scratch bytes forward and backward; by name of the operation."""
        self.weights: dict[str, Column] = {}
        """Bytes of each operation's weights, by its name."""
        for same in zip(*works, strict=True):
            name, names = same[0].name, [activation.name for activation in same[0].makes]
            made = np.array([[activation.num_bytes for activation in op.makes] for op in same], dtype=np.int64)
            scratch = np.array([(op.scratch_bytes, op.backward_scratch_bytes) for op in same], dtype=np.int64)
            self._columns[name] = dict(zip(names, made.T, strict=True)), *scratch.T
            if same[0].weights:
                sizes = [sum(elements[weight] for weight in same[0].weights) for elements in weights]
                self.weights[name] = np.array(sizes, dtype=np.int64) * itemsize
        self.ops = tuple(map(self._in_columns, works[0]))

    def _in_columns(self, op: Op) -> Op:
        """`op` with columns in place of numbers of bytes."""
        results, scratch, backward_scratch = self._columns[op.name]
        return replace(
            op, makes=tuple(Activation(name, results[name]) for name, _ in op.makes), weights=(),
            scratch_bytes=scratch, backward_scratch_bytes=backward_scratch,
        )  # fmt: skip

    def measure(self, recomputation: BlockRecompute | None, selective: Selective) -> Column:
        """Replay both passes; the fields of `BlockMemory`, [shapes, 4]. `selective`: what the stack keeps in selective
        recomputation if `recomputation` names no kinds."""
        ledger, kept_names = cast(_Columns, self.ledger), frozenset[str]()
        recomputed = tuple(
            region._replace(ops=tuple(map(self._in_columns, region.ops)))
            for region in regions_of(self.plain_ops, recomputation)
        )
        live = {name: ledger.take("", "", self.hidden_bytes) for name in self.inputs}
        checkpoint, keep = dict[str, Allocation](), None
        if recomputation is not None and not recomputation.modules:
            checkpoint = {name: tensor.retain() for name, tensor in live.items()}
            if not recomputation.whole:
                keep, kept_names = {}, saved_results(self.plain_ops, recomputation, selective)
        tape = self._run(
            self.ops, live, "", {self.result}, saves=not checkpoint, keep=keep, kept_names=kept_names, recomputed=recomputed
        )
        forward_peak = ledger.peak
        ledger.release_all(live.values())
        saved, ledger.peak = ledger.total, 0
        gradients = {self.result: ledger.take("", "", cast(int, self.result_bytes))}
        if checkpoint:
            tape = self._rerun(self.ops, {name: tensor.retain() for name, tensor in checkpoint.items()}, keep, 0)
        self._unwind(tape, gradients, 0, None)
        waiting = sum(tensor.num_bytes for tensor in self.waiting.values())
        columns = (saved, forward_peak, ledger.peak, waiting)
        return np.stack([np.broadcast_to(column, self.result_bytes.shape) for column in columns], axis=1)

    def _backward_op(self, op: Op, saved: list[Allocation], arriving: Allocation, now: Unwinding) -> None:
        leaving = self._input_gradients(op, op.reads, saved, arriving, now.sizes)
        if self.splits and is_deferrable(op):
            self._defer_weight_gradient(op, saved, arriving)
        else:
            self._make_weight_gradients(op, saved)
            self.ledger.touch("", "", op.backward_scratch_bytes)
        self.ledger.release_all([arriving, *saved])
        self._merge(now.gradients, leaving)

    def _defer_weight_gradient(self, op: Op, saved: list[Allocation], arriving: Allocation) -> None:
        """Keep a linear layer's input and output gradient for W: this rank's positions of a row-parallel layer's, rounded in
        fp8."""
        part = next((c.makes[0].num_bytes for c in self.ops if is_row_sum(c) and c.reads[0] == op.makes[0].name), None)
        gradient = arriving.retain()
        if part is not None or op.in_fp8:
            whole = arriving.num_bytes if part is None else part
            self.ledger.release(gradient)
            gradient = self.ledger.take("", "", whole // (self.itemsize if op.in_fp8 else 1))
        for tensor in (gradient, *(tensor.retain() for tensor in saved[:1])):
            if self.waiting.setdefault(id(tensor), tensor) is not tensor:
                self.ledger.release(tensor)

    def _make_weight_gradients(self, op: Op, saved: list[Allocation]) -> None:
        if op.name not in self.weights or (self.gradients == "in place" and not self.is_outside):
            return
        if self.gradients != "held":
            if not op.hands_on_saved:
                self.ledger.touch("", "", cast(int, self.weights[op.name]))
        elif op.hands_on_saved:
            saved[1].retain()
        else:
            self.ledger.take("", "", cast(int, self.weights[op.name]))
