"""Write `ultrascale/__init__.pyi`, the stub for type checkers and editors: every flag of a verb as a keyword, with its type and
default. A test checks that it is up to date."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from textwrap import indent, wrap
from typing import Any, Literal, get_args, get_origin, get_type_hints

import ultrascale
from ultrascale.api.check import CheckOptions, check
from ultrascale.api.keywords import COMMAND_LINE_ONLY
from ultrascale.api.planning.plan import compare, plan, search
from ultrascale.api.planning.plan_request import PlanOptions
from ultrascale.api.report import ReportOptions, report
from ultrascale.api.schedule import ScheduleOptions, schedule
from ultrascale.api.sweep import SweepOptions, sweep
from ultrascale.api.trace import TraceOptions, trace
from ultrascale.config.choices import without_none
from ultrascale.config.reference import docs_of
from ultrascale.config.schema import default_of

FILE = Path(ultrascale.__file__).with_suffix(".pyi")
HEAD = '''"""Written by `python .ci/write_stub.py`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from ultrascale.api.check import Check, CheckMatrix
from ultrascale.api.planning.plan_result import Comparison, Plan, Search
from ultrascale.api.report import Report
from ultrascale.api.schedule import Costs, ExecutedSchedule, Schedule, Schedules
from ultrascale.api.sweep import Sweep
from ultrascale.api.trace import StageTraces, Trace
from ultrascale.description.problems import SpecError as SpecError

__version__: str
_Words = str | int | float | PathLike[str] | Sequence[str | int]
'''
PLAN = "model: str | PathLike[str] | None = None, gpus: str | None = None"
VERBS: dict[Any, tuple[str, Any, str]] = {
    plan: (PLAN, PlanOptions, "Plan"),
    search: (PLAN, PlanOptions, "Search"),
    schedule: ("name: str | PathLike[str] | None = None", ScheduleOptions, "Schedule | Schedules | ExecutedSchedule"),
    trace: ("run: str | PathLike[str] | None = None", TraceOptions, "Trace | StageTraces"),
    check: ("run: str | PathLike[str] | None = None", CheckOptions, "Check | CheckMatrix"),
    sweep: ("run: str | PathLike[str]", SweepOptions, "Sweep"),
    report: ("folder: str | PathLike[str]", ReportOptions, "Report"),
}
"""Positional arguments of each verb, its options, and its result."""
WRITTEN = {str: "_Words", Path: "str | PathLike[str]", int: "int | str", float: "float", bool: "bool"}
"""Accepted types for each option type: several values where commas are allowed, 4k for 4,096."""
WIDTH = 116


def text() -> str:
    """Text of the stub."""
    public = sorted(["SpecError", "__version__", "compare", *(verb.__name__ for verb in VERBS)])
    every = "__all__ = [\n" + "".join(f'    "{name}",\n' for name in public) + "]\n"
    plans = "a: Plan | str | PathLike[str], b: Plan | str | PathLike[str]"
    last = f'def compare({plans}) -> Comparison:\n    """{inspect.getdoc(compare)}"""\n    ...\n'
    return "\n".join([HEAD + every, *(_function(verb, *about) for verb, about in VERBS.items()), last])


def _function(verb: Any, first: str, options: Any, result: str) -> str:
    named = {parameter.partition(":")[0] for parameter in first.split(", ")} | {*COMMAND_LINE_ONLY, "run"}
    keyword_fields = [field for field in fields(options) if field.name not in named]
    hints, docs = get_type_hints(options), docs_of(options)
    keywords = [f"{field.name}: {_written(hints[field.name])} = {_default(default_of(field))}" for field in keyword_fields]
    lines = [*first.split(", "), *(["*", *keywords] if keywords else []), "**settings: Any"]
    about = inspect.getdoc(verb) or ""
    texts = [f"{field.name}: {docs.get(field.name, 'See `Costs`.')}" for field in keyword_fields]
    arguments = [line for text in texts for line in wrap(text, WIDTH, initial_indent=" " * 4, subsequent_indent=" " * 8)]
    docstring = "\n".join([about, *(["", "Args:", *arguments] if arguments else []), ""])
    body = indent(f'"""{docstring}"""\n...', "    ", lambda line: bool(line.strip()))
    return f"def {verb.__name__}(\n" + "".join(f"    {line},\n" for line in lines) + f") -> {result}:\n{body}\n"


def _default(value: Any) -> str:
    if value is MISSING or is_dataclass(value) or value == ():
        return "..."
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _written(kind: Any) -> str:
    if (inner := without_none(kind)) is not kind:
        return f"{_written(inner)} | None"
    if get_origin(kind) is Literal:
        return "Literal[" + ", ".join(f'"{literal}"' for literal in get_args(kind)) + "]"
    if get_origin(kind) is tuple:
        item = _written(get_args(kind)[0])
        return f"{item} | Sequence[{item}]"
    return f"{kind.__name__} | Mapping[str, float]" if is_dataclass(kind) else WRITTEN[kind]  # type: ignore[union-attr]


if __name__ == "__main__":
    FILE.write_text(text())
