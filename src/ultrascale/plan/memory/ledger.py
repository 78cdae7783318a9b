"""Ledger of a rank's memory: allocations and their holders, the live total, and its peak."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from typing import Any

CATEGORIES = (
    "parameters", "gathered", "gradients", "optimizer", "activations", "temporary", "communication", "other",
)  # fmt: skip
"""Categories of `measure.memory`, which defines them on real tensors."""


@dataclass(slots=True)
class Allocation:
    """Bytes with a reference count: they live until the last holder releases them."""

    category: str
    label: str
    num_bytes: int
    holders: int = 1
    offloaded_bytes: int = 0
    """Bytes that are only on the host, not in `num_bytes`."""
    host_bytes: int = 0
    """Bytes on the host until the last holder releases them."""

    def retain(self) -> Allocation:
        self.holders += 1
        return self


@dataclass(frozen=True)
class MemorySnapshot:
    """Live bytes at one time."""

    step: int
    phase: str
    total: int
    by_category: dict[str, int]
    by_label: dict[tuple[str, str], int]
    """Live bytes by (category, label)."""


@dataclass
class Effect:
    """Change of the ledger over a recording, and the peak in it; bytes relative to its start, zero entries left out. During
    the recording: bytes at its start, and the absolute peak since."""

    total: int
    alive: dict[tuple[str, str], int]
    held: dict[str, int]
    peak_total: int
    peak_alive: dict[tuple[str, str], int]
    highest: dict[str, int]
    """Peak of each category, each at its own moment."""


@dataclass
class Ledger:
    """Live bytes, the peak of every step, and optionally a timeline."""

    step: int = 0
    phase: str = "start"
    total: int = 0
    peaks: dict[int, MemorySnapshot] = field(default_factory=dict)
    highest: dict[int, dict[str, int]] = field(default_factory=dict)
    """Peak of each category in every step, each at its own moment."""
    keeps_timeline: bool = False
    timeline: list[tuple[int, str, dict[str, int]]] = field(default_factory=list)
    """(step, phase, bytes by category) before every decrease."""
    on_host: int = 0
    peak_on_host: int = 0
    _alive: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    _held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    _highest: dict[str, Any] = field(default_factory=dict)
    """Peak of each category in the current recording, or else in the current step (then an entry of `highest`)."""
    _top: float = -1
    """Highest total noted in that recording or step; infinite inside `unrecorded`."""
    _recorder: Effect | None = None

    def __post_init__(self) -> None:
        self._highest = self.highest.setdefault(self.step, dict(self._held))

    def mark(self, phase: str, step: int) -> None:
        """Set the phase and step of what follows. Not allowed inside a recording."""
        self._note()
        is_new, self.phase, self.step = step != self.step, phase, step
        if is_new:
            self._highest = self.highest.setdefault(step, dict(self._held))
            self._top = self.peaks[step].total if step in self.peaks else -1
        if is_new or self.keeps_timeline:
            self._note()

    def take(self, category: str, label: str, num_bytes: int) -> Allocation:
        """Allocate bytes."""
        self._change(category, label, num_bytes)
        return Allocation(category, label, num_bytes)

    def release_all(self, allocations: Iterable[Allocation]) -> None:
        """Remove one holder of each."""
        for allocation in allocations:
            allocation.holders -= 1
            if allocation.holders <= 0:
                self._free(allocation)

    def release(self, allocation: Allocation) -> None:
        """Remove one holder; removing the last one frees the bytes."""
        allocation.holders -= 1
        if allocation.holders <= 0:
            self._free(allocation)

    def _free(self, allocation: Allocation) -> None:
        assert allocation.holders == 0, allocation
        self.on_host -= allocation.host_bytes
        if allocation.num_bytes:
            self._note()
            self._change(allocation.category, allocation.label, -allocation.num_bytes)

    def copy_to_host(self, allocation: Allocation) -> None:
        """Count a copy of the bytes on the host; they stay on the device."""
        allocation.host_bytes = allocation.num_bytes
        self.on_host += allocation.host_bytes
        self.peak_on_host = max(self.peak_on_host, self.on_host)

    def leave_device(self, allocation: Allocation) -> None:
        """Free the bytes on the device; only the host copy remains, for all holders."""
        if allocation.holders and allocation.num_bytes:
            self._note()
            self._change(allocation.category, allocation.label, -allocation.num_bytes)
            allocation.offloaded_bytes, allocation.num_bytes = allocation.num_bytes, 0

    def bring_back(self, allocation: Allocation) -> None:
        """Allocate the bytes on the device again, from the host copy."""
        if allocation.offloaded_bytes:
            self._change(allocation.category, allocation.label, allocation.offloaded_bytes)
            allocation.offloaded_bytes, allocation.num_bytes = 0, allocation.offloaded_bytes

    def touch(self, category: str, label: str, num_bytes: int) -> None:
        """Allocate bytes and free them at once."""
        if num_bytes:
            self._change(category, label, num_bytes)
            self._note()
            self._change(category, label, -num_bytes)

    def move(self, allocation: Allocation, category: str, label: str) -> Allocation:
        """Move bytes to another category and label."""
        self._change(allocation.category, allocation.label, -allocation.num_bytes)
        allocation.category, allocation.label = category, label
        self._change(category, label, allocation.num_bytes)
        return allocation

    @contextmanager
    def recording(self) -> Iterator[Effect]:
        """Context that records all changes inside, for `apply`: complete once it is left. Without offloading to the host."""
        top, highest, alive, inside = self._top, self._highest, dict(self._alive), dict(self._held)
        start, held, around = self.total, dict(inside), self._recorder
        recorder = self._recorder = Effect(start, alive, held, start, alive, inside)
        self._top, self._highest = start, inside
        try:
            yield recorder
            self._note()
        finally:
            self._recorder, self._top, self._highest = around, top, highest
        for category, num_bytes in inside.items():
            highest[category] = max(highest[category], num_bytes)
        if recorder.peak_total > top:
            self._see(recorder.peak_total, recorder.peak_alive)
        recorder.total, recorder.peak_total = self.total - start, recorder.peak_total - start
        recorder.alive, recorder.peak_alive = _since(self._alive, alive), _since(recorder.peak_alive, alive)
        recorder.held, recorder.highest = _since(self._held, held), _since(inside, held)

    def apply(self, effect: Effect) -> None:
        """Apply a recorded effect: the same changes and peaks, on top of the current bytes."""
        top, alive, held = self.total + effect.peak_total, self._alive, self._held
        if top > self._top:
            peak_alive = effect.peak_alive
            self._see(top, {key: alive.get(key, 0) + peak_alive.get(key, 0) for key in {**alive, **peak_alive}})
        for category, more in effect.highest.items():
            if held[category] + more > self._highest[category]:
                self._highest[category] = held[category] + more
        for key, more in effect.alive.items():
            alive[key] += more
        for category, more in effect.held.items():
            held[category] += more
        self.total += effect.total

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context whose changes count nothing in totals and peaks: for bytes that are in them already."""
        alive, held = self._alive.copy(), dict(self._held)
        before = self.total, self._top, self._highest
        self._top, self._highest = inf, dict.fromkeys(self._held, inf)
        try:
            yield
        finally:
            self.total, self._top, self._highest = before
            self._alive, self._held = alive, held

    def now(self) -> MemorySnapshot:
        """Snapshot of the live bytes."""
        return self._moment(self.total, self._alive)

    def _moment(self, total: int, alive: Mapping[tuple[str, str], int]) -> MemorySnapshot:
        by_category: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
        for (category, _), num_bytes in alive.items():
            by_category[category] += num_bytes
        return MemorySnapshot(self.step, self.phase, total, by_category, {key: size for key, size in alive.items() if size})

    def _change(self, category: str, label: str, num_bytes: int) -> None:
        self._alive[category, label] += num_bytes
        self.total += num_bytes
        held = self._held[category] = self._held[category] + num_bytes
        if held > self._highest[category]:
            self._highest[category] = held

    def _note(self) -> None:
        """Compare the total with the peak. Called before each decrease: a peak is always followed by one."""
        if self.total > self._top:
            self._see(self.total, dict(self._alive))
        if self.keeps_timeline:
            self.timeline.append((self.step, self.phase, self.now().by_category))

    def _see(self, total: int, alive: dict[tuple[str, str], int]) -> None:
        """Store a new peak: its total and its live bytes."""
        self._top = total
        if self._recorder is None:
            self.peaks[self.step] = self._moment(total, alive)
        else:
            self._recorder.peak_total, self._recorder.peak_alive = total, alive


def _since(now: dict[Any, int], then: dict[Any, int]) -> dict[Any, int]:
    """Differences of the entries that changed."""
    more = {key: num_bytes - then.get(key, 0) for key, num_bytes in now.items()}
    return {key: num_bytes for key, num_bytes in more.items() if num_bytes}
