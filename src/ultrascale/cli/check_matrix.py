"""`ultrascale check --matrix` and planted faults without a run: many combinations, with a bar of how far it is."""

from __future__ import annotations

import json as json_module
import sys
from collections import Counter
from collections.abc import Callable
from multiprocessing import Value
from pathlib import Path
from typing import TYPE_CHECKING

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
    outcomes = prove_cells(todo, processes=most, steps=steps, on_verdict=_bar(count))
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
        print(f"{len(outcomes)} combinations: " + ", ".join(f"{number} {state}" for state, number in states.most_common()))
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
    verdicts = prove_all(todo, steps=max(2, steps), go_on=True, on_verdict=_bar(len(todo)))
    if as_json:
        print(json_module.dumps([verdict.to_json() for verdict in verdicts], indent=1))
    else:
        print_verdicts(verdicts, planted=True)
    return 1 if any(verdict.holds for verdict in verdicts) else 0


def _bar(count: int) -> Callable[[Verdict], None] | None:
    """Told each verdict in the process of rank 0, draws how far it is. None where nobody watches."""
    if not sys.stderr.isatty():
        return None
    done = _Count(count)
    return done.tell


class _Count:
    """How many verdicts there are, in memory that processes started later share."""

    def __init__(self, total: int):
        self.total, self.done = total, Value("i", 0)

    def tell(self, verdict: Verdict) -> None:
        self.done.value += 1
        filled = BAR_WIDTH * self.done.value // self.total
        line = f"\r{'#' * filled}{'.' * (BAR_WIDTH - filled)} {self.done.value}/{self.total} {verdict.case[:60]:60}"
        print(line, end="\n" if self.done.value == self.total else "", file=sys.stderr, flush=True)
