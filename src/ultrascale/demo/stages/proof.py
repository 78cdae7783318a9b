"""Proof of the run's layout, and a test of the proof itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ultrascale.check.cases import cases
from ultrascale.check.compare import Verdict
from ultrascale.check.faults.all_faults import CLASSIC
from ultrascale.check.prove import TOLERANCE, prove_all
from ultrascale.demo.claims import Claim, judged
from ultrascale.description.run import Run

STEPS = 2


def prove_layouts(run: Run) -> Claim:
    """Prove every ZeRO stage, with and without gradient accumulation, tied and untied, against one process. Raises
    RankFailed."""
    verdicts = prove_all(list(cases(run)), steps=STEPS)
    worst = max(difference.error for verdict in verdicts for difference in verdict.worst.values())
    held = sum(verdict.holds for verdict in verdicts)
    return judged(
        "two processes compute what one does",
        f"{held} of {len(verdicts)} cases (all ZeRO stages) equal in float64, largest error {worst:.0e}",
        held == len(verdicts),
        cases={verdict.case: verdict.holds for verdict in verdicts}, largest_error=worst, tolerance=TOLERANCE,
    )  # fmt: skip


def plant_faults(run: Run, faults: Sequence[str] = CLASSIC) -> Claim:
    """Plant faults between processes one by one: the proof must detect each and name a parameter."""
    todo = [replace(case, fault=fault, name=fault) for fault in faults for case in cases(run, own_layout=True)]
    verdicts = prove_all(todo, steps=STEPS)
    first_differing = {fault: _where_seen([v for v in verdicts if v.case == fault]) for fault in faults}
    count = sum(name is not None for name in first_differing.values())
    return judged(
        "the proof sees planted faults", f"{count} of {len(faults)}, each with the parameter it breaks",
        count == len(faults), seen=first_differing,
    )  # fmt: skip


def _where_seen(verdicts: list[Verdict]) -> str | None:
    """First parameter whose gradient reveals the fault; None if any of the cases missed it."""
    if any(verdict.holds for verdict in verdicts):
        return None
    named = [difference.name for difference in verdicts[0].beyond if difference.quantity == "gradient"]
    return named[0] if named else None
