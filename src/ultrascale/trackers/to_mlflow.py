"""MLflow, through its client, so that no run of its fluent API stays open."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from ultrascale.trackers.tracker import RunFacts

STATUS = {"end": "FINISHED", "stop": "KILLED", "crash": "FAILED"}
MOST_PARAMS, LONGEST_PARAM = 100, 6000
"""Most parameters in one request, and most characters of a value."""
COUNTER = "train/lr"
"""A metric that every row has: its last step is the run's."""


class MlflowRun:
    """A run of MLflow."""

    def __init__(self, facts: RunFacts, known: str | None):
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")  # the follower retries by itself
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "20")
        settings = facts.run.log.mlflow
        url = offline_store(facts.folder) if settings.offline else settings.url
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

        self.client = MlflowClient(url, registry_uri=url)
        if known is not None:
            self.client.update_run(known, status="RUNNING")
            self.id = known
        else:
            tags = {"mlflow.runName": facts.run.name, **dict(_tag(text) for text in settings.tags)}
            tags |= {} if settings.group is None else {"group": settings.group}
            tags |= {} if settings.entity is None else {"mlflow.user": settings.entity}
            self.id = self.client.create_run(self._experiment(settings.project), tags=tags).info.run_id
            self._params(facts)
        steps = [metric.step for metric in self.client.get_metric_history(self.id, COUNTER)] if known else []
        self.last_step = max(steps, default=-1)

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric  # pyright: ignore[reportMissingImports]

        rows = [Metric(key, value, round(seconds * 1000), step) for key, value in values.items()]
        self.client.log_batch(self.id, metrics=rows)

    def close(self, ending: str) -> None:
        self.client.set_terminated(self.id, STATUS[ending])

    def _experiment(self, name: str) -> str:
        experiment = self.client.get_experiment_by_name(name)
        return self.client.create_experiment(name) if experiment is None else experiment.experiment_id

    def _params(self, facts: RunFacts) -> None:
        from mlflow.entities import Param  # pyright: ignore[reportMissingImports]

        params = [Param(key, str(value)[:LONGEST_PARAM]) for key, value in facts.flat().items()]
        for first in range(0, len(params), MOST_PARAMS):
            self.client.log_batch(self.id, params=params[first : first + MOST_PARAMS])


def offline_store(folder: Path) -> str:
    """URI of a store in the run's folder: a database, or files if mlflow-skinny lacks the database's dependencies."""
    if find_spec("sqlalchemy") is not None:
        return f"sqlite:///{folder.resolve() / 'mlflow.db'}"
    os.environ["MLFLOW_ALLOW_FILE_STORE"] = "true"
    return (folder.resolve() / "mlruns").as_uri()


def _tag(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    return name, value if equals else "true"
