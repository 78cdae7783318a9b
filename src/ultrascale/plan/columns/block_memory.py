"""Memory of a part of the model (a block, the embedding, the head) on one rank for one micro-batch, by playing its operations.

    forward     every operation takes its results; what autograd saves stays, the rest goes after its last reader
    backward    last operation first: take the gradients of what it read and of its weights, let go of what it saved
    recomputed  a part that keeps little runs forward again before, or in the middle of, its backward pass

The same moves as `plan.memory.replay`, which replays a whole step; here for any shape, once per distinct one:
`plan.columns.footprint` builds whole ranks out of it. A part owns what it reads (`hidden`), not what it hands on. Shapes whose
blocks do the same operations and differ in sizes alone are played together, a column of bytes for each number
(`block_columns`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ultrascale.catalogue.stacks.stack import Selective, Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights_outside_layers
from ultrascale.description.recomputed import Again
from ultrascale.plan.cut_backward import is_row_sum, may_wait
from ultrascale.work.kept import Region, block_again, kept_results, regions
from ultrascale.work.work import Op, Shape, block_work, embedding_work, head_work

Recompute = str
"""One block's, as `description.recomputed` has the words."""
WeightGradients = Literal["held", "momentary", "in place"]
"""Fate of a weight's gradient. Held: it stays until the block is done (FSDP). Momentary: it is added to the accumulated one
and freed. In place: the product adds to the accumulated one itself (Megatron's gradient accumulation fusion)."""


@dataclass(frozen=True, slots=True)
class BlockMemory:
    """Bytes. Peaks include what the part itself saves, and nothing that was there before but its input."""

    saved_bytes: int
    """Bytes saved from the forward to the backward pass."""
    saved_by_kind: dict[str, int]
    """`saved_bytes` by kind of operation that made them; `residual` is the residual stream."""
    forward_peak_bytes: int
    backward_peak_bytes: int
    """Peak of the backward pass, with the gradient of the result and, if they are held, those of the weights."""
    waiting_bytes: int = 0
    """Bytes that I leaves for W, where the backward pass is split in two."""


@lru_cache(maxsize=1 << 12)
def block_memory(
    model: Model, layer: int, shape: Shape, *, recompute: Recompute = "none", stack: Stack, cuts: bool = False
) -> BlockMemory:
    """Decoder block `layer`. `shape.kernels` are those of `stack`; `recompute` as in `Layout`, without every-k. `cuts`: the
    backward pass is I, which leaves inputs and gradients of linear layers for W."""
    ops = block_work(model, layer, shape)
    sizes = local_weights(model, layer, shape.tp, shape.ep, shape.expert_tp)
    hidden = shape.outer_tokens * model.hidden_size * shape.itemsize
    part = _Part(ops, {"hidden": hidden}, "hidden_out", hidden, sizes, shape.itemsize, weight_gradients(stack))
    part.cuts = shape if cuts else None
    found = part.measure(block_again(recompute, model, layer, shape, stack), stack.selective)
    if not (shape.partition_checkpoints and recompute == "full"):
        return found
    less = hidden - -(-hidden // shape.tp)
    kinds = found.saved_by_kind | {"residual": found.saved_by_kind["residual"] - less}
    return replace(found, saved_bytes=found.saved_bytes - less, saved_by_kind=kinds)


def block_columns(
    model: Model, layer: int, shapes: Sequence[Shape], *, recompute: Recompute, stack: Stack, cuts: bool
) -> NDArray[np.float64]:
    """`block_memory` of many shapes, [shapes, 4]: what is saved, both peaks, and what waits for W."""
    found = np.empty((len(shapes), 4))
    alike: dict[object, list[int]] = {}
    works = [block_work(model, layer, shape) for shape in shapes]
    for number, shape in enumerate(shapes):
        again = block_again(recompute, model, layer, shape, stack)
        key = again, shape.precision, shape.partition_checkpoints and shape.tp, _moves_of(model, layer, shape)
        alike.setdefault(key, []).append(number)
    for (again, *_), rows in alike.items():  # type: ignore[misc]
        found[rows] = _played_together(model, layer, [shapes[row] for row in rows], [works[row] for row in rows], again,
                                       recompute, stack, cuts).T  # fmt: skip
    return found


@lru_cache(maxsize=1 << 13)
def _moves_of(model: Model, layer: int, shape: Shape) -> object:
    """All of a block's operations by which `_Part` goes, but for their sizes."""
    return _known_moves(tuple(map(_moves, block_work(model, layer, shape))))


@lru_cache(maxsize=1 << 10)
def _known_moves(moves: tuple[object, ...]) -> object:
    """The one object that stands for these: it is compared at once."""
    return object()


def _moves(op: Op) -> tuple[object, ...]:
    axes = tuple((one.axis, one.kind) for one in op.collectives)
    made = tuple(one.name for one in op.makes)
    return op.name, op.kind, op.reads, made, op.saves, op.weights, op.hands_on_saved, op.inside != (), axes, op.in_fp8


def _played_together(
    model: Model, layer: int, shapes: Sequence[Shape], works: Sequence[tuple[Op, ...]], again: Again | None,
    recompute: Recompute, stack: Stack, cuts: bool,
) -> NDArray[np.int64]:  # fmt: skip
    """[4, shapes] of shapes whose blocks make the same moves."""
    itemsize = shapes[0].itemsize
    weights = [local_weights(model, layer, shape.tp, shape.ep, shape.expert_tp) for shape in shapes]
    hidden = np.array([shape.outer_tokens * model.hidden_size * itemsize for shape in shapes], dtype=np.int64)
    of_weights = {name: np.array([one[name] for one in weights], dtype=np.int64) for name in weights[0]}
    part = _Part(works[0], {"hidden": hidden}, "hidden_out", hidden, of_weights, itemsize, weight_gradients(stack))
    part.cuts = shapes[0] if cuts else None
    part.results = {
        (op.name, one.name): np.array([ops[number].makes[place].num_bytes for ops in works], dtype=np.int64)
        for number, op in enumerate(works[0])
        for place, one in enumerate(op.makes)
    }
    part.made |= {name: num_bytes for (_, name), num_bytes in part.results.items()}
    part.scratch = {op.name: (np.array([ops[number].scratch_bytes for ops in works], dtype=np.int64),
                              np.array([ops[number].backward_scratch_bytes for ops in works], dtype=np.int64))
                    for number, op in enumerate(works[0])}  # fmt: skip
    found = part.measure(again, stack.selective)
    saved = found.saved_bytes
    if shapes[0].partition_checkpoints and recompute == "full":
        saved = saved - (hidden - -(-hidden // shapes[0].tp))
    columns = (saved, found.forward_peak_bytes, found.backward_peak_bytes, found.waiting_bytes)
    return np.stack([np.broadcast_to(column, len(shapes)) for column in columns])


@lru_cache(maxsize=1 << 14)
def head_memory(model: Model, shape: Shape, *, stack: Stack) -> BlockMemory:
    """The final norm, the head and its loss."""
    hidden = shape.outer_tokens * model.hidden_size * shape.itemsize
    sizes = _outside_weights(model, shape.tp)
    part = _Part(head_work(model, shape), {"hidden": hidden}, "loss", 0, sizes, shape.itemsize, weight_gradients(stack),
                 is_outside=True)  # fmt: skip
    return part.measure(None, stack.selective)


@lru_cache(maxsize=1 << 14)
def embedding_memory(model: Model, shape: Shape, *, stack: Stack) -> BlockMemory:
    """The embedding."""
    hidden = shape.outer_tokens * model.hidden_size * shape.itemsize
    sizes = _outside_weights(model, shape.tp)
    ops = embedding_work(model, shape)
    part = _Part(ops, {}, "hidden", hidden, sizes, shape.itemsize, weight_gradients(stack), is_outside=True)
    return part.measure(None, stack.selective)


def weight_gradients(stack: Stack) -> WeightGradients:
    """Fate of a weight's gradient in `stack`."""
    if stack.gathers == "buckets":
        return "held"
    return "in place" if stack.fuses_gradient_accumulation else "momentary"


@lru_cache(maxsize=1 << 14)
def dummy_gradient_bytes(model: Model, layers: tuple[int, ...], shape: Shape, *, stack: Stack) -> int:
    """One gradient for every distinct shape of a linear layer in blocks like `layers`; one expert stands for all."""
    if not stack.keeps_dummy_gradients:
        return 0
    products = [op.product for layer in layers for op in block_work(model, layer, shape) if op.kind == "matmul"]
    return sum(n * k for n, k in {(one.n, one.k) for one in products if one is not None}) * shape.itemsize


@lru_cache(maxsize=1024)
def local_weights(model: Model, layer: int, tp: int, ep: int, expert_tp: int) -> dict[str, int]:
    """Elements of each weight of a block on one rank; names without the block's."""
    prefix = len(f"layers.{layer}.")
    rows = layer_weights(model, layer)
    return {w.name[prefix:]: w.local_numel(tp=tp, ep=ep, expert_tp=expert_tp) for w in rows}


@lru_cache(maxsize=256)
def _outside_weights(model: Model, tp: int) -> dict[str, int]:
    return {w.name: w.local_numel(tp=tp) for w in weights_outside_layers(model)}


class _Books:
    """Bytes by name, each with its number of holders, and the highest total."""

    __slots__ = ("holders", "peak", "sizes", "total")

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.total: Any = 0
        self.peak: Any = 0
        self.sizes: dict[str, Any] = {}
        self.holders: dict[str, int] = {}
        for name, num_bytes in given.items():
            self.take(name, num_bytes)

    def take(self, name: str, num_bytes: int) -> None:
        self.sizes[name], self.holders[name] = num_bytes, 1
        self.total += num_bytes
        if self.total > self.peak:
            self.peak = self.total

    def hold(self, name: str) -> None:
        self.holders[name] += 1

    def drop(self, name: str) -> None:
        left = self.holders[name] - 1
        self.holders[name] = left
        if not left:
            self.total -= self.sizes.pop(name)
            del self.holders[name]

    def touch(self, num_bytes: int) -> None:
        if self.total + num_bytes > self.peak:
            self.peak = self.total + num_bytes


class _BooksOfMany(_Books):
    """Books of many shapes at once: columns of bytes."""

    __slots__ = ()

    def take(self, name: str, num_bytes: Any) -> None:
        self.sizes[name], self.holders[name] = num_bytes, 1
        self.total = self.total + num_bytes
        self.peak = np.maximum(self.peak, self.total)

    def drop(self, name: str) -> None:
        left = self.holders[name] - 1
        self.holders[name] = left
        if not left:
            self.total = self.total - self.sizes.pop(name)
            del self.holders[name]

    def touch(self, num_bytes: Any) -> None:
        self.peak = np.maximum(self.peak, self.total + num_bytes)


class _Part:
    """Operations with an end each, and the passes over them."""

    def __init__(
        self,
        ops: tuple[Op, ...],
        given: dict[str, Any],
        result: str,
        result_bytes: Any,
        weights: dict[str, Any],
        itemsize: int,
        gradients: WeightGradients,
        *,
        is_outside: bool = False,
    ):
        """Sizes are bytes, or columns of them."""
        self.ops, self.given, self.result, self.result_bytes = ops, given, result, result_bytes
        self.weights, self.itemsize, self.gradients, self.is_outside = weights, itemsize, gradients, is_outside
        self.cuts: Shape | None = None
        self.waiting: dict[str, None] = {}
        """Names held for W."""
        self.made: dict[str, Any] = given | {one.name: one.num_bytes for op in ops for one in op.makes}
        self.results: dict[tuple[str, str], Any] = {(op.name, one.name): one.num_bytes for op in ops for one in op.makes}
        """By operation too: eager attention and a router both make what is called scores."""
        self.scratch: dict[str, tuple[Any, Any]] = {op.name: (op.scratch_bytes, op.backward_scratch_bytes) for op in ops}
        """Forward and backward, by name of the operation."""
        self.books = (_Books if isinstance(result_bytes, int) else _BooksOfMany)(given)
        self._lent: dict[int, list[str]] = {}
        """By region, what others have made again that it reads."""

    def measure(self, again: Again | None, selective: Selective) -> BlockMemory:
        """Play both passes. `selective`: where `again` keeps results and names no kinds, what the stack means by it."""
        some = () if again is None else regions(self.ops, again.modules, as_megatron=again.as_megatron)
        checkpoints = again is not None and not again.modules
        kept = frozenset[str]() if again is None or again.whole or not checkpoints else kept_results(self.ops, again, selective)
        if checkpoints:
            self._hold_given()
        tape = self._forward(self.ops, saves=not checkpoints, keep=kept, some=some)
        forward_peak = self.books.peak
        saved = {name: n for name, n in self.books.sizes.items() if name != self.result}
        if self.result in self.books.sizes:
            self.books.drop(self.result)
        self.books.peak = 0
        self.books.take(f"d {self.result}", self.result_bytes)
        if checkpoints:
            tape = self._again(kept)
        self._backward(tape, some)
        return BlockMemory(
            sum(saved.values()),
            self._by_kind(saved),
            forward_peak,
            self.books.peak,
            sum(self.books.sizes[name] for name in self.waiting),
        )

    def _hold_given(self) -> None:
        for name in self.given:
            self.books.hold(name)

    def _forward(
        self,
        ops: tuple[Op, ...],
        *,
        saves: bool,
        keep: Collection[str] = (),
        some: Sequence[Region] = (),
        kept: Collection[str] = (),
        leaves: Collection[str] | None = None,
    ) -> list[tuple[Op, list[str]]]:
        """Run forward. `keep`: results to hold; `kept`: those of the first run, there already; `some`:
        what they make is not saved now, but what they read."""
        books = self.books
        leaves = (self.result,) if leaves is None else leaves
        last_reader = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves)}
        live = set(self.given)
        there = {name for op in ops if kept and op.makes[0].name in kept for name in op.reads}
        again = frozenset(name for region in some for name in region.drops)
        tape: list[tuple[Op, list[str]]] = []
        if some:
            places = {op.name: index for index, op in enumerate(ops)}
            for region in some:
                end = places[region.end]
                last_reader |= {name: max(end, last_reader.get(name, 0)) for name in region.reads}
        for index, op in enumerate(ops):
            for one in op.makes:
                if one.name not in kept:  # of a sum that is kept nobody makes the parts again
                    books.take(one.name, 0 if op.makes_partial_sums and one.name in there else self.results[op.name, one.name])
                live.add(one.name)
                if one.name in keep:
                    books.hold(one.name)
            books.touch(self.scratch[op.name][0])
            if saves:
                tape.append((op, self._save(op, again)))
            for region in some:
                if op.name == region.end:
                    self._hold([name for name in region.reads if name not in again])
            gone = [name for name in live if name not in leaves and last_reader.get(name, -1) <= index]
            for name in gone:
                live.remove(name)
                books.drop(name)
        return tape

    def _save(self, op: Op, again: Collection[str]) -> list[str]:
        """Hold what `op` saves. What blocks share is nobody's here."""
        return self._hold([name for name in op.saves if name not in again])

    def _hold(self, names: Iterable[str]) -> list[str]:
        held = [name for name in names if name in self.books.sizes]
        for name in held:
            self.books.hold(name)
        return held

    def _again(self, kept: frozenset[str]) -> list[tuple[Op, list[str]]]:
        """Run forward again up to the last operation that saves something, as torch does."""
        last = max((index for index, op in enumerate(self.ops) if op.saves), default=0)
        self._hold_given()
        leaves = set(self.ops[last].saves)
        tape = self._forward(self.ops[:last], saves=True, kept=kept, leaves=leaves)
        final = self.ops[last]
        tape.append((final, self._save(final, ())))
        for name in leaves:
            if name in self.books.sizes:
                self.books.drop(name)
        return [*tape, *((op, []) for op in self.ops[last + 1 :])]

    def _backward(self, tape: list[tuple[Op, list[str]]], some: Sequence[Region]) -> None:
        books, gradients = self.books, {self.result: f"d {self.result}"}
        left = {name: region for region in some for name in region.drops}
        dropped = frozenset(left)
        while tape:
            op, saved = tape[-1]
            for name in op.saves:
                if name in left:
                    self._make_again(left[name], tape, left, dropped)
            tape.pop()
            arriving = list(dict.fromkeys(gradients.pop(one.name) for one in op.makes if one.name in gradients))
            leaving: dict[str, str] = {}
            if arriving or op.hands_on_saved:
                leaving = self._one_backward(op, saved, arriving)
            for name in (*arriving, *saved):
                books.drop(name)
            for name, gradient in leaving.items():
                gradients[name] = self._added(gradients[name], gradient) if name in gradients else gradient

    def _make_again(
        self, region: Region, tape: list[tuple[Op, list[str]]], left: dict[str, Region], dropped: frozenset[str]
    ) -> None:
        """Run a region again; what it makes belongs to the operations on the tape that save it. `left`: what is still to be
        made again, of all that was `dropped`."""
        books = self.books
        for name in region.reads:
            if name in left:
                self._make_again(left[name], tape, left, dropped)
        borrowed = self._hold([name for name in region.reads if name in dropped])
        for name in region.drops:
            left.pop(name, None)
        last = {name: index for index, op in enumerate(region.ops) for name in (*op.reads, *op.saves)}
        passing: list[str] = []
        for index, op in enumerate(region.ops):
            for one in op.makes:
                books.take(one.name if one.name in region.drops else f"{one.name} again", self.results[op.name, one.name])
            passing += [one.name for one in op.makes if one.name not in region.drops]
            books.touch(self.scratch[op.name][0])
            for name in [one for one in passing if last.get(one, -1) <= index]:
                passing.remove(name)
                books.drop(f"{name} again")
        for op, saved in tape:
            names = [name for name in op.saves if name in region.drops]
            saved += self._hold(names)
        for other in dict.fromkeys(left.values()):  # they will read it
            other_reads = [name for name in other.reads if name in region.drops]
            self._lent.setdefault(id(other), []).extend(self._hold(other_reads))
        for name in region.drops:
            books.drop(name)
        for name in (*borrowed, *self._lent.pop(id(region), ()), *(one for one in region.reads if one not in dropped)):
            if name in books.sizes:
                books.drop(name)

    def _added(self, there: str, gradient: str) -> str:
        """The sum: autograd adds to the one that is there, unless W waits for it too."""
        total = there
        if self.books.holders[there] > 1:
            total = f"{there} + {gradient}"
            self.books.take(total, self.books.sizes[there])
            self.books.drop(there)
        self.books.drop(gradient)
        return total

    def _one_backward(self, op: Op, saved: list[str], arriving: list[str]) -> dict[str, str]:
        """Gradients of what `op` reads."""
        books = self.books
        leaving: dict[str, str] = {}
        for name in op.reads:
            if op.hands_on_saved:
                leaving[name] = saved[0]
                books.hold(saved[0])
            elif op.passes_gradient:
                leaving[name] = arriving[0]
                books.hold(arriving[0])
            else:
                leaving[name] = f"d {name} of {op.name}"
                books.take(leaving[name], self.made[name])
        if self.cuts is not None and may_wait(op):
            self._leave_for_w(op, saved, arriving[0], self.cuts)
        else:
            self._make_weight_gradients(op, saved)
            books.touch(self.scratch[op.name][1])
        return leaving

    def _leave_for_w(self, op: Op, saved: list[str], arriving: str, shape: Shape) -> None:
        """The input and the gradient of a linear layer's result: of what tp sums this rank's positions, in fp8 as rounded."""
        held = [arriving, *saved[:1]]
        part = next(
            (self.made[one.makes[0].name] for one in self.ops if is_row_sum(one) and one.reads[0] == op.makes[0].name), None
        )
        if part is not None or op.in_fp8:
            held[0] = f"d {op.makes[0].name} for W"
            whole = self.books.sizes[arriving] if part is None else part
            self.books.take(held[0], whole // (shape.itemsize if op.in_fp8 else 1))
            self.books.holders[held[0]] = 0
        for name in held:
            if name not in self.waiting:
                self.waiting[name] = None
                self.books.hold(name)

    def _make_weight_gradients(self, op: Op, saved: list[str]) -> None:
        if not op.weights or (self.gradients == "in place" and not self.is_outside):
            return
        if op.hands_on_saved:
            if self.gradients == "held":
                self.books.hold(saved[1])
            return
        num_bytes = self._weight_bytes(op.weights)
        if self.gradients == "held":
            self.books.take(f"weights of {op.name}", num_bytes)
        else:
            self.books.touch(num_bytes)

    def _weight_bytes(self, names: Iterable[str]) -> int:
        return sum(self.weights.get(name, 0) for name in names) * self.itemsize

    def _by_kind(self, saved: dict[str, int]) -> dict[str, int]:
        kinds = {one.name: op.kind for op in self.ops for one in op.makes}
        found: dict[str, int] = {}
        for name, num_bytes in saved.items():
            kind = "residual" if name in self.given or name == "hidden_mid" else kinds[name]
            found[kind] = found.get(kind, 0) + num_bytes
        return found
