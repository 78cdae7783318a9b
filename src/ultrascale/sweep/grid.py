"""Grid of runs that settings with several values make, such as `--layout.dp 1,2 --layout.zero-stage 0,3`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import get_origin

from ultrascale.config.resolve import resolve, to_toml
from ultrascale.config.schema import STAND_INS, ValueContext, convert, leaves
from ultrascale.description.problems import Problem, SpecError, expect_none, mistake
from ultrascale.description.run import Run
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.schedules.for_layout import schedule_of

MOST_CELLS = 5_000
"""Most cells of a sweep: resolving more would take minutes before the first measurement."""
MOST_REASONS = 5
"""Most reasons reported if every cell is refused."""
NOT_SWEPT = ("name", "folder")
"""Settings that cannot be swept: every cell has its own folder."""


@dataclass(frozen=True)
class Axis:
    """A setting and the values it takes."""

    key: str
    values: tuple[str, ...]

    @property
    def short(self) -> str:
        """Short name of the axis in tables."""
        return self.key.rpartition(".")[2]


@dataclass(frozen=True)
class SweepCell:
    """A combination of one value for each axis."""

    values: dict[str, str]
    """Key -> value, as given."""
    run: Run | None
    """Run of the cell; None if it is refused."""
    problems: tuple[Problem, ...] = ()


def split_axes(words: Sequence[str]) -> tuple[list[Axis], list[str]]:
    """Settings with several comma-separated values among a command line's `words`, and all other words.

    Raises SpecError for a wrong, empty or repeated value, a setting given twice, or one that cannot be swept.
    """
    axes: dict[str, Axis] = {}
    other_words: list[str] = []
    pending = list(words)
    while pending:
        word = pending.pop(0)
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or not (_is_scalar(key) or key in NOT_SWEPT):
            other_words.append(word)
            continue
        if not equals and pending and not pending[0].startswith("--"):
            value = pending[0]
        if "," not in value:
            other_words.append(word)
            continue
        if not equals:
            pending.pop(0)
        if key in axes:
            raise mistake(flag, "is given twice", "Keep one of the two, with all values.")
        axes[key] = _axis(key, value)
    return list(axes.values()), other_words


def cells(
    path: str, axes: Sequence[Axis], others: Sequence[str] = (), *, processes: int | None = None
) -> tuple[list[SweepCell], int]:
    """All combinations of the axes' values, the last axis fastest, and the number of combinations dropped because another gives
    the same run. `others`: settings common to all. Raises SpecError if there are too many, or if all are refused.
    """
    count = prod(len(axis.values) for axis in axes)
    if count > MOST_CELLS:
        product_text = " x ".join(f"{len(axis.values)} of {axis.key}" for axis in axes)
        raise mistake("sweep", f"{product_text} make {count:,} cells", f"Give fewer values: at most {MOST_CELLS:,} cells.")
    combinations = [_cell(path, axes, values, others, processes) for values in product(*(axis.values for axis in axes))]
    _expect_some(combinations)
    first = {to_toml(cell.run): cell for cell in reversed(combinations) if cell.run is not None}
    different = [cell for cell in combinations if cell.run is None or first[to_toml(cell.run)] is cell]
    return different, len(combinations) - len(different)


def names_of(axes: Sequence[Axis]) -> list[str]:
    """Last part of each setting's key, or the whole key if several end in the same."""
    ends = [axis.short for axis in axes]
    return [axis.short if ends.count(axis.short) == 1 else axis.key for axis in axes]


def _is_scalar(key: str) -> bool:
    kind = leaves()[key].kind if key in leaves() else STAND_INS.get(key)
    return kind is not None and not any(get_origin(kind_part) is tuple for kind_part in (kind, *getattr(kind, "__args__", ())))


def _axis(key: str, value: str) -> Axis:
    values = tuple(part.strip() for part in value.split(","))
    flag = f"--{key.replace('_', '-')}"
    if key in NOT_SWEPT:
        raise mistake(flag, "cannot be swept: every cell has a place of its own", "Give one value, or none.")
    if "" in values:
        rule = f"has an empty value: {value!r}"
        raise mistake(flag, rule, "Put a value on both sides of every comma, no blanks between: 1,2,4.")
    if len(set(values)) < len(values):
        raise mistake(flag, f"has a value twice: {value}", "Give each once.")
    if any(part.isdigit() and part != str(int(part)) for part in values):
        rule = f"reads as the values {' and '.join(values)}: commas are between values here, not between thousands"
        raise mistake(flag, rule, f"Write {value.replace(',', '_')} for one number.")
    problems: list[Problem] = []
    for part in values:  # what is no value of the setting is a slip, not a cell that is refused
        convert(part, leaves()[key].kind if key in leaves() else STAND_INS[key], ValueContext(key, "flag", True, problems))
    expect_none(problems)
    return Axis(key, values)


def _cell(path: str, axes: Sequence[Axis], values: tuple[str, ...], others: Sequence[str], processes: int | None) -> SweepCell:
    chosen = {axis.key: value for axis, value in zip(axes, values, strict=True)}
    flags = [f"--{key}={value}" for key, value in chosen.items()]
    try:
        run = resolve(path, [*others, *flags], require_data=True, processes=processes).run
        if run.layout.pp > 1:
            schedule_of(run.layout, num_micro_batches(run.layout, run.batch.sequences_per_batch))
    except SpecError as error:
        return SweepCell(chosen, None, error.problems)
    return SweepCell(chosen, run)


def _expect_some(combinations: Sequence[SweepCell]) -> None:
    """Raise the problems of the cells if all of them are refused, so that nothing can be measured."""
    if all(cell.run is None for cell in combinations):
        reasons = {problem: None for cell in combinations for problem in cell.problems}
        raise SpecError(list(reasons)[:MOST_REASONS])
