"""Stamp of the schema that each JSON output of a verb follows, in the key `schema` of the object: `ultrascale/plan/2`.

The number increases when a key is removed, or changes its meaning; a new key does not change it. In a list, or in objects by
name, each object has the key. The schemas are files of the package, such as `schemas/plan-2.json` (`ultrascale show schema`);
`.ci/write_schemas.py` generates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "schemas"
RUN_TOML = "run.toml"

VERSIONS = {
    "plan": 2, "compare": 2, "plan-far": 1, "schedule": 1, "schedules": 1, "schedule-executed": 1, "trace": 2,
    "trace-stages": 1, "check": 1, "check-matrix": 1, "faults": 1, "sweep": 1, "report": 1, "run": 1, "model": 1,
    "clusters": 1, "stack": 1, "keys": 1, "validate": 1, "doctor": 1, "checkpoints": 1, "generate": 1, "evaluate": 1,
    "export": 1, "import": 1, "convert": 1, "demo": 1, "primer": 1, "measure-step": 1, "measure-speed": 1,
    "measure-network": 1, "soak": 1, "train": 2, "data-prepare": 1, "data-inspect": 1, "rules": 1,
}  # fmt: skip
SCHEMA_NAMES = (RUN_TOML, *VERSIONS)
"""Names of all schemas, run.toml's first."""


def schema_file(name: str) -> Path:
    """Path of the file of a schema."""
    return FOLDER / (f"{RUN_TOML}.json" if name == RUN_TOML else f"{name}-{VERSIONS[name]}.json")


def stamped(name: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """`document` preceded by the schema that it follows, with lists in place of tuples and dictionaries in place of
    dataclasses."""
    return {"schema": f"ultrascale/{name}/{VERSIONS[name]}", **plain(document)}


def plain(value: Any) -> Any:
    """A value as JSON has it."""
    if is_dataclass(value) and not isinstance(value, type):
        value = asdict(value)
    if isinstance(value, Mapping):
        return {key: plain(entry) for key, entry in value.items()}
    return [plain(entry) for entry in value] if isinstance(value, list | tuple) else value
