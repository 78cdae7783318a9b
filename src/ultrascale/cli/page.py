"""`ultrascale page`: the planner in a browser, on this machine; and `question`, the one function behind every page.

This file is where the page meets the planner: it reads the words of a question as `ultrascale plan` does, and plans.
"""

from __future__ import annotations

import io
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import tyro

from ultrascale.cli import plan as verb
from ultrascale.cli.main import explain, problem_list
from ultrascale.cli.parse import parse, parse_with_overrides, take_settings
from ultrascale.cli.plan_conflicts import refuse_conflicts, refuse_imbalance, refuse_precision
from ultrascale.page.controls import words_of
from ultrascale.page.shown import Planned, answer
from ultrascale.plan.report import has_rates, plan_run, workload_of
from ultrascale.spec.cluster import Cluster
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.stack import Stack, with_optimizer
from ultrascale.spec.stack_files import changed_stack

KEPT = 8
"""Searches that are kept: asking one's reasons does not search again."""


def page(
    port: int = 0,
    no_browser: bool = False,
    build: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
    pyodide: Annotated[str | None, tyro.conf.arg(metavar="DIR")] = None,
) -> dict[str, Any]:
    """The planner in a browser: controls, memory, time, schedule, reasons.

    For example:

        ultrascale page

        ultrascale page --port 8080 --no-browser

        ultrascale page --build site --pyodide pyodide

    Serves on 127.0.0.1 only, to whoever has the link that is printed; ctrl-C ends it.

    Args:
        port: To serve on. Default: one that is free.
        no_browser: Print the link, and open no browser.
        build: Write the page as a folder that any web server serves, and that plans in the browser, without a network.
        pyodide: With --build: a folder with Pyodide (npm package pyodide), its wheel of NumPy and the wheels of ultrascale,
            tyro and rich with what they need.
    """
    return locals()


def command(arguments: list[str]) -> int:
    """Serve until Ctrl-C, or write the folder."""
    asked = parse(page, "page", arguments)
    if asked["build"] is not None:
        from ultrascale.page.folder import build

        print(build(Path(asked["build"]), None if asked["pyodide"] is None else Path(asked["pyodide"])))
        return 0
    if asked["pyodide"] is not None:
        raise SpecError([Problem("--pyodide", "is for --build, and nothing is built", "Add --build DIR, or leave it out.")])
    if not 0 <= asked["port"] <= 65535:
        raise SpecError([Problem("--port", f"must be from 0 to 65535, is {asked['port']}", "Leave it out for a free one.")])
    from ultrascale.page.server import serve

    serve(question, port=asked["port"], opens_browser=not asked["no_browser"])
    return 0


def question(asked: dict[str, Any]) -> dict[str, Any]:
    """The answer to a page's question (`page.controls`): what is drawn (`page.shown`), or {"error": ...}, what the command
    line says to the same."""
    with TemporaryDirectory() as folder:
        said = io.StringIO()
        try:
            with redirect_stderr(said), redirect_stdout(said):
                words = words_of(asked, Path(folder))
                return answer(planned(words), [word.replace(f"{folder}/dropped/", "") for word in words])
        except SpecError as error:
            text = problem_list(error)
        except SystemExit:  # tyro has printed why
            text = said.getvalue()
        except Exception as error:
            with redirect_stderr(said):
                explain(error, "plan")  # raises again what is not meant for people
            text = said.getvalue()
        return {"error": text.replace(f"{folder}/dropped/", "").strip()}


def planned(words: list[str]) -> Planned:
    """The plan that `ultrascale plan` makes of these words. Raises SpecError, or SystemExit for words it cannot read."""
    own = [word for word in words if word != "--explain"]
    has_file = any(Path(word.removeprefix("--model=")).is_file() for word in own)  # dropped: the next has the same name
    found = _planned(own) if has_file else _kept(tuple(own))
    return found if len(own) == len(words) else explained(found)


def explained(found: Planned) -> Planned:
    """`found` with what --explain adds, of a search."""
    if found.explanation is None:
        return found
    return replace(found, json=found.json | {"search": found.json["search"] | {"explanation": found.explanation()}})


@lru_cache(maxsize=KEPT)
def _kept(words: tuple[str, ...]) -> Planned:
    return _planned([*words])


def _planned(words: list[str]) -> Planned:
    settings, others = take_settings(words, "stack")
    parsed, rest = parse_with_overrides(verb.plan, "plan", others)
    stack = changed_stack(parsed["stack"], settings)
    if parsed["optimizer"] is not None:
        stack = with_optimizer(stack, parsed["optimizer"])
    refuse_conflicts(parsed, words)
    return planned_of(parsed, rest, stack)


def planned_of(parsed: dict[str, Any], rest: list[str], stack: Stack) -> Planned:
    """The same of words that have been read, as `cli.plan` reads them."""
    parsed = dict(parsed)
    tokens = verb.num_tokens(parsed["tokens"])
    if parsed["run"] is not None:
        return _of_run(parsed, rest, stack, tokens)
    cluster = verb._machines(parsed, rest)
    refuse_precision(parsed, cluster)
    has = cluster.accelerator.peak_flops
    if parsed["precision"] is None and "fp16" in has and "bf16" not in has:
        parsed["precision"] = "fp16"
    if not has_rates(cluster.accelerator, parsed["precision"] or "bf16"):
        if parsed["precision"] is not None:
            resolve(
                None, verb._overrides(parsed, {}), defaults=verb.run_defaults(parsed, dp=1)
            )  # says so, if there is none of this name
        rule = f"{cluster.name} has rates that are measured at run time, and the page draws times"
        raise SpecError([Problem("gpus", rule, "Name accelerators such as 8xh100, or leave --html out.")])
    return _searched(parsed, rest, cluster, stack, tokens)


def write_html(path: str, parsed: dict[str, Any], rest: list[str], arguments: list[str], stack: Stack) -> None:
    """The plan of these words as one file that needs nothing else."""
    from ultrascale.page.one_file import one_file

    found = planned_of(parsed, rest, stack)
    if parsed["explain"]:
        found = explained(found)
    Path(path).write_text(one_file(answer(found, arguments)), encoding="utf-8")


def _of_run(parsed: dict[str, Any], rest: list[str], stack: Stack, tokens: int | None) -> Planned:
    """The one layout of a run's file."""
    run = resolve(parsed["run"], [*verb._overrides(parsed, {}), *rest]).run
    if parsed["gpus"] is not None:
        words = {"cluster": parsed["gpus"], "layout.dp": verb._ranks_left(run, parsed["gpus"])}
        run = resolve(parsed["run"], [*verb._overrides(parsed, words), *rest]).run
    chosen = plan_run(run, verb.cluster_of(run), stack, **verb.conditions(parsed))
    verb._refuse_what_the_trainer_lacks(chosen)
    return Planned(chosen, verb._as_json(chosen, [chosen]), conditions=verb.conditions(parsed), tokens=tokens)


def _searched(parsed: dict[str, Any], rest: list[str], cluster: Cluster, stack: Stack, tokens: int | None) -> Planned:
    """The best of all layouts."""
    from ultrascale.cli import plan_search as found

    settings, others = found._split(parsed, rest)
    asked, base = found._choices(settings)
    run = found._described(parsed, others, asked, base, cluster)
    refuse_imbalance(parsed, run.model)
    if problems := found.not_searched(stack, base):
        raise SpecError(problems)
    conditions = verb.conditions(parsed)
    result = found.search(workload_of(replace(run, layout=base), cluster, stack, **conditions), base=base, asked=asked)
    best = result.best or result.smallest
    assert best is not None
    layout = replace(best.layout, **{name: getattr(base, name) for name in found.NOT_IN_TABLES})
    chosen = plan_run(replace(run, layout=layout), cluster, stack, **conditions)
    json = found._as_json(result, chosen, parsed, base, asked)

    @cache
    def explanation() -> dict[str, Any]:
        return found._explanation_json(result, *found._compared(result, base, asked))

    return Planned(chosen, json, result, conditions, tokens, explanation)
