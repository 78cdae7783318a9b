"""`ultrascale plan` as a function: plans the layout of a run's file, or finds the best layout of a model on machines.

Three kinds of request:

    a run's file                       its own layout
    a model on accelerators            a search over all layouts (`api.planning.plan_search`)
    a model on an unmeasured machine   ZeRO stages and recomputation compared by memory
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import prod
from os import PathLike, fspath
from pathlib import Path
from typing import Any

from ultrascale.api.keywords import read_keywords
from ultrascale.api.planning.plan_conflicts import (
    refuse_conflicts,
    refuse_imbalance,
    refuse_on_measured_device,
    refuse_precision,
)
from ultrascale.api.planning.plan_request import PlanOptions, PlanRequest
from ultrascale.api.planning.plan_result import Comparison, Plan, Search
from ultrascale.api.planning.run_of import (
    cluster_of,
    conditions,
    fills_machines,
    has_flag,
    mask_default,
    overrides,
    run_defaults,
)
from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.catalogue.stacks.stack import Stack, with_optimizer
from ultrascale.catalogue.stacks.stack_files import changed_stack, in_precision
from ultrascale.config.layers import read_flags
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.description.problems import SpecError, mistake
from ultrascale.output_file import write_output
from ultrascale.plan.report import RunPlan, alternatives, first_that_fits, has_rates, plan_run


def plan(
    model: str | PathLike[str] | None = None,
    gpus: str | None = None,
    *,
    seq_len: int | None = None,
    tokens_per_batch: str | int | None = None,
    **settings: Any,
) -> Plan:
    """Find the best layout of a model on machines, `plan("llama-3-8b", "64xh100")`, or plan a run's own layout,
    `plan("run.toml")`.

    Returns a Plan: memory in bytes, step time in seconds with an 80% prediction interval, MFU. `settings` are the flags of
    `ultrascale plan` by name, `zero_stage=3`, `tp=[4, 8]`, `stack="megatron"`, and settings of a run,
    `layout={"attention": "sdpa"}`. Raises SpecError with every invalid argument.
    """
    keywords = {"seq_len": seq_len, "tokens_per_batch": tokens_per_batch, **settings}
    return answer(plan_request(model, gpus, keywords))


def search(
    model: str | PathLike[str] | None = None,
    gpus: str | None = None,
    *,
    seq_len: int | None = None,
    tokens_per_batch: str | int | None = None,
    **settings: Any,
) -> Search:
    """Rank all layouts of a model on machines; `plan` with the same arguments returns the first.

    Raises SpecError if an argument is invalid.
    """
    keywords = {"seq_len": seq_len, "tokens_per_batch": tokens_per_batch, **settings}
    planned = answer(plan_request(model, gpus, keywords))
    if planned.searched is None:
        what = "a run's file has one layout" if planned.request.options.file else "this machine's speed is measured at run time"
        raise mistake("search", f"has nothing to rank: {what}", "Give a model and accelerators, or call plan.")
    return Search(planned, planned.searched)


def compare(a: Plan | str | PathLike[str], b: Plan | str | PathLike[str]) -> Comparison:
    """Compare two plans, largest differences first. A run's file stands for its plan. Raises SpecError if it is invalid."""
    for name, source in (("a", a), ("b", b)):
        if not isinstance(source, Plan | str | PathLike):
            rule = f"must be a plan or the file of a run, is {source!r}"
            raise mistake(name, rule, 'Give what us.plan returned, or "run.toml".')
    return Comparison(*(source if isinstance(source, Plan) else plan(source) for source in (a, b)))


def plan_request(model: str | PathLike[str] | None, gpus: str | None, keywords: dict[str, Any]) -> PlanRequest:
    """The request that these keywords make. A first argument that ends in .toml, or a folder with run.toml, is a run."""
    first = "run" if isinstance(model, str | PathLike) and _is_run(fspath(model)) else "model"
    keywords = {first: model, "gpus": gpus, **keywords}
    return read_keywords(PlanOptions, "plan", keywords, positional=("run",))


def _is_run(path: str) -> bool:
    return path.endswith(".toml") or (path != "" and Path(path, "run.toml").is_file())


def answer(request: PlanRequest, *, report: Callable[[str], None] = lambda phase: None) -> Plan:
    """Make the requested plan and write the requested files. `report` is called with each phase of a search.

    Raises SpecError if the request is invalid.
    """
    planned, options = _answer(request, report), request.options
    if options.html is not None or options.png is not None:
        from ultrascale.api.planning.plan_page import write_drawn

        write_drawn(planned, options.html, options.png)
    return planned


def _answer(request: PlanRequest, report: Callable[[str], None]) -> Plan:
    options = request.options
    if len(options.run) > 1:
        files = f"names {len(options.run)} files: {', '.join(options.run)}"
        raise mistake("run", files, "Plan one at a time.")
    stack = changed_stack(options.stack, dict(request.stack))
    if options.precision is not None:
        stack = in_precision(stack, options.precision, dict(request.stack))
    if options.optimizer is not None:
        stack = with_optimizer(stack, options.optimizer)
    refuse_conflicts(request)
    if options.file is not None:
        return _plan_of_file(request, stack)
    cluster = _machines(request)
    refuse_precision(options, cluster)
    has = cluster.accelerator.peak_flops
    if options.precision is None and "fp16" in has and "bf16" not in has:
        request = replace(request, options=replace(options, precision="fp16"))
    if not has_rates(cluster.accelerator, request.options.precision or "bf16"):
        refuse_on_measured_device(request)
        return _compared(request)
    from ultrascale.api.planning.plan_search import explained, searched

    outcome, chosen = searched(request, cluster, stack, report)
    if outcome.result.best is not None:
        write_files(chosen, options)
    wants_why = options.explain and not options.print_flags
    return Plan(chosen, request, searched=explained(outcome, report) if wants_why else outcome)


def _plan_of_file(request: PlanRequest, stack: Stack) -> Plan:
    """Plan the layout of a run's file."""
    options, settings = request.options, request.settings
    count = parse_cluster(options.gpus or "").num_accelerators if fills_machines(options, settings) else None
    words, defaults = [*overrides(options), *settings], mask_default(options)
    run = resolve(options.file, words, defaults=defaults, processes=count, processes_flag="--gpus").run
    cluster, stack = cluster_of(run), in_precision(stack, run.layout.precision, dict(request.stack))
    refuse_imbalance(options, run.model)
    if cluster.accelerator.measured_at_run_time:
        refuse_on_measured_device(request)
    chosen = plan_run(run, cluster, stack, **conditions(options))
    _refuse_what_the_trainer_lacks(chosen)
    write_files(chosen, options)
    return Plan(chosen, request)


def _compared(request: PlanRequest) -> Plan:
    """Compare ZeRO stages and recomputation on devices of unknown speed."""
    options, gpus = request.options, request.options.gpus
    assert gpus is not None
    if options.dp_shard is not None and options.zero_stage is None:
        options = replace(options, zero_stage="1")  # the others are compared below; stage 0 shards nothing
    words = [*overrides(options), *request.settings]
    run = resolve(None, words, defaults=run_defaults(options, dp=_remaining_dp(request, gpus))).run
    any_stage, any_way = not has_flag(request.words, "zero-stage"), not has_flag(request.words, "recompute")
    plans = alternatives(run, cluster_of(run), any_stage=any_stage, any_way=any_way)
    chosen = first_that_fits(plans) or min(plans, key=lambda candidate: candidate.peak_bytes)
    write_files(chosen, options)
    return Plan(chosen, request, compared=tuple(plans))


def _remaining_dp(request: PlanRequest, gpus: str) -> int:
    """Degree of data parallelism that the settings of tp, cp and pp leave of the devices. Raises SpecError if they divide
    them into no whole number, unless dp is given."""
    given, count = read_flags(request.settings, []).entries, parse_cluster(gpus).num_accelerators
    sizes = {name: str(given[f"layout.{name}"].value) for name in ("tp", "cp", "pp") if f"layout.{name}" in given}
    together = prod(int(size) for size in sizes.values() if size.isdigit() and int(size))
    if together < count and count % together and fills_machines(request.options, request.settings):
        rule = f"of {' x '.join(sizes)} = {together} do not divide {gpus}"
        raise mistake("layout", f"ranks {rule}", "Change one of them, or the number of devices.")
    return max(1, count // together)


def _refuse_what_the_trainer_lacks(chosen: RunPlan) -> None:
    """Raises SpecError if the trainer cannot run the run's layout."""
    from ultrascale.plan.flags.trainers import cannot_express
    from ultrascale.plan.report import workload_of

    if chosen.stack.name == "ultrascale":
        return
    problems = cannot_express(workload_of(chosen.run, chosen.cluster, chosen.stack), chosen.run.layout)
    remedy = f"Change the run, such as --{{}}, or search: --model ... --gpus ... --stack {chosen.stack.name}."
    if problems:
        raise SpecError([replace(problem, remedy=remedy.format(problem.key.replace("_", "-"))) for problem in problems])


def _machines(request: PlanRequest) -> Cluster:
    """The named machines. Raises SpecError with every missing option."""
    options = request.options
    if options.model is None:
        remedy = "Give a run's TOML file, or --model llama-3-8b --gpus 8xh100."
        raise mistake("model", "is missing: nothing says what to plan", remedy)
    if options.gpus is None:
        raise mistake("gpus", "is missing: nothing says on what", "Give --gpus 8xh100, or 2xcpu for this machine.")
    return parse_cluster(options.gpus)


def write_files(chosen: RunPlan, options: PlanOptions) -> None:
    """Write the run and the requested pictures; `refuse_conflicts` has checked that they overwrite nothing."""
    if options.save is not None:
        write_output(options.save, to_toml(chosen.run))
    if options.svg is not None or options.perfetto is not None:
        from ultrascale.plan.view.step_timeline import write_step

        write_step(chosen, svg=options.svg, perfetto=options.perfetto)
