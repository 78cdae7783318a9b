"""What the planner accepts trains, to the result of one process; what is refused has a reason. Up to eight ranks, all of it.

Every accepted layout does a step in float64 on forked ranks, and loss, gradients and updated weights are those of one process
(`check.prove`). CI takes a few at random, of which the seed is printed by their names; at night all of them: 1,796 of a dense
model, half an hour on two cores, and 7,249 of one with experts, which take hours.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from layouts.every_layout import DENSE, SPARSE, accepted, every_layout, reasons, run_of

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.check.prove import Case, prove_all
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.workload import Workload

MODELS = {"dense": DENSE, "experts": SPARSE}
PARTS = {
    "dense": {1: 1, 2: 2, 3: 1, 4: 6, 5: 1, 6: 8, 7: 1, 8: 20},
    "experts": {1: 1, 2: 2, 3: 1, 4: 20, 5: 1, 6: 16, 7: 1, 8: 96},
}  # fmt: skip
"""Nightly tests of each number of ranks: some fifty layouts, some minutes, in each."""


@cache
def all_accepted(name: str) -> list[Run]:
    return accepted(MODELS[name])


def accepted_of(name: str, world: int) -> list[Run]:
    return [run for run in all_accepted(name) if run.layout.world_size == world]


def differences(runs: list[Run]) -> list[str]:
    """The layouts that fail, or do not compute what one process does."""
    verdicts = prove_all([Case(str(run.layout), run) for run in runs], steps=1, go_on=True)
    assert len(verdicts) == len(runs) > 0
    return [str(verdict) for verdict in verdicts if not verdict.holds]


@pytest.mark.catalogue(61)
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_layout_is_accepted_or_refused_with_reason_and_remedy(model):
    refused = [problems for layout in every_layout(model) if (problems := reasons(run_of(model, layout)))]
    assert len(refused) > 10_000
    assert all(problem.key and problem.rule and problem.remedy for problems in refused for problem in problems)


@pytest.mark.catalogue(61)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("world", "count"), [(2, 3), (3, 1), (4, 2), (8, 1)])
def test_some_of_what_is_accepted_trains_a_step_to_the_result_of_one_process(name, world, count):
    assert differences(random.Random(world).sample(accepted_of(name, world), count)) == []


@pytest.mark.nightly
@pytest.mark.catalogue(61)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("name", "world", "part"),
    [(name, world, part) for name, worlds in PARTS.items() for world, parts in worlds.items() for part in range(parts)],
)
def test_all_of_what_is_accepted_trains_a_step_to_the_result_of_one_process(name, world, part):
    assert differences(accepted_of(name, world)[part :: PARTS[name][world]]) == []


def searched(model: Model, count: int) -> list[Run]:
    """Every layout that the planner searches for so many devices."""
    length, batch = 4096, 4 * count
    workload = Workload(model, parse_cluster(f"{count}xh100"), length, batch)
    table = legal_layouts(workload).table
    run = run_of(replace(model, max_position_embeddings=length), Layout())
    sizes = replace(run.batch, sequence_length=length, sequences_per_batch=batch)
    return [replace(run, layout=table.layout(row), batch=sizes) for row in range(len(table))]


@pytest.mark.catalogue(61)
@pytest.mark.parametrize("name", MODELS)
def test_every_layout_that_the_planner_searches_for_this_trainer_is_accepted(name):
    for count in range(1, 9):
        runs = searched(MODELS[name], count)
        assert runs and [(str(run.layout), found) for run in runs if (found := reasons(run))] == []
