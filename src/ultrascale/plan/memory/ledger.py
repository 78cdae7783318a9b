"""The books of a rank's memory: who holds which bytes, how much in all, and the highest it ever was."""

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
"""As in `measure.memory`, which defines them on real tensors."""


@dataclass(slots=True)
class Allocation:
    """Bytes that live until the last of their holders lets go."""

    category: str
    label: str
    num_bytes: int
    holders: int = 1
    offloaded_bytes: int = 0
    """On the host alone, and not in `num_bytes`."""
    host_bytes: int = 0
    """On the host, until the last holder lets go."""

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


@dataclass(frozen=True)
class Effect:
    """Change of the books over a while, and the highest moment in it; bytes relative to its beginning, where there are any."""

    total: int
    alive: dict[tuple[str, str], int]
    held: dict[str, int]
    peak_total: int
    peak_alive: dict[tuple[str, str], int]
    highest: dict[str, int]
    """The most of each category, whenever that was."""


@dataclass
class EffectRecorder:
    """An `Effect` in the making: the books at its beginning, and the highest moment since."""

    ledger: Ledger
    total: int
    alive: dict[tuple[str, str], int]
    held: dict[str, int]
    peak_total: int
    peak_alive: dict[tuple[str, str], int]
    highest: dict[str, int]

    def effect(self) -> Effect:
        """Effect of all changes since the recording began."""
        ledger, start = self.ledger, self.total
        return Effect(
            ledger.total - start, _since(ledger._alive, self.alive), _since(ledger._held, self.held),
            self.peak_total - start, _since(self.peak_alive, self.alive), _since(self.highest, self.held),
        )  # fmt: skip


@dataclass
class Ledger:
    """Live bytes, the highest moment of every step, and the totals as they changed."""

    step: int = 0
    phase: str = "start"
    total: int = 0
    peaks: dict[int, MemorySnapshot] = field(default_factory=dict)
    highest: dict[int, dict[str, int]] = field(default_factory=dict)
    """The most of each category in every step, whenever that was."""
    keeps_timeline: bool = False
    timeline: list[tuple[int, str, dict[str, int]]] = field(default_factory=list)
    """(step, phase, bytes by category) before every fall."""
    on_host: int = 0
    peak_on_host: int = 0
    _alive: defaultdict[tuple[str, str], int] = field(default_factory=lambda: defaultdict(int))
    _held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    _highest: dict[str, Any] = field(default_factory=dict)
    """The most of each category: in the recording under way, else in the current step, where it is an entry of `highest`."""
    _top: float = -1
    """The highest total that was looked at in the same while; infinite off the books."""
    _recorder: EffectRecorder | None = None

    def __post_init__(self) -> None:
        self._highest = self.highest.setdefault(self.step, dict(self._held))

    def mark(self, phase: str, step: int) -> None:
        """Say what comes next. Not inside a recording."""
        self._note()
        is_new, self.phase, self.step = step != self.step, phase, step
        if is_new:
            self._highest = self.highest.setdefault(step, dict(self._held))
            self._top = self.peaks[step].total if step in self.peaks else -1
        if is_new or self.keeps_timeline:
            self._note()

    def take(self, category: str, label: str, num_bytes: int) -> Allocation:
        """New bytes."""
        self._change(category, label, num_bytes)
        return Allocation(category, label, num_bytes)

    def release_all(self, allocations: Iterable[Allocation]) -> None:
        """Drop each of them."""
        for allocation in allocations:
            allocation.holders -= 1
            if allocation.holders <= 0:
                self._free(allocation)

    def release(self, allocation: Allocation) -> None:
        """One holder lets go; the last one frees the bytes."""
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
        """The bytes are on the host too."""
        allocation.host_bytes = allocation.num_bytes
        self.on_host += allocation.host_bytes
        self.peak_on_host = max(self.peak_on_host, self.on_host)

    def leave_device(self, allocation: Allocation) -> None:
        """The bytes are on the host alone, whoever holds them."""
        if allocation.holders and allocation.num_bytes:
            self._note()
            self._change(allocation.category, allocation.label, -allocation.num_bytes)
            allocation.offloaded_bytes, allocation.num_bytes = allocation.num_bytes, 0

    def bring_back(self, allocation: Allocation) -> None:
        """They are on the device as well."""
        if allocation.offloaded_bytes:
            self._change(allocation.category, allocation.label, allocation.offloaded_bytes)
            allocation.offloaded_bytes, allocation.num_bytes = 0, allocation.offloaded_bytes

    def touch(self, category: str, label: str, num_bytes: int) -> None:
        """Bytes that exist for a moment."""
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
    def recording(self) -> Iterator[EffectRecorder]:
        """Write down what happens inside, which can be applied again. Not with offloading to the host."""
        outer, top, highest, alive = self._recorder, self._top, self._highest, dict(self._alive)
        inside = dict(self._held)
        recorder = EffectRecorder(self, self.total, alive, dict(inside), self.total, alive, inside)
        self._recorder, self._top, self._highest = recorder, self.total, inside
        try:
            yield recorder
            self._note()
        finally:
            self._recorder, self._top, self._highest = outer, top, highest
        self._raise_highest(inside)
        if recorder.peak_total > top:
            self._see(recorder.peak_total, recorder.peak_alive)

    def apply(self, effect: Effect) -> None:
        """Book a recorded effect once more: the same changes, peaks and bytes."""
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
        """Leave totals and peaks as they are, whatever happens inside: the bytes are in them already."""
        alive, held = self._alive.copy(), dict(self._held)
        before = self.total, self._top, self._highest
        self._top, self._highest = inf, dict.fromkeys(self._held, inf)
        try:
            yield
        finally:
            self.total, self._top, self._highest = before
            self._alive, self._held = alive, held

    def now(self) -> MemorySnapshot:
        """The books as they stand."""
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
        """Only before a fall can the sum have been at its highest, so only then is it looked at."""
        if self.total > self._top:
            self._see(self.total, dict(self._alive))
        if self.keeps_timeline:
            self.timeline.append((self.step, self.phase, self.now().by_category))

    def _see(self, total: int, alive: dict[tuple[str, str], int]) -> None:
        """There was more than at any moment before, with these bytes alive."""
        self._top = total
        if self._recorder is None:
            self.peaks[self.step] = self._moment(total, alive)
        else:
            self._recorder.peak_total, self._recorder.peak_alive = total, alive

    def _raise_highest(self, most: dict[str, int]) -> None:
        for category, num_bytes in most.items():
            self._highest[category] = max(self._highest[category], num_bytes)


def _since(now: dict[Any, int], then: dict[Any, int]) -> dict[Any, int]:
    """Entries that there are more of than there was, or less."""
    more = {key: num_bytes - then.get(key, 0) for key, num_bytes in now.items()}
    return {key: num_bytes for key, num_bytes in more.items() if num_bytes}
