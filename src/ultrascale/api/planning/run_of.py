"""The run that a request to the planner is about, with its machines and conditions.

If `--model ... --gpus ...` replace a run's file, it is the run whose layout `ultrascale plan` chooses for the same options.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ultrascale.api.keywords import VerbRequest
from ultrascale.api.planning.plan_request import SHORT, PlanOptions
from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.launch.events import longest_seconds
from ultrascale.plan.costs.storage import Storage

LONGEST_DEFAULT = 8192
"""Default sequence length in tokens; shorter if the model has fewer positions."""


def run_defaults(options: PlanOptions, *, dp: int) -> dict[str, Any]:
    """Default settings of a run without a file. `dp`: number of data-parallel ranks."""
    assert options.gpus is not None
    return {
        "batch.sequence_length": LONGEST_DEFAULT,
        "batch.sequences_per_batch": dp * (options.micro_batch_size or 1),
        "layout.dp": dp,
        "layout.precision": "fp32" if parse_cluster(options.gpus).accelerator.name == "cpu" else "bf16",
    } | mask_default(options)


def mask_default(options: PlanOptions) -> dict[str, Any]:
    """Intra-document masking is our trainer's default. Other trainers' own is one stream of tokens, which their printed
    settings train too."""
    return {} if options.stack == "ultrascale" else {"data.document_mask": False}


def model_settings(model: str) -> dict[str, Any]:
    """Settings of a model that is given as a folder, its config.json, or the name of a preset."""
    path = Path(model).expanduser()
    return {"model.path": str(path)} if path.is_dir() or path.is_file() else {"model.preset": model}


def overrides(options: PlanOptions, *, of_layout: bool = True) -> list[str]:
    """The machines, the model and the short flags as dotted flags. `of_layout`: those of the layout too."""
    machines = {} if options.gpus is None else {"cluster": options.gpus}
    model = {} if options.model is None else model_settings(options.model)
    short = {key: value for flag, key in SHORT.items() if (value := getattr(options, flag)) is not None}
    return as_flags(machines | model | {key: short[key] for key in short if of_layout or not key.startswith("layout.")})


def fills_machines(options: PlanOptions, settings: tuple[str, ...]) -> bool:
    """True if dp is what the other axes leave of the GPUs that are named for a run's file."""
    return options.gpus is not None and options.dp is None and "layout.dp" not in names_of_flags(settings)


def as_flags(words: dict[str, Any]) -> list[str]:
    """Dotted settings as command-line words."""
    return [word for key, value in words.items() for word in (f"--{key.replace('_', '-')}", str(value))]


def names_of_flags(words: tuple[str, ...] | list[str]) -> set[str]:
    """Names of the flags among these words."""
    return {word.partition("=")[0].replace("_", "-").removeprefix("--") for word in words if word.startswith("--")}


def has_flag(words: tuple[str, ...], *names: str) -> bool:
    """True if one of these settings is given, as a short or a dotted flag."""
    return not {name.removeprefix("layout.") for name in names_of_flags(words)}.isdisjoint(names)


def cluster_of(run: Run) -> Cluster:
    """The run's machines, one device per rank of its layout. Raises SpecError if there are fewer."""
    world = run.layout.world_size
    cluster = parse_cluster(f"{world}xcpu" if run.cluster == "auto" else run.cluster)
    if cluster.num_accelerators < world:
        rule = f"{world} ranks do not fit on {cluster.name}, which has {cluster.num_accelerators}"
        axis = max(("dp", "tp", "cp", "pp"), key=lambda name: (name == "dp" and run.layout.dp > 1, getattr(run.layout, name)))
        raise mistake(f"layout.{axis}", rule, "Lower it, or plan for more (--gpus).")
    return replace(cluster, num_accelerators=world)


def conditions(options: PlanOptions) -> dict[str, Any]:
    """Conditions of the request: expert imbalance, storage bandwidth, and seconds that a checkpoint blocks training."""
    gbytes, minutes = options.storage_gbytes, options.checkpoint_minutes
    storage = None if gbytes is None else Storage(gbytes * 1e9, None if minutes is None else minutes * 60)
    return {"expert_imbalance": options.expert_imbalance, "storage": storage, "save_seconds": _save_seconds(options)}


def _save_seconds(options: PlanOptions) -> float | None:
    """Seconds that a checkpoint blocks training, as given or from the metrics of the run's folder; None without either."""
    if options.save_seconds is not None or options.file is None:
        return options.save_seconds
    return longest_seconds(Path(options.file) / "metrics.jsonl", "perf/save_s") or None


@dataclass(frozen=True)
class ModelAndMachines:
    """A model and machines that replace a run's file."""

    model: str | None
    gpus: str | None
    seq_len: int | None
    tokens_per_batch: str | None

    @classmethod
    def of(cls, options: Any) -> ModelAndMachines:
        """Model and machines of a verb's options."""
        return cls(options.model, options.gpus, options.seq_len, options.tokens_per_batch)

    @property
    def is_given(self) -> bool:
        """True if any of the fields is given."""
        return any(value is not None for value in vars(self).values())


def planned_run(described: ModelAndMachines, settings: tuple[str, ...] | list[str], *, run: str | None, verb: str) -> Run:
    """The run of the best layout that `ultrascale train` can run. `run`: a file that is also given, which is a contradiction.

    Raises SpecError if the request is invalid or no layout fits.
    """
    from ultrascale.api.planning.plan import answer

    if run is not None:
        remedy = "Keep one of the two; settings of a file are changed by flags such as --layout.tp 2."
        raise mistake("--model", f"describes a run, and the file {run} is given too", remedy)
    words = [word for name, value in vars(described).items() if value for word in (f"--{name.replace('_', '-')}", str(value))]
    is_searched = described.gpus is not None and not parse_cluster(described.gpus).accelerator.measured_at_run_time
    options = PlanOptions(**vars(described), runnable=is_searched)
    request = VerbRequest(options, tuple(settings), (), (*words, *settings))
    plan = answer(request)
    if not plan.fits:
        rule = f"no layout of {described.model} fits on {described.gpus}"
        raise mistake("--gpus", rule, f"{plan.command} says how much is missing; {verb} fewer or larger GPUs.")
    return plan.run
