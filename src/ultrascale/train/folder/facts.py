"""The JSON metadata of a checkpoint, as `resume.facts_of` writes it: validated key by key before any of it is used.

A checkpoint may be intact and still not belong to a run: `checkpoint.save` accepts any metadata.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from sys import float_info
from typing import Any

from ultrascale.checkpoint import CheckpointError, read_metadata
from ultrascale.checkpoint.manifest import MANIFEST_NAME
from ultrascale.config.ranges import MOST
from ultrascale.description.architecture.model import RANGES
from ultrascale.description.layout import LONGEST_HISTORY
from ultrascale.description.sections.islands import MOST_ISLANDS

NUMBER = (int, float)
_REQUIRED: dict[str, tuple[type, ...]] = {"steps_done": (int,), "run": (str,), "decides": (dict,), "data": (str,)}
_OPTIONAL: dict[str, tuple[type, ...]] = {
    "noise_scale": (dict,), "optimizer": (str,), "skipped_steps": (int,), "norms": (list,), "loss_scale": (dict,),
    "fp8_amax_history": (dict,), "saved_at": NUMBER, "imported_dtype": (str,), "islands": (dict,),
}  # fmt: skip
"""Null, or not written by older releases."""
_PARTS: dict[str, dict[str, tuple[type, ...]]] = {
    "noise_scale": {"signal": NUMBER, "noise": NUMBER}, "loss_scale": {"value": NUMBER, "steps_since_change": (int,)},
    "fp8_amax_history": {"updates": (int,), "length": (int,), "layers": (list,)},
    "islands": {
        "count": (int,), "fragments": (int,), "outer_steps": (int,), "sent_bytes": (int,), "owes": (int,), "under_way": (list,),
    },
}  # fmt: skip


def read_facts(folder: Path) -> dict[str, Any]:
    """The facts of the checkpoint in `folder`. Raises CheckpointError that names the file and the key."""
    return expect_facts(read_metadata(folder), folder)


def expect_facts(facts: dict[str, Any], folder: Path) -> dict[str, Any]:
    """`facts`, if they are valid facts of a run. Raises CheckpointError otherwise."""
    for key in sorted(facts.keys() - _REQUIRED.keys() - _OPTIONAL.keys()):
        raise _wrong(folder, key, "is not known to this release")
    for key, kinds in _REQUIRED.items():
        _expect(facts, key, kinds, folder)
    for key, kinds in _OPTIONAL.items():
        if facts.get(key) is not None:
            _expect(facts, key, kinds, folder)
            parts = _PARTS.get(key, {})
            for part in sorted(facts[key].keys() - parts.keys()) if parts else ():
                raise _wrong(folder, f"{key}.{part}", "is not known to this release")
            for part, part_kinds in parts.items():
                _expect(facts[key], part, part_kinds, folder, inside=f"{key}.")
    if not all(_is_a(number, NUMBER) and 0 <= number <= float_info.max for number in facts.get("norms") or []):
        raise _wrong(folder, "norms", "holds something else than norms")
    layers = (facts.get("fp8_amax_history") or {"layers": [0, 0]})["layers"]
    if len(layers) != 2 or not all(_is_a(number, (int,)) and 0 <= number < RANGES["num_hidden_layers"][1] for number in layers):
        raise _wrong(folder, "fp8_amax_history.layers", f"is {layers!r:.100}, expected the first and the last block")
    for pair in (facts.get("islands") or {"under_way": []})["under_way"]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(_is_a(n, (int,)) and 0 <= n <= MOST for n in pair):
            raise _wrong(folder, "islands.under_way", f"holds {pair!r:.100}, expected a fragment and a step")
    for key, (least, most) in _bounds(facts["steps_done"]).items():
        first, _, part = key.partition(".")
        value = (facts.get(first) or {}).get(part) if part else facts.get(first)
        if value is not None and not least <= value <= most:
            raise _wrong(folder, key, f"is {value!r:.40}, expected {least:g} to {most:g}")
    try:
        tomllib.loads(facts["run"])
    except ValueError as error:
        raise _wrong(folder, "run", f"is not the TOML of a run ({error})") from error
    return facts


def _bounds(steps_done: int) -> dict[str, tuple[float, float]]:
    """Lower and upper bound of each number; NaN is outside every range."""
    steps, finite = (0, min(steps_done, MOST)), (-float_info.max, float_info.max)
    return {
        "steps_done": (0, MOST), "skipped_steps": steps, "loss_scale.steps_since_change": steps,
        "loss_scale.value": (2.0**-24, 2.0**127), "noise_scale.signal": finite, "noise_scale.noise": finite,
        "fp8_amax_history.updates": steps, "fp8_amax_history.length": (1, LONGEST_HISTORY),
        "islands.count": (1, MOST_ISLANDS), "islands.fragments": (1, MOST), "islands.outer_steps": (0, MOST),
        "islands.sent_bytes": (0, 2**63), "islands.owes": (0, 1),
    }  # fmt: skip


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
