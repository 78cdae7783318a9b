"""`ultrascale plan --model ... --gpus ...` on a terminal: the ranking, the best layout, and the explanation."""

from __future__ import annotations

import shlex

from rich.text import Text

from ultrascale.api.planning.plan_request import BRIEF_ROWS, PlanRequest
from ultrascale.api.planning.plan_result import Plan
from ultrascale.api.planning.plan_search import SearchOutcome, sufficient_gpus
from ultrascale.cli.plan.plan_command import next_command_words, next_of_run, num_tokens, what_would_fit
from ultrascale.cli.terminal.screen import console_for_people
from ultrascale.description.units import count_of, format_bytes, parse_tokens
from ultrascale.plan.flags.trainers import has_settings
from ultrascale.plan.report import RunPlan, not_trainable
from ultrascale.plan.search.search import SearchResult, distinct
from ultrascale.plan.view.notes import TIGHT_BYTES
from ultrascale.plan.view.plan_view import show_plan
from ultrascale.plan.view.search_view import no_layout_fits, show_explanation, show_ranking
from ultrascale.plan.workload import Workload


def show_search(plan: Plan, searched: SearchOutcome) -> None:
    """Print the ranking, the plan of the best layout, the explanation if requested, the top of the ranking again, and next
    commands."""
    console, options, result = console_for_people(), plan.request.options, searched.result
    console.print(Text(_batch_note(searched.requested_tokens, result.workload), style="dim"))
    if result.best is None:
        console.print(f"[bold red]{no_layout_fits(result)}[/]")
        console.print(sufficient_gpus(searched) + "\n")
    else:
        show_ranking(result, console, top=options.rows, legend=not options.brief)
        if not options.brief:
            console.print()
    tokens = num_tokens(plan.request)
    show_plan(plan.chosen, console, tokens=tokens, budget=options.budget, result=result, brief=options.brief)
    if options.explain:
        console.print()
        show_explanation(result, searched.scaling_points, searched.better_clusters, console)
    if result.best is not None and not options.brief:
        console.print("\n[bold]the ranking again[/bold]")
        show_ranking(result, console, top=min(options.top, BRIEF_ROWS), legend=False)
    if spare := first_with_headroom(result, plan.chosen):
        console.print(Text(spare, style="yellow"))
    if not options.brief:
        console.print()
    console.print(f"[bold]next[/bold]  {_next_command(plan.chosen, plan.request, searched)}", soft_wrap=True)


def first_with_headroom(result: SearchResult, chosen: RunPlan) -> str:
    """The first layout of the ranking with more headroom than the best; empty if the best has enough."""
    best = result.best
    if best is None or not 0 <= chosen.headroom_bytes < TIGHT_BYTES:
        return ""
    ranked = distinct(result.replayed(None).ranked)
    for number, prediction in enumerate(ranked, start=1):
        headroom = float(prediction.memory.headroom)
        if headroom >= TIGHT_BYTES:
            slower = prediction.step_seconds / best.step_seconds - 1
            longer = f"{abs(slower):.1%} {'longer' if slower >= 0 else 'shorter'}"
            return f"number {number} has {format_bytes(headroom)} of headroom and a step {longer}"
    return f"no layout of the ranking has {format_bytes(TIGHT_BYTES)}"


def _batch_note(text: str | None, workload: Workload) -> str:
    """The global batch, with the requested one if they differ, and the power of two that was perhaps meant."""
    sequences = f"{count_of(workload.sequences_per_batch, 'sequence')}, {workload.tokens_per_step:,} tokens"
    if text is None or parse_tokens(text) == workload.tokens_per_step:
        return f"global batch: {sequences}"
    binary = parse_tokens(f"{text}i") if text.endswith("M") else workload.tokens_per_step
    power = "" if binary == workload.tokens_per_step else f" ({text}i is {binary:,} tokens)"
    return f"global batch: {sequences}; {text} rounded so that data-parallel ranks share it{power}"


def _next_command(chosen: RunPlan, request: PlanRequest, searched: SearchOutcome) -> str:
    words = ["ultrascale plan", shlex.join(next_command_words(request))]
    if not chosen.fits:
        return " ".join(words) + f"   {what_would_fit(chosen, more_gpus=searched.smallest_that_fits is not None)}"
    if request.options.save is not None:
        return next_of_run(chosen, [request.options.save])
    is_foreign = chosen.stack.name != "ultrascale"
    if is_foreign and has_settings(chosen.stack.name):
        return " ".join([*words, "--print-flags"])
    if is_foreign or not_trainable(chosen.run):
        return " ".join([*words, "" if request.options.explain else "--explain"]).rstrip()
    return " ".join([*words, "--save run.toml"])
