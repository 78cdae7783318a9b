"""The books of a rank's memory: who holds which bytes, how much in all, and the highest it ever was."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = (
    "parameters", "gathered", "gradients", "optimizer", "activations", "temporary", "communication", "other",
)  # fmt: skip
"""As in `measure.memory`, which defines them on real tensors."""


@dataclass(slots=True)
class Held:
    """Bytes that live until the last of their holders lets go."""

    category: str
    label: str
    num_bytes: int
    holders: int = 1
    away_bytes: int = 0
    """On the host alone, and not in `num_bytes`."""
    host_bytes: int = 0
    """On the host, until the last holder lets go."""

    def hold(self) -> Held:
        self.holders += 1
        return self


@dataclass(frozen=True)
class Moment:
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
class Recorder:
    """An `Effect` in the making."""

    ledger: Ledger
    start: Moment
    alive: dict[tuple[str, str], int]
    peak_total: int
    peak_alive: dict[tuple[str, str], int]
    highest: dict[str, int]

    def look(self) -> None:
        """The sum is about to fall."""
        if self.ledger.total > self.peak_total:
            self.peak_total, self.peak_alive = self.ledger.total, dict(self.ledger._alive)

    def join(self, total: int, alive: dict[tuple[str, str], int], highest: dict[str, int]) -> None:
        """Somebody else looked: at the highest moment of a while."""
        if total > self.peak_total:
            self.peak_total, self.peak_alive = total, alive
        for name, most in highest.items():
            self.highest[name] = max(self.highest[name], most)

    def effect(self) -> Effect:
        """Effect of all changes since the recording began."""
        ledger, start, held = self.ledger, self.start.total, self.start.by_category

        return Effect(
            ledger.total - start, _since(ledger._alive, self.alive), _since(ledger._held, held),
            self.peak_total - start, _since(self.peak_alive, self.alive), _since(self.highest, held),
        )  # fmt: skip


@dataclass
class Ledger:
    """Live bytes, the highest moment of every step, and the totals as they changed."""

    step: int = 0
    phase: str = "start"
    total: int = 0
    peaks: dict[int, Moment] = field(default_factory=dict)
    highest: dict[int, dict[str, int]] = field(default_factory=dict)
    """The most of each category in every step, whenever that was."""
    keeps_timeline: bool = False
    timeline: list[tuple[int, str, dict[str, int]]] = field(default_factory=list)
    """(step, phase, bytes by category) before every fall."""
    on_host: int = 0
    peak_on_host: int = 0
    _alive: dict[tuple[str, str], int] = field(default_factory=dict)
    _held: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0))
    _highest: dict[str, int] = field(default_factory=dict)
    """Entry of `highest` for the current step."""
    _recorder: Recorder | None = None
    _is_off: bool = False

    def __post_init__(self) -> None:
        self._highest = self.highest.setdefault(self.step, dict(self._held))

    def mark(self, phase: str, step: int) -> None:
        """Say what comes next."""
        self._note()
        is_new, self.phase, self.step = step != self.step, phase, step
        if is_new:
            self._highest = self.highest.setdefault(step, dict(self._held))
        if is_new or self.keeps_timeline:
            self._note()

    def take(self, category: str, label: str, num_bytes: int) -> Held:
        """New bytes."""
        self._change(category, label, num_bytes)
        return Held(category, label, num_bytes)

    def drop_all(self, held: Iterable[Held]) -> None:
        """Drop each of them."""
        for one in held:
            self.drop(one)

    def drop(self, held: Held) -> None:
        """One holder lets go; the last one frees the bytes."""
        held.holders -= 1
        assert held.holders >= 0, held
        if held.holders == 0:
            self.on_host -= held.host_bytes
            if held.num_bytes:
                self._note()
                self._change(held.category, held.label, -held.num_bytes)

    def copy_to_host(self, held: Held) -> None:
        """The bytes are on the host too."""
        held.host_bytes = held.num_bytes
        self.on_host += held.host_bytes
        self.peak_on_host = max(self.peak_on_host, self.on_host)

    def leave_device(self, held: Held) -> None:
        """The bytes are on the host alone, whoever holds them."""
        if held.holders and held.num_bytes:
            self._note()
            self._change(held.category, held.label, -held.num_bytes)
            held.away_bytes, held.num_bytes = held.num_bytes, 0

    def bring_back(self, held: Held) -> None:
        """They are on the device as well."""
        if held.away_bytes:
            self._change(held.category, held.label, held.away_bytes)
            held.away_bytes, held.num_bytes = 0, held.away_bytes

    def touch(self, category: str, label: str, num_bytes: int) -> None:
        """Bytes that exist for a moment."""
        if num_bytes:
            self._change(category, label, num_bytes)
            self._note()
            self._change(category, label, -num_bytes)

    def move(self, held: Held, category: str, label: str) -> Held:
        """Move bytes to another category and label."""
        self._change(held.category, held.label, -held.num_bytes)
        held.category, held.label = category, label
        self._change(category, label, held.num_bytes)
        return held

    @contextmanager
    def recording(self) -> Iterator[Recorder]:
        """Write down what happens inside, which can be applied again. Not with offloading to the host."""
        outer, alive = self._recorder, dict(self._alive)
        recorder = self._recorder = Recorder(self, self.now(), alive, self.total, alive, dict(self._held))
        try:
            yield recorder
            recorder.look()
        finally:
            self._recorder = outer
        if outer is not None:
            outer.join(recorder.peak_total, recorder.peak_alive, recorder.highest)

    def apply(self, effect: Effect) -> None:
        """Book a recorded effect once more: the same changes, peaks and bytes."""
        best, recorder, top = self.peaks.get(self.step), self._recorder, self.total + effect.peak_total
        highest = {category: self._held[category] + more for category, more in effect.highest.items()}
        if best is None or top > best.total or (recorder is not None and top > recorder.peak_total):
            alive = {
                key: self._alive.get(key, 0) + effect.peak_alive.get(key, 0) for key in {**self._alive, **effect.peak_alive}
            }
            held: dict[str, int] = dict.fromkeys(CATEGORIES, 0)
            for (category, _), num_bytes in alive.items():
                held[category] += num_bytes
            alive = {key: num_bytes for key, num_bytes in alive.items() if num_bytes}
            if recorder is not None:
                recorder.join(top, alive, highest)
            if best is None or top > best.total:
                self.peaks[self.step] = Moment(self.step, self.phase, top, held, alive)
        elif recorder is not None:
            recorder.join(0, {}, highest)
        for category, most in highest.items():
            self._highest[category] = max(self._highest[category], most)
        for key, more in effect.alive.items():
            self._alive[key] = self._alive.get(key, 0) + more
        for category, more in effect.held.items():
            self._held[category] += more
        self.total += effect.total

    @contextmanager
    def off_the_books(self) -> Iterator[None]:
        """Leave totals and peaks as they are, whatever happens inside: the bytes are in them already."""
        total, alive, held = self.total, dict(self._alive), dict(self._held)
        self._is_off = True
        try:
            yield
        finally:
            self.total, self._alive, self._held, self._is_off = total, alive, held, False

    def now(self) -> Moment:
        """The books as they stand."""
        by_label = {key: num_bytes for key, num_bytes in self._alive.items() if num_bytes}
        return Moment(self.step, self.phase, self.total, dict(self._held), by_label)

    def _change(self, category: str, label: str, num_bytes: int) -> None:
        key = (category, label)
        self._alive[key] = self._alive.get(key, 0) + num_bytes
        if not num_bytes:
            return
        self.total += num_bytes
        held = self._held[category] = self._held[category] + num_bytes
        if self._is_off:
            return
        if held > self._highest[category]:
            self._highest[category] = held
        if self._recorder is not None and held > self._recorder.highest[category]:
            self._recorder.highest[category] = held

    def _note(self) -> None:
        """Only before a fall can the sum have been at its highest, so only then is it looked at."""
        if self._is_off:
            return
        if self._recorder is not None:
            self._recorder.look()
        best = self.peaks.get(self.step)
        if best is None or self.total > best.total:
            self.peaks[self.step] = self.now()
        if self.keeps_timeline:
            self.timeline.append((self.step, self.phase, self.now().by_category))


def _since(now: dict[Any, int], then: dict[Any, int]) -> dict[Any, int]:
    """Entries that there are more of than there was, or less."""
    more = {key: num_bytes - then.get(key, 0) for key, num_bytes in now.items()}
    return {key: num_bytes for key, num_bytes in more.items() if num_bytes}
