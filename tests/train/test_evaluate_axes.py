"""What a run writes about itself is the same on every axis: held-out loss, and how often each expert was chosen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stand_ins import made_up_peak
from train.small_runs import make_corpus, small_run, train_here, train_in_turn
from train.test_resume_layouts import EXPERTS, TIED_MODEL

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Evaluation, Optimizer, Run, Source

LENGTH, SEQUENCES, STEPS = 11, 4, 4
DENSE_LAYOUTS = {
    "tp": Layout(tp=2),
    "tp, sequences whole, recomputed": Layout(tp=2, sequence_parallel=False, recompute="full"),
    "cp": Layout(cp=2, zero_stage=1),
    "cp, all-to-all": Layout(cp=2, cp_method="all-to-all"),
    "pp, 1f1b": Layout(pp=2),
    "pp, zb-v": Layout(pp=2, schedule="zb-v", virtual_stages=2, micro_batch_size=2),
    "pp, dualpipe": Layout(pp=2, schedule="dualpipe"),
}
EXPERT_LAYOUTS = {
    "ep in dp": Layout(dp=2, ep=2),
    "ep in tp": Layout(tp=2, ep=2),
    "ep in cp": Layout(cp=2, ep=2),
    "expert_tp": Layout(tp=2, expert_tp=2),
    "expert_tp, sequences whole": Layout(tp=2, expert_tp=2, sequence_parallel=False),
    "pp": Layout(pp=2),
    "dualpipe": Layout(pp=2, schedule="dualpipe"),
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("axes")
    make_corpus(folder / "tokens")
    make_corpus(folder / "held-out", seed=9)
    with made_up_peak():
        yield folder


@pytest.fixture(scope="module")
def dense(home: Path) -> list[Run]:
    return trained(home, replace(TIED_MODEL, num_hidden_layers=4), DENSE_LAYOUTS)


@pytest.fixture(scope="module")
def experts(home: Path) -> list[Run]:
    return trained(
        home, replace(EXPERTS, num_hidden_layers=3, router_aux_loss_coef=0.05, router_aux_loss_scope="sequence"), EXPERT_LAYOUTS
    )


def trained(home: Path, model: Model, layouts: dict[str, Layout]) -> list[Run]:
    """The run of one process and then those of two, all done; they evaluate 11 packed sequences, which nothing divides
    and which are more than a pipeline runs at once."""
    whole, *cut = [run_of(home, model, layout, name) for name, layout in {model.model_type: Layout(), **layouts}.items()]
    train_here(whole)
    outcomes = train_in_turn([(run, None) for run in cut])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [STEPS] * len(cut)
    return [whole, *cut]


def run_of(home: Path, model: Model, layout: Layout, name: str) -> Run:
    base = small_run(home, model=model, name=name, layout=replace(layout, precision="fp64"))
    return replace(
        base,
        steps=STEPS,
        batch=Batch(sequence_length=LENGTH, sequences_per_batch=SEQUENCES),
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=1),
        data=replace(base.data, validation=(Source(str(home / "held-out")),)),
        evaluation=Evaluation(every_steps=STEPS, sequences=11),
    )


@pytest.mark.parametrize("model", ["dense", "experts"])
def test_the_held_out_loss_is_that_of_one_process_on_every_axis(model, request):
    whole, *cut = request.getfixturevalue(model)
    expected = held_out(whole)
    assert {run.name: error for run in cut if not (error := abs(held_out(run) / expected - 1)) < 1e-12} == {}


def held_out(run: Run) -> float:
    return written(run)[-1]["val/loss"]


def written(run: Run) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()]


def test_the_written_loads_of_experts_count_each_choice_of_the_step_once_on_every_axis(experts):
    """Also in the step that is followed by an evaluation, whose choices are none of its own."""
    whole, *cut = experts
    expected = loads(whole)
    chosen = LENGTH * SEQUENCES * EXPERTS.num_experts_per_tok
    assert expected.shape == (STEPS, 3, EXPERTS.num_experts)
    assert (expected.sum(2) == [0, chosen, chosen]).all()  # the first layer is dense
    assert {run.name for run in cut if not np.array_equal(loads(run), expected)} == set()


def test_the_written_extremes_of_load_are_over_the_mean_of_their_layer(experts):
    """The losses for balance too are those of one process."""
    whole, *cut = experts
    for run in (whole, *cut):
        for row, load in zip(written(run), loads(run)[:, 1:], strict=True):
            over_mean = load / load.mean(axis=1, keepdims=True)
            assert (row["moe/load_max_over_mean"], row["moe/load_min_over_mean"]) == (over_mean.max(), over_mean.min())
            assert row["moe/auxiliary_loss"] > 0, run.name
    expected = np.array([row["moe/auxiliary_loss"] for row in written(whole)])
    found = {run.name: np.array([row["moe/auxiliary_loss"] for row in written(run)]) for run in cut}
    assert {name: losses for name, losses in found.items() if not np.abs(losses / expected - 1).max() < 1e-12} == {}


def test_a_run_without_experts_writes_nothing_of_them(dense):
    assert not [key for run in dense for row in written(run) for key in row if key.startswith("moe/")]


def loads(run: Run) -> np.ndarray:
    """[steps, layers, experts]."""
    return np.array([row["moe/load"] for row in written(run)])
