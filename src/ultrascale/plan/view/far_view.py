"""A far plan on a terminal: cost of distance and bandwidth, and the savings of fewer reductions."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ultrascale.console import plain_table
from ultrascale.description.units import format_bytes, format_bytes_per_second, format_count, format_seconds
from ultrascale.plan.view.far_apart import FarPlan

INTERVALS = (1, 10, 50, 100, 500)
"""H: every step, and the range tested for DiLoCo."""
WORTH_IT = 0.95
"""Fraction of the time spent computing from which a far cluster is called worthwhile."""


def show(plan: FarPlan, console: Console) -> None:
    """Print one plan with its alternatives."""
    kilometres = plan.distance_metres / 1e3
    distance = f"{kilometres:,.0f} km from one to {'another' if plan.uplink else 'the next'}"
    head = f"{format_count(plan.num_parameters)} parameters on {plan.num_sites:,} sites, {distance}"
    console.print(Text(head, style="bold"))
    console.print(_all_reduce(plan))
    console.print()
    console.print(_intervals(plan))
    console.print()
    console.print(_needs(plan))


def _all_reduce(plan: FarPlan) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    line = format_bytes_per_second(plan.line_bytes_per_second)
    bits = f"{plan.bits_per_parameter:g} bits a parameter"
    flight = format_seconds(plan.flight_seconds)
    table.add_row("buffer", format_bytes(plan.num_bytes), bits)
    carried = format_bytes(plan.bytes_per_line)
    table.add_row("on the line", format_seconds(plan.transfer_seconds), f"{carried} in each direction at {line}")
    table.add_row("light", format_seconds(plan.latency_seconds), f"{plan.num_messages:,} hops of {flight} one after another")
    table.add_row(
        "all-reduce",
        format_seconds(plan.all_reduce_seconds),
        "a line each" if plan.uplink else "bidirectional ring" if plan.num_ways == 2 else "two sites, one line",
    )
    return table


def _intervals(plan: FarPlan) -> Table:
    columns = ("reduce every", "shown", "a step takes", "computing", "line traffic saved")
    table = plain_table(*columns, left=(), whole=columns, pad_edge=True, padding=(0, 3, 0, 0))
    for interval in sorted({*INTERVALS, plan.outer_every}):
        variant = plan.every(interval)
        style = "bold green" if interval == plan.outer_every else ""
        steps = f"{interval:,} steps" if interval > 1 else "step"
        saved = f"{1 - 1 / interval:.1%}"
        row = (
            steps,
            format_seconds(variant.exposed_seconds),
            format_seconds(variant.seconds_per_step),
            f"{variant.utilisation:.1%}",
            saved,
        )
        table.add_row(*row, style=style)
    return table


def _needs(plan: FarPlan) -> Text:
    every = plan.every(1)
    share = f"{WORTH_IT:.0%}"
    if every.utilisation >= WORTH_IT:
        text = f"Reducing every step computes {share} of the time already."
    else:
        needed = every.line_bytes_per_second_for(WORTH_IT)
        line = (
            f"{format_bytes_per_second(needed)} a line"
            if needed < float("inf")
            else "no line will do, light alone takes longer"
        )
        steps = plan.outer_every_for(WORTH_IT)
        text = f"To compute {share} of the time: reduce every {steps:,} steps; or, reducing every step: {line}."
    return Text(f"{text} What fewer reductions do to the loss is not predicted.", style="dim")
