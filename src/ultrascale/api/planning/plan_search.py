"""The search behind `ultrascale plan --model ... --gpus ...`: from the request to the best layout on the machines."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from math import prod
from typing import Any

from ultrascale.api.planning.plan_conflicts import refuse_imbalance
from ultrascale.api.planning.plan_request import SHORT, PlanOptions, PlanRequest
from ultrascale.api.planning.run_of import conditions, overrides, run_defaults
from ultrascale.catalogue.cluster import Cluster
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.config.layers import read_flags, take_settings
from ultrascale.config.resolve import resolve, sequences_for_tokens
from ultrascale.config.rules.run_rules import offloaded_optimizer
from ultrascale.config.rules.trainable import untrainable
from ultrascale.config.schema import INVALID, ValueContext, convert, leaves
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, expect_none
from ultrascale.description.run import Run
from ultrascale.description.schedules import SCHEDULES
from ultrascale.description.units import UnitError, count_of, divisors, parse_tokens
from ultrascale.plan.flags.trainers import not_searched
from ultrascale.plan.report import RunPlan, plan_run, prediction_json, workload_of
from ultrascale.plan.search.explain import changes, marginals, rungs
from ultrascale.plan.search.scaling import MOST_GPUS, ScalingPoint, better_clusters, scaling, smallest_that_fits
from ultrascale.plan.search.search import TIE, SearchResult, distinct, risk, search
from ultrascale.plan.search.space import Constraints
from ultrascale.plan.time.price import Prediction
from ultrascale.plan.view.search_view import layout_words

SEARCHED_FIELDS = (
    "dp", "tp", "sequence_parallel", "cp", "cp_method", "cp_heads", "pp", "virtual_stages", "schedule", "zero_stage",
    "dp_shard", "micro_batch_size", "recompute", "recompute_every", "ep", "expert_tp", "tp_overlap",
)  # fmt: skip
MIN_BATCH_GAIN = 0.01
"""Smallest relative improvement towards the requested tokens per batch that is worth a second search."""
UNPRICED_FIELDS = ("attention", "pipeline_runtime", "fp8_amax_compute_algo")
"""Settings on which the predicted cost does not depend beyond the workload: they are restored in the chosen layout."""


@dataclass(frozen=True)
class SearchOutcome:
    """A search, with the constraints of the request."""

    result: SearchResult
    base: Layout
    """Layout fields that are not searched."""
    constraints: Constraints
    """Searched fields that are fixed to given values."""
    requested_tokens: str | None
    """Tokens per batch, as written in the request."""
    scaling_points: tuple[ScalingPoint, ...] = ()
    """Best layouts on other numbers of GPUs; only with `explain`, as for `better_clusters`."""
    better_clusters: tuple[tuple[Cluster, Prediction], ...] = ()
    """Best layouts on other GPUs."""

    @cached_property
    def smallest_that_fits(self) -> Prediction | None:
        """The smallest of the larger clusters on which a layout fits."""
        return smallest_that_fits(self.result.workload, base=self.base, constraints=self.constraints)

    def to_json(self, *, top: int, explained: bool) -> dict[str, Any]:
        """A JSON-able dictionary: the search, the `top` layouts, the Pareto front, and the explanation."""
        result, priced = self.result, self.result.priced
        document: dict[str, Any] = {
            "num_legal": len(priced.fits),
            "num_fitting": int(priced.fits.sum()),
            "num_priced": int(priced.was_priced.sum()),
            "seconds": result.seconds,
            "tie_fraction": TIE,
            "num_tied": result.num_tied,
            "ranked": [
                prediction_json(prediction) | {"out_of_memory_risk": risk(prediction)}
                for prediction in distinct(result.ranked)[:top]
            ],
            "front": [prediction_json(prediction) for prediction in result.front],
            "smallest": result.smallest and prediction_json(result.smallest),
            "refused": [asdict(refusal) for refusal in result.refused],
        }
        return document | ({"explanation": self._explanation_json()} if explained else {})

    def _explanation_json(self) -> dict[str, Any]:
        result = self.result
        return {
            "fit": [asdict(rung) for rung in rungs(result)],
            "changes": [asdict(change) for change in changes(result)],
            "worth": [asdict(marginal) for marginal in marginals(result)],
            "scaling": [_scaled_json(scaled) for scaled in self.scaling_points],
            "elsewhere": {cluster.name: prediction_json(prediction) for cluster, prediction in self.better_clusters},
        }


def sufficient_gpus(searched: SearchOutcome) -> str:
    """Sentence that names the smallest larger cluster on which a layout fits."""
    smallest = searched.smallest_that_fits
    if smallest is None:
        return f"No number of these GPUs would do{_with_settings(searched)}; {_what_might_fit(searched)} might."
    words = layout_words(smallest.layout, smallest.num_micro_batches)
    return f"{count_of(smallest.layout.world_size, 'GPU')} would do: {words}."


def _with_settings(searched: SearchOutcome) -> str:
    """The settings that the search kept, if any."""
    kept = [f"{name} {' or '.join(map(str, values))}" for name, values in searched.constraints.items()]
    return f" with {', '.join(kept)}" if kept else ""


def _what_might_fit(searched: SearchOutcome) -> str:
    """Changes after which a layout might fit. A larger batch is one if dp may grow and shards the state, and while it has fewer
    micro-batches than the most GPUs that were tried: from then on dp can be as large as they are."""
    kept = searched.constraints
    shards = set(kept.get("zero_stage", (1,))) != {0} and not {"dp", "dp_shard"} & kept.keys()
    micro_batches = searched.result.workload.sequences_per_batch // min(kept.get("micro_batch_size", (1,)))
    might = ["other settings"] if kept else []
    might += ["a larger batch"] if shards and micro_batches < MOST_GPUS else []
    return ", ".join([*might, "a shorter sequence or larger GPUs"])


def _scaled_json(scaled: ScalingPoint) -> dict[str, Any]:
    best = scaled.best and prediction_json(scaled.best)
    return {"num_gpus": scaled.num_gpus, "brings": scaled.marginal_efficiency, "pays": scaled.pays, "best": best}


def searched(
    request: PlanRequest, cluster: Cluster, stack: Stack, report: Callable[[str], None]
) -> tuple[SearchOutcome, RunPlan]:
    """Search all layouts on the machines, and plan the best; plan the smallest if none fits. `report` is called with each
    phase.

    Raises SpecError.
    """
    options = request.options
    settings, run_words = _split(request)
    constraints, base = _choices(settings)
    run, requested_tokens = _described(options, run_words, constraints, base, cluster)
    refuse_imbalance(options, run.model)
    problems = not_searched(stack, base)
    if stack.name == "ultrascale":
        problems = [*problems, *offloaded_optimizer(replace(run, layout=base))]
    expect_none(problems)
    workload = workload_of(replace(run, layout=base), cluster, stack, **conditions(options))
    if options.runnable:
        expect_none(untrainable(run.model, base))  # whatever else is chosen

    def report_share(share: float) -> None:
        report(f"{share:.0%} of the layouts searched" if share < 1 else "the fastest layouts played action by action")

    drawn = options.json or options.explain or options.html or options.png
    num_shown = options.rows if options.brief and not drawn else None
    searching = partial(search, base=base, constraints=constraints, on_progress=report_share)
    if requested_tokens is None or not _is_far(requested_tokens, run):
        result = searching(workload, shown=num_shown)
    else:
        result = searching(workload, shown=1)
        before = result.best
        if before is not None and (nearer := _nearer_batch(requested_tokens, run, before)) is not None:
            del result  # its columns, before those of the second search
            result = searching(workload.with_batch(nearer), shown=num_shown)
            if result.best is not None and result.best.tokens_per_second >= (1 - TIE) * before.tokens_per_second:
                run = replace(run, batch=replace(run.batch, sequences_per_batch=nearer))
            else:  # the nearer batch is not worth its price, such as an odd number of micro-batches
                del result
                result = searching(workload, shown=num_shown)
        else:
            result = result.replayed(num_shown)
    best = result.best or result.smallest
    assert best is not None
    layout = replace(best.layout, **{name: getattr(base, name) for name in UNPRICED_FIELDS})
    chosen = plan_run(replace(run, layout=layout), cluster, stack, **conditions(options))
    return SearchOutcome(result, base, constraints, requested_tokens), chosen


def _is_far(requested_tokens: str, run: Run) -> bool:
    """True if another batch could be worth a second search."""
    wanted = parse_tokens(requested_tokens)
    return abs(run.batch.sequences_per_batch * run.batch.sequence_length - wanted) > MIN_BATCH_GAIN * wanted


def _nearer_batch(requested_tokens: str, run: Run, best: Prediction) -> int | None:
    """Number of sequences of the batch that is nearest to the request among those that the best layout's own ranks can share,
    with a multiple of pp micro-batches where its schedule goes by rounds; None if it is hardly nearer than the batch that was
    searched, which more ranks can share."""
    length, now, layout = run.batch.sequence_length, run.batch.sequences_per_batch, best.layout
    wanted, shared = parse_tokens(requested_tokens), layout.dp * layout.micro_batch_size
    by_rounds = layout.pp > 1 and SCHEDULES[layout.schedule].in_rounds
    for multiple in (shared * layout.pp, shared) if by_rounds else (shared,):
        with suppress(UnitError):
            nearest = sequences_for_tokens(requested_tokens, length, multiple=multiple)
            if abs(now * length - wanted) - abs(nearest * length - wanted) > MIN_BATCH_GAIN * wanted:
                return nearest
    return None


def explained(searched: SearchOutcome, report: Callable[[str], None] = lambda phase: None) -> SearchOutcome:
    """Add the explanation to a search: other numbers of GPUs and other GPUs, each of which takes a search. `report` is called
    with each phase."""
    workload, best = searched.result.workload, searched.result.best
    report("searching other numbers of GPUs")
    scaling_points = scaling(workload, base=searched.base, constraints=searched.constraints, best=best)
    report("searching other GPUs")
    return replace(
        searched,
        scaling_points=tuple(scaling_points),
        better_clusters=tuple(better_clusters(workload, base=searched.base, constraints=searched.constraints, best=best)),
    )


def _split(request: PlanRequest) -> tuple[dict[str, str], list[str]]:
    """Split settings into those of the layout, by field, and the words of all others."""
    settings = {
        key.removeprefix("layout."): str(value)
        for flag, key in SHORT.items()
        if key.startswith("layout.") and (value := getattr(request.options, flag)) is not None
    }
    of_layout, run_words = take_settings(request.settings, "layout")
    return settings | of_layout, run_words


def _choices(settings: dict[str, str]) -> tuple[dict[str, tuple[Any, ...]], Layout]:
    """Requested values of the searched fields, and a layout with the others. Raises SpecError with every invalid one."""
    problems: list[Problem] = []
    constraints: dict[str, tuple[Any, ...]] = {}
    fixed: dict[str, Any] = {"precision": "bf16"}
    for name, text in settings.items():
        leaf = leaves().get(f"layout.{name}")
        if leaf is None or name == "layers_per_stage":
            rule = "is for one layout, not for a search" if leaf else "is not a key of a layout"
            problems.append(Problem(f"layout.{name}", rule, "Plan a run's file with it." if leaf else "See docs/describe.md."))
            continue
        at = ValueContext(leaf.key, "flag", text=True, problems=problems)
        values = tuple(convert(word.strip(), leaf.kind, at) for word in text.split(","))
        if INVALID in values:
            continue
        if name in SEARCHED_FIELDS:
            constraints[name] = values
        elif len(values) == 1:
            fixed[name] = values[0]
        else:
            problems.append(Problem(leaf.key, f"is not searched, and {text} are {len(values)} values", "Give one."))
    if not problems:
        problems = [p for name, values in constraints.items() for value in values for p in _range_problems(name, value)]
    expect_none(problems)
    return constraints, Layout(**fixed)


def _range_problems(name: str, value: Any) -> list[Problem]:
    """Problems of one value that do not depend on other fields."""
    in_use = {
        "cp_heads": {"cp": 2 * value, "cp_method": "ring+all-to-all"} if name == "cp_heads" and value != 1 else {},
        "schedule": {"pp": 2, "virtual_stages": 2}, "ep": {"dp": value}, "expert_tp": {"dp": value},
        "dp_shard": {"dp": value or 1, "zero_stage": 1},
    }.get(name, {})  # fmt: skip
    return [problem for problem in Layout(**{**in_use, name: value}).problems() if problem.key == f"layout.{name}"]


def _described(
    options: PlanOptions, run_words: list[str], constraints: dict[str, tuple[Any, ...]], base: Layout, cluster: Cluster
) -> tuple[Run, str | None]:
    """The run without its layout, and its tokens per batch as written. `dp` stands in for the layout, so that a batch such as
    4M becomes one that many ranks can share."""
    words = [*overrides(options, of_layout=False), *run_words]  # a layout is searched
    defaults = run_defaults(options, dp=1) | {"layout.precision": base.precision}
    length = resolve(None, words, defaults=defaults).run.batch.sequence_length
    entry = read_flags(words, []).entries.get("batch.tokens_per_batch")
    requested_tokens = options.tokens_per_batch if entry is None else entry.value
    if entry is not None:
        micro, dp = _batch_split(requested_tokens, constraints, cluster.num_accelerators, length)
        defaults |= {"layout.micro_batch_size": micro, "layout.dp": dp}
    else:
        defaults["batch.sequences_per_batch"] = cluster.num_accelerators * constraints.get("micro_batch_size", (1,))[0]
    return resolve(None, words, defaults=defaults).run, requested_tokens


def _batch_split(text: str | None, constraints: dict[str, tuple[Any, ...]], num_gpus: int, length: int) -> tuple[int, int]:
    """Micro-batch size and number of ranks that are to share the batch: the requested ones where possible."""
    micro, tokens = constraints.get("micro_batch_size", (1,))[0], _tokens(text)
    if tokens < micro * length:
        micro = 1  # the search refuses it, with a reason
    if "dp" in constraints and num_gpus % constraints["dp"][0] == 0 and constraints["dp"][0] * micro * length <= tokens:
        return micro, constraints["dp"][0]
    return micro, _sharing_ranks(text, _ranks_of_dp(constraints, num_gpus), length * micro)


def _ranks_of_dp(constraints: dict[str, tuple[Any, ...]], num_gpus: int) -> int:
    """GPUs that the requested axes leave for dp; all GPUs if the axes do not divide them, which the search refuses."""
    model_parallel = prod(constraints[axis][0] for axis in ("tp", "cp", "pp") if len(constraints.get(axis, ())) == 1)
    return num_gpus // model_parallel if model_parallel > 0 and num_gpus % model_parallel == 0 else num_gpus


def _tokens(text: str | None) -> int:
    """Tokens per batch as requested; 1 if none were, or if they cannot be read (reported where they are resolved)."""
    try:
        return parse_tokens(str(text or 1))
    except UnitError:
        return 1


def _sharing_ranks(text: str | None, num_gpus: int, tokens_of_a_pass: int) -> int:
    """Largest number of GPUs that can share the batch: tokens are rounded to a multiple of it if that is near enough, and a
    search may leave the remaining GPUs to other axes."""

    def shares(ranks: int) -> bool:
        with suppress(UnitError):
            return bool(sequences_for_tokens(str(text), tokens_of_a_pass, multiple=ranks))
        return False

    tokens = _tokens(text)
    able = [n for n in divisors(num_gpus) if n * tokens_of_a_pass <= tokens]
    return max((n for n in able if shares(n)), default=max(able, default=1))
