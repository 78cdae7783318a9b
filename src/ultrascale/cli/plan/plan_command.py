"""`ultrascale plan`: predicts layout, memory and time before anything runs. Needs no torch."""

from __future__ import annotations

import shlex
import sys

from ultrascale.api.planning.plan import answer
from ultrascale.api.planning.plan_request import PlanOptions, PlanRequest
from ultrascale.api.planning.plan_result import Plan
from ultrascale.api.planning.run_of import fills_machines, has_flag, overrides
from ultrascale.catalogue.stacks.stack_files import changed_settings, stack_file
from ultrascale.cli.terminal.parse import parse_with_overrides, take_settings
from ultrascale.cli.terminal.screen import console_for_people, print_json, waiting
from ultrascale.description.units import parse_tokens
from ultrascale.plan.flags.trainers import has_settings
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, not_trainable


def command(arguments: list[str]) -> int:
    """Run the verb; returns 0 if the run fits, 1 if it does not."""
    if arguments[:1] == ["far"]:
        from ultrascale.cli.plan import plan_far

        return plan_far.command(arguments[1:])
    request = request_of(arguments)
    options = request.options
    if options.compare is not None:
        from ultrascale.cli.plan.plan_compare import show_comparison

        return show_comparison(request)
    with waiting("planning") as report:
        plan = answer(request, report=lambda phase: report(f"planning, {phase}"))
    if plan.unwritten:
        print(f"ultrascale: no layout fits; not written: {', '.join(plan.unwritten)}.", file=sys.stderr)
    if options.print_flags:
        print_flags(plan)
    elif options.json:
        print_json(plan.to_dict(), indent=2)
    elif plan.searched is not None:
        from ultrascale.cli.plan.plan_search import show_search

        show_search(plan, plan.searched)
    else:
        _show(plan)
    return 0 if plan.fits else 1


def request_of(arguments: list[str]) -> PlanRequest:
    """The request of these words. Raises SpecError."""
    stack, words = take_settings(arguments, "stack")
    options, settings = parse_with_overrides(PlanOptions, "plan", words, positional={"run": "[RUN.TOML]"})
    return PlanRequest(options, tuple(settings), tuple(stack.items()), tuple(arguments))


def _show(plan: Plan) -> None:
    from ultrascale.plan.view.plan_view import show_alternatives, show_plan

    console = console_for_people()
    if len(plan.compared) > 1:
        show_alternatives(list(plan.compared), console)
    options = plan.request.options
    show_plan(plan.chosen, console, tokens=num_tokens(plan.request), budget=options.budget, brief=options.brief)
    console.print(f"\n[bold]next[/bold]  {_next_command(plan.chosen, plan.request)}", soft_wrap=True)


def print_flags(plan: Plan) -> None:
    """Print the plan as settings of its framework; if it does not fit, stderr says so, which a script ignores."""
    print(plan.flags())
    if not plan.fits:
        print("ultrascale: this layout does not fit; the same command without --print-flags says why.", file=sys.stderr)


def next_command_words(request: PlanRequest) -> list[str]:
    """The words of the command for the next one, without --brief."""
    return [word for word in request.words if word != "--brief"]


def num_tokens(request: PlanRequest) -> int | None:
    """`15T` as a number; it has been validated before."""
    return None if request.options.tokens is None else parse_tokens(request.options.tokens)


def _next_command(chosen: RunPlan, request: PlanRequest) -> str:
    layout, options = chosen.run.layout, request.options
    words = ["ultrascale plan", shlex.join(next_command_words(request))]
    if not chosen.fits:
        if chosen.memory.by_category["other"] > chosen.capacity_bytes:  # the tokens of a step, which no layout makes fewer
            return " ".join(words) + "   with a smaller batch, or more --gpus"
        if layout.zero_stage == 3 and layout.recompute == "full":
            return " ".join(words) + f"   {what_would_fit(chosen)}"
        return " ".join([*words, "--layout.zero-stage 3 --layout.recompute full"])
    if options.save is not None:
        return next_of_run(chosen, [options.save])
    if options.file is not None:
        degree = ["--layout.dp", str(layout.dp)] if fills_machines(options, request.settings) else []
        return next_of_run(chosen, [options.file, *degree, *overrides(options), *request.settings])
    open_words = [] if has_flag(request.words, "zero-stage") else ["--zero-stage", str(layout.zero_stage)]
    open_words += [] if has_flag(request.words, "recompute") else ["--recompute", layout.recompute]
    return " ".join([*words, *open_words, "--save run.toml"])


def what_would_fit(chosen: RunPlan, *, more_gpus: bool = True) -> str:
    """Changes after which a layout that shards and recomputes all it can might fit. A shorter sequence is none where parameters
    and optimizer state alone are too large. `more_gpus`: some number of them would do, or it is not known that none would."""
    might = ["more --gpus"] if more_gpus else []
    if chosen.memory.between_steps.total < chosen.usable_bytes:
        might.append("a shorter --seq-len")
    without_state = chosen.needed_bytes - chosen.memory.by_category["optimizer"]
    can_offload = chosen.stack.name == "ultrascale" and chosen.stack.optimizer == DEFAULT_OPTIMIZER
    can_offload = can_offload and chosen.run.islands.count == 1 and not chosen.run.layout.offload_optimizer
    if can_offload and without_state < chosen.usable_bytes:
        might.append("--layout.offload-optimizer true")
    return f"with {', or '.join(might or ['larger GPUs'])}"


def next_of_run(chosen: RunPlan, words: list[str]) -> str:
    """Next commands for a run's file (and settings over it): train it, pass it to its framework, or trace its step."""
    optimizer, of_run = chosen.stack.optimizer, chosen.run.optimizer.name
    if chosen.stack.name != "ultrascale":
        changed = changed_settings(chosen.stack)
        stack = [chosen.stack.name, *(word for key, value in changed.items() for word in (f"--stack.{key}", str(value)))]
        again = stack_file(chosen.stack.name).stack.optimizer if of_run == DEFAULT_OPTIMIZER else of_run
        short = [] if optimizer == again or "optimizer" in changed else ["--optimizer", optimizer]
        wanted = "--print-flags" if has_settings(chosen.stack.name) else "--perfetto step.json"
        return f"ultrascale plan {shlex.join([*words, *short, '--stack', *stack])} {wanted}"
    optimizer_words = [] if optimizer in (DEFAULT_OPTIMIZER, of_run) else ["--optimizer.name", optimizer]
    arguments = shlex.join([*words, *optimizer_words])
    if not_trainable(chosen.run):
        return f"ultrascale plan {arguments} --perfetto step.json   (`ultrascale train` cannot run it)"
    return f"ultrascale check {arguments}   then  ultrascale train {arguments}"
