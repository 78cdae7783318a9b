"""What each tracker has of a run, read back by its own package."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BLOCK = 32768


@dataclass
class Tracked:
    """One tracked run."""

    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    """Steps and values, in the order that the tracker has them, repetitions included."""
    settings: dict[str, Any] = field(default_factory=dict)
    labels: dict[str, Any] = field(default_factory=dict)
    """Project, group, tags, and how it ended."""


def read_wandb(folder: Path) -> dict[str, Tracked]:
    """Of the files that `wandb sync` would send."""
    from wandb.proto import wandb_internal_pb2  # pyright: ignore[reportMissingImports]

    found: dict[str, Tracked] = {}
    for path in sorted((folder / "wandb").glob("*run-*/*.wandb")):
        for text in _records(path):
            record = wandb_internal_pb2.Record.FromString(text)
            one = found.setdefault(path.stem.removeprefix("run-"), Tracked())
            if record.HasField("run"):
                run = record.run
                one.labels |= {"project": run.project, "group": run.run_group, "tags": list(run.tags), "name": run.display_name}
                one.settings |= {item.key or item.nested_key[0]: item.value_json for item in run.config.update}
            if record.HasField("history"):
                values = {(item.key or item.nested_key[0]): item.value_json for item in record.history.item}
                numbers = {key: float(value) for key, value in values.items() if not key.startswith("_")}
                one.rows.append((record.history.step.num, numbers))
            if record.HasField("exit"):
                one.labels["exit"] = record.exit.exit_code
            if record.HasField("stats"):
                one.labels["system"] = True
    return found


def _records(path: Path) -> Iterator[bytes]:
    """Records of a LevelDB log: blocks of 32 KiB, a record in one part or in several."""
    data, position, partial = path.read_bytes(), 7, b""
    while position + 7 <= len(data):
        if BLOCK - position % BLOCK < 7:
            position += BLOCK - position % BLOCK
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + 7])
        partial += data[position + 7 : position + 7 + size]
        position += 7 + size
        if kind in (1, 4):
            yield partial
            partial = b""


def read_mlflow(folder: Path) -> dict[str, Tracked]:
    """Of the store in the run's folder."""
    from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]

    from ultrascale.trackers.to_mlflow import offline_store

    url, found = offline_store(folder), {}
    client = MlflowClient(url, registry_uri=url)
    for experiment in client.search_experiments():
        for run in client.search_runs([experiment.experiment_id]):
            points: dict[int, list[tuple[str, float]]] = {}
            for key in run.data.metrics:
                for one in client.get_metric_history(run.info.run_id, key):
                    points.setdefault(one.step, []).append((key, one.value))
            repeated = [pair for step, pairs in points.items() for pair in _rows_of(step, pairs)]
            labels = {"project": experiment.name, "status": run.info.status, **run.data.tags}
            found[run.info.run_id] = Tracked(sorted(repeated, key=lambda pair: pair[0]), dict(run.data.params), labels)
    return found


def _rows_of(step: int, pairs: list[tuple[str, float]]) -> list[tuple[int, dict[str, float]]]:
    """A row; a row more for each time that a metric has another point at this step."""
    rows: list[dict[str, float]] = []
    for key, value in pairs:
        row = next((row for row in rows if key not in row), None)
        if row is None:
            rows.append(row := {})
        row[key] = value
    return [(step, row) for row in rows]


def read_trackio(folder: Path) -> dict[str, Tracked]:
    """Of the databases in the run's folder."""
    import sqlite3

    found = {}
    for path in (folder / "trackio").glob("*.db"):
        os.environ["TRACKIO_DIR"] = str(path.parent)
        with sqlite3.connect(path) as base:
            base.row_factory = sqlite3.Row
            rows = base.execute("select run_name, step, metrics from metrics order by id").fetchall()
            configs = base.execute("select run_name, config from configs").fetchall()
        import json

        for row in rows:
            values = {key: value for key, value in json.loads(row["metrics"]).items() if isinstance(value, int | float)}
            found.setdefault(row["run_name"], Tracked()).rows.append((row["step"], values))
        for row in configs:
            found[row["run_name"]].settings |= json.loads(row["config"])
            found[row["run_name"]].labels |= {"project": path.stem}
    return found


def read_tensorboard(folder: Path) -> dict[str, Tracked]:
    """Of the event files, every event counted."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader  # pyright: ignore[reportMissingImports]

    found, values = Tracked(), {}
    for path in sorted((folder / "tensorboard").rglob("events.*")):
        for event in EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                if value.tag.startswith("run"):
                    found.settings["text"] = value.tensor.string_val[0].decode()
                elif value.tensor.float_val:
                    values.setdefault(event.step, []).append((value.tag, value.tensor.float_val[0]))
    found.rows = [row for step in sorted(values) for row in _rows_of(step, values[step])]
    return {"tensorboard": found}


READ = {"wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio, "tensorboard": read_tensorboard}
