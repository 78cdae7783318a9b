"""The interface of a tracker, and the facts that it receives about a run."""

from __future__ import annotations

import json
import secrets
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ultrascale.config.resolve import resolve
from ultrascale.description.run import Run

FILE = "tracked.json"
"""File in the run's folder: the run's id in each tracker, and the last step sent to it."""
SCHEMA = "ultrascale/tracked/1"


class Tracker(Protocol):
    """An open tracked run."""

    id: str
    """Identifier to resume the tracked run."""
    last_step: int | None
    """Last step that it has; 0 or less: none. None if unknown."""

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        """Record the values of the `step`th step of the run, which ended at the Unix time `seconds`."""

    def close(self, ending: str) -> None:
        """Finish: `end`, the run is complete; `stop`, it stopped in order; `crash`."""


@dataclass(frozen=True)
class RunFacts:
    """Facts about a run for trackers."""

    run: Run
    folder: Path
    settings: dict[str, Any]
    """Every value of the run's TOML file, nested as there."""
    plan: dict[str, float]
    """Predicted values, named like the measured ones: `plan/step_s` for `perf/step_s`."""

    @classmethod
    def read(cls, folder: Path) -> RunFacts:
        """Facts about the run in a folder."""
        settings = tomllib.loads((folder / "run.toml").read_text())
        return cls(resolve(folder / "run.toml").run, folder, settings, plan_values(_json(folder / "plan.json")))

    def flat(self) -> dict[str, Any]:
        """Settings and plan by dotted keys, without empty settings."""
        return {key: value for key, value in _flat(self.settings).items() if value not in ("none", "", [])} | self.plan


def plan_values(plan: Mapping[str, Any]) -> dict[str, float]:
    """Numbers of a `plan.json` by the names of the metrics that they predict; without memory, which every row has already."""
    time = plan.get("time") or {}
    predicted = {
        "plan/step_s": time.get("seconds_per_step"),
        "plan/tokens_per_s_per_gpu": time.get("tokens_per_second_per_gpu"),
        "plan/mfu": time.get("mfu"),
    }
    return {name: float(value) for name, value in predicted.items() if value is not None}


@dataclass
class TrackedRecord:
    """The run's record of its trackers, stored as `tracked.json` in its folder.

    It is valid for one run: a copy of a folder under another name starts new tracked runs.
    """

    folder: Path
    name: str
    by_sink: dict[str, dict[str, Any]]

    @classmethod
    def read(cls, folder: Path, name: str) -> TrackedRecord:
        content = _json(folder / FILE)
        by_sink = content.get("trackers", {}) if content.get("name") == name else {}
        if "schema" not in content:  # from an earlier release, which counted steps from 0
            by_sink = {sink: known | {"step": known.get("step", -1) + 1, "behind": 1} for sink, known in by_sink.items()}
        return cls(folder, name, by_sink)

    def id(self, sink: str, wanted_id: str | None) -> str | None:
        """Identifier of the tracked run to resume; None to start one."""
        return wanted_id or self.by_sink.get(sink, {}).get("id")

    def last_step(self, sink: str, identity: str) -> int:
        """Last step sent to this tracked run; 0: none."""
        return self._known(sink, identity).get("step", 0)

    def behind(self, sink: str, identity: str) -> int:
        """Offset between the run's step numbers and the tracked run's: 1 after an earlier release, until a row is sent."""
        return self._known(sink, identity).get("behind", 0)

    def _known(self, sink: str, identity: str) -> dict[str, Any]:
        known = self.by_sink.get(sink, {})
        return known if known.get("id") == identity else {}

    def save(self, sink: str, identity: str, step: int) -> None:
        """Record the last step of a tracked run. Raises OSError."""
        self.by_sink[sink] = {"id": identity, "step": step}
        partial = self.folder / f".{FILE}.tmp"
        partial.write_text(json.dumps({"schema": SCHEMA, "name": self.name, "trackers": self.by_sink}, indent=1) + "\n")
        partial.replace(self.folder / FILE)


def new_id(name: str) -> str:
    """`demo-9f86d081`: the name with a unique suffix."""
    return f"{name}-{secrets.token_hex(4)}"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, Mapping) else {f"{prefix}{name}": value}
    return flat


def _json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
