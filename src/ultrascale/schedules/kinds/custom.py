"""Schedules from files, in the CSV of `torch.distributed.pipelining` (compute only), or the same cells as a JSON list of lists.

0F0,0F1,,0B0,0B1          one line per rank; STAGE KIND MICRO-BATCH with kinds F B I W; empty cells are pauses and optional:
1F0,1B0,1F1,1B1           an action starts as soon as it can. (0F4;3B0)OVERLAP_F_B is a forward overlapped with a backward.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

from ultrascale.description.parsing import line_of, parse_json, read_bounded
from ultrascale.description.problems import MOST_PROBLEMS, Problem, SpecError, mistake
from ultrascale.description.schedules import USUAL
from ultrascale.schedules.actions import Action, Kind, overlapped
from ultrascale.schedules.executable import Schedule, check_executable

MOST_TEXT = 4 << 20
"""Most characters of a file: half a million actions, several times as many as are simulated."""
_PASS = re.compile(r"([0-9]{1,6})([FBIW])([0-9]{1,6})")
_PAIR = re.compile(r"\(([0-9]{1,6}F[0-9]{1,6});([0-9]{1,6}B[0-9]{1,6})\)OVERLAP_F_B")


def read_schedule(path: Path) -> list[list[Action]]:
    """Read the schedule in a CSV or JSON file.

    Raises SpecError if it cannot be read, naming every wrong cell, or why it cannot be executed.
    """
    remedy = f"`ultrascale show schedule {USUAL} --csv FILE` writes one to start from."
    try:
        text = read_bounded(path, MOST_TEXT, encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise mistake(str(path), f"is not UTF-8 at byte {error.start}", remedy) from None
    except OSError as error:
        missing = isinstance(error, FileNotFoundError)
        why = "there is no such file" if missing else f"cannot be read: {(error.strerror or str(error)).lower()}"
        raise mistake(str(path), why, remedy) from None
    rows = _json_rows(path, text) if path.suffix == ".json" else _csv_rows(path, text)
    return parse_schedule(rows, source=str(path))


def parse_schedule(rows: Iterable[Iterable[str]], *, source: str = "schedule") -> list[list[Action]]:
    """Parse and check the schedule in cells as above. Raises SpecError, its keys beginning with `source`."""
    schedule: list[list[Action]] = []
    problems: list[Problem] = []
    for line, row in enumerate(rows, 1):
        schedule.append([])
        for column, cell in enumerate(row, 1):
            if not cell.strip():
                continue
            if (action := _action(cell.strip())) is None:
                remedy = "Write STAGE KIND MICRO-BATCH, as 2F0; kinds F, B, I, W; a pair as (0F4;3B0)OVERLAP_F_B."
                problems.append(Problem(f"{source}:{line}", f"cell {column} is no action: {cell.strip()!r}", remedy))
                if len(problems) == MOST_PROBLEMS:
                    raise SpecError(problems)
            else:
                schedule[-1].append(action)
    if not problems and not any(schedule):
        problems.append(Problem(source, "holds no action", "Write one line of actions for each rank."))
    elif not problems:
        remedy = "Take the line away, or give the rank a stage."
        idle = [line for line, actions in enumerate(schedule, 1) if not actions]
        problems = [Problem(f"{source}:{line}", f"rank {line - 1} has no action", remedy) for line in idle]
    if problems:
        raise SpecError(problems)
    check_executable(schedule)
    return schedule


def to_csv(schedule: Schedule) -> str:
    """CSV text that torch's `_load_csv` and `read_schedule` read."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([action.cell for action in row] for row in schedule)
    return out.getvalue()


def _action(cell: str) -> Action | None:
    if match := _PAIR.fullmatch(cell):
        ahead, back = (_action(part) for part in match.groups())
        assert ahead is not None and back is not None
        return overlapped(ahead, back)
    match = _PASS.fullmatch(cell)
    return None if match is None else Action(Kind(match[2]), int(match[3]), int(match[1]))


def _csv_rows(path: Path, text: str) -> list[list[str]]:
    reader = csv.reader(io.StringIO(text.rstrip()))  # a trailing empty line is not a rank
    try:
        return [*reader]
    except csv.Error as error:
        problem = Problem(f"{path}:{reader.line_num}", f"is not CSV: {error}", "Write one line of actions for each rank.")
        raise SpecError([problem]) from None


def _json_rows(path: Path, text: str) -> list[list[str]]:
    try:
        rows = parse_json(text)
    except ValueError as error:
        raise mistake(line_of(error, path), f"is not JSON: {error}", "Write a list of lists of cells.") from None
    if not (isinstance(rows, list) and all(isinstance(row, list) and all(isinstance(c, str) for c in row) for row in rows)):
        raise mistake(str(path), "is not a list of lists of cells", 'Write [["0F0", "0B0"], ["1F0", "1B0"]].')
    return rows
