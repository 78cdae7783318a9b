"""Ranks with different descriptions are refused at the start, by key."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.distributed as dist
from ranks import run_ranks

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Optimizer, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.start.agreement import expect_same_run

RUN = Run(PRESETS["tiny-llama"], layout=Layout(dp=3))


def agree(rank: int, runs: list[Run]) -> list[tuple[str, str]]:
    ranks = Ranks(rank, dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)
    try:
        expect_same_run(runs[rank], ranks)
    except SpecError as error:
        return [(problem.key, problem.rule) for problem in error.problems]
    return []


def test_ranks_with_the_same_description_go_on():
    assert run_ranks(3, agree, [RUN, RUN, RUN]) == [[], [], []]


def test_every_rank_is_told_each_key_that_differs_who_has_what_and_that_it_was_the_odd_one():
    other = replace(RUN, seed=1, optimizer=Optimizer(learning_rate=1.0), layout=replace(RUN.layout, zero_stage=2))
    told = run_ranks(3, agree, [RUN, other, RUN])
    assert told[0] == told[1] == told[2]
    assert [key for key, _ in told[0]] == ["layout.zero_stage", "optimizer.learning_rate", "seed"]
    assert "rank 1 was started with 2, rank 0 with 0" in told[0][0][1]


def test_a_setting_that_only_one_rank_has_is_told_too():
    rope = replace(RUN, model=PRESETS["llama-3.1-8b"])
    keys = [key for key, _ in run_ranks(2, agree, [RUN, rope])[0]]
    assert "model.rope_scaling.factor" in keys and "model.hidden_size" in keys


def test_a_rank_that_is_alone_agrees_with_itself():
    expect_same_run(RUN, Ranks(0, 1, torch.device("cpu")))
