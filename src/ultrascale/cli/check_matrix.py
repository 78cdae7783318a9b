"""`ultrascale check --matrix` and planted faults without a run: many combinations, with a bar of how far it is."""

from __future__ import annotations

import json as json_module
import sys
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing import Value
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.spec.units import count_of, format_seconds

if TYPE_CHECKING:  # imports torch
    from ultrascale.check.compare import Verdict

BAR_WIDTH = 30


def prove_matrix(processes: int | None, steps: int, *, markdown: str | None, as_json: bool) -> int:
    """Prove every combination of at most `processes` processes; 0 if none differs. `markdown`: a file for the tables."""
    from ultrascale.check.matrix import cells, prove_cells
    from ultrascale.check.small import MOST_PROCESSES
    from ultrascale.check.support import to_markdown

    most, todo = processes or MOST_PROCESSES, cells()
    count = sum(not cell.refused and cell.run.layout.world_size <= most for cell in todo)
    outcomes = prove_cells(todo, processes=most, steps=steps, on_verdict=progress(count))
    if markdown is not None:
        Path(markdown).write_text(to_markdown(outcomes, steps, most))
    wrong = [outcome for outcome in outcomes if outcome.state == "DIFFERS"]
    if as_json:
        rows = [
            {"name": one.cell.name, "state": one.state, "reason": one.cell.refused,
             "verdict": one.verdict and one.verdict.to_json()} for one in outcomes
        ]  # fmt: skip
        print(json_module.dumps(rows, indent=1))
    else:
        for outcome in wrong:
            assert outcome.verdict is not None
            told = outcome.verdict.failure or "; ".join(str(difference) for difference in outcome.verdict.beyond[:3])
            print(f"{outcome.cell.name}: {told}")
        states = Counter(outcome.state for outcome in outcomes)
        print(
            f"{count_of(len(outcomes), 'combination')}: "
            + ", ".join(f"{number} {state}" for state, number in states.most_common())
        )
    return 1 if wrong else 0


def list_faults() -> int:
    """Print every fault that can be planted."""
    from ultrascale.check.faults import FAULTS

    width = max(map(len, FAULTS))
    for fault in FAULTS.values():
        print(f"{fault.name:{width}}  {fault.what}; needs {fault.needs}")
    return 0


def plant_at_home(name: str | None, steps: int, *, as_json: bool) -> int:
    """Plant the fault `name`, or `all`, each in the least run in which it can be seen; 0 if each was seen."""
    from ultrascale.check.faults import FAULTS, expect_known, home_of
    from ultrascale.check.prove import Case, prove_all
    from ultrascale.cli.check import print_verdicts

    assert name is not None
    expect_known(name)
    names = list(FAULTS) if name == "all" else [name]
    todo = [Case(one, home_of(one), one) for one in names]
    verdicts = prove_all(todo, steps=max(2, steps), go_on=True, on_verdict=progress(len(todo)))
    if as_json:
        print(json_module.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    else:
        print_verdicts(verdicts, planted=True)
    return 1 if any(verdict.holds for verdict in verdicts) else 0


def progress(count: int, *, lines: bool = False) -> Callable[[Verdict], None] | None:
    """Told each verdict in the process of rank 0, says on stderr how far it is and how long the rest should take.

    A bar on a terminal; elsewhere nothing, or with `lines` a line for each verdict.
    """
    if not (sys.stderr.isatty() or lines):
        return None
    return _Count(count).tell


class _Count:
    """How many verdicts there are, in memory that processes started later share."""

    def __init__(self, total: int):
        self.total, self.done, self.started = total, Value("i", 0), time.monotonic()

    def tell(self, verdict: Verdict) -> None:
        self.done.value += 1
        done, taken = self.done.value, time.monotonic() - self.started
        left = "" if done == self.total else f", about {format_seconds(taken / done * (self.total - done))} left"
        if not sys.stderr.isatty():
            print(f"{done} of {count_of(self.total, 'case')} after {format_seconds(taken)}{left}", file=sys.stderr, flush=True)
            return
        filled = BAR_WIDTH * done // self.total
        line = f"\r{'#' * filled}{'.' * (BAR_WIDTH - filled)} {done}/{self.total}{left:20} {verdict.case[:50]:50}"
        print(line, end="\n" if done == self.total else "", file=sys.stderr, flush=True)
