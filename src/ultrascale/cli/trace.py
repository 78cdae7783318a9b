"""`ultrascale trace`: any rank of any cluster's job, on this machine, without a device."""

from __future__ import annotations

import sys

from ultrascale.api.asked import Asked
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.trace import StageTraces, Trace, TraceOptions, answer
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, print_json, waiting
from ultrascale.description.units import format_bytes


def command(arguments: list[str]) -> int:
    """Run the verb: 0, or 1 if the rank does not fit its device and why was asked."""
    options, rest = parse_with_overrides(TraceOptions, "trace", arguments, positional={"run": "[RUN.TOML]"}, short=SHORT)
    asked = Asked(options, tuple(rest), words=tuple(arguments))
    with waiting("tracing"):
        found = answer(asked, tell=lambda note: print(f"ultrascale: {note}", file=sys.stderr))
    if options.json:
        print_json(found.to_dict(), indent=1)
    elif isinstance(found, StageTraces):
        from ultrascale.trace.views.view import show_stages

        show_stages(list(found.peaks), console_for_people())
    else:
        _show(found)
    return 0 if isinstance(found, StageTraces) else _code(found)


def _show(found: Trace) -> None:
    from ultrascale.trace.views.view import show_parts, show_trace

    console = console_for_people()
    show_trace(found.found, found.comparison, found.reserved_bytes, console, step=found.step, tier=found.tiers)
    if found.options.explain_oom:
        show_parts(list(found.parts), list(found.edits), found.peak_bytes, console)
    for path in (*found.options.out, *filter(None, [found.options.html])):
        console.print(f"written: {path}")


def _code(found: Trace) -> int:
    """1, with a line that says why, if the rank does not fit and that was the question."""
    if found.fits or not found.options.explain_oom:
        return 0
    device = found.cluster.accelerator
    has = f"a {device.name} has {format_bytes(device.memory_bytes.value)}"
    needed = f"needs {format_bytes(found.reserved_bytes)} of torch's allocator, and {has}"
    print(f"ultrascale: rank {found.found.rank} {needed}.", file=sys.stderr)
    return 1
