"""The folder of a sweep: a folder for each cell, with its run, its result or failure, and its output.

    cells/dp2-zero_stage3-1f2e3d/run.toml      the run, as `ultrascale train` would read it
                                 speed.json    the measurement (`train.speed.Speed`)
                                 failed.json   or its failure
                                 log.txt       its output

The name ends in a digest of the run and of the number of steps, so that different runs have different folders, and no cell is
measured twice. There is no other state: several commands, on several machines, can measure cells of one folder.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ultrascale.catalogue.machine_file import machine_text
from ultrascale.config.resolve import to_toml
from ultrascale.description.parsing import parse_json
from ultrascale.description.run import Run
from ultrascale.output_file import write_output
from ultrascale.sweep.grid import Axis, SweepCell

WARM, TIMED = 4, 8
"""Steps of a measurement: warm-up and timed. Memory is counted in two warm-up steps; one more lets the allocator settle, one is
spare."""
LONGEST_NAME = 80
OUTCOMES = ("out of memory", "too slow", "killed", "failed")
COUNTED = ("tokens_per_step", "ranks", "mfu", "planned_peak_bytes")
MAYBE_COUNTED = ("planned_step_seconds", "measured_peak_bytes", "planned_reserved_bytes", "measured_reserved_bytes")
NEEDED = ("step_seconds", *COUNTED, *MAYBE_COUNTED, "device", "environment")
"""Required keys of `train.speed.Speed`: a result that lacks one, or has a wrong value, is from another version or damaged, and
is ignored."""
MOST_COUNTED = 1e30


@dataclass(frozen=True)
class Failure:
    """Failure of a cell."""

    outcome: str
    """One of `OUTCOMES`."""
    text: str
    """Message, on one line."""
    exit_code: int | None = None


@dataclass(frozen=True)
class CellPlace:
    """Folder of a cell that can run."""

    cell: SweepCell
    run: Run
    """Run of the cell, named like its folder."""
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
        """Result of the cell, as written by `train.speed.Speed`; None if there is none, or its file is incomplete."""
        content = _read(self.result_file)
        return content if all(key in content for key in NEEDED) and _is_result(content) else None

    @property
    def failure(self) -> Failure | None:
        content = _read(self.path / "failed.json")
        if content.get("outcome") not in OUTCOMES or not isinstance(content.get("text"), str):
            return None
        return Failure(content["outcome"], content["text"], content.get("exit_code"))

    def prepare(self) -> None:
        """Write the run, and delete an earlier failure. A result that cannot be read is renamed and kept."""
        self.path.mkdir(parents=True, exist_ok=True)
        if self.result is None and self.result_file.exists():
            self.result_file.replace(self.result_file.with_suffix(".not-understood.json"))
        write_output(self.run_file, to_toml(self.run))
        (self.path / "failed.json").unlink(missing_ok=True)

    def fail(self, failure: Failure) -> None:
        """Write the failure of the cell."""
        self.keep("failed.json", (json.dumps(asdict(failure)) + "\n").encode())

    def keep(self, name: str, data: bytes) -> None:
        """Write a file of the cell, atomically."""
        write_output(self.path / name, data)


def place_of(folder: Path, cell: SweepCell, axes: Sequence[Axis], *, steps: int, warm: int) -> CellPlace:
    """Folder of a cell that can run; it may not exist yet."""
    assert cell.run is not None
    described = to_toml(replace(cell.run, name="", folder=""))
    planned_for = machine_text(cell.run.cluster)
    digest = hashlib.sha256(f"{described}\n{warm} {steps}{planned_for}".encode()).hexdigest()[:6]
    words = "-".join(f"{axis.short}{_plain(cell.values[axis.key])}" for axis in axes)
    name = f"{words[:LONGEST_NAME]}-{digest}" if words else digest
    return CellPlace(cell, replace(cell.run, name=f"{cell.run.name}-{name}"), folder / "cells" / name)


def _plain(value: str) -> str:
    return re.sub(r"[^\w.+]+", "_", value)


def _is_result(result: Mapping[str, Any]) -> bool:
    seconds, facts = result["step_seconds"], result["environment"]
    if not (isinstance(seconds, list) and seconds and isinstance(facts, dict) and {"torch", "ultrascale"} <= facts.keys()):
        return False
    numbers = [*seconds, *(result[key] for key in COUNTED), *(result[key] for key in MAYBE_COUNTED if result[key] is not None)]
    return all(type(number) in (int, float) and 1 / MOST_COUNTED < number < MOST_COUNTED for number in numbers)


def _read(path: Path) -> dict[str, Any]:
    """JSON object in a file; empty if the file is missing or truncated, or has half a surrogate pair: no table can."""
    try:
        content = parse_json(path.read_bytes())
        json.dumps(content, ensure_ascii=False).encode()
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
