"""`ultrascale trace`: traces any rank of a job on any cluster, on this machine, without a device."""

from __future__ import annotations

import sys

from ultrascale.api.keywords import VerbRequest
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.trace import StageTraces, Trace, TraceOptions, answer
from ultrascale.cli.terminal.parse import parse_with_overrides
from ultrascale.cli.terminal.screen import console_for_people, print_json, waiting
from ultrascale.description.units import format_bytes


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0, or 1 with --explain-oom if the rank does not fit its device."""
    options, settings = parse_with_overrides(TraceOptions, "trace", arguments, positional={"run": "[RUN.TOML]"}, short=SHORT)
    request = VerbRequest(options, tuple(settings), words=tuple(arguments))
    with waiting("tracing") as display:
        result = answer(request, report=lambda note: print(f"ultrascale: {note}", file=sys.stderr), progress=display)
    if options.json:
        print_json(result.to_dict(), indent=1)
    elif isinstance(result, StageTraces):
        from ultrascale.trace.views.view import show_stages

        show_stages(list(result.peaks), console_for_people())
    else:
        _show(result)
    return 0 if isinstance(result, StageTraces) else _code(result)


def _show(trace: Trace) -> None:
    from ultrascale.trace.views.view import show_parts, show_trace

    console = console_for_people()
    show_trace(trace.rank_trace, trace.comparison, trace.reserved_bytes, console, step=trace.step, tier=trace.tiers)
    if trace.options.explain_oom:
        show_parts(list(trace.parts), list(trace.edits), trace.peak_bytes, console)
    for path in (*trace.options.out, *filter(None, [trace.options.html])):
        console.print(f"written: {path}")


def _code(trace: Trace) -> int:
    """1, with an explaining line, if --explain-oom is given and the rank does not fit; else 0."""
    if trace.fits or not trace.options.explain_oom:
        return 0
    device = trace.cluster.accelerator
    has = f"a {device.name} has {format_bytes(device.memory_bytes.value)}"
    needed = f"needs {format_bytes(trace.reserved_bytes)} of torch's allocator, and {has}"
    print(f"ultrascale: rank {trace.rank_trace.rank} {needed}.", file=sys.stderr)
    return 1
