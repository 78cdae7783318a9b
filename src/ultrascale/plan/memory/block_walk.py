"""Walk over the operations of a block, forward and backward: which tensors it holds at each moment.

The rule is stated here alone. `plan.memory.stage_replay` walks with all that a rank has around a block (FSDP2, messages, weight
gradients), `plan.columns.block_memory` with columns of bytes in place of numbers. Both are subclasses, because the walk itself
calls what differs: `_backward_op`, `_experts`, `_shared`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ultrascale.plan.memory.gradients import Deferred
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.sharding import Bucket, Shards
from ultrascale.plan.memory.tally import Tally
from ultrascale.schedules.actions import Action
from ultrascale.work.ops import Op
from ultrascale.work.recompute import Region, adds_bias_apart


@dataclass
class PendingRegion:
    """A region to recompute (`work.recompute`), with the inputs kept for that, by name."""

    region: Region
    reads: dict[str, Allocation] = field(default_factory=dict)


@dataclass
class Tape:
    """Autograd's record of one forward pass: each operation with the tensors it saved."""

    entries: list[tuple[Op, list[Allocation]]] = field(default_factory=list)
    remade: dict[str, PendingRegion] = field(default_factory=dict)
    """Saved tensors that have to be recomputed first, by name."""
    offloaded: list[Allocation] = field(default_factory=list)
    """Tensors offloaded to the host (`parallel.activations.offload`)."""


@dataclass(frozen=True)
class Unwinding:
    """A backward pass that runs over a tape."""

    gradients: dict[str, Allocation]
    """By name: of results that the pass has not reached, then of inputs."""
    sizes: dict[str, int]
    """Bytes of every activation, by name."""
    layer: int | None
    deferred: list[Deferred] | None
    """Gradients of weights that I leaves for W; None if the pass is not split."""


class Nothing:
    """Stand-in for `Shards` and `Tally` whose every method does nothing."""

    root = None
    buckets = ()

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


class BlockWalk(ABC):
    """Passes of a block on a ledger."""

    def __init__(self, ledger: Ledger, tally: Tally, shards: Shards, hidden_bytes: int):
        """`hidden_bytes`: of the residual stream."""
        self.ledger, self.tally, self.shards, self.hidden_bytes = ledger, tally, shards, hidden_bytes
        self._known_drops: dict[Hashable, tuple[Any, list[list[str]]]] = {}
        self._known_last: dict[int, tuple[tuple[Op, ...], int, tuple[Op, ...]]] = {}

    def _experts(self, layer: int | None, ops: Sequence[Op]) -> tuple[Bucket | None, int, int]:
        """Separate bucket of a block's experts (or None), and the indices of the first and last operation that read it."""
        return None, 0, 0

    def _shared(self) -> dict[str, Allocation]:
        """Tensors that all blocks read, by name."""
        return {}

    @abstractmethod
    def _backward_op(self, op: Op, saved: list[Allocation], arriving: Allocation, now: Unwinding) -> None:
        """Backward pass of `op`, whose result has the gradient `arriving`: adds those of its inputs to those of `now`, and
        releases `arriving` and `saved`."""

    def _run(
        self,
        ops: tuple[Op, ...],
        live: dict[str, Allocation],
        category: str,
        leaves: set[str],
        *,
        layer: int | None = None,
        saves: bool = True,
        keep: dict[str, Allocation] | None = None,
        kept: dict[str, Allocation] | None = None,
        kept_names: Collection[str] = (),
        recomputed: Sequence[Region] = (),
        is_recomputation: bool = False,
    ) -> Tape:
        """Run operations forward. `live`: live activations, each freed after its last reader unless in `leaves`. `keep`
        collects the results that selective recomputation keeps; `kept`: those of the first run, reused. `recomputed`: regions
        whose results are not saved, and whose inputs are kept instead. `is_recomputation`: inside a backward pass, where FSDP2
        frees nothing and the caller counts FLOPs and messages."""
        tape = Tape()
        drops = self._drops(ops, recomputed, tuple(live), frozenset(leaves))
        for region in recomputed:
            tape.remade |= dict.fromkeys(region.drops, PendingRegion(region))
        ends = {region.end: region for region in recomputed}
        read_by_kept = (
            set() if kept is None else {name for op in ops if op.reads and op.makes[0].name in kept for name in op.reads}
        )
        experts, first, last = self._experts(layer, ops)
        for index, op in enumerate(ops):
            if not is_recomputation:
                self.tally.forward(op)
            if experts is not None and index == first:
                self.shards.before_forward(experts)
            keeps = keep if keep is not None and op.makes[0].name in kept_names else None
            adds_bias = (kept is not None or keeps is not None) and adds_bias_apart(op)
            for result in op.makes:
                if kept is not None and result.name in kept and not adds_bias:
                    live[result.name] = kept.pop(result.name)
                else:  # partial sums are not recomputed if their sum is kept
                    num_bytes = 0 if result.name in read_by_kept and op.makes_partial_sums else result.num_bytes
                    live[result.name] = self.ledger.take(category, op.kind, num_bytes)
                if kept is not None and result.name in kept:  # kept without bias, which is added again
                    self.ledger.release(kept.pop(result.name))
                if keeps is not None and not adds_bias:
                    keeps[result.name] = live[result.name].retain()
            if op.kind == "attention" and (parts := self.tally.partial_result_bytes(op)):
                if keeps is not None:  # results of single ring hops are kept, and merged again
                    keeps[f"{op.name} parts"] = self.ledger.take(category, op.kind, parts)
                elif kept is not None and f"{op.name} parts" in kept:
                    self.ledger.release(kept.pop(f"{op.name} parts"))
            self.ledger.touch(category, "scratch", op.scratch_bytes)
            if keeps is not None and adds_bias:
                keeps[op.makes[0].name] = self.ledger.take(category, op.kind, op.makes[0].num_bytes)
            if saves:
                tape.entries.append((op, self._save(op, live, tape.remade) if op.saves else []))
            if (region := ends.get(op.name)) is not None:
                reads = {name: live[name].retain() for name in region.reads if name in live and name not in tape.remade}
                tape.remade[next(iter(region.drops))].reads |= reads
            for name in drops[index]:
                self.ledger.release(live.pop(name))
            if experts is not None and index == last:
                if is_recomputation:  # recomputation enters FSDP2 at the experts, which it then treats as the root
                    self.shards.end_forward()
                else:
                    self.shards.after_forward(experts)
        return tape

    def _drops(
        self, ops: tuple[Op, ...], recomputed: Sequence[Region], inputs: tuple[str, ...], leaves: frozenset[str]
    ) -> list[list[str]]:
        """Names to free after each operation: of `inputs` and results that no later operation reads, except `leaves`."""
        key = id(ops), id(recomputed), inputs, leaves
        if key not in self._known_drops:
            last_reader, live = self._last_readers(ops, recomputed), dict.fromkeys(inputs)
            drops = list[list[str]]()
            for index, op in enumerate(ops):
                live |= dict.fromkeys(result.name for result in op.makes)
                drops.append([name for name in live if name not in leaves and last_reader.get(name, -1) <= index])
                for name in drops[-1]:
                    del live[name]
            self._known_drops[key] = (ops, recomputed), drops
        return self._known_drops[key][1]

    def _last_readers(self, ops: tuple[Op, ...], recomputed: Sequence[Region]) -> dict[str, int]:
        """Index of the last operation that reads each tensor, by name."""
        last_reader = {name: index for index, op in enumerate(ops) for name in (*op.reads, *op.saves, *op.keeps_alive)}
        places = {op.name: index for index, op in enumerate(ops)}
        for region in recomputed:
            end = places[region.end]
            last_reader |= {name: max(end, last_reader.get(name, 0)) for name in region.reads}
            last_reader |= {name: min(end, last_reader.get(name, end)) for name in region.hidden}  # local to the region
        return last_reader

    def _last_saving(self, ops: tuple[Op, ...]) -> tuple[int, tuple[Op, ...]]:
        """Index of the last operation that saves a tensor, and the operations before it."""
        if id(ops) not in self._known_last:
            last = max(index for index, op in enumerate(ops) if op.saves)
            self._known_last[id(ops)] = ops, last, ops[:last]
        return self._known_last[id(ops)][1:]

    def _save(self, op: Op, live: dict[str, Allocation], remade: Collection[str] = ()) -> list[Allocation]:
        shared = self._shared()  # the mask of a block's last operation is missing if recomputation does not run that again
        saved = [live.get(name) or shared.get(name) for name in op.saves if name not in remade]
        return [allocation.retain() for allocation in saved if allocation is not None]

    def _rerun(self, ops: tuple[Op, ...], live: dict[str, Allocation], kept: dict[str, Allocation] | None, layer: int) -> Tape:
        """Recompute a block up to, not including, the last operation that saves a tensor: torch stops there. `live`: its
        inputs."""
        last, before = self._last_saving(ops)
        tape = self._run(before, live, "temporary", set(ops[last].saves), layer=layer, kept=kept, is_recomputation=True)
        tape.entries += [(ops[last], self._save(ops[last], live)), *((op, []) for op in ops[last + 1 :])]
        self.ledger.release_all(live.values())
        return tape

    def _unwind(
        self,
        tape: Tape,
        gradients: dict[str, Allocation],
        layer: int | None,
        deferred: list[Deferred] | None,
        action: Action | None = None,
    ) -> None:
        """Run the backward pass of a tape's operations, last first. `gradients`, by name: of results before the call, of inputs
        after it."""
        sizes = {a.name: a.num_bytes for op, _ in tape.entries for a in op.makes}
        sizes |= dict.fromkeys(("hidden", "final", "coming"), self.hidden_bytes)
        now, ops = Unwinding(gradients, sizes, layer, deferred), tuple(op for op, _ in tape.entries)
        experts, first, last = self._experts(layer, ops)
        for index, (op, saved) in reversed(list(enumerate(tape.entries))):
            if tape.remade and layer is not None and any(result.name in gradients for result in op.makes):
                for name in op.saves:
                    if name in tape.remade:
                        self._recompute_region(tape, index, tape.remade[name], layer)
            if experts is not None and index == last:
                self.shards.before_backward(experts)
            arrived = [gradients.pop(result.name) for result in op.makes if result.name in gradients]
            if not arrived:
                self.ledger.release_all(saved)
                continue
            self._backward_op(op, saved, arrived[0], now)
            self.ledger.release_all(arrived[1:])
            if experts is not None and index == first:
                assert action is not None
                self.shards.after_backward(experts, action)

    def _recompute_region(self, tape: Tape, index: int, waiting: PendingRegion, layer: int) -> None:
        """Recompute a region of a block, for the operations of its tape up to `index` that save its results."""
        region = waiting.region
        for name in region.reads:
            if name in tape.remade:
                self._recompute_region(tape, index, tape.remade[name], layer)
        for name in region.drops:
            del tape.remade[name]
        live = {name: allocation.retain() for name, allocation in waiting.reads.items()}
        self._run(region.ops, live, "temporary", set(region.drops), layer=layer, saves=False, is_recomputation=True)
        for op in region.ops:
            self.tally.recompute(op)
            if op.collectives:
                self.tally.resend(op)
        for op, saved in tape.entries[: index + 1]:
            saved += [live[name].retain() for name in op.saves if name in region.drops]
        for other in {id(entry): entry for entry in tape.remade.values()}.values():  # other regions read the results
            other.reads |= {name: live[name].retain() for name in other.region.reads if name in region.drops}
        self.ledger.release_all([*live.values(), *waiting.reads.values()])

    def _input_gradients(
        self, op: Op, names: Sequence[str], saved: list[Allocation], arriving: Allocation, sizes: dict[str, int]
    ) -> dict[str, Allocation]:
        """Gradients of an operation's inputs; memory is allocated for `names` if they are tensors of their own."""
        if op.hands_on_saved:
            return {op.reads[0]: saved[0].retain()}
        if op.passes_gradient:
            return {name: arriving.retain() for name in op.reads}
        return {name: self.ledger.take("temporary", "gradients of activations", sizes[name]) for name in names}

    def _merge(self, gradients: dict[str, Allocation], leaving: dict[str, Allocation]) -> None:
        for name, gradient in leaving.items():
            gradients[name] = self._sum_gradients(gradients[name], gradient) if name in gradients else gradient

    def _sum_gradients(self, existing: Allocation, gradient: Allocation) -> Allocation:
        """Sum of two gradients: autograd adds in place, unless the existing one has another holder."""
        if existing.holders > 1:
            total = self.ledger.take("temporary", "gradients of activations", existing.num_bytes)
            self.ledger.release(existing)
            existing = total
        self.ledger.release(gradient)
        return existing
