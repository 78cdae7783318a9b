"""Real packages, offline: what each has of a run that was cut off and went on."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from trackers.tracked import READ
from train.small_runs import STEPS, at_step, small_run, train_here

from ultrascale.description.run import Checkpoint
from ultrascale.description.sections.trackers import SINKS, Log, Mlflow, Tensorboard, Trackio, Wandb
from ultrascale.trackers.to_mlflow import offline_store

LOG = Log(
    memory_steps=0,
    wandb=Wandb(project="lab", group="seeds", tags=("first", "small"), offline=True),
    mlflow=Mlflow(project="lab", entity="ada", group="seeds", tags=("team=core", "small"), offline=True),
    trackio=Trackio(project="lab", group="seeds", tags=("first", "small"), offline=True),
    tensorboard=Tensorboard(tags=("first", "small")),
)


def expect_installed(sink: str) -> None:
    if find_spec(sink) is None:
        pytest.skip(f"{sink} is not installed")


class PowerCutError(Exception):
    pass


def cut_off(trainer) -> None:
    raise PowerCutError


@pytest.mark.parametrize("sink", SINKS)
def test_a_run_that_is_cut_off_and_goes_on_is_one_tracked_run_with_every_step_once(home, wait_at_the_end, sink):
    expect_installed(sink)
    wait_at_the_end(60.0)
    run = small_run(home, log=replace(LOG, sinks=(sink,)), checkpoint=Checkpoint(every_steps=4, export=False))
    with pytest.raises(PowerCutError):
        train_here(run, before_step=at_step(7, cut_off))
    ((first, tracked),) = READ[sink](home / "small").items()
    assert [step for step, _ in tracked.rows] == list(range(1, 8))

    train_here(run)  # from step 4: steps 5 to 7 once more
    ((identity, tracked),) = READ[sink](home / "small").items()
    assert identity == first
    lines = [json.loads(line) for line in (home / "small" / "metrics.jsonl").read_text().splitlines()]
    assert [step for step, _ in tracked.rows] == [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for (_, values), line in zip(tracked.rows, lines, strict=True):
        for key in ("train/loss", "train/grad_norm", "train/lr", "plan/peak_gib"):
            assert values[key] == pytest.approx(line[key], rel=1e-6)
    assert (home / "small" / "log.txt").read_text().count("warning") == 0
    settings = json.dumps(tracked.settings)
    assert "learning_rate" in settings and "0.005" in settings
    has_system = sink == "wandb" or any("system/disk_free_gib" in values for _, values in tracked.rows)
    assert has_system, "nothing of the machine"
    expect_labels(sink, tracked.labels, settings)


def expect_labels(sink: str, labels: dict, settings: str) -> None:
    if sink == "wandb":
        assert labels["project"] == "lab" and labels["group"] == "seeds" and labels["tags"] == ["first", "small"]
        assert labels["exit"] == 0 and labels["name"] == "small"
    elif sink == "mlflow":
        assert labels["project"] == "lab" and labels["status"] == "FINISHED" and labels["team"] == "core"
        assert (labels["group"], labels["small"], labels["mlflow.user"]) == ("seeds", "true", "ada")
    else:
        assert "first" in settings and "small" in settings


@pytest.mark.parametrize("sink", SINKS)
def test_a_run_goes_on_with_the_tracked_run_whose_id_is_given(home, wait_at_the_end, sink):
    expect_installed(sink)
    wait_at_the_end(60.0)
    known = "mine"
    if sink == "mlflow":  # which makes ids itself
        (home / "small").mkdir()
        url = offline_store(home / "small")
        client = importlib.import_module("mlflow").MlflowClient(url, registry_uri=url)
        known = client.create_run(client.create_experiment("lab")).info.run_id
    settings = replace(getattr(LOG, sink), id=known)
    train_here(small_run(home, log=replace(LOG, sinks=(sink,), **{sink: settings})))
    ((identity, tracked),) = READ[sink](home / "small").items()
    assert identity == (sink if sink == "tensorboard" else known)  # event files of the run's folder have no id
    assert json.loads((home / "small" / "tracked.json").read_text())["trackers"][sink]["id"] == known
    assert [step for step, _ in tracked.rows] == list(range(1, STEPS + 1))


@pytest.mark.parametrize("sink", ["wandb", "mlflow"])
def test_a_server_that_is_not_there_costs_a_line_and_not_one_bit(home, wait_at_the_end, monkeypatch, sink):
    expect_installed(sink)
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wait_at_the_end(20.0)  # until the first failure is told
    calm = small_run(home, name="calm")
    train_here(calm)
    nowhere = "http://127.0.0.1:9"
    log = Log(memory_steps=0, sinks=(sink,), wandb=Wandb(url=nowhere), mlflow=Mlflow(url=nowhere))
    run = small_run(home, log=log)
    assert train_here(run).steps_done == STEPS
    text = (home / "small" / "log.txt").read_text()
    assert text.count(f"warning: {sink} takes no rows") == 1 or "have not taken every row yet" in text
    assert losses(home / "small") == losses(home / "calm")


def losses(folder: Path) -> list[float]:
    return [json.loads(line)["train/loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_run_without_a_network_is_sent_later_by_hand_also_to_another_tracker(home):
    expect_installed("tensorboard")
    train_here(small_run(home))
    words = [sys.executable, "-m", "ultrascale.trackers", str(home / "small"), "--to", "tensorboard"]
    for _ in range(2):  # the second time there is nothing to send
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    (tracked,) = READ["tensorboard"](home / "small").values()
    assert [step for step, _ in tracked.rows] == list(range(1, STEPS + 1))
