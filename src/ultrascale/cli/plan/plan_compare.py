"""`ultrascale plan A.toml --compare B.toml` on a terminal: differences in memory and time, largest first, then in settings."""

from __future__ import annotations

from dataclasses import replace

from rich.text import Text

from ultrascale.api.planning.plan import answer
from ultrascale.api.planning.plan_request import PlanRequest
from ultrascale.api.planning.plan_result import Comparison, value_words
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.console import plain_table
from ultrascale.description.problems import mistake
from ultrascale.description.units import format_bytes

SAME = 0.0005
"""Relative difference below which two quantities count as equal."""


def show_comparison(request: PlanRequest) -> int:
    """Plan both runs, print them side by side, and return 0 if both fit, else 1."""
    first, second = request.options.file, request.options.compare
    if first is None or second is None:
        remedy = "Write: ultrascale plan A.toml --compare B.toml."
        raise mistake("--compare", "compares two runs' files, and one is given", remedy)
    words = request.words
    if first in words and "--compare" in words[: words.index(first)]:
        first, second = second, first  # --compare A.toml B.toml
    of_files = (replace(request.options, run=(file,), compare=None) for file in (first, second))
    comparison = Comparison(*(answer(replace(request, options=options)) for options in of_files))
    if request.options.json:
        print_json(comparison.to_dict(), indent=2)
    else:
        _show(comparison, first, second)
    return 0 if comparison.a.fits and comparison.b.fits else 1


def _show(comparison: Comparison, first: str, second: str) -> None:
    console = console_for_people()
    style = {"left": ("",), "folds": True, "padding": (0, 2, 0, 0)}
    quantities, settings = plain_table("", "a", "b", "b / a", **style), plain_table("", "a", "b", **style)
    for quantity in comparison.rows():
        ratio = quantity["b_over_a"]
        if ratio is not None and abs(ratio - 1) < SAME:
            continue
        values = (value_words(quantity[side], quantity["unit"]) for side in ("a", "b"))
        quantities.add_row(quantity["name"], *values, "" if ratio is None else f"{ratio:.2f}")
    for row in comparison.setting_words():
        settings.add_row(*row)
    console.print(Text(f"a  {first}\nb  {second}"), soft_wrap=True)
    for table in (quantities, settings):
        if table.row_count:
            console.print(table)
    if not quantities.row_count + settings.row_count:
        console.print("The two plans are the same.")
    for name, plan in (("a", comparison.a), ("b", comparison.b)):
        if not plan.fits:
            console.print(f"{name} does not fit: {format_bytes(-plan.headroom_bytes)} too much.")
