"""Steps that are timed beside the plan, on one rank and on two."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Batch
from ultrascale.launch.forked import run_forked
from ultrascale.train import speed
from ultrascale.train.speed import Speed, measure_speed


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speed")
    make_corpus(folder / "tokens")
    return small_run(folder, batch=Batch(sequence_length=12, sequences_per_batch=8))


def _rank(rendezvous, run, out):
    found = measure_speed(run, 3, out, warm=2, rendezvous=rendezvous)
    return None if found is None else found.ranks


def test_what_is_measured_stands_in_the_file(run, tmp_path):
    found = measure_speed(run, 3, tmp_path / "speed.json", warm=2)
    assert found is not None
    assert Speed(**json.loads((tmp_path / "speed.json").read_text())) == found
    assert len(found.step_seconds) == 3 and found.tokens_per_step == 8 * 12
    assert found.measured_peak_bytes == pytest.approx(found.planned_peak_bytes, rel=0.01)
    assert found.tokens_per_second_per_rank == pytest.approx(8 * 12 / found.median_seconds)
    assert {path.name for path in tmp_path.iterdir()} == {"speed.json"}


def test_of_several_ranks_the_fullest_is_told(run, tmp_path):
    """A pipeline whose first stage has all the blocks."""
    uneven = replace(run, layout=Layout(pp=2, layers_per_stage=(2, 0), micro_batch_size=4))
    out = tmp_path / "speed.json"
    assert run_forked(2, _rank, uneven, out) == [2, None]
    found = Speed(**json.loads(out.read_text()))
    assert found.fullest_rank == 0
    assert found.measured_peak_bytes == pytest.approx(found.planned_peak_bytes, rel=0.02)


def test_a_plan_for_other_machines_is_not_held_against_a_cpu(run, tmp_path):
    found = measure_speed(replace(run, cluster="1xh100"), 1, tmp_path / "speed.json", warm=1)
    assert found is not None and found.planned_step_seconds is None


def test_what_is_measured_is_not_lost_where_nothing_can_be_planned(run, tmp_path, monkeypatch):
    def refuse(*_):
        raise SpecError([Problem("cluster", "12 is not a whole number of nodes", "Choose 8xh100.")])

    monkeypatch.setattr(speed, "cluster_of", refuse)
    found = measure_speed(run, 1, tmp_path / "speed.json", warm=1)
    assert found is not None and found.planned_step_seconds is None and len(found.step_seconds) == 1
