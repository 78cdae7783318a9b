"""Data of a trace: all storages, messages, FLOPs and actions of some steps of one rank. Does not import torch.

tick        a count of operations: the trace's clock, without seconds
block       a storage from allocation to free; FSDP2 frees and reallocates its buffers by resizing
change      (tick, block, bytes): positive for an allocation, negative for a free
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.ledger import CATEGORIES

Change = tuple[int, int, int]


@dataclass(slots=True)
class StorageRecord:
    """A storage."""

    category: str
    """Its last category, of `plan.memory.ledger.CATEGORIES`."""
    what: str
    """Name of the parameter that it belongs to, or of the operation that made it."""
    line: str
    """`file:line` in our code that allocated it."""
    during: str
    """Action that allocated it, such as `F3` (forward pass of micro-batch 3), and the block of the model."""
    stream: str = "compute"


@dataclass(frozen=True, slots=True)
class Sent:
    """One collective, or a message of one rank to another."""

    tick: int
    step: int
    kind: str
    """all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, send, receive, barrier"""
    axis: str
    """Axis of the layout along which the group lies."""
    size: int
    stride: int
    """Distance of the group's ranks; `size`: their number."""
    num_bytes: int
    """Bytes of the whole buffer that is gathered or reduced; for all_to_all, of what one rank sends; of a message itself."""
    line: str
    during: str
    is_host: bool = False
    """True for messages between processors: small numbers that the trainer agrees on."""
    times: int = 1
    """Number of times it is sent: one of several equal micro-batches is traced."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Start of a phase or action at a tick."""

    tick: int
    step: int
    phase: str
    """`forward`, `backward`, `optimizer`, `between`"""
    action: str
    """`F0`, `B0`, in a pipeline with the stage: `F0@2`; else empty."""


@dataclass
class RankTrace:
    """Some steps of one rank."""

    model: Model
    layout: Layout
    rank: int
    device: str
    """Target device, `cpu` or `cuda`, for which kernels were chosen."""
    blocks: list[StorageRecord] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    moves: list[tuple[int, int, str]] = field(default_factory=list)
    """(tick, block, category before): a storage changed its category, as a gradient does when it is complete."""
    sent: list[Sent] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    flops: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    """FLOPs by (step, operation, pass)."""
    ticks: int = 0
    round_to: int = 1
    """Bytes to a multiple of which storages are rounded up: 512 in CUDA's allocator."""
    micro_batches: tuple[int, int] = (0, 0)
    """Micro-batches of a step: the traced number, and the real one."""
    outer: tuple[int, int] | None = None
    """Bytes that islands send to others in one round, and keep in host memory."""
    documents: str = ""
    """Assumed number of documents in each sequence, in words; empty where documents are not masked."""

    def totals(self) -> list[int]:
        """Live bytes after each change."""
        return list(accumulate(change for _, _, change in self.changes))

    def peak_at(self, step: int | None) -> int:
        """Index of the change after which the peak is reached, in one step or in all."""
        totals, first = self.totals(), 0
        indices: range | list[int] = range(len(totals))
        if step is not None:
            start, end = self.span(step)
            indices = [i for i, (tick, _, _) in enumerate(self.changes) if start <= tick < end]
        return max(indices, key=totals.__getitem__, default=first)

    def peak_bytes(self, step: int | None = None) -> int:
        """Peak of live bytes."""
        totals = self.totals()
        return totals[self.peak_at(step)] if totals else 0

    def span(self, step: int) -> tuple[int, int]:
        """First tick of a step and the first after it."""
        starts = [mark.tick for mark in self.marks if mark.step == step and mark.phase != "between"]
        later = [mark.tick for mark in self.marks if mark.step > step and mark.phase != "between"]
        return min(starts, default=0), min(later, default=self.ticks + 1)

    def alive_at(self, index: int) -> list[tuple[StorageRecord, int]]:
        """Storages live after a change, with their category at that time, and their bytes; the largest first."""
        sizes: Counter[int] = Counter()
        for _, number, change in self.changes[: index + 1]:
            sizes[number] += change
        tick = self.changes[index][0] if self.changes else 0
        categories: dict[int, str] = {}
        for moved_at, number, before in reversed(self.moves):
            if moved_at > tick:
                categories[number] = before
        blocks = [(self._as_it_was(number, categories), size) for number, size in sizes.items() if size]
        return sorted(blocks, key=lambda pair: -pair[1])

    def _as_it_was(self, number: int, categories: dict[int, str]) -> StorageRecord:
        block = self.blocks[number]
        if number not in categories:
            return block
        return StorageRecord(categories[number], block.what, block.line, block.during, block.stream)

    def by_category(self, index: int) -> dict[str, int]:
        """Live bytes of each category after a change."""
        totals: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for block, size in self.alive_at(index):
            totals[block.category] += size
        return totals

    def timeline(self) -> Iterator[tuple[int, dict[str, int]]]:
        """(tick, bytes by category) after each change."""
        now: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        sizes: Counter[int] = Counter()
        moves = iter([*self.moves, (1 << 62, 0, "")])
        moved_at, moved, _ = next(moves)
        first: dict[int, str] = {}
        for _, number, category in self.moves:
            first.setdefault(number, category)
        categories = {number: first.get(number, block.category) for number, block in enumerate(self.blocks)}
        after = self._categories_after_moves()
        position = 0
        for tick, number, change in self.changes:
            while moved_at <= tick:
                now[categories[moved]] -= sizes[moved]
                categories[moved] = after[position]
                now[categories[moved]] += sizes[moved]
                position += 1
                moved_at, moved, _ = next(moves)
            sizes[number] += change
            now[categories[number]] += change
            yield tick, dict(now)

    def _categories_after_moves(self) -> list[str]:
        """Category that each move gave its block: the category before the block's next move, or its last."""
        following: dict[int, str] = {}
        categories = []
        for _, number, before in reversed(self.moves):
            categories.append(following.get(number, self.blocks[number].category))
            following[number] = before
        return categories[::-1]

    def total_flops(self, step: int) -> int:
        """FLOPs of a step."""
        return sum(count for (of_step, _, _), count in self.flops.items() if of_step == step)

    def actions(self, step: int) -> list[str]:
        """The actions of a step in order."""
        return [mark.action for mark in self.marks if mark.step == step and mark.action]
