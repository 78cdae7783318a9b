"""`ultrascale plan --model ... --gpus ...` on a terminal: the ranking, the best layout, and why."""

from __future__ import annotations

import shlex

from ultrascale.api.plan_request import PlanRequest
from ultrascale.api.plan_result import Plan
from ultrascale.api.plan_search import Searched
from ultrascale.cli.plan import console_for_people, next_of_run, num_tokens
from ultrascale.plan.report import RunPlan, not_trainable
from ultrascale.plan.view.plan_view import show_plan
from ultrascale.plan.view.search_view import layout_words, no_layout_fits, show_explanation, show_ranking
from ultrascale.plan.workload import Workload
from ultrascale.spec.units import count_of, parse_tokens


def show_search(found: Plan, searched: Searched) -> None:
    """Print the ranking, the plan of its first, why if that was asked, and what to do next."""
    console, options, result = console_for_people(), found.request.options, searched.result
    if note := _batch_note(searched.tokens_asked, result.workload):
        console.print(f"[dim]{note}[/]\n")
    if result.best is None:
        console.print(f"[bold red]{no_layout_fits(result)}[/]")
        console.print(_what_would_fit(searched) + "\n")
    else:
        show_ranking(result, console, top=options.top)
        console.print()
    show_plan(found.chosen, console, tokens=num_tokens(found.request))
    if options.explain:
        console.print()
        show_explanation(result, searched.scan, searched.others, console)
    console.print(f"\n[bold]next[/bold]  {_next_command(found.chosen, found.request)}", soft_wrap=True)


def _batch_note(text: str | None, workload: Workload) -> str:
    """That a batch of so many tokens has become the nearest of whole sequences that many can share; empty if it has not."""
    if text is None or parse_tokens(text) == workload.tokens_per_step:
        return ""
    count = workload.sequences_per_batch
    return f"{text} tokens a batch: nearest that divide are {count_of(count, 'sequence')}, {workload.tokens_per_step:,} tokens"


def _what_would_fit(searched: Searched) -> str:
    """The smallest larger cluster on which something fits, in a sentence."""
    one = searched.smallest_that_fits
    if one is None:
        return "No number of these GPUs would do with this batch; a larger batch, a shorter sequence or larger GPUs might."
    words = layout_words(one.layout, one.num_micro_batches)
    return f"{count_of(one.layout.world_size, 'GPU')} would do: {words}."


def _next_command(chosen: RunPlan, request: PlanRequest) -> str:
    words = ["ultrascale plan", shlex.join(request.words)]
    if not chosen.fits:
        return " ".join(words) + "   with more --gpus, or a shorter --seq-len"
    if request.options.save is not None:
        return next_of_run(chosen, [request.options.save])
    if chosen.stack.name != "ultrascale":
        return " ".join([*words, "--print-flags"])
    if not_trainable(chosen.run):
        return " ".join([*words, "" if request.options.explain else "--explain"]).rstrip()
    return " ".join([*words, "--save run.toml"])
