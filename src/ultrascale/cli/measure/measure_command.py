"""`ultrascale measure`: some steps of a run, with the profiler (`step`, here) or without it (`speed`)."""

from __future__ import annotations

import json as jsonlib
import os
import re
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.cli.measure.measure_speed import launched_once
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.problems import Problem, SpecError, did_you_mean, mistake
from ultrascale.description.rank_environment import env_rank
from ultrascale.description.run import Run
from ultrascale.page.documents import step_document
from ultrascale.page.html_file import expect_writable, write_document
from ultrascale.train.corpora import expect_startable
from ultrascale.train.folder.run_folder import RunFolder

if TYPE_CHECKING:
    from ultrascale.measure.step.step_report import StepReport

_HELP = """ultrascale measure: measure a run on this machine, compared with the plan.

  ultrascale measure step RUN.TOML    profile of a step by category, on every rank
  ultrascale measure speed RUN.TOML   time and memory of a step, without the profiler
  ultrascale measure network          speed of collectives between ranks

Each has --help with an example.
"""
FIRST = 3
"""First step that can be profiled: one is cold or compiles, one warms the profiler up."""
MOST_BEFORE, MOST_STEPS = 100, 20
"""Most steps before the first profiled one, and most profiled steps: a trace has several megabytes per step and rank."""


@dataclass(frozen=True)
class StepOptions:
    """Profile steps of a run: a trace per rank, and step time by the planner's categories, compared with the plan.

    The run starts anew and writes only the measurement to its folder.

    Any setting can follow as a dotted flag (`ultrascale show keys` lists them):

        ultrascale measure step run.toml --steps 8-10 --layout.dp 2

    Under torchrun this is one rank, as with train.
    """

    what: str
    """`step`."""
    run: str
    """TOML file of the run."""
    steps: str = "8-10"
    """Steps to profile, counted from 1: the first four measure memory, and one before these warms the profiler up."""
    out: Path | None = None
    """Folder for traces, report and pictures. Default: `profile` in the run's folder."""
    processes: int | None = None
    """Start this many processes here, as `ultrascale train` does."""
    top: int = 10
    """Number of operations or kernels to list."""
    html: Path | None = None
    """Write the report with its charts to one self-contained HTML file."""
    json: bool = False
    """Print the report as one JSON object."""


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if measured, 1 if it failed, 2 if the configuration is invalid."""
    if not arguments:
        print(_HELP, end="", file=sys.stderr)
        return 2
    if arguments[0] in ("speed", "network"):
        return import_module(f"ultrascale.cli.measure.measure_{arguments[0]}").command(arguments[1:])
    if arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if arguments[0].isalpha() and arguments[0] != "step":
        raise SpecError([_unknown(arguments[0], "RUN.TOML")])
    options, overrides = parse_with_overrides(StepOptions, "measure", arguments, positional={"what": "step", "run": "RUN.TOML"})
    if options.what != "step":
        raise SpecError([_unknown(options.what, options.run)])
    if options.top < 0:
        raise mistake("--top", f"must be at least 0, is {options.top}", "0 lists none.")
    first, last = parse_steps(options.steps)
    expect_writable(options.html)
    run = resolve(options.run, overrides, require_data=True, processes=options.processes).run
    expect_startable(run)
    folder = options.out or RunFolder.of(run).path / "profile"
    code = _profile(run, first, last, folder)
    if code == 0 and env_rank() == 0:
        if options.html is not None:
            write_document(options.html, step_document(_report(folder).to_json()), ["measure", *arguments])
        _show(folder, options.html, top=options.top, as_json=options.json)
    return code


def _unknown(what: str, path: str) -> Problem:
    remedy = f"`ultrascale measure step {path}` or `ultrascale measure speed {path}`, settings after it."
    remedy = did_you_mean(what, ("step", "speed", "network"), remedy)
    return Problem("measure", f"knows `step`, `speed` and `network`, and here is {what!r}", remedy)


def parse_steps(text: str) -> tuple[int, int]:
    """`8-10` or `8` as the first and the last step. Raises SpecError."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    rule = None
    if not match:
        rule = f"must be a step or two with a dash, is {text!r}"
    elif first < FIRST:
        rule = f"starts at step {first}: the first {FIRST - 1} are cold, and warm the profiler up"
    elif last < first:
        rule = f"ends before it begins: {text}"
    elif first > MOST_BEFORE:
        rule = f"starts at step {first:,}: all steps before it would be run too, and one is as long as another"
    elif last - first >= MOST_STEPS:
        rule = f"asks for {last - first + 1:,} steps, and traces of more than {MOST_STEPS} are too large to look at"
    if rule:
        raise mistake("--steps", rule, "Such as 8-10.")
    return first, last


def _profile(run: Run, first: int, last: int, folder: Path) -> int:
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # else torch prints every start and stop on stderr; read when it is loaded
    if "WORLD_SIZE" in os.environ or run.layout.world_size == 1:
        from ultrascale.train.observers.profile import profile_run
        from ultrascale.train.worker import run_or_explain

        return run_or_explain(lambda: profile_run(run, first, last, folder))
    folder.mkdir(parents=True, exist_ok=True)
    described = to_toml(run)
    (folder / "run.toml").write_text(described)
    arguments = ("--profile", str(folder), "--profile-steps", str(first), str(last))
    return launched_once(described, run.layout.world_size, arguments)


def _report(folder: Path) -> StepReport:
    from ultrascale.measure.step.step_report import StepReport
    from ultrascale.train.observers.profile import REPORT

    return StepReport.from_json(jsonlib.loads((folder / REPORT).read_text()))


def _show(folder: Path, html: Path | None, *, top: int, as_json: bool) -> None:
    report = _report(folder)
    if as_json:
        print_json(report.to_json(), "measure-step")
    else:
        _print(report, [*sorted(folder.iterdir()), *([] if html is None else [html])], top)


def _print(report: StepReport, files: list[Path], top: int) -> None:
    from ultrascale.measure.step.step_report import computing_share, hidden_lines, top_table, waterfall_table

    console = console_for_people()
    console.print(waterfall_table(report))
    ranks, (first, *_, last) = len(report.ranks), [*report.steps, report.steps[-1]]
    steps = f"mean of steps {first} to {last}" if last > first else f"step {first}"
    console.print(f"\nmeasured: {steps} on {ranks} rank{'s' * (ranks > 1)}, profiled")
    without, share = report.unprofiled_step_seconds, computing_share(report)
    console.print(f"without the profiler a step takes {without * 1e3:.2f} ms; compute is {share:.0%} of the profiled one")
    if report.planned:
        console.print(f"planned: {report.planned_origin}", soft_wrap=True)
    for line in hidden_lines(report):
        console.print(line)
    if top:
        console.print()
        console.print(top_table(report.ranks[0].top[:top], len(report.steps)))
    console.print("\nfiles")
    for path in files:
        console.print(f"  {path}", soft_wrap=True)
