"""Experiment trackers: the tables `[log.wandb]`, `[log.mlflow]`, `[log.trackio]` and `[log.tensorboard]` of a run's file.

A table enables its tracker; `log.sinks`, if given, takes precedence. No table contains a key or a password: each tracker reads
its own from an environment variable or a file.
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
    """Weights & Biases. API key: WANDB_API_KEY, or `wandb login`."""

    project: str = "ultrascale"
    """Project of the run."""
    entity: str | None = None
    """User or team that owns the project. None: the default of the API key."""
    group: str | None = None
    """Group of runs that are shown together, such as seeds of one experiment."""
    tags: tuple[str, ...] = ()
    """Tags to filter runs by."""
    id: str | None = None
    """Id of a tracked run to resume. None: the one that the run's folder started, or a new one."""
    offline: bool = False
    """Write to the run's folder; `wandb sync` uploads it later."""
    url: str | None = None
    """URL of a self-hosted server (WANDB_BASE_URL). None: wandb.ai."""


@dataclass(frozen=True)
class Mlflow:
    """MLflow. Credentials: MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD."""

    project: str = "ultrascale"
    """Experiment of the run; created if it does not exist."""
    entity: str | None = None
    """User of the run (the tag mlflow.user)."""
    group: str | None = None
    """Value of the tag `group`, to filter runs by."""
    tags: tuple[str, ...] = ()
    """Tags: NAME=VALUE, or NAME, which is set to true."""
    id: str | None = None
    """Id of a tracked run to resume. None: the one that the run's folder started, or a new one."""
    offline: bool = False
    """Write to the run's folder: mlflow.db, or `mlruns` if only mlflow-skinny is installed."""
    url: str | None = None
    """URI of the tracking server or database. None: MLFLOW_TRACKING_URI."""


@dataclass(frozen=True)
class Trackio:
    """Trackio. Token for a space: HF_TOKEN, or `hf auth login`."""

    project: str = "ultrascale"
    """Dashboard project of the run."""
    entity: str | None = None
    """Hugging Face space of the dashboard, as USER/NAME. None: local, shown by `trackio show`."""
    group: str | None = None
    """Group of runs that are shown together."""
    tags: tuple[str, ...] = ()
    """Tags, stored in the run's configuration."""
    id: str | None = None
    """Name of a Trackio run to resume. None: the one that the run's folder started, or a new one."""
    offline: bool = False
    """Write to the run's folder (its TRACKIO_DIR) and to no space."""


@dataclass(frozen=True)
class Tensorboard:
    """TensorBoard event files. It needs no server and no credentials."""

    project: str | None = None
    """Folder of event files, with a subfolder for each run. None: `tensorboard` in the run's folder."""
    group: str | None = None
    """Subfolder of `project` for a group of runs."""
    tags: tuple[str, ...] = ()
    """Tags, shown in the text tab."""
    id: str | None = None
    """Name of the run's subfolder in `project`. None: the one that the run's folder started, or a new one."""


@dataclass(frozen=True)
class Log:
    """Metrics and their trackers."""

    every_steps: int = 1
    """Write metrics and the console line after each multiple of this many steps."""
    sinks: tuple[Sink, ...] = ()
    """Trackers that follow `metrics.jsonl`, each imported only if named. If omitted, tables such as [log.wandb] name them."""
    gradient_noise_scale: bool = False
    """Estimate the critical batch size online (McCandlish et al. 2018). Needs at least two micro-batches or ranks per step."""
    memory_steps: int = 4
    """Number of first steps over which live memory by category is measured and compared with the plan. 0: never. Not on the CPU
    with `compile`, since the measurement would prevent compilation."""
    system_metrics: bool = True
    """Send CPU, memory, disk and GPU metrics of the first rank's machine to trackers."""
    wandb: Wandb = field(default_factory=Wandb)
    mlflow: Mlflow = field(default_factory=Mlflow)
    trackio: Trackio = field(default_factory=Trackio)
    tensorboard: Tensorboard = field(default_factory=Tensorboard)


def sinks_named(keys: Iterable[str]) -> tuple[Sink, ...]:
    """Trackers named by dotted keys or by tables: `log.wandb`, `log.wandb.project`."""
    named = {key.split(".")[1] for key in keys if key.startswith("log.")}
    return tuple(sink for sink in SINKS if sink in named)


def tracker_problems(log: Log) -> Iterator[Problem]:
    """Settings that no tracker accepts."""
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
    """Notes on tables that are set but not used."""
    unused = [sink for sink in SINKS if sink not in log.sinks and getattr(log, sink) != _default(sink)]
    return [f"log.{sink} has no effect: log.sinks does not name {sink}." for sink in unused]


def _default(sink: str) -> Any:
    return next(log_field.default_factory() for log_field in fields(Log) if log_field.name == sink)  # type: ignore[misc]
