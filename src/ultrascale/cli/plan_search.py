"""`ultrascale plan --model ... --gpus ...`: search all layouts of the machines, print the best, and why."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from typing import Any

from ultrascale.cli import plan as verb
from ultrascale.plan.flags.trainers import not_searched
from ultrascale.plan.report import RunPlan, not_trainable, plan_run, prediction_json, workload_of
from ultrascale.plan.search.explain import changes, marginals, rungs
from ultrascale.plan.search.scaling import Scaled, elsewhere, scaling, smallest_that_fits
from ultrascale.plan.search.search import TIE, Progress, SearchResult, distinct, search
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.plan_view import show_plan
from ultrascale.plan.view.search_view import layout_words, no_layout_fits, show_explanation, show_ranking
from ultrascale.plan.workload import Workload
from ultrascale.spec.cluster import Cluster
from ultrascale.spec.layers import read_flags
from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Run
from ultrascale.spec.schema import BAD, At, convert, leaves
from ultrascale.spec.stack import Stack
from ultrascale.spec.trainable import untrainable_layout, untrainable_model
from ultrascale.spec.units import UnitError, count_of, divisors, parse_tokens

SEARCHED = (
    "dp", "tp", "sequence_parallel", "cp", "cp_method", "cp_heads", "pp", "virtual_stages", "schedule", "zero_stage",
    "dp_shard", "micro_batch_size", "recompute", "recompute_every", "ep", "expert_tp", "tp_overlap",
)  # fmt: skip
PROGRESS_SECONDS = 1.0
"""After which a search says how far it is."""
NOT_IN_TABLES = ("attention", "pipeline_runtime", "fp8_amax_compute_algo")
"""Settings of one's own that no price depends on beyond what the workload says: the chosen layout has them again."""


def searched(parsed: dict[str, Any], rest: list[str], arguments: list[str], cluster: Cluster, stack: Stack) -> int:
    """Search, print and write what is asked for: 0 if a layout fits, 1 if none does."""
    settings, others = _split(parsed, rest)
    asked, base = _choices(settings)
    run = _described(parsed, others, asked, base, cluster)
    verb.refuse_imbalance(parsed, run.model)
    if problems := not_searched(stack, base):
        raise SpecError(problems)
    workload = workload_of(replace(run, layout=base), cluster, stack, **verb.conditions(parsed))
    if parsed["runnable"]:
        _expect_runnable(run.model, base)
    with _progress() as told:
        result = search(workload, base=base, asked=asked, told=told)
    best = result.best or result.smallest
    assert best is not None
    layout = replace(best.layout, **{name: getattr(base, name) for name in NOT_IN_TABLES})
    chosen = plan_run(replace(run, layout=layout), cluster, stack, **verb.conditions(parsed))
    if result.best is not None:
        verb.write_files(chosen, parsed)
    elif unwritten := [parsed[name] for name in ("save", "svg", "perfetto") if parsed[name] is not None]:
        print(f"ultrascale: no layout fits; not written: {', '.join(unwritten)}.", file=sys.stderr)
    if parsed["print_flags"]:
        verb.print_flags(chosen)
    elif parsed["json"]:
        print(jsonlib.dumps(_as_json(result, chosen, parsed, base, asked), indent=2))
    else:
        _print(result, chosen, parsed, arguments, base, asked)
    return 0 if chosen.fits else 1


@contextmanager
def _progress() -> Iterator[Progress]:
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


def _expect_runnable(model: Model, base: Layout) -> None:
    """Raises SpecError for what the trainer does not run, whatever else is chosen."""
    if problems := [*untrainable_model(model), *untrainable_layout(base)]:
        raise SpecError(problems)


def _split(parsed: dict[str, Any], rest: list[str]) -> tuple[dict[str, str], list[str]]:
    """Settings of the layout, by field, and the words of all others."""
    settings = {
        key.removeprefix("layout."): str(parsed[flag])
        for flag, key in verb.SHORT.items()
        if key.startswith("layout.") and parsed[flag] is not None
    }
    others, words = [], list(rest)
    while words:
        word = words.pop(0)
        name, equals, value = word.replace("_", "-").partition("=")
        if not name.startswith("--layout."):
            others.append(word)
            continue
        field = name.removeprefix("--layout.").replace("-", "_")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        settings[field] = value
    return settings, others


def _choices(settings: dict[str, str]) -> tuple[dict[str, tuple[Any, ...]], Layout]:
    """What is asked of the searched fields, and a layout of the others. Raises SpecError with every wrong one."""
    problems: list[Problem] = []
    asked: dict[str, tuple[Any, ...]] = {}
    fixed: dict[str, Any] = {"precision": "bf16"}
    for name, text in settings.items():
        leaf = leaves().get(f"layout.{name}")
        if leaf is None or name == "layers_per_stage":
            rule = "is for one layout, not for a search" if leaf else "is not a key of a layout"
            problems.append(Problem(f"layout.{name}", rule, "Plan a run's file with it." if leaf else "See docs/describe.md."))
            continue
        at = At(leaf.key, "flag", text=True, problems=problems)
        values = tuple(convert(word.strip(), leaf.kind, at) for word in text.split(","))
        if BAD in values:
            continue
        if name in SEARCHED:
            asked[name] = values
        elif len(values) == 1:
            fixed[name] = values[0]
        else:
            problems.append(Problem(leaf.key, f"is not searched, and {text} are {len(values)} values", "Give one."))
    if not problems:
        problems = [p for name, values in asked.items() for value in values for p in _range_problems(name, value)]
    if problems:
        raise SpecError(problems)
    return asked, Layout(**fixed)


def _range_problems(name: str, value: Any) -> list[Problem]:
    """What is wrong with one value whatever the others are."""
    in_use = {
        "cp_heads": {"cp": 2 * value, "cp_method": "ring+all-to-all"} if name == "cp_heads" and value != 1 else {},
        "schedule": {"pp": 2, "virtual_stages": 2}, "ep": {"dp": value}, "expert_tp": {"dp": value},
        "dp_shard": {"dp": value or 1, "zero_stage": 1},
    }.get(name, {})  # fmt: skip
    return [problem for problem in Layout(**{**in_use, name: value}).problems() if problem.key == f"layout.{name}"]


def _described(
    parsed: dict[str, Any], others: list[str], asked: dict[str, tuple[Any, ...]], base: Layout, cluster: Cluster
) -> Run:
    """The run without its layout: `dp` stands in for it so that a batch such as 4M becomes one that many ranks can share."""
    batch = {key: parsed[flag] for flag, key in verb.SHORT.items() if key.startswith("batch.") and parsed[flag] is not None}
    words = [*verb.as_flags(verb.source_of(parsed["model"]) | {"cluster": parsed["gpus"]} | batch), *others]
    defaults = verb.run_defaults(parsed, dp=1) | {"layout.precision": base.precision}
    length = resolve(None, words, defaults=defaults).run.batch.sequence_length
    if "batch.tokens_per_batch" in (said := read_flags(words, []).entries):
        parsed["tokens_per_batch"] = said["batch.tokens_per_batch"].value
        micro, dp = _shares(parsed, asked, cluster.num_accelerators, length)
        defaults |= {"layout.micro_batch_size": micro, "layout.dp": dp}
    else:
        defaults["batch.sequences_per_batch"] = cluster.num_accelerators * asked.get("micro_batch_size", (1,))[0]
    return resolve(None, words, defaults=defaults).run


def _shares(parsed: dict[str, Any], asked: dict[str, tuple[Any, ...]], num_gpus: int, length: int) -> tuple[int, int]:
    """Micro-batch size and ranks among whom the batch is to be shared: those asked for, where they can be."""
    micro = asked.get("micro_batch_size", (1,))[0]
    if _tokens(parsed) < micro * length:
        micro = 1  # refused by the search, for its own reason
    if "dp" in asked and num_gpus % asked["dp"][0] == 0 and asked["dp"][0] * micro * length <= _tokens(parsed):
        return micro, asked["dp"][0]
    return micro, _sharing_ranks(parsed, _ranks_of_dp(asked, num_gpus), length * micro)


def _ranks_of_dp(asked: dict[str, tuple[Any, ...]], num_gpus: int) -> int:
    """GPUs that are left for dp by the axes that were asked for; all, where these do not divide, which the search refuses."""
    cut = prod(asked[axis][0] for axis in ("tp", "cp", "pp") if len(asked.get(axis, ())) == 1)
    return num_gpus // cut if cut > 0 and num_gpus % cut == 0 else num_gpus


def _tokens(parsed: dict[str, Any]) -> int:
    """Of the batch, as it was asked for; 1 if it was not, or cannot be read, which is told where it is resolved."""
    try:
        return parse_tokens(str(parsed["tokens_per_batch"] or 1))
    except UnitError:
        return 1


def _sharing_ranks(parsed: dict[str, Any], num_gpus: int, tokens_of_a_pass: int) -> int:
    """The most GPUs among whom the batch can be shared: a number of tokens is brought to a multiple of them."""
    tokens = _tokens(parsed)
    return max(n for n in divisors(num_gpus) if n == 1 or n * tokens_of_a_pass <= tokens)


def _print(
    result: SearchResult, chosen: RunPlan, parsed: dict[str, Any], arguments: list[str], base: Layout,
    asked: dict[str, tuple[Any, ...]],
) -> None:  # fmt: skip
    console = verb.console_for_people()
    if note := _batch_note(parsed["tokens_per_batch"], result.workload):
        console.print(f"[dim]{note}[/]\n")
    if result.best is None:
        console.print(f"[bold red]{no_layout_fits(result)}[/]")
        console.print(_what_would_fit(result.workload, base, asked) + "\n")
    else:
        show_ranking(result, console, top=parsed["top"])
        console.print()
    show_plan(chosen, console, tokens=verb.num_tokens(parsed["tokens"]))
    if parsed["explain"]:
        console.print()
        show_explanation(result, *_compared(result, base, asked), console)
    console.print(f"\n[bold]next[/bold]  {_next_command(chosen, parsed, arguments)}", soft_wrap=True)


def _batch_note(text: str | None, workload: Workload) -> str:
    """That a batch of so many tokens has become the nearest of whole sequences that many can share; empty if it has not."""
    if text is None or parse_tokens(text) == workload.tokens_per_step:
        return ""
    count = workload.sequences_per_batch
    return f"{text} tokens a batch: nearest that divide are {count_of(count, 'sequence')}, {workload.tokens_per_step:,} tokens"


def _compared(
    result: SearchResult, base: Layout, asked: dict[str, tuple[Any, ...]]
) -> tuple[list[Scaled], list[tuple[Cluster, Prediction]]]:
    """Other numbers of GPUs, and other GPUs."""
    workload, best = result.workload, result.best
    scan = scaling(workload, base=base, asked=asked, best=best)
    return scan, elsewhere(workload, base=base, asked=asked, best=best)


def _what_would_fit(workload: Workload, base: Layout, asked: dict[str, tuple[Any, ...]]) -> str:
    """The smallest larger cluster on which something fits, in a sentence."""
    one = smallest_that_fits(workload, base=base, asked=asked)
    if one is None:
        return "No number of these GPUs would do with this batch; a larger batch, a shorter sequence or larger GPUs might."
    words = layout_words(one.layout, one.num_micro_batches)
    return f"{count_of(one.layout.world_size, 'GPU')} would do: {words}."


def _next_command(chosen: RunPlan, parsed: dict[str, Any], arguments: list[str]) -> str:
    words = ["ultrascale plan", shlex.join(arguments)]
    if not chosen.fits:
        return " ".join(words) + "   with more --gpus, or a shorter --seq-len"
    if parsed["save"] is not None:
        return verb.next_of_run(chosen, [parsed["save"]])
    if chosen.stack.name != "ultrascale":
        return " ".join([*words, "--print-flags"])
    if not_trainable(chosen.run):
        return " ".join([*words, "" if parsed["explain"] else "--explain"]).rstrip()
    return " ".join([*words, "--save run.toml"])


def _as_json(
    result: SearchResult, chosen: RunPlan, parsed: dict[str, Any], base: Layout, asked: dict[str, tuple[Any, ...]]
) -> dict[str, Any]:
    priced = result.priced
    found: dict[str, Any] = {
        "num_legal": len(priced.fits),
        "num_fitting": int(priced.fits.sum()),
        "num_priced": int(priced.was_priced.sum()),
        "seconds": result.seconds,
        "tie_fraction": TIE,
        "num_tied": result.num_tied if result.ranked else 0,
        "ranked": [prediction_json(one) for one in distinct(result.ranked)[: parsed["top"]]],
        "front": [prediction_json(one) for one in result.front],
        "smallest": result.smallest and prediction_json(result.smallest),
        "refused": [asdict(one) for one in result.refused],
    }
    if parsed["explain"]:
        found["explanation"] = _explanation_json(result, *_compared(result, base, asked))
    return chosen.to_json() | {"search": found}


def _explanation_json(
    result: SearchResult, scan: Sequence[Scaled], others: Sequence[tuple[Cluster, Prediction]]
) -> dict[str, Any]:
    return {
        "fit": [asdict(one) for one in rungs(result)],
        "changes": [asdict(one) for one in changes(result)],
        "worth": [asdict(one) for one in marginals(result)],
        "scaling": [
            {"num_gpus": one.num_gpus, "brings": one.brings, "pays": one.pays, "best": one.best and prediction_json(one.best)}
            for one in scan
        ],
        "elsewhere": {cluster.name: prediction_json(one) for cluster, one in others},
    }
