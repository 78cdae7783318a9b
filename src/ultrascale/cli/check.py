"""`ultrascale check`: prove that a layout computes what one process computes."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from typing import TYPE_CHECKING

from ultrascale.api.check import NOT_COVERED, Check, CheckMatrix, CheckOptions, answer, expect_numbers
from ultrascale.api.keywords import VerbRequest
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.catalogue.machines import usable_cores
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import Words, console_for_people, print_json, waiting
from ultrascale.console import plain_table
from ultrascale.description.units import count_of, format_seconds

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.compare import Verdict

QUANTITIES = ("loss", "gradient norm", "gradient", "weight", "moment", "experts")
MOST_PER_CORE = 2
"""Processes per core above which a proof takes minutes, and prints its progress."""
BAR_WIDTH = 30


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if everything is proven (or every planted fault was detected)."""
    options, settings = parse_with_overrides(CheckOptions, "check", arguments, positional={"run": "[RUN.TOML]"}, short=SHORT)
    if options.plant == "list" and not options.matrix:
        expect_numbers(options, settings)
        return list_faults(json=options.json)

    def report(note: str) -> None:
        print(note, file=sys.stderr if options.json else sys.stdout, flush=True)

    with waiting("starting the proof") as display:
        result = answer(
            VerbRequest(options, tuple(settings)), report=report, progress=lambda count, most: progress(count, most, display)
        )
    if options.json:
        print_json(result.to_dict(), indent=1)
    elif isinstance(result, CheckMatrix):
        _show_matrix(result)
    else:
        show_verdicts(result)
    return 0 if result.holds else 1


def list_faults(*, json: bool) -> int:
    """Print every fault that can be planted."""
    from ultrascale.check.faults.table import FAULTS

    if json:
        entries = [{"name": fault.name, "what": fault.what, "needs": fault.needs} for fault in FAULTS.values()]
        print_json({"faults": entries}, "faults", indent=1)
        return 0
    width = max(map(len, FAULTS))
    for fault in FAULTS.values():
        print(f"{fault.name:{width}}  {fault.what}; needs {fault.needs}")
    return 0


def _show_matrix(matrix: CheckMatrix) -> None:
    for outcome in matrix.wrong:
        assert outcome.verdict is not None
        differences = outcome.verdict.failure or "; ".join(str(difference) for difference in outcome.verdict.beyond[:3])
        print(f"{outcome.cell.name}: {differences}")
    states = ", ".join(f"{number} {state}" for state, number in matrix.states)
    print(f"{count_of(len(matrix.outcomes), 'combination')}: {states}")


def show_verdicts(proof: Check) -> None:
    """Print the table of verdicts, the differences, a summary, and the proof's blind spots."""
    console, verdicts = console_for_people(), proof.verdicts
    quantities = [q for q in QUANTITIES if any(q in verdict.worst for verdict in verdicts)]
    table = plain_table(
        "case", *quantities, "", left=("case", ""), title=f"float64, tolerance {verdicts[0].tolerance:.0e}",
        title_justify="left", pad_edge=True, padding=(0, 2, 0, 0),
    )  # fmt: skip
    for verdict in verdicts:
        errors = [f"{verdict.worst[q].error:.0e}" if q in verdict.worst else "" for q in quantities]
        words = ("[yellow]MISSED[/]", "[green]seen[/]") if proof.planted else ("[green]equal[/]", "[red]DIFFERS[/]")
        table.add_row(verdict.case, *errors, words[0] if verdict.holds else words[1])
    console.print(table)
    for verdict in verdicts:
        for difference in _difference_lines(verdict):
            console.print(f"  {verdict.case}: {difference}", soft_wrap=True)
    num_held = sum(verdict.holds for verdict in verdicts)
    if proof.planted:
        console.print(f"\n{len(verdicts) - num_held} of {len(verdicts)} planted faults were seen.")
    else:
        compute = "computes" if len(verdicts) == 1 else "compute"
        what = "one process" if proof.against is None else f"a plain loop of {proof.against}"
        console.print(f"\n{num_held} of {count_of(len(verdicts), 'case')} {compute} what {what} computes.")
        console.print(f"Not seen: {'; '.join(NOT_COVERED[proof.against])}.", soft_wrap=True)


def _difference_lines(verdict: Verdict) -> list[str]:
    if verdict.failure:
        return [verdict.failure.splitlines()[-1]]
    # A message that is not waited for explains a wrong gradient, which in turn explains wrong weights and moments.
    first = [d for kind in ("messages", "gradient") for d in verdict.beyond if d.quantity == kind] or list(verdict.beyond)
    num_more = len(verdict.beyond) - min(3, len(first))
    return [str(difference) for difference in first[:3]] + ([f"and {num_more} more"] if num_more > 0 else [])


def progress(
    count: int, most_processes: int, report: Callable[[Words], None] = lambda words: None
) -> Callable[[Verdict], None] | None:
    """Returns a function that takes each verdict in the process of rank 0, and prints progress and the remaining time on
    stderr.

    On a terminal it draws a bar; elsewhere it prints nothing, or, with many processes on few cores, which take seconds per
    case, one line per verdict.
    """
    counted = _ProofProgress(count)
    report(counted.words)
    lines = most_processes > MOST_PER_CORE * usable_cores()
    if lines:
        cores = count_of(usable_cores(), "core")
        line = f"{count_of(count, 'case')} on {most_processes} processes, which share {cores}; --processes 2 or 4 take seconds."
        print(line, file=sys.stderr, flush=True)
    return counted.report if sys.stderr.isatty() or lines else None


class _ProofProgress:
    """Number of verdicts, in memory shared with processes that are started later."""

    def __init__(self, total: int):
        self.total, self.done, self.started = total, get_context("spawn").Value("i", 0), time.monotonic()

    def words(self) -> str:
        """Text of the current phase of the proof."""
        cases = count_of(self.total, "case")
        return f"{self.done.value} of {cases} compared" if self.done.value else f"processes start for the first of {cases}"

    def report(self, verdict: Verdict) -> None:
        self.done.value += 1
        done, elapsed = self.done.value, time.monotonic() - self.started
        remaining = "" if done == self.total else f", about {format_seconds(elapsed / done * (self.total - done))} left"
        if not sys.stderr.isatty():
            print(
                f"{done} of {count_of(self.total, 'case')} after {format_seconds(elapsed)}{remaining}",
                file=sys.stderr,
                flush=True,
            )
            return
        filled = BAR_WIDTH * done // self.total
        line = f"\r{'#' * filled}{'.' * (BAR_WIDTH - filled)} {done}/{self.total}{remaining:20} {verdict.case[:50]:50}"
        print(line, end="\n" if done == self.total else "", file=sys.stderr, flush=True)
