"""Steps of real runs under the profiler: the parts sum to the step, and what is planted shows where it belongs."""

from __future__ import annotations

import gzip
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from train.small_runs import before_each_step, make_corpus, small_run

from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Run
from ultrascale.launch.forked import run_forked
from ultrascale.measure.step.categories import AXES, CATEGORIES
from ultrascale.measure.step.spans import read_trace
from ultrascale.models.decoder import Decoder
from ultrascale.train.observers.profile import profile_run
from ultrascale.train.trainer import Trainer

FIRST, LAST = 4, 5
SLEEP = {"reading": 0.1, "rank 1": 2.0}
"""Seconds. A step of the smallest model takes a hundredth; on a busy machine a rank may lose tenths by itself."""


def profiled(folder: Path, plant: str, **layout: Any) -> Run:
    return small_run(folder, name=plant, layout=Layout(**layout), batch=Batch(sequence_length=12, sequences_per_batch=8))


def plant_sleep(plant: str, rank: int) -> None:
    """Let reading sleep, on every rank, or one rank's forward passes."""
    owner: Any = {"reading": Loader, "rank 1": Decoder}.get(plant)
    if owner is None or (plant == "rank 1" and rank != 1):
        return
    name = {Loader: "read", Decoder: "forward"}[owner]
    original = getattr(owner, name)

    def late(*arguments: Any, **options: Any) -> Any:
        time.sleep(SLEEP[plant])
        return original(*arguments, **options)

    setattr(owner, name, late)


def profile_ranks(rendezvous: str, run: Run, folder: str) -> dict[str, Any] | None:
    import os

    torch.set_num_threads(1)
    plant_sleep(run.name, int(os.environ["RANK"]))
    report = profile_run(run, FIRST, LAST, Path(folder), rendezvous=rendezvous, pictures=run.name == "nothing")
    return None if report is None else report.to_json()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    make_corpus(folder / "tokens", num_tokens=2000)
    return folder


@pytest.fixture(scope="module")
def reports(corpus) -> dict[str, dict[str, Any]]:
    """Of two ranks under ZeRO 2: as they are, with slow reading, and with one slow rank."""
    found = {}
    for plant in ("nothing", "reading", "rank 1"):
        run = profiled(corpus, plant, dp=2, zero_stage=2, micro_batch_size=4)
        found[plant] = run_forked(2, profile_ranks, run, str(corpus / plant))[0]
    return found


def of_rank(report: dict[str, Any], rank: int, category: str) -> float:
    return report["ranks"][rank]["mean"][category]


def test_the_parts_sum_to_the_step(reports):
    for rank in reports["nothing"]["ranks"]:
        assert sum(rank["mean"].values()) == pytest.approx(sum(rank["step_seconds"]) / len(rank["step_seconds"]), rel=1e-6)
        assert set(rank["mean"]) == set(CATEGORIES)
        assert len(rank["step_seconds"]) == LAST - FIRST + 1


def test_everything_a_step_of_zero_2_does_has_a_share(reports):
    for rank in (0, 1):
        present = ("matrix products", "attention", "element-wise", "optimizer", "dp", "all ranks", "data wait", "launch gaps")
        assert all(of_rank(reports["nothing"], rank, name) > 0 for name in present)
        assert all(of_rank(reports["nothing"], rank, name) == 0 for name in set(AXES) - {"dp"})


def test_a_slow_reader_shows_as_data_wait(reports):
    for rank in (0, 1):
        assert of_rank(reports["reading"], rank, "data wait") >= SLEEP["reading"]


def test_a_slow_rank_shows_as_exposed_messages_on_the_other(reports):
    slow = reports["rank 1"]
    assert of_rank(slow, 1, "launch gaps") >= SLEEP["rank 1"]
    assert of_rank(slow, 0, "dp") > SLEEP["rank 1"] / 5


def test_traces_pictures_and_the_memory_of_the_first_steps_are_written(reports, corpus):
    folder = corpus / "nothing"
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "rank-0.json.gz", "rank-1.json.gz", "merged.json.gz", "memory.json", "report.json", "steps.png", "memory.png",
    }  # fmt: skip
    memory = json.loads((folder / "memory.json").read_text())
    assert {row["step"] for row in memory["measured_timeline"]} == {row["step"] for row in memory["planned_timeline"]} == {1, 2}
    assert abs(memory["difference_percent"]) < 10
    assert len(read_trace(folder / "rank-1.json.gz").steps) == 2
    merged = json.loads(gzip.decompress((folder / "merged.json.gz").read_bytes()))["traceEvents"]
    assert {event["tid"] for event in merged if event["ph"] == "X"} == {0, 1}


@pytest.mark.parametrize(
    ("layout", "shown"),
    [({"tp": 2}, "tp"), ({"cp": 2}, "cp"), ({"pp": 2, "micro_batch_size": 2}, "pp"), ({"dp": 2, "zero_stage": 3}, "dp")],
)
def test_each_axis_is_told_by_its_name(corpus, tmp_path, layout, shown):
    run = profiled(corpus, f"axis-{shown}", **{"micro_batch_size": 4} | layout)
    (report, _) = run_forked(2, profile_ranks, run, str(tmp_path))
    assert all(of_rank(report, rank, shown) > 0 for rank in (0, 1))
    others = set(AXES) - {shown} - ({"dp"} if shown == "cp" else set())  # gradients are summed over cp as over dp
    assert all(of_rank(report, rank, axis) == 0 for rank in (0, 1) for axis in others)


def test_recomputation_is_chosen_as_training_chooses_it(corpus, tmp_path):
    report = profile_run(profiled(corpus, "auto", recompute="auto", micro_batch_size=4), FIRST, FIRST, tmp_path)
    assert report is not None and report.facts["layout"]["recompute"] == "blocks"


def test_recomputed_blocks_are_told_apart_and_the_trainer_is_left_as_it_was(corpus, tmp_path):
    kept: list[Trainer] = []
    run = profiled(corpus, "again", recompute="full", micro_batch_size=4)
    with before_each_step(kept.append):
        report = profile_run(run, FIRST, FIRST, tmp_path)
    assert report is not None and report.measured("recomputation") > 0
    assert set(report.planned) == {"matrix products", "attention", "recomputation"}
    attention = next(module for module in kept[0].decoder.modules() if hasattr(module, "core"))
    assert attention.core.__name__ == "attention"
    assert asdict(report.ranks[0])["communication"] == {}
