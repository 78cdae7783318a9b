"""`ultrascale soak`: trains a small run here under injected faults, and proves that it ends like an undisturbed one."""

from __future__ import annotations

import statistics
from collections import defaultdict
from functools import partial
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import print_json
from ultrascale.config.rules.early import expect_processes
from ultrascale.description.problems import mistake
from ultrascale.launch.restarts import goodput_text

if TYPE_CHECKING:
    from ultrascale.soak.story import StormOutcome, Strike


def soak(
    processes: int = 2,
    minutes: float = 2.0,
    count: int | None = None,
    faults: str = "all",
    seed: int = 0,
    folder: Path = Path("out/soak"),
    torchrun: bool = False,
    json: bool = False,
) -> int:
    """Train a very small model under injected faults, and compare its end with that of an undisturbed run, bit by bit.

    For example, 50 kills of random ranks at random times:

        ultrascale soak --processes 4 --faults kill --count 50

    Exit code 1 if a fault was not survived or anything differs.

    Args:
        processes: Number of ranks on this machine, even.
        minutes: Duration of the faults, in addition to the undisturbed run.
        count: Stop after this number of faults instead.
        faults: Kinds of faults, separated by commas, or all.
        seed: Random seed of kinds, steps, ranks and times.
        folder: Folder for both runs and the log. That of an earlier soak is emptied.
        torchrun: Start and restart the ranks with torchrun.
        json: Print one JSON object.
    """
    if processes < 2 or processes % 2:
        raise mistake("--processes", f"must be even, is {processes}", "Use 2 or 4.")
    expect_processes(processes)
    if not (isfinite(minutes) and minutes > 0) or (count is not None and count < 1):
        raise mistake("--minutes, --count", "must be above 0 and finite", "One minute is about six faults.")
    from ultrascale.soak.storm import KINDS, expect_kinds

    possible = {kind: fault for kind, fault in KINDS.items() if not (torchrun and fault.meets_launcher)}
    kinds = tuple(possible) if faults == "all" else tuple(faults.split(","))
    if refused := [kind for kind in kinds if kind in KINDS and kind not in possible]:
        rule = f"{refused[0]!r} strikes the launcher of `ultrascale train`, and with --torchrun there is none"
        raise mistake("--faults", rule, f"There are {', '.join(possible)}.")
    expect_kinds(kinds)
    from ultrascale.soak.story import soak as carry_through

    outcome = carry_through(
        folder.absolute(), processes=processes, seed=seed, kinds=kinds, seconds=None if count else minutes * 60,
        num_faults=count, torchrun=torchrun, say=(lambda line: None) if json else lambda line: print(line, flush=True),
    )  # fmt: skip
    if json:
        print_json(to_json(outcome) | {"processes": processes, "seed": seed}, "soak")
    else:
        print("\n".join(table(outcome)))
    return 0 if outcome.holds else 1


command = partial(parse, soak, "soak")
"""Run the verb; returns 0 if both runs end alike."""


def table(outcome: StormOutcome) -> list[str]:
    """Lines of the printed table: one per kind of fault, and the verdict."""
    head = ("fault", "struck", "survived", "found in s", "next step in s", "steps lost", "found by")
    rows = [head, *(_row(kind, facts) for kind, facts in to_json(outcome)["kinds"].items())]
    widths = [max(len(row[place]) for row in rows) for place in range(len(head))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    account, survived = outcome.account, sum(strike.is_survived for strike in outcome.strikes)
    idle = sum(not strike.had_effect for strike in outcome.strikes)
    none = f", {idle} without effect," if idle else ""
    struck = len(outcome.strikes)
    lines.append(f"{survived} of {struck} faults survived{none} in {outcome.seconds:.0f} s and {outcome.steps} steps")
    lines.append(f"steps done again {account.steps_lost}, goodput {goodput_text(account)}")
    same = ("the same bits", "DIFFERENT")
    lines.append(f"losses, norms: {same[not outcome.equal_losses]}; weights, moments: {same[not outcome.equal_state]}")
    return lines


def to_json(outcome: StormOutcome) -> dict[str, Any]:
    """The table as JSON."""
    from ultrascale.soak.storm import KINDS

    by_kind: dict[str, list[Strike]] = defaultdict(list)
    for strike in outcome.strikes:
        by_kind[strike.fault.kind].append(strike)
    kinds = {
        kind: {
            "row": KINDS[kind].row, "struck": len(strikes), "survived": sum(strike.is_survived for strike in strikes),
            "without_effect": sum(not strike.had_effect for strike in strikes),
            "detect_seconds": _spread([strike.detect_seconds for strike in strikes]),
            "recover_seconds": _spread([strike.recover_seconds for strike in strikes]),
            "steps_lost": _spread([float(strike.steps_lost) for strike in strikes]),
            "detected_by": sorted({strike.detected_by for strike in strikes}),
        }
        for kind, strikes in sorted(by_kind.items())
    }  # fmt: skip
    goodput = outcome.account.goodput
    return {
        "holds": outcome.holds, "equal_losses": outcome.equal_losses, "equal_state": outcome.equal_state,
        "steps": outcome.steps, "seconds": round(outcome.seconds, 1), "faults": len(outcome.strikes), "kinds": kinds,
        "steps_lost": outcome.account.steps_lost, "goodput": None if goodput is None else round(goodput, 4),
    }  # fmt: skip


def _row(kind: str, facts: dict[str, Any]) -> tuple[str, ...]:
    spreads = [_words(facts[name]) for name in ("detect_seconds", "recover_seconds", "steps_lost")]
    return kind, str(facts["struck"]), str(facts["survived"]), *spreads, ", ".join(facts["detected_by"])


def _spread(values: list[float | None]) -> dict[str, float] | None:
    """Median and maximum of the known values."""
    known = [value for value in values if value is not None]
    return {"median": round(statistics.median(known), 2), "max": round(max(known), 2)} if known else None


def _words(spread: dict[str, float] | None) -> str:
    return "-" if spread is None else f"{spread['median']:.1f} (max {spread['max']:.1f})"
