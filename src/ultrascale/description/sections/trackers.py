"""Experiment trackers: the tables `[log.wandb]`, `[log.mlflow]`, `[log.trackio]` and `[log.tensorboard]` of a run's file.

A table turns its tracker on; `log.sinks`, where it is given too, has the last word. None of them holds a key or a password:
each tracker reads its own from its own variable or file.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from ultrascale.description.problems import Problem

Sink = Literal["wandb", "mlflow", "trackio", "tensorboard"]
SINKS: tuple[Sink, ...] = get_args(Sink)
_WITH_PASSWORD = re.compile(r"\w+://[^/]*@")
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True)
class Wandb:
    """Weights & Biases. Its key: WANDB_API_KEY, or `wandb login`."""

    project: str = "ultrascale"
    """Project in which runs are compared."""
    entity: str | None = None
    """User or team that owns the project. None: the key's own."""
    group: str | None = None
    """Runs shown as one, such as seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """Labels to filter runs by."""
    id: str | None = None
    """Go on with this tracked run. None: the one that the run's folder began, or a new one."""
    offline: bool = False
    """Write to the run's folder; `wandb sync` sends it later."""
    url: str | None = None
    """A server of one's own (WANDB_BASE_URL). None: wandb.ai."""


@dataclass(frozen=True)
class Mlflow:
    """MLflow. Its keys: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    project: str = "ultrascale"
    """Experiment that runs belong to; it is made if need be."""
    entity: str | None = None
    """User that the run is filed under (the tag mlflow.user)."""
    group: str | None = None
    """The tag `group`, to filter runs by."""
    tags: tuple[str, ...] = ()
    """Labels: NAME=VALUE, or NAME, which is set to true."""
    id: str | None = None
    """Go on with this run id. None: the one that the run's folder began, or a new one."""
    offline: bool = False
    """Write to the run's folder: mlflow.db, or `mlruns` where mlflow-skinny alone is installed."""
    url: str | None = None
    """Tracking server or database. None: MLFLOW_TRACKING_URI."""


@dataclass(frozen=True)
class Trackio:
    """Trackio. Its key, for a space: HF_TOKEN, or `hf auth login`."""

    project: str = "ultrascale"
    """Dashboard that runs are compared in."""
    entity: str | None = None
    """Hugging Face space that shows the dashboard, as USER/NAME. None: this machine's own, `trackio show`."""
    group: str | None = None
    """Runs shown as one."""
    tags: tuple[str, ...] = ()
    """Labels, in the run's settings."""
    id: str | None = None
    """Name of the run in Trackio, to go on with it. None: the one that the run's folder began, or a new one."""
    offline: bool = False
    """Write to the run's folder (its TRACKIO_DIR) and to no space."""


@dataclass(frozen=True)
class Tensorboard:
    """TensorBoard's event files. It has no server and no keys."""

    project: str | None = None
    """Folder of event files, in which each run gets one of its own. None: `tensorboard` in the run's folder."""
    group: str | None = None
    """A folder between the two."""
    tags: tuple[str, ...] = ()
    """Labels, in the text beside the curves."""
    id: str | None = None
    """Name of the run's own folder in `project`. None: the one that the run's folder began, or a new one."""


@dataclass(frozen=True)
class Log:
    """Metrics and their trackers."""

    every_steps: int = 1
    """Write metrics and the console line after each multiple of this many steps."""
    sinks: tuple[Sink, ...] = ()
    """Trackers that follow `metrics.jsonl`, each imported only when named here. A table such as [log.wandb] names it too."""
    gradient_noise_scale: bool = False
    """Estimate the critical batch size online (McCandlish et al. 2018). Needs at least two micro-batches or ranks a step."""
    memory_steps: int = 4
    """Measure live memory by category over this many first steps and put it beside the plan. 0: never. On the CPU not with
    `compile`, which counting would keep from compiling."""
    system_metrics: bool = True
    """Processor, memory, disk and GPUs of the first rank's machine, to trackers."""
    wandb: Wandb = field(default_factory=Wandb)
    mlflow: Mlflow = field(default_factory=Mlflow)
    trackio: Trackio = field(default_factory=Trackio)
    tensorboard: Tensorboard = field(default_factory=Tensorboard)


def sinks_named(keys: Iterable[str]) -> tuple[Sink, ...]:
    """Trackers that dotted keys or names of tables speak of: `log.wandb`, `log.wandb.project`."""
    named = {key.split(".")[1] for key in keys if key.startswith("log.")}
    return tuple(sink for sink in SINKS if sink in named)


def tracker_problems(log: Log) -> Iterator[Problem]:
    """Settings that no tracker would take."""
    for sink in SINKS:
        settings = getattr(log, sink)
        identity, url = settings.id, getattr(settings, "url", None)
        if identity is not None and not _ID.fullmatch(identity):
            rule = f"must be letters, digits, '.', '_' and '-', is {identity!r}"
            yield Problem(f"log.{sink}.id", rule, "Copy it from the tracker's page of the run.")
        if url is not None and _WITH_PASSWORD.match(url):
            rule = "holds a name or password, and the run's folder would keep it"
            yield Problem(f"log.{sink}.url", rule, "Leave it out of the address: the tracker reads it from its own variables.")
        if settings.project == "":
            yield Problem(f"log.{sink}.project", "must not be empty", "Name one, or leave it out.")
    if log.trackio.entity is not None and not re.fullmatch(r"[\w.-]+/[\w.-]+", log.trackio.entity):
        rule = f"must be USER/NAME, is {log.trackio.entity!r}"
        yield Problem("log.trackio.entity", rule, "Name a space, or leave it out.")


def tracker_notes(log: Log) -> list[str]:
    """Tables that are set and not used."""
    unused = [sink for sink in SINKS if sink not in log.sinks and getattr(log, sink) != _default(sink)]
    return [f"log.{sink} has no effect: log.sinks does not name {sink}." for sink in unused]


def _default(sink: str) -> Any:
    return next(log_field.default_factory() for log_field in fields(Log) if log_field.name == sink)  # type: ignore[misc]
