"""Conflicts: options of `ultrascale plan` that exclude each other, or files that cannot be written. All are reported at once,
before any work.
"""

from __future__ import annotations

from math import inf
from pathlib import Path

from ultrascale.api.planning.plan_request import PlanOptions, PlanRequest
from ultrascale.api.planning.run_of import names_of_flags
from ultrascale.catalogue.cluster import Cluster
from ultrascale.catalogue.machines import missing_dtype_problem
from ultrascale.config.schema import leaves
from ultrascale.description.architecture.model import Model
from ultrascale.description.problems import Problem, SpecError, expect_none, mistake
from ultrascale.description.units import UnitError, parse_tokens
from ultrascale.plan.costs.budget import budget_problems

SEARCH_FLAGS = ("explain", "runnable", "top")
TIME_FLAGS = (
    "explain", "top", "svg", "perfetto", "html", "png", "tokens", "optimizer", "expert-imbalance", "checkpoint-minutes",
    "storage-gbytes", "save-seconds", "budget",
)  # fmt: skip
AXES = ("tp", "cp", "pp", "ep", "schedule")


def refuse_conflicts(request: PlanRequest) -> None:
    """Raises SpecError with all flags that contradict each other, files that cannot be written, and invalid token counts."""
    options = request.options
    problems = [*_contradictions(options), *_files(options), *_tokens(options.tokens), *_conditions(options)]
    problems += budget_problems(options.budget)
    if options.gpus is not None and "cluster" in names_of_flags(request.words):
        problems.append(Problem("--cluster", "names the machines, and so does --gpus", "Keep one of the two."))
    if options.top < 1:
        problems.append(Problem("--top", f"must be at least 1, is {options.top}", "10 is usual."))
    if options.file is not None:
        problems += [
            Problem(f"--{name}", "is of a search, and a run's file has one layout", "Leave it out, or give --model and --gpus.")
            for name in SEARCH_FLAGS
            if name in names_of_flags(request.words)
        ]
    expect_none(problems)


def refuse_on_measured_device(request: PlanRequest) -> None:
    """Refuses questions about time on a device whose speed is measured at run time: there, only data parallelism is compared,
    by memory."""
    options = request.options
    problems = [
        Problem(f"--{name}", "is of step times, and this machine's are measured at run time", "Leave it out.")
        for name in TIME_FLAGS
        if name in names_of_flags(request.words)
    ]
    if options.stack != "ultrascale":
        rule = f"{options.stack} is planned for accelerators, and this machine's speed is measured at run time"
        problems.append(Problem("--stack", rule, "Leave it out, or plan for an accelerator such as 8xh100."))
    for name in AXES:
        if getattr(options, name) not in (None, "1"):
            value = getattr(options, name)
            rule = f"is {value}; of a machine whose speed is measured at run time, only data parallelism is compared"
            fix = f"Fix it with --layout.{name} {value}" if str(value).isdigit() else "Leave it out"
            problems.append(Problem(f"--{name}", rule, f"{fix}, or plan for an accelerator such as 8xh100."))
    expect_none(problems)


def refuse_imbalance(options: PlanOptions, model: Model) -> None:
    """Raises SpecError if the model has no experts over which tokens could be unevenly spread, or too few for this
    imbalance."""
    value, experts = options.expert_imbalance, model.num_experts
    if value == 1.0:
        return
    if not experts:
        raise mistake("--expert-imbalance", f"is {value:g}, and the model has no experts", "Leave it out.")
    most = experts / model.num_experts_per_tok
    if value > most:
        top_k = model.num_experts_per_tok
        rule = f"is {value:g}; with {experts} experts, {top_k} a token, one gets at most {most:g} times the mean"
        raise mistake("--expert-imbalance", rule, "1.1 to 1.5 is usual.")


def refuse_precision(options: PlanOptions, cluster: Cluster) -> None:
    """Raises SpecError if the accelerator does not support the dtype."""
    accelerator, precision = cluster.accelerator, options.precision
    known = getattr(leaves()["layout.precision"].kind, "__args__", ())
    if precision is None:
        return
    if precision in known and not accelerator.measured_at_run_time and precision not in ("fp16", *accelerator.peak_flops):
        raise SpecError([missing_dtype_problem(accelerator, precision, "--precision")])


def _contradictions(options: PlanOptions) -> list[Problem]:
    pairs = [
        ("sequences_per_batch", "tokens_per_batch", "say the same thing twice", "Keep one of the two."),
        ("print_flags", "json", "both want the whole output", "Keep one of the two."),
    ]
    problems = [
        Problem(f"--{first.replace('_', '-')}", f"and --{second.replace('_', '-')} {why}", remedy)
        for first, second, why, remedy in pairs
        if getattr(options, first) not in (None, False) and getattr(options, second) not in (None, False)
    ]
    if options.runnable and options.stack != "ultrascale":
        rule = f"is about `ultrascale train`, and the plan is for {options.stack}"
        problems.append(Problem("--runnable", rule, "Leave out one of the two."))
    return problems


def _conditions(options: PlanOptions) -> list[Problem]:
    """Invalid values of expert imbalance, storage bandwidth and save time."""
    problems = [
        Problem(
            f"--{name.replace('_', '-')}", f"must be a positive number, is {getattr(options, name):g}", f"{usual} is usual."
        )
        for name, usual in (("checkpoint_minutes", 30), ("storage_gbytes", 100), ("save_seconds", 10))
        if getattr(options, name) is not None and not 0 < getattr(options, name) < inf
    ]
    if options.checkpoint_minutes is not None and options.storage_gbytes is None:
        rule = "says how often, and nothing says how fast the storage is"
        problems.append(Problem("--checkpoint-minutes", rule, "Give --storage-gbytes 100 too."))
    if not 1 <= options.expert_imbalance < inf:
        rule = f"is the busiest rank over the mean: at least 1, is {options.expert_imbalance:g}"
        problems.append(Problem("--expert-imbalance", rule, "1.1 to 1.5 is usual."))
    return problems


def _files(options: PlanOptions) -> list[Problem]:
    """Output files that already exist (pictures and traces may be overwritten), and folders that do not exist."""
    problems = []
    for name, drawn in (("save", None), ("svg", ".svg"), ("perfetto", ".json"), ("html", ".html")):
        if getattr(options, name) is None:
            continue
        path = Path(getattr(options, name))
        if not getattr(options, name):
            problems.append(Problem(f"--{name}", "is empty: a path of no letters", "Name a file."))
        elif path.is_dir():
            example = path / f"plan{drawn or '.toml'}"
            problems.append(Problem(f"--{name}", f"{path} is a folder", f"Name a file, such as {example}."))
        elif path.exists() and path.suffix != drawn:
            problems.append(Problem(f"--{name}", f"{path} is there already", "Name another file, or remove it."))
        elif not path.parent.is_dir():
            problems.append(Problem(f"--{name}", f"the folder {path.parent} is not there", f"mkdir -p {path.parent}"))
    if options.png == "":
        problems.append(Problem("--png", "is empty: a path of no letters", "Name a folder; . is the current one."))
    elif options.png is not None and Path(options.png).exists() and not Path(options.png).is_dir():
        problems.append(Problem("--png", f"{options.png} is a file", "Name a folder, new or old."))
    return problems


def _tokens(text: str | None) -> list[Problem]:
    if text is None:
        return []
    try:
        return [] if parse_tokens(text) else [Problem("--tokens", "must be more than 0", "Write 300B or 1T.")]
    except UnitError as error:
        return [Problem("--tokens", str(error), "Write 300B or 1T.")]
