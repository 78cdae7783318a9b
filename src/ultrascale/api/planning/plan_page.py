"""A plan as data for the planner page, and as the single file of `plan --html`."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ultrascale.api.extras import naming_extras
from ultrascale.api.planning.plan_result import Plan
from ultrascale.api.planning.run_of import conditions
from ultrascale.description.problems import mistake
from ultrascale.description.units import parse_tokens
from ultrascale.output_file import write_output
from ultrascale.page.html_file import plan_file
from ultrascale.page.pictures import write_pictures
from ultrascale.page.plan_data import PagePlan, answer


def page_plan(plan: Plan) -> PagePlan:
    """Data of a plan for the page. Raises SpecError if there are no times to draw."""
    if plan.chosen.prediction is None:
        rule = f"{plan.chosen.cluster.name} has rates that are measured at run time, and the page draws times"
        raise mistake("gpus", rule, "Name accelerators such as 8xh100.")
    options, searched = plan.request.options, plan.searched
    tokens = None if options.tokens is None else parse_tokens(options.tokens)
    if searched is None:
        return PagePlan(plan.chosen, plan.to_dict(), conditions=conditions(options), tokens=tokens)

    @cache
    def explanation() -> dict[str, Any]:
        from ultrascale.api.planning.plan_search import explained

        complete = searched if searched.scaling_points or searched.better_clusters else explained(searched)
        return complete.to_json(top=options.top, explained=True)["explanation"]

    @cache
    def sufficient() -> str:
        from ultrascale.api.planning.plan_search import sufficient_gpus

        return sufficient_gpus(searched)

    return PagePlan(plan.chosen, plan.to_dict(), searched.result, conditions(options), tokens, explanation, sufficient)


def write_drawn(plan: Plan, html: str | None, png_folder: str | None) -> None:
    """Write the plan as one self-contained HTML file, and its charts as PNGs. Raises SpecError if there are no times to draw,
    NotInstalledError without matplotlib."""
    drawn = answer(page_plan(plan), list(plan.request.words))
    if html is not None:
        write_output(html, plan_file(drawn))
    if png_folder is not None:
        with naming_extras("plan --png"):
            write_pictures(drawn, Path(png_folder))
