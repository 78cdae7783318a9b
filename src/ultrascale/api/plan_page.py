"""A plan as what a page draws, and `plan --html`'s one file."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from ultrascale.api.plan_result import Plan
from ultrascale.api.run_of import conditions
from ultrascale.page.shown import Planned
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.units import parse_tokens


def drawn(found: Plan) -> Planned:
    """What a page draws of a plan. Raises SpecError where there are no times to draw."""
    if found.chosen.prediction is None:
        rule = f"{found.chosen.cluster.name} has rates that are measured at run time, and the page draws times"
        raise SpecError([Problem("gpus", rule, "Name accelerators such as 8xh100, or leave --html out.")])
    options, searched = found.request.options, found.searched
    tokens = None if options.tokens is None else parse_tokens(options.tokens)
    if searched is None:
        return Planned(found.chosen, found.to_dict(), conditions=conditions(options), tokens=tokens)

    @cache
    def explanation() -> dict[str, Any]:
        from ultrascale.api.plan_search import explained

        told = searched if searched.scan or searched.others else explained(searched)
        return told.to_json(top=options.top, explained=True)["explanation"]

    return Planned(found.chosen, found.to_dict(), searched.result, conditions(options), tokens, explanation)


def write_html(found: Plan, path: str) -> None:
    """The plan as one file that needs nothing else. Raises SpecError where there are no times to draw."""
    from ultrascale.page.one_file import one_file
    from ultrascale.page.shown import answer

    Path(path).write_text(one_file(answer(drawn(found), list(found.request.words))), encoding="utf-8")
