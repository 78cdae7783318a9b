"""Restarts of a run and their cost: a limit, and the account kept in the run's `events.jsonl`.

    failure     the launcher saw ranks end: cause, rank, node, step; and whether it restarted them
    start       rank 0 has found the newest checkpoint and resumes from its step
    stepped     rank 0 has done its first step since

The limit is on restarts without a new checkpoint between them: a run that makes progress may be restarted for weeks. A step
that fails several times in a row, for whatever reason, is not tried again: another restart would not help.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from ultrascale.description.units import count_of
from ultrascale.launch.events import Event, event_of, is_event, read_rows, seconds_between

MOST_AT_A_STEP = 3
"""Failures in a row at the same step before the launcher gives up."""


@dataclass
class RestartBudget:
    """The restarts that a launcher has left."""

    max_restarts: int
    used: int = 0
    """Restarts since the last new checkpoint."""
    _progress: str | None = None
    _step: int | None = None
    _at_step: int = 0

    @property
    def left(self) -> int:
        return self.max_restarts - self.used

    def refusal(self, step: int | None, progress: str) -> str:
        """Count a failure in `step` (None: before any) while the newest checkpoint is `progress`. Returns the reason not to
        restart; empty to restart."""
        if progress != self._progress:
            self._progress, self.used = progress, 0
        self._at_step = self._at_step + 1 if step == self._step else 1
        self._step = step
        where = "The start" if step is None else f"Step {step}"
        if self._at_step >= MOST_AT_A_STEP and self.left > 0:
            return f"{where} has now failed {self._at_step} times in a row: once more would be no better"
        if self.left <= 0:
            return (
                f"{count_of(self.max_restarts, 'restart')} since the last new checkpoint: no more are allowed (--max-restarts)"
            )
        self.used += 1
        return ""


@dataclass(frozen=True)
class Restart:
    """One restart of a run, according to its events."""

    cause: str
    rank: int | None
    node: str
    failed_step: int
    """Steps done when it failed."""
    resumed_step: int | None
    """Steps done in the checkpoint that it resumed from; None if it did not resume."""
    seconds: float | None
    """Seconds from the failure to the end of the next step; None if unknown, or if a user gave the command again."""

    @property
    def steps_lost(self) -> int:
        return 0 if self.resumed_step is None else max(0, self.failed_step - self.resumed_step)


@dataclass(frozen=True)
class RestartAccount:
    """The cost of restarts so far."""

    restarts: tuple[Restart, ...] = ()
    useful_seconds: float = 0.0
    """Seconds of the steps that count, each once, at the run's mean pace."""
    wall_seconds: float = 0.0
    """Seconds in the run's commands, from starts to ends; the time between two commands is left out."""
    unknown_spans: int = 0
    """Number of time spans that are not included, because the clock was set back."""
    unreadable: int = 0
    """Number of rows that could not be read."""

    @property
    def goodput(self) -> float | None:
        """Goodput between 0 and 1; None if it cannot be computed."""
        if self.unknown_spans or self.wall_seconds <= 0:
            return None
        return min(1.0, self.useful_seconds / self.wall_seconds)

    @property
    def steps_lost(self) -> int:
        return sum(restart.steps_lost for restart in self.restarts)


@dataclass
class _Stretch:
    """The time from a start to a failure, a stop or the end."""

    start: Event
    stepped: Event | None = None
    end: Event | None = None

    @property
    def last(self) -> Event:
        return self.end or self.stepped or self.start

    @property
    def failed(self) -> bool:
        return self.end is not None and self.end.kind == "failure"

    @property
    def pace(self) -> tuple[float, int]:
        """Seconds and number of its steps, without the first: it includes warm-up."""
        if self.stepped is None or self.end is None:
            return 0.0, 0
        steps = (self.end.step or 0) - (self.stepped.step or 0)
        seconds = seconds_between(self.stepped, self.end)
        return (seconds, steps) if seconds is not None and steps > 0 else (0.0, 0)


def read_account(events: Path) -> RestartAccount:
    """The account of a run from its `events.jsonl`."""
    return account_of(read_rows(events))


def account_of(rows: Iterable[object]) -> RestartAccount:
    """The account of a run from rows of its events in order. Invalid rows are skipped, and counted."""
    rows = list(rows)
    unreadable = sum(not is_event(row) for row in rows)
    stretches = _stretches(event for row in rows if (event := event_of(row)) is not None)
    if not stretches:
        return RestartAccount(unreadable=unreadable)
    seconds, steps = (sum(part) for part in zip(*(stretch.pace for stretch in stretches), strict=True))
    first = next((stretch.start.step for stretch in stretches if stretch.start.step is not None), 0)
    useful = max(0, (stretches[-1].last.step or 0) - first)
    pairs = list(pairwise(stretches))
    spans = [seconds_between(stretch.start, stretch.last) for stretch in stretches]
    spans += [seconds_between(stretch.last, after.start) for stretch, after in pairs if stretch.failed and stretch.last.again]
    known = [span for span in spans if span is not None]
    restarts = tuple(_restart(stretch, after) for stretch, after in pairs if stretch.end is None or stretch.failed)
    return RestartAccount(restarts, useful * seconds / steps if steps else 0.0, sum(known), len(spans) - len(known), unreadable)


def _stretches(events: Iterable[Event]) -> list[_Stretch]:
    stretches: list[_Stretch] = []
    for event in events:
        if event.kind == "start":
            stretches.append(_Stretch(event))
        elif event.kind == "failure" and (not stretches or stretches[-1].end is not None):
            stretches.append(_Stretch(replace(event, step=None), end=event))  # ranks that failed before they started
        elif stretches and event.kind == "rewind":
            stretches[-1].end = replace(event, kind="failure")
            stretches.append(_Stretch(replace(event, step=event.to)))
        elif stretches and event.kind == "stepped":
            stretches[-1].stepped = event
        elif stretches and event.kind in ("failure", "stop", "end"):
            stretches[-1].end = event
    return stretches


def summary(account: RestartAccount) -> list[str]:
    """One line for every restart, and one with the total cost; empty if there is nothing to report."""
    lines = [f"restart {number}: {_describe(restart)}" for number, restart in enumerate(account.restarts, 1)]
    if lines:
        total = (
            f"{count_of(len(lines), 'restart')}, {count_of(account.steps_lost, 'step')} lost, goodput {goodput_text(account)}"
        )
        lines.append(total)
    if account.unreadable:
        lines.append(f"{count_of(account.unreadable, 'row')} of events.jsonl cannot be read and are left out of this account")
    return lines


def _describe(restart: Restart) -> str:
    rank = "unknown" if restart.rank is None else str(restart.rank)
    fields = [f"rank {rank}", f"node {restart.node or 'unknown'}", f"step {restart.failed_step}"]
    fields.append(f"{count_of(restart.steps_lost, 'step')} lost")
    if restart.seconds is not None:
        fields.append(f"{restart.seconds:.1f} s until the next step was done")
    return f"{', '.join(fields)}; cause: {restart.cause}"


def goodput_text(account: RestartAccount) -> str:
    """Goodput in words, with the time it covers."""
    if account.goodput is not None:
        return f"{account.goodput:.1%} of {account.wall_seconds:.0f} s"
    if account.unknown_spans:
        return f"unknown: the clock was set back ({count_of(account.unknown_spans, 'time')})"
    return "unknown: no time has passed"


def _restart(before: _Stretch, after: _Stretch) -> Restart:
    end = before.end
    if end is None:
        return Restart("the launcher ended without a word", None, "", before.last.step or 0, after.start.step, None)
    seconds = seconds_between(end, after.stepped) if end.again and after.stepped is not None else None
    return Restart(end.cause or "unknown", end.rank, end.node, end.step or 0, after.start.step, seconds)
