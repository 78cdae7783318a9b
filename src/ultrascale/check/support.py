"""The outcome of the matrix as a page: a table for each group of combinations, and the refused ones with reasons."""

from __future__ import annotations

from collections import Counter

from ultrascale.check.matrix import CellOutcome
from ultrascale.check.prove import TOLERANCE

PAGE = "docs/support.md"
MARKS = {"proven": "proven", "refused": "refused", "untried": "untried", "DIFFERS": "**DIFFERS**"}


def command(steps: int, processes: int) -> str:
    """The command that writes the page; with fewer steps or processes the page would prove less."""
    return f"ultrascale check --matrix --processes {processes} --steps {steps} --markdown {PAGE}"


def to_markdown(outcomes: list[CellOutcome], steps: int, processes: int) -> str:
    """The page `docs/support.md`, of combinations of at most `processes` processes."""
    counts = Counter(outcome.state for outcome in outcomes)
    summary = ", ".join(f"{counts[state]} {state}" for state in MARKS if counts[state])
    parts = [
        "# What is supported, and proven",
        f"Written by `{command(steps, processes)}`; do not edit. {len(outcomes)} combinations: {summary}.",
        f"*Proven*: N processes compute what one does, in float64 to {TOLERANCE:.0e}: loss, gradient norm, every gradient, "
        "updated weights and both moments, loads and biases of experts; and what several ranks hold is the same bits. "
        f"{steps} steps, documents of uneven length, no sequence length that ranks divide. See [how](proving.md).",
    ]
    tables = dict.fromkeys(outcome.cell.table for outcome in outcomes)
    parts += [_table(table, [outcome for outcome in outcomes if outcome.cell.table == table]) for table in tables]
    return "\n\n".join(parts) + "\n"


def _table(title: str, outcomes: list[CellOutcome]) -> str:
    rows = dict.fromkeys(outcome.cell.row for outcome in outcomes)
    columns = list(dict.fromkeys(outcome.cell.column for outcome in outcomes))
    by_place = {(outcome.cell.row, outcome.cell.column): outcome for outcome in outcomes}
    reasons: dict[str, int] = {}
    lines = [f"| | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        marks = [_mark(by_place.get((row, column)), reasons) for column in columns]
        lines.append(f"| {row} | {' | '.join(marks)} |")
    notes = [f"{number}. refused: {reason}" for reason, number in reasons.items()]
    return "\n".join([f"## {title}", "", *lines, *(["", *notes] if notes else [])])


def _mark(outcome: CellOutcome | None, reasons: dict[str, int]) -> str:
    if outcome is None:
        return ""
    if outcome.state == "refused":
        return f"refused ({reasons.setdefault(outcome.cell.refused, len(reasons) + 1)})"
    return MARKS[outcome.state]
