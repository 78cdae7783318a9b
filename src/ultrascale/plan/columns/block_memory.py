"""Memory of one part of the model (block, embedding, head) on one rank for one micro-batch, by replaying its operations.

    forward     every operation allocates its results; tensors saved by autograd stay, others are freed after their last reader
    backward    last operation first: allocate the gradients of its inputs and weights, free the tensors it saved
    recomputed  a part with recomputation runs forward again before, or in the middle of, its backward pass

The same allocations as in `plan.memory.replay`, which replays a whole step; here once per distinct shape, from which
`plan.columns.footprint` builds whole ranks. A part owns its input (`hidden`), not its result. Shapes with the same operations
that differ only in sizes are replayed together: every number of bytes is a column, [shapes].
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ultrascale.catalogue.stacks.stack import Selective, Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights_outside_layers
from ultrascale.description.recomputed import BlockRecompute
from ultrascale.plan.split_backward import is_deferrable, is_row_sum
from ultrascale.work.recompute import Region, recompute_of_mode, regions_of, saved_results
from ultrascale.work.work import Op, Shape, block_work, embedding_work, head_work

Column = NDArray[np.int64]
"""Bytes by shape."""
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
    return BlockMemory(*block_columns(model, layer, [shape], recompute=recompute, stack=stack, splits=splits)[0].astype(int))


def block_columns(
    model: Model, layer: int, shapes: Sequence[Shape], *, recompute: Recompute, stack: Stack, splits: bool
) -> NDArray[np.float64]:
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
            [works[row] for row in rows], {"hidden": hidden[rows]}, "hidden_out", hidden[rows],
            [weights[row] for row in rows], shapes[rows[0]].itemsize, weight_gradients(stack), splits=splits,
        )  # fmt: skip
        table[rows] = part.measure(recomputations[rows[0]], stack.selective)
    table[:, 0] -= not_saved
    return table


def head_columns(model: Model, shapes: Sequence[Shape], *, stack: Stack) -> NDArray[np.float64]:
    """Fields of `block_memory` for the final norm, the head and its loss, [shapes, 4]."""
    hidden = _hidden_bytes(model, shapes)
    works = [head_work(model, shape) for shape in shapes]
    return _outside(model, shapes, works, {"hidden": hidden}, "loss", np.zeros_like(hidden), stack)


def embedding_columns(model: Model, shapes: Sequence[Shape], *, stack: Stack) -> NDArray[np.float64]:
    """Fields of `block_memory` for the embedding, [shapes, 4]."""
    works = [embedding_work(model, shape) for shape in shapes]
    return _outside(model, shapes, works, {}, "hidden", _hidden_bytes(model, shapes), stack)


def _outside(
    model: Model, shapes: Sequence[Shape], works: Sequence[tuple[Op, ...]], inputs: Mapping[str, Column], result: str,
    result_bytes: Column, stack: Stack,
) -> NDArray[np.float64]:  # fmt: skip
    table = np.empty((len(shapes), 4))
    keys = [(shape.precision, tuple(map(_moves, ops))) for shape, ops in zip(shapes, works, strict=True)]
    for rows in _alike(keys):
        part = _Part(
            [works[row] for row in rows], {name: column[rows] for name, column in inputs.items()}, result, result_bytes[rows],
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


class _Ledger:
    """Live bytes by name, with their number of holders, and the peak total."""

    __slots__ = ("holders", "peak", "sizes", "total")

    def __init__(self, inputs: Mapping[str, Column]) -> None:
        self.total: Column | int = 0
        self.peak: Column | int = 0
        self.sizes: dict[str, Column | int] = {}
        self.holders: dict[str, int] = {}
        for name, num_bytes in inputs.items():
            self.take(name, num_bytes)

    def take(self, name: str, num_bytes: Column | int) -> None:
        self.sizes[name], self.holders[name] = num_bytes, 1
        self.total = self.total + num_bytes
        self.peak = np.maximum(self.peak, self.total)

    def retain(self, name: str) -> None:
        self.holders[name] += 1

    def release(self, name: str) -> None:
        holders = self.holders[name] - 1
        self.holders[name] = holders
        if not holders:
            self.total = self.total - self.sizes.pop(name)
            del self.holders[name]

    def touch(self, num_bytes: Column) -> None:
        self.peak = np.maximum(self.peak, self.total + num_bytes)


class _Part:
    """A part's operations, with the replay of its passes."""

    def __init__(
        self,
        works: Sequence[tuple[Op, ...]],
        inputs: Mapping[str, Column],
        result: str,
        result_bytes: Column,
        weights: Sequence[Mapping[str, int]],
        itemsize: int,
        gradients: WeightGradients,
        *,
        is_outside: bool = False,
        splits: bool = False,
    ):
        """`works`, `weights`: operations, and elements of each weight, of every shape."""

        def column(sizes: Iterable[int]) -> Column:
            return np.array([*sizes], dtype=np.int64)

        ops = self.ops = works[0]
        self.inputs, self.result, self.result_bytes = inputs, result, result_bytes
        self.itemsize, self.gradients, self.is_outside, self.splits = itemsize, gradients, is_outside, splits
        self.weights = {name: column(elements[name] for elements in weights) for name in weights[0]}
        self.waiting: dict[str, None] = {}
        """Names kept for W."""
        self.results = {
            (op.name, activation.name): column(work[number].makes[place].num_bytes for work in works)
            for number, op in enumerate(ops)
            for place, activation in enumerate(op.makes)
        }
        """Sizes by (operation, name): eager attention and a router both produce `scores`."""
        self.activation_bytes = {**inputs, **{name: num_bytes for (_, name), num_bytes in self.results.items()}}
        self.scratch = {
            op.name: (
                column(work[number].scratch_bytes for work in works),
                column(work[number].backward_scratch_bytes for work in works),
            )
            for number, op in enumerate(ops)
        }
        """Forward and backward scratch bytes, by name of the operation."""
        self.ledger = _Ledger(inputs)
        self._borrowed: dict[int, list[str]] = {}
        """For each region, its inputs that other regions have recomputed."""

    def measure(self, recomputation: BlockRecompute | None, selective: Selective) -> Column:
        """Replay both passes; the fields of `BlockMemory`, [shapes, 4]. `selective`: what the stack keeps in selective
        recomputation if `recomputation` names no kinds."""
        recomputed, kept = regions_of(self.ops, recomputation), frozenset[str]()
        if checkpoints := recomputation is not None and not recomputation.modules:
            self._retain(self.inputs)
            kept = kept if recomputation.whole else saved_results(self.ops, recomputation, selective)
        tape = self._forward(self.ops, saves=not checkpoints, keep=kept, recomputed=recomputed)
        forward_peak = self.ledger.peak
        if self.result in self.ledger.sizes:
            self.ledger.release(self.result)
        saved = self.ledger.total
        self.ledger.peak = 0
        self.ledger.take(f"d {self.result}", self.result_bytes)
        if checkpoints:
            tape = self._recompute(kept)
        self._backward(tape, recomputed)
        waiting = sum(self.ledger.sizes[name] for name in self.waiting)
        columns = (saved, forward_peak, self.ledger.peak, waiting)
        return np.stack([np.broadcast_to(column, self.result_bytes.shape) for column in columns], axis=1)

    def _forward(
        self,
        ops: tuple[Op, ...],
        *,
        saves: bool,
        keep: Collection[str] = (),
        recomputed: Sequence[Region] = (),
        kept: Collection[str] = (),
        leaves: Collection[str] | None = None,
    ) -> list[tuple[Op, list[str]]]:
        """Run forward. `keep`: results to hold; `kept`: those of the first run, reused; `recomputed`: regions whose inputs are
        saved instead of their results."""
        ledger = self.ledger
        leaves = (self.result,) if leaves is None else leaves
        last_reader = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves)}
        live = set(self.inputs)
        read_by_kept = {name for op in ops if kept and op.makes[0].name in kept for name in op.reads}
        remade = frozenset(name for region in recomputed for name in region.drops)
        tape: list[tuple[Op, list[str]]] = []
        if recomputed:
            places = {op.name: index for index, op in enumerate(ops)}
            for region in recomputed:
                end = places[region.end]
                last_reader |= {name: max(end, last_reader.get(name, 0)) for name in region.reads}
        for index, op in enumerate(ops):
            for activation in op.makes:
                if activation.name not in kept:  # partial sums are not recomputed if their sum is kept
                    ledger.take(
                        activation.name,
                        0
                        if op.makes_partial_sums and activation.name in read_by_kept
                        else self.results[op.name, activation.name],
                    )
                live.add(activation.name)
                if activation.name in keep:
                    ledger.retain(activation.name)
            ledger.touch(self.scratch[op.name][0])
            if saves:
                tape.append((op, self._save(op, remade)))
            for region in recomputed:
                if op.name == region.end:
                    self._retain([name for name in region.reads if name not in remade])
            unread = [name for name in live if name not in leaves and last_reader.get(name, -1) <= index]
            for name in unread:
                live.remove(name)
                ledger.release(name)
        return tape

    def _save(self, op: Op, remade: Collection[str]) -> list[str]:
        """Hold the tensors that `op` saves, without those shared by all blocks."""
        return self._retain([name for name in op.saves if name not in remade])

    def _retain(self, names: Iterable[str]) -> list[str]:
        held = [name for name in names if name in self.ledger.sizes]
        for name in held:
            self.ledger.retain(name)
        return held

    def _recompute(self, kept: frozenset[str]) -> list[tuple[Op, list[str]]]:
        """Recompute up to the last operation that saves a tensor, as torch does."""
        last = max((index for index, op in enumerate(self.ops) if op.saves), default=0)
        self._retain(self.inputs)
        leaves = set(self.ops[last].saves)
        tape = self._forward(self.ops[:last], saves=True, kept=kept, leaves=leaves)
        final = self.ops[last]
        tape.append((final, self._save(final, ())))
        for name in leaves:
            if name in self.ledger.sizes:
                self.ledger.release(name)
        return [*tape, *((op, []) for op in self.ops[last + 1 :])]

    def _backward(self, tape: list[tuple[Op, list[str]]], recomputed: Sequence[Region]) -> None:
        ledger, gradients = self.ledger, {self.result: f"d {self.result}"}
        pending = {name: region for region in recomputed for name in region.drops}
        dropped = frozenset(pending)
        while tape:
            op, saved = tape[-1]
            for name in op.saves:
                if name in pending:
                    self._recompute_region(pending[name], tape, pending, dropped)
            tape.pop()
            arriving = list(
                dict.fromkeys(gradients.pop(activation.name) for activation in op.makes if activation.name in gradients)
            )
            leaving: dict[str, str] = {}
            if arriving or op.hands_on_saved:
                leaving = self._backward_op(op, saved, arriving)
            for name in (*arriving, *saved):
                ledger.release(name)
            for name, gradient in leaving.items():
                gradients[name] = self._sum_gradients(gradients[name], gradient) if name in gradients else gradient

    def _recompute_region(
        self, region: Region, tape: list[tuple[Op, list[str]]], pending: dict[str, Region], dropped: frozenset[str]
    ) -> None:
        """Recompute a region; its results are held by the operations on the tape that save them. `pending`: the results not
        yet recomputed, of all `dropped`."""
        ledger = self.ledger
        for name in region.reads:
            if name in pending:
                self._recompute_region(pending[name], tape, pending, dropped)
        borrowed = self._retain([name for name in region.reads if name in dropped])
        for name in region.drops:
            pending.pop(name, None)
        last = {name: index for index, op in enumerate(region.ops) for name in (*op.reads, *op.saves)}
        passing: list[str] = []
        for index, op in enumerate(region.ops):
            for activation in op.makes:
                ledger.take(
                    activation.name if activation.name in region.drops else f"{activation.name} again",
                    self.results[op.name, activation.name],
                )
            passing += [activation.name for activation in op.makes if activation.name not in region.drops]
            ledger.touch(self.scratch[op.name][0])
            for name in [transient for transient in passing if last.get(transient, -1) <= index]:
                passing.remove(name)
                ledger.release(f"{name} again")
        for op, saved in tape:
            names = [name for name in op.saves if name in region.drops]
            saved += self._retain(names)
        for later_region in dict.fromkeys(pending.values()):  # later regions read the results
            other_reads = [name for name in later_region.reads if name in region.drops]
            self._borrowed.setdefault(id(later_region), []).extend(self._retain(other_reads))
        for name in region.drops:
            ledger.release(name)
        for name in (*borrowed, *self._borrowed.pop(id(region), ()), *(read for read in region.reads if read not in dropped)):
            if name in ledger.sizes:
                ledger.release(name)

    def _sum_gradients(self, existing: str, gradient: str) -> str:
        """Sum of two gradients: autograd adds in place, unless the existing one is kept for W."""
        total = existing
        if self.ledger.holders[existing] > 1:
            total = f"{existing} + {gradient}"
            self.ledger.take(total, self.ledger.sizes[existing])
            self.ledger.release(existing)
        self.ledger.release(gradient)
        return total

    def _backward_op(self, op: Op, saved: list[str], arriving: list[str]) -> dict[str, str]:
        """Backward pass of `op`. Returns the gradients of its inputs."""
        ledger = self.ledger
        leaving: dict[str, str] = {}
        for name in op.reads:
            if op.hands_on_saved:
                leaving[name] = saved[0]
                ledger.retain(saved[0])
            elif op.passes_gradient:
                leaving[name] = arriving[0]
                ledger.retain(arriving[0])
            else:
                leaving[name] = f"d {name} of {op.name}"
                ledger.take(leaving[name], self.activation_bytes[name])
        if self.splits and is_deferrable(op):
            self._defer_weight_gradient(op, saved, arriving[0])
        else:
            self._make_weight_gradients(op, saved)
            ledger.touch(self.scratch[op.name][1])
        return leaving

    def _defer_weight_gradient(self, op: Op, saved: list[str], arriving: str) -> None:
        """Keep a linear layer's input and output gradient for W: this rank's positions of a row-parallel layer's, rounded in
        fp8."""
        held = [arriving, *saved[:1]]
        part = next(
            (
                self.activation_bytes[consumer.makes[0].name]
                for consumer in self.ops
                if is_row_sum(consumer) and consumer.reads[0] == op.makes[0].name
            ),
            None,
        )
        if part is not None or op.in_fp8:
            held[0] = f"d {op.makes[0].name} for W"
            whole = self.ledger.sizes[arriving] if part is None else part
            self.ledger.take(held[0], whole // (self.itemsize if op.in_fp8 else 1))
            self.ledger.holders[held[0]] = 0
        for name in held:
            if name not in self.waiting:
                self.waiting[name] = None
                self.ledger.retain(name)

    def _make_weight_gradients(self, op: Op, saved: list[str]) -> None:
        if not op.weights or (self.gradients == "in place" and not self.is_outside):
            return
        if op.hands_on_saved:
            if self.gradients == "held":
                self.ledger.retain(saved[1])
            return
        num_bytes = np.sum([self.weights[name] for name in op.weights], axis=0) * self.itemsize
        if self.gradients == "held":
            self.ledger.take(f"weights of {op.name}", num_bytes)
        else:
            self.ledger.touch(num_bytes)
