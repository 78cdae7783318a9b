"""The folder of a sweep: a folder for each cell, with its run, what came of it, and what it printed.

    cells/dp2-zero_stage3-1f2e3d/run.toml      the run, as `ultrascale train` would read it
                                 speed.json    what was measured (`train.speed.Speed`)
                                 failed.json   or how it failed
                                 log.txt       what it printed

The name ends in a digest of the run and of the steps that are timed, so that another run has another folder, and what is
measured is not measured again. Nothing else is kept: several commands, on several machines, can measure cells of one folder.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ultrascale.spec.resolve import to_toml
from ultrascale.spec.run import Run
from ultrascale.sweep.grid import Axis, Cell

LONGEST_NAME = 80


@dataclass(frozen=True)
class Failure:
    """A cell that came to no result."""

    outcome: str
    """`out of memory`, `too slow`, `killed` or `failed`."""
    text: str
    """What it said, in a line."""
    exit_code: int | None = None


@dataclass(frozen=True)
class Place:
    """Where a cell that can run is kept."""

    cell: Cell
    run: Run
    """Named like its folder."""
    path: Path

    @property
    def run_file(self) -> Path:
        return self.path / "run.toml"

    @property
    def result_file(self) -> Path:
        return self.path / "speed.json"

    @property
    def log_file(self) -> Path:
        return self.path / "log.txt"

    @property
    def result(self) -> dict[str, Any] | None:
        """What was measured, as `train.speed.Speed` wrote it."""
        return _read(self.result_file)

    @property
    def failure(self) -> Failure | None:
        told = _read(self.path / "failed.json")
        return None if told is None else Failure(**told)

    def prepare(self) -> None:
        """Write the run, and forget how it failed before."""
        self.path.mkdir(parents=True, exist_ok=True)
        self.run_file.write_text(to_toml(self.run))
        (self.path / "failed.json").unlink(missing_ok=True)

    def fail(self, failure: Failure) -> None:
        """Keep how it failed."""
        partial = self.path / f"failed.{os.getpid()}"
        partial.write_text(json.dumps(asdict(failure)) + "\n")
        partial.replace(self.path / "failed.json")


def place_of(folder: Path, cell: Cell, axes: Sequence[Axis], *, steps: int, warm: int) -> Place:
    """The place of a cell that can run, which need not be there yet."""
    assert cell.run is not None
    described = to_toml(replace(cell.run, name="", folder=""))
    digest = hashlib.sha256(f"{described}\n{warm} {steps}".encode()).hexdigest()[:6]
    words = "-".join(f"{axis.short}{_plain(cell.values[axis.key])}" for axis in axes)
    name = f"{words[:LONGEST_NAME]}-{digest}" if words else digest
    return Place(cell, replace(cell.run, name=f"{cell.run.name}-{name}"), folder / "cells" / name)


def _plain(value: str) -> str:
    return re.sub(r"[^\w.+]+", "_", value)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return json.loads(path.read_text())
    except (OSError, json.JSONDecodeError):
        return None
