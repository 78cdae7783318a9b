"""Faults drawn from the catalogue: kind, step, rank and moment of the step, all determined by a seed.

A fault strikes once: its rank creates a file `N.fired` before it acts, so that the step is not disturbed when it is repeated
after the restart.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from ultrascale.description.problems import mistake

MOMENTS = ("reading data", "forward", "backward", "optimizer")
SAVE_POINTS = ("save.start", "save.folder", "save.block", "save.shard", "save.shards", "save.manifest", "publish.renamed")
ON_RANK_0 = ("save.start", "save.folder", "save.shards", "save.manifest", "publish.renamed")

SLOW_STEPS = 24
"""Steps of a slow rank, which must be reported within 20."""


@dataclass(frozen=True)
class FaultKind:
    """A kind of fault."""

    row: int
    """Row of the catalogue (docs/faults.md)."""
    what: str
    strikes_save: bool = False
    """True if the fault strikes the next save."""
    steps: int = 0
    """Number of steps that the fault lasts; the next fault does not come sooner."""
    met_by: str = ""
    """Handling of a fault that a run survives without a restart and need not report."""
    meets_launcher: bool = False
    """True if the fault strikes the process that started the ranks."""


KINDS = {
    "kill": FaultKind(2, "SIGKILL of a rank at a moment of a step"),
    "kill-in-save": FaultKind(1, "SIGKILL of a rank at a point of saving", strikes_save=True),
    "power-cut": FaultKind(3, "SIGKILL of launcher and all ranks; the command is given again", meets_launcher=True),
    "raise": FaultKind(6, "an exception on a rank"),
    "segfault": FaultKind(7, "a segmentation fault on a rank"),
    "leave": FaultKind(7, "a rank leaves early with exit code 0"),
    "terminate": FaultKind(10, "SIGTERM to the launcher; the command is given again", meets_launcher=True),
    "stop": FaultKind(17, "SIGSTOP of a rank"),
    "skip": FaultKind(18, "a rank skips a collective"),
    "shape": FaultKind(18, "a rank comes to a collective with another shape"),
    "lock": FaultKind(19, "a rank holds the interpreter's lock"),
    "nan": FaultKind(49, "a NaN in the gradient of a rank"),
    "flip-bit": FaultKind(51, "a bit of a weight is flipped on one rank"),
    "flip-file": FaultKind(27, "a bit of the newest checkpoint is flipped, then SIGKILL"),
    "cut-file": FaultKind(28, "a file of the newest checkpoint is cut short, then SIGKILL"),
    "drop": FaultKind(24, "all connections of a rank are reset"),
    "full-disk": FaultKind(25, "the disk is full for a rank while it saves", True, 3, "the save, again a step later"),
    "flaky-disk": FaultKind(33, "a write of a save fails once", True, 3, "the write, done again"),
    "slow-disk": FaultKind(32, "a save takes longer than a hang", True, 3, "patience"),
    "stall": FaultKind(21, "SIGSTOP of a rank for less than a hang", False, 1, "patience"),
    "slow": FaultKind(20, "a rank is slow for 24 steps", False, SLOW_STEPS + 1, "patience"),
}


@dataclass(frozen=True)
class Planted:
    """One fault of a storm."""

    number: int
    kind: str
    step: int
    """Completed steps when it strikes."""
    rank: int
    moment: str
    """Moment of the step, or of the save."""


def expect_kinds(kinds: Sequence[str]) -> None:
    """Raises SpecError for an unknown kind."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise mistake("--faults", f"{unknown[0]!r} is no fault", f"There are {', '.join(KINDS)}.")


def draw(seed: int, kinds: Sequence[str], *, world: int, mean_gap: float, interval: int) -> Iterator[Planted]:
    """Infinite sequence of faults in order of their steps. `mean_gap`: steps between two, exponentially distributed;
    `interval`: steps between checkpoints. Raises SpecError for an unknown kind."""
    expect_kinds(kinds)
    chance, step, order = random.Random(seed), interval + 1, list(kinds)
    for number in count():
        if number % len(order) == 0:
            chance.shuffle(order)  # all kinds are equally frequent
        kind = order[number % len(order)]
        step += 1 + round(chance.expovariate(1 / mean_gap))
        rank, moment = chance.randrange(world), chance.choice(MOMENTS)
        if KINDS[kind].strikes_save:
            step += -step % interval or interval
            step -= 1
        if kind == "kill-in-save":
            moment = chance.choice(SAVE_POINTS)
            rank = 0 if moment in ON_RANK_0 else rank
        yield Planted(number, kind, step, rank, moment)
        step += KINDS[kind].steps


def write(folder: Path, faults: Sequence[Planted], *, stop_at: int | None = None) -> Path:
    """Write a storm for the ranks to read. `stop_at`: steps after which the run is asked to stop."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "storm.json"
    path.write_text(json.dumps({"stop_at": stop_at, "faults": [asdict(fault) for fault in faults]}))
    return path


def read(path: Path) -> tuple[list[Planted], int | None]:
    """Faults of a storm, and the step at which the run is to stop."""
    storm = json.loads(path.read_text())
    return [Planted(**fault) for fault in storm["faults"]], storm["stop_at"]


def fire(folder: Path, fault: Planted) -> bool:
    """True if `fault` may strike now, because it has not yet."""
    try:
        with open(folder / f"{fault.number}.fired", "x") as file:
            file.write(json.dumps({"time": time.time()}))
        return True
    except FileExistsError:
        return False


def heal(folder: Path, fault: Planted) -> None:
    """Record that `fault` has ended without ending the run."""
    (folder / f"{fault.number}.healed").write_text(json.dumps({"time": time.time()}))


def healed(folder: Path, faults: Sequence[Planted]) -> dict[int, float]:
    """Time at which each of `faults` ended, by number."""
    return _times(folder, faults, "healed")


def fired(folder: Path, faults: Sequence[Planted]) -> dict[int, float]:
    """Time at which each of `faults` struck, by number."""
    return _times(folder, faults, "fired")


def _times(folder: Path, faults: Sequence[Planted], what: str) -> dict[int, float]:
    texts = {fault.number: path.read_text() for fault in faults if (path := folder / f"{fault.number}.{what}").exists()}
    return {number: json.loads(text)["time"] for number, text in texts.items() if text}  # else the file is still being written
