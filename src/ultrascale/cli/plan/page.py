"""`ultrascale page`: the planner in a browser, on this machine; and `question`, the one function behind every page.

This file connects page and planner: it reads a question's words as `ultrascale plan` does, and plans.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro

from ultrascale.api.planning.plan import answer as answer_of
from ultrascale.api.planning.plan_page import page_plan
from ultrascale.cli.main import exit_code_and_text
from ultrascale.cli.plan.plan_command import request_of
from ultrascale.cli.terminal.parse import parse
from ultrascale.description.problems import mistake
from ultrascale.page.controls import words_of
from ultrascale.page.plan_data import PARTS, PagePlan, answer

CACHED_PLANS = 8
"""Number of cached searches, so that asking for an explanation does not search again."""


def page(
    port: int = 0,
    no_browser: bool = False,
    build: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    parts: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
) -> dict[str, Any]:
    """Open the planner in a browser: controls, memory, time, schedule, explanation.

    For example:

        ultrascale page

        ultrascale page --port 8080 --no-browser

        ultrascale page --build site

    Serves on 127.0.0.1 only, and only requests with the printed link; Ctrl-C ends it.

    Args:
        port: Port to serve on. Default: a free one.
        no_browser: Print the link without opening a browser.
        build: Write the page to a folder for any web server; it plans within the browser, without a network.
        parts: With --build: folder with the npm packages of Pyodide and NumPy. Default: downloaded by npm.
    """
    return locals()


def command(arguments: list[str]) -> int:
    """Serve until Ctrl-C, or write the folder."""
    parsed = parse(page, "page", arguments)
    if parsed["build"] is not None:
        from ultrascale.page.folder import build

        print(build(Path(parsed["build"]), None if parsed["parts"] is None else Path(parsed["parts"])))
        return 0
    if parsed["parts"] is not None:
        raise mistake("--parts", "is for --build, and nothing is built", "Add --build DIR, or leave it out.")
    if not 0 <= parsed["port"] <= 65535:
        raise mistake("--port", f"must be from 0 to 65535, is {parsed['port']}", "Leave it out for a free one.")
    from ultrascale.page.server import serve

    serve(question, port=parsed["port"], opens_browser=not parsed["no_browser"])
    return 0


def question(form: dict[str, Any]) -> dict[str, Any]:
    """Answer to a question from the page (`page.controls`): data to draw (`page.plan_data`; only one `part`, if requested), or
    {"error": ...} with the message of the command line."""
    with TemporaryDirectory() as folder:
        try:
            words = words_of(form, Path(folder))
            parts = [form["part"]] if form.get("part") in PARTS else PARTS
            return answer(planned(words), [word.replace(f"{folder}/dropped/", "") for word in words], parts=parts)
        except Exception as error:
            _, sentence = exit_code_and_text(error, "plan")  # raises again what is not an error for users
        return {"error": sentence.replace(f"{folder}/dropped/", "")}


def planned(words: list[str]) -> PagePlan:
    """Plan that `ultrascale plan` makes of these words. Raises SpecError."""
    base_words = [word for word in words if word != "--explain"]
    has_file = any(Path(word.removeprefix("--model=")).is_file() for word in base_words)  # an upload: the next has its name
    result = _planned(base_words) if has_file else _cached_plan(tuple(base_words))
    return result if len(base_words) == len(words) else explained(result)


def explained(result: PagePlan) -> PagePlan:
    """`result` with the explanation of --explain, for a search."""
    if result.explanation is None:
        return result
    return replace(result, json=result.json | {"search": result.json["search"] | {"explanation": result.explanation()}})


@lru_cache(maxsize=CACHED_PLANS)
def _cached_plan(words: tuple[str, ...]) -> PagePlan:
    return _planned([*words])


def _planned(words: list[str]) -> PagePlan:
    return page_plan(answer_of(request_of(words)))
