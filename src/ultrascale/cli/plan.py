"""`ultrascale plan`: which layout, what memory, how long, before anything runs. No torch."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ultrascale.api.plan import answer
from ultrascale.api.plan_request import PlanOptions, PlanRequest
from ultrascale.api.plan_result import Plan
from ultrascale.api.run_of import says
from ultrascale.cli.parse import parse_with_overrides, take_settings
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, not_trainable
from ultrascale.spec.stack_files import changed_settings
from ultrascale.spec.units import parse_tokens

if TYPE_CHECKING:
    from rich.console import Console


PROGRESS_SECONDS = 1.0
"""After which a search says how far it is."""


def command(arguments: list[str]) -> int:
    """Run the verb: 0 if the run fits, 1 if it does not."""
    if arguments[:1] == ["far"]:
        from ultrascale.cli import plan_far

        return plan_far.command(arguments[1:])
    request = request_of(arguments)
    options = request.options
    with _progress() as told:
        found = answer(request, told=told)
    if found.unwritten:
        print(f"ultrascale: no layout fits; not written: {', '.join(found.unwritten)}.", file=sys.stderr)
    if options.print_flags:
        print_flags(found)
    elif options.json:
        print(jsonlib.dumps(found.to_dict(), indent=2))
    elif found.searched is not None:
        from ultrascale.cli.plan_search import show_search

        show_search(found, found.searched)
    else:
        _show(found)
    return 0 if found.fits else 1


def request_of(arguments: list[str]) -> PlanRequest:
    """The question that these words ask. Ends the process where they cannot be read."""
    stack, words = take_settings(arguments, "stack")
    options, rest = parse_with_overrides(PlanOptions, "plan", words, positional={"run": "[RUN.TOML]"})
    return PlanRequest(options, tuple(rest), tuple(stack.items()), tuple(arguments))


@contextmanager
def _progress() -> Iterator[Callable[[float], None]]:
    """On a terminal, of a search that takes longer than a second, a line that says how far it is, and goes when it ends."""
    started, shown = time.monotonic(), False

    def told(share: float) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.monotonic() - started > PROGRESS_SECONDS:
            shown = True
            print(f"\rultrascale: {share:.0%} of the layouts searched", end="", file=sys.stderr, flush=True)

    try:
        yield told
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _show(found: Plan) -> None:
    from ultrascale.plan.view.plan_view import show_alternatives, show_plan

    console = console_for_people()
    if len(found.compared) > 1:
        show_alternatives(list(found.compared), console)
    show_plan(found.chosen, console, tokens=num_tokens(found.request))
    console.print(f"\n[bold]next[/bold]  {_next_command(found.chosen, found.request)}", soft_wrap=True)


def console_for_people() -> Console:
    """A terminal that colours what we colour, and no numbers by itself."""
    from rich.console import Console

    return Console(highlight=False)


def print_flags(found: Plan) -> None:
    """Print the plan as settings of its trainer; that it does not fit is said on stderr, which a script leaves out."""
    print(found.flags())
    if not found.fits:
        print("ultrascale: this layout does not fit; the same command without --print-flags says why.", file=sys.stderr)


def num_tokens(request: PlanRequest) -> int | None:
    """`15T` as a number; it has been read before."""
    return None if request.options.tokens is None else parse_tokens(request.options.tokens)


def _next_command(chosen: RunPlan, request: PlanRequest) -> str:
    layout, options = chosen.run.layout, request.options
    words = ["ultrascale plan", shlex.join(request.words)]
    if not chosen.fits:
        if layout.zero_stage == 3 and layout.recompute == "full":
            return " ".join(words) + "   with more --gpus, or a shorter --seq-len"
        return " ".join([*words, "--layout.zero-stage 3 --layout.recompute full"])
    run = options.file or options.save
    if run is not None:
        return next_of_run(chosen, [run, *(request.settings if options.file else [])])
    open_words = [] if says(request.words, "zero-stage") else ["--zero-stage", str(layout.zero_stage)]
    open_words += [] if says(request.words, "recompute") else ["--recompute", layout.recompute]
    return " ".join([*words, *open_words, "--save run.toml"])


def next_of_run(chosen: RunPlan, words: list[str]) -> str:
    """What to do with a run's file (and settings over it): train it, hand it to its trainer, or look at its step."""
    optimizer = chosen.stack.optimizer
    said = [] if optimizer == DEFAULT_OPTIMIZER or "--optimizer.name" in words else ["--optimizer.name", optimizer]
    told = shlex.join([*words, *said])
    if chosen.stack.name != "ultrascale":
        changed = changed_settings(chosen.stack).items()
        stack = shlex.join([chosen.stack.name, *(word for key, value in changed for word in (f"--stack.{key}", str(value)))])
        return f"ultrascale plan {told} --stack {stack} --print-flags"
    if not_trainable(chosen.run):
        return f"ultrascale plan {told} --perfetto step.json   (our trainer does not run it yet)"
    return f"ultrascale check {told}   then  ultrascale train {told}"
