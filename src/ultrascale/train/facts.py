"""The JSON beside a checkpoint's tensors, as `resume.facts_of` writes it: looked at key by key before any of it is used.

A checkpoint may be whole and still not be one of a run: `checkpoint.save` takes any metadata.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from ultrascale.checkpoint import CheckpointError, read_metadata
from ultrascale.checkpoint.manifest import MANIFEST_NAME

NUMBER = (int, float)
_REQUIRED: dict[str, tuple[type, ...]] = {"steps_done": (int,), "run": (str,), "decides": (dict,), "data": (str,)}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "noise_scale": (dict,), "optimizer": (str,), "skipped_steps": (int,), "norms": (list,), "loss_scale": (dict,),
    "fp8_amax_history": (dict,), "saved_at": NUMBER,
}  # fmt: skip
"""Null, or not written by older releases."""
_PARTS: dict[str, dict[str, tuple[type, ...]]] = {
    "noise_scale": {"signal": NUMBER, "noise": NUMBER}, "loss_scale": {"value": NUMBER, "steps_since_change": (int,)},
    "fp8_amax_history": {"updates": (int,), "length": (int,), "layers": (list,)},
}  # fmt: skip


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of the checkpoint in `folder`. Raises CheckpointError that names the file and the key."""
    return expect_facts(read_metadata(folder), folder)


def expect_facts(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`facts`, if they are those of a run. Raises CheckpointError otherwise."""
    for key, kinds in _REQUIRED.items():
        _expect(facts, key, kinds, folder)
    for key, kinds in _OPTIONAL.items():
        if facts.get(key) is not None:
            _expect(facts, key, kinds, folder)
            for part, part_kinds in _PARTS.get(key, {}).items():
                _expect(facts[key], part, part_kinds, folder, inside=f"{key}.")
    if not all(_is_a(number, NUMBER) for number in facts.get("norms") or []):
        raise _wrong(folder, "norms", "holds something else than numbers")
    layers = (facts.get("fp8_amax_history") or {"layers": [0, 0]})["layers"]
    if len(layers) != 2 or not all(_is_a(number, (int,)) for number in layers):
        raise _wrong(folder, "fp8_amax_history.layers", f"is {layers!r:.100}, expected the first and the last block")
    if facts["steps_done"] < 0:
        raise _wrong(folder, "steps_done", f"is {facts['steps_done']}, expected 0 or more")
    try:
        tomllib.loads(facts["run"])
    except ValueError as error:
        raise _wrong(folder, "run", f"is not the TOML of a run ({error})") from error
    return facts


def _expect(facts: dict[str, Any], key: str, kinds: tuple[type, ...], folder: Path, *, inside: str = "") -> None:
    if key not in facts:
        raise _wrong(folder, f"{inside}{key}", "is missing")
    if not _is_a(facts[key], kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        raise _wrong(folder, f"{inside}{key}", f"is {facts[key]!r:.100}, expected {expected}")


def _is_a(value: Any, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and not isinstance(value, bool)


def _wrong(folder: Path, key: str, what: str) -> CheckpointError:
    remedy = "It was not saved by a training run of this release: use another checkpoint"
    return CheckpointError(f"{folder / MANIFEST_NAME}: metadata key {key!r} {what}. {remedy}.")
