"""How often a run is started again, and what it cost: a budget, and the account kept in the run's `events.jsonl`.

    failure     the launcher saw ranks end: cause, rank, node, step
    start       rank 0 has found the newest checkpoint and goes on from its step
    stepped     rank 0 has done its first step since

The budget is for restarts without a new checkpoint between them: a run that gets on may be started again for weeks. A step
that fails again and again is poison, whatever it dies of: once more would be no better.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

MOST_AT_A_STEP = 3
"""Failures in a row at the same step before it is given up."""


@dataclass
class Budget:
    """What is left of the patience of a launcher."""

    max_restarts: int
    used: int = 0
    """Since the last new checkpoint."""
    _progress: str | None = None
    _step: int | None = None
    _at_step: int = 0

    @property
    def left(self) -> int:
        return self.max_restarts - self.used

    def refusal(self, step: int | None, progress: str) -> str:
        """Count a failure in `step` (None: before any) while the newest checkpoint is `progress`. Why not to start again; empty
        if it should be tried."""
        if progress != self._progress:
            self._progress, self.used = progress, 0
        self._at_step = self._at_step + 1 if step == self._step else 1
        self._step = step
        where = "The start" if step is None else f"Step {step}"
        if self._at_step >= MOST_AT_A_STEP and self.left > 0:
            return f"{where} has now failed {self._at_step} times in a row: once more would be no better"
        if self.left <= 0:
            return f"{self.max_restarts} restarts since the last new checkpoint: no more are allowed (--max-restarts)"
        self.used += 1
        return ""


@dataclass(frozen=True)
class Restart:
    """One restart of a run, as its events tell."""

    cause: str
    rank: int | None
    node: str
    failed_step: int
    """Steps done when it failed."""
    resumed_step: int | None
    """Steps done in the checkpoint that it went on from; None if it did not."""
    seconds: float | None
    """From the failure to the end of the next step."""

    @property
    def steps_lost(self) -> int:
        return 0 if self.resumed_step is None else max(0, self.failed_step - self.resumed_step)


@dataclass(frozen=True)
class Account:
    """What restarts have cost a run so far."""

    restarts: tuple[Restart, ...] = ()
    useful_seconds: float = 0.0
    """Of the steps that count, each once, at the run's own mean pace."""
    wall_seconds: float = 0.0
    """In the run's commands, from starts to ends; the time between two commands is left out."""

    @property
    def goodput(self) -> float:
        return min(1.0, self.useful_seconds / self.wall_seconds) if self.wall_seconds > 0 else 1.0

    @property
    def steps_lost(self) -> int:
        return sum(one.steps_lost for one in self.restarts)


@dataclass
class _Stretch:
    """From a start to a failure, a stop or the end."""

    start: dict[str, Any]
    stepped: dict[str, Any] | None = None
    end: dict[str, Any] | None = None

    @property
    def last(self) -> dict[str, Any]:
        return self.end or self.stepped or self.start

    @property
    def pace(self) -> tuple[float, int]:
        """Seconds and number of its steps, the first left out: it holds warm-up."""
        if self.stepped is None or self.end is None:
            return 0.0, 0
        return self.end["time"] - self.stepped["time"], max(0, (self.end["step"] or 0) - self.stepped["step"])


def read_account(events: Path) -> Account:
    """The account of a run from its `events.jsonl`; lines that a crash tore are passed over."""
    return account_of(_rows(events)) if events.exists() else Account()


def account_of(events: Iterable[dict[str, Any]]) -> Account:
    """The account of a run from its events in order."""
    stretches: list[_Stretch] = []
    for event in events:
        if event["event"] == "start":
            stretches.append(_Stretch(event))
        elif event["event"] == "failure" and (not stretches or stretches[-1].end is not None):
            stretches.append(_Stretch(event | {"step": None}, end=event))  # ranks that failed before they started
        elif stretches and event["event"] == "rewind":
            stretches[-1].end = event | {"event": "failure"}
            stretches.append(_Stretch(event | {"step": event["to"]}))
        elif stretches and event["event"] == "stepped":
            stretches[-1].stepped = event
        elif stretches and event["event"] in ("failure", "stop", "end"):
            stretches[-1].end = event
    if not stretches:
        return Account()
    seconds, steps = (sum(part) for part in zip(*(one.pace for one in stretches), strict=True))
    first = next((one.start["step"] for one in stretches if one.start["step"] is not None), 0)
    useful = max(0, (stretches[-1].last["step"] or 0) - first)
    wall = sum(one.last["time"] - one.start["time"] for one in stretches)
    pairs = list(pairwise(stretches))
    wall += sum(after.start["time"] - one.last["time"] for one, after in pairs if _failed(one))
    restarts = tuple(_restart(one, after) for one, after in pairs if one.end is None or _failed(one))
    return Account(restarts, useful * seconds / steps if steps else 0.0, wall)


def summary(account: Account) -> list[str]:
    """Every restart in a line, and what all of them cost; empty if there was none."""
    lines = [
        f"restart {number}: {one.cause}; step {one.failed_step}, {one.steps_lost} steps done again"
        + (f", {one.seconds:.1f} s until the next step was done" if one.seconds is not None else "")
        for number, one in enumerate(account.restarts, 1)
    ]
    if lines:
        total = f"{len(lines)} restarts, {account.steps_lost} steps done again, goodput {account.goodput:.1%}"
        lines.append(f"{total} of {account.wall_seconds:.0f} s")
    return lines


def _failed(stretch: _Stretch) -> bool:
    return stretch.end is not None and stretch.end["event"] == "failure"


def _restart(before: _Stretch, after: _Stretch) -> Restart:
    told = before.end or {}
    seconds = after.stepped["time"] - told["time"] if told and after.stepped is not None else None
    return Restart(
        told.get("cause", "the launcher ended without a word"), told.get("rank"), told.get("node", ""),
        before.last["step"] or 0, after.start["step"], seconds,
    )  # fmt: skip


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict) and {"event", "time"} <= row.keys():
            yield row
