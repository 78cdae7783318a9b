"""Bugs that are planted in the source, one at a time, and who saw each: the table, and the page that is made of it.

    python tests/mutations/run.py               plant all of them, note what saw each, write docs/mutations.md
    python tests/mutations/run.py NAME ...      only these
    python tests/mutations/run.py --control     let all look at the source as it is, where nothing must be seen
    python tests/mutations/table.py             write the page anew from what is noted

`faults.toml` has a text of the source, which occurs there once, and what stands in its place. `check.faults.all_faults` plants
faults in a trainer that is finished, for users and in every run of CI; these here change any line of the product, and take
their time.
"""

from __future__ import annotations

import ast
import hashlib
import json
import tomllib
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
TESTS, ROOT = HERE.parent, HERE.parent.parent
SOURCE = ROOT / "src" / "ultrascale"
FAULTS, RESULTS, PAGE = HERE / "faults.toml", HERE / "results.json", ROOT / "docs" / "mutations.md"

HEAD = """# Planted bugs, and what saw each

Written by `python tests/mutations/run.py`, and at night by `make nightly`; do not edit. Each bug of
`tests/mutations/faults.toml` is planted alone in a copy of the source. Where a run is named (a preset, made small as `check`
does by itself, and its layout), `ultrascale check --own-layout` of it must not pass; where tests are named, each of them must
fail. What the proof shares with the trainer (the decoder, initial weights, learning rate) and what lies outside it (narrow
dtypes, data, resuming, files) only tests can see. In every run of CI a test holds that each text still applies to the source,
that it was planted as it is told here, and that whoever was to see it did. Besides these lines of the source `check` has
[faults of its own](proving.md), which it plants into a finished trainer."""


@dataclass(frozen=True)
class Mutation:
    """A line of the source made wrong."""

    name: str
    file: str
    """Below src/ultrascale."""
    bug: str
    """What is wrong with it."""
    old: str
    """Occurs once in the file."""
    new: str
    check: str = ""
    """A run that `check` must refute: a preset, and settings of its layout or, with their section, others. Empty: it cannot."""
    tests: tuple[str, ...] = ()
    """`train/test_resume.py::test_...`, from the folder of tests: each of them must fail, at least in one case."""
    same: str = ""
    """Why no result changes: nothing must see it."""

    @property
    def digest(self) -> str:
        """Of all that a result depends on in the table."""
        told = "\n".join((self.file, self.old, self.new, self.check, *self.tests))
        return hashlib.sha256(told.encode()).hexdigest()[:12]

    def planted(self, text: str) -> str:
        """The source with the bug. Raises ValueError unless the text occurs once, and Python can read the result."""
        if (count := text.count(self.old)) != 1:
            told = f"{self.name}: {self.old!r} occurs {count} times in {self.file}, expected once"
            raise ValueError(f"{told}. Write in faults.toml what the source now says, and plant it: run.py {self.name}.")
        found = text.replace(self.old, self.new)
        ast.parse(found)
        return found


def read_mutations() -> list[Mutation]:
    """The table, in order."""
    rows = tomllib.loads(FAULTS.read_text())
    return [Mutation(name, **{**row, "tests": tuple(row.get("tests", ()))}) for name, row in rows.items()]


def controls(mutations: list[Mutation]) -> list[Mutation]:
    """Every look that is taken, once, at the source as it is: nothing must be seen."""
    bare = [replace(one, new=one.old, same="nothing is changed") for one in mutations]
    checks = {one.check: replace(one, name=f"check {one.check}", tests=()) for one in bare if one.check}
    tests = {one.tests: replace(one, name=" ".join(one.tests), check="") for one in bare if one.tests}
    return [*checks.values(), *tests.values()]


def read_results() -> dict[str, dict[str, Any]]:
    """What was noted of each, by name."""
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write_results(new: dict[str, dict[str, Any]]) -> None:
    """Note `new` beside what is known of the others that are still there. One a line."""
    every = read_results() | new
    lines = [f"{json.dumps(one.name)}: {json.dumps(every[one.name])}" for one in read_mutations() if one.name in every]
    RESULTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def problems(mutations: list[Mutation], results: dict[str, dict[str, Any]]) -> list[str]:
    """What was not measured as the table now is, who did not see what it should, who saw what changes nothing, and bugs that
    name what the source does not have: anything would see those."""
    found = []
    for one in mutations:
        result = results.get(one.name, {})
        if result.get("digest") != one.digest:
            found.append(f"{one.name}: run `python tests/mutations/run.py {one.name}`")
            continue
        if result["check"].startswith(("raised AttributeError", "raised NameError")):
            found.append(f"{one.name}: names what is not there: {result['check']}")
        for who in [who for who in ("check", "tests") if getattr(one, who)]:
            if bool(result[who]) == bool(one.same):
                found.append(f"{one.name}: {who} " + (f"saw a change: {result[who]}" if one.same else "did not see it"))
    return found


def page(mutations: list[Mutation], results: dict[str, dict[str, Any]]) -> str:
    """The text of docs/mutations.md."""
    real, same = [one for one in mutations if not one.same], [one for one in mutations if one.same]
    lines = [HEAD, "", *_totals(real, same, results)]
    for package in sorted({one.file.split("/")[0] for one in real}):
        lines += ["", f"## {package}", "", "| bug | in | check of | and it said | tests that failed |", "|---|---|---|---|---|"]
        lines += [_line(one, results.get(one.name, {})) for one in real if one.file.startswith(f"{package}/")]
    lines += ["", "## What changes no result", "", "| change | in | why |", "|---|---|---|"]
    lines += [f"| {one.bug} | `{one.file}` | {one.same} |" for one in same]
    return "\n".join(lines) + "\n"


def _totals(real: list[Mutation], same: list[Mutation], results: dict[str, dict[str, Any]]) -> list[str]:
    seen = Counter(_who(results.get(one.name, {})) for one in real)
    minutes = sum(result["seconds"] for result in results.values()) / 60
    days = sorted({result["on"] for result in results.values()})
    return [
        f"{len(real)} bugs: {seen['check'] + seen['both']} seen by `check`, {seen['tests'] + seen['both']} by tests, "
        f"{seen['nobody']} by nobody; {len(same)} changes beside them that change no result.",
        f"Looking for them took processes {minutes:.0f} minutes, of which two run at a time; last on "
        f"{' to '.join(dict.fromkeys((days[0], days[-1]))) if days else 'no day'}.",
    ]


def _who(result: dict[str, Any]) -> str:
    check, tests = bool(result.get("check")), bool(result.get("tests"))
    return "both" if check and tests else "check" if check else "tests" if tests else "nobody"


def _line(one: Mutation, result: dict[str, Any]) -> str:
    tests = "<br>".join(f"`{test}`" for test in result.get("tests", "").splitlines())
    cells = [one.bug, f"`{one.file}`", one.check, result.get("check", ""), tests]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page(read_mutations(), read_results()))
    print(f"written: {PAGE}")
