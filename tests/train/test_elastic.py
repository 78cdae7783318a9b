"""A run that loses ranks and gains some again goes on as if nothing were, in layouts that the planner chooses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from train.small_runs import STEPS, largest_error, rows, small_run, state, stop_at, train_here, train_ranks

from ultrascale.cli.main import main
from ultrascale.plan.elastic import elastic_layout
from ultrascale.spec.layout import Layout
from ultrascale.spec.problems import SpecError
from ultrascale.spec.resolve import to_toml
from ultrascale.spec.trainable import expect_trainable


@pytest.mark.catalogue(13)
def test_fewer_and_more_ranks_train_the_same_to_rounding(home):
    whole = small_run(home, name="whole", layout=Layout(precision="fp64", micro_batch_size=2))
    train_here(whole)
    run = small_run(home, name="elastic", layout=Layout(precision="fp64", dp=4, zero_stage=3))
    for world, until in ((4, 4), (2, 8), (4, STEPS)):
        run = replace(run, layout=elastic_layout(run, world))
        expect_trainable(run.model, run.layout)
        assert run.layout.world_size == world
        outcomes = train_ranks(run, before_step=stop_at(until))
        assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [until] * world, run.layout
    found, expected = (np.array(rows(one, "train/loss", "train/grad_norm", "progress/tokens")) for one in (run, whole))
    assert np.abs(found / expected - 1).max() < 1e-11
    assert largest_error(state(run), state(whole)) < 1e-11


def test_a_layout_that_fits_stays_and_others_have_its_batch_and_precision(tmp_path):
    run = small_run(tmp_path, layout=Layout(dp=4, zero_stage=3, precision="bf16"))
    assert elastic_layout(run, 4) == run.layout
    for world in (1, 2, 8):
        layout = elastic_layout(run, world)
        assert layout.world_size == world and layout.precision == "bf16"
        assert all(stage.sequences_per_batch % (layout.dp * layout.micro_batch_size) == 0 for stage in run.batch.ramp)


def test_where_rates_are_known_the_fastest_is_chosen(tmp_path):
    run = replace(small_run(tmp_path, layout=Layout(dp=8, tp=2, precision="bf16")), cluster="16xh100")
    layout = elastic_layout(run, 4)
    assert (layout.world_size, layout.tp, layout.precision) == (4, 1, "bf16")


def test_no_process_at_all_is_a_mistake(home, capsys):
    file = home / "run.toml"
    file.write_text(to_toml(small_run(home)))
    assert main(["train", str(file), "--elastic", "--processes", "0"]) == 2
    assert "must be at least 1, is 0" in capsys.readouterr().err


def test_where_nothing_fits_the_number_of_ranks_is_named(tmp_path):
    with pytest.raises(SpecError, match="no layout of this run for 7919 ranks"):
        elastic_layout(small_run(tmp_path), 7919)
