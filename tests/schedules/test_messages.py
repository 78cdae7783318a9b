"""Who sends what to whom, and where ZeRO's collectives go, in every schedule."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Kind, backward, forward
from ultrascale.schedules.build import build_schedule, stages_of_ranks
from ultrascale.schedules.executable import dependencies_of
from ultrascale.schedules.messages import messages, only_forward
from ultrascale.schedules.sharded import sharded

CASES = [(name, pp, count) for name in SCHEDULES for pp in (2, 4) for count in (1, 3, 8)]


@pytest.mark.parametrize("name, pp, count", CASES)
def test_every_border_between_ranks_is_crossed_once_each_way_by_every_micro_batch(name, pp, count):
    schedule = build_schedule(name, pp, count)
    held = stages_of_ranks(name, pp)
    if name == "dualpipe":
        borders = pp - 1
    else:
        of_stage = {stage: rank for rank, stages in enumerate(held) for stage in stages}
        borders = sum(of_stage[stage] != of_stage[stage + 1] for stage in range(len(of_stage) - 1))
    sent = messages(schedule)
    assert len(sent) == 2 * borders * count == len({message.key for message in sent})
    assert sum(message.is_gradient for message in sent) == borders * count


@pytest.mark.parametrize("name, pp, count", CASES)
def test_messages_are_sent_before_they_are_needed_and_leave_each_rank_in_order(name, pp, count):
    schedule = build_schedule(name, pp, count)
    starts = [sum(len(row) for row in schedule[:rank]) for rank in range(pp)]
    wave_of = {number: index for index, wave in enumerate(dependencies_of(schedule).waves) for number in wave}
    sent = messages(schedule)
    for message in sent:
        assert message.sender != message.receiver
        made, read = starts[message.sender] + message.sent_by, starts[message.receiver] + message.needed_by
        assert wave_of[made] < wave_of[read]
    assert all(first.number < second.number for first, second in pairwise(sent))
    assert all(a.sent_by <= b.sent_by for a, b in pairwise(sent) if a.sender == b.sender)


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_forward_passes_alone_can_be_executed_and_are_all_there(name):
    rows = only_forward(build_schedule(name, 4, 6))
    dependencies_of(rows)
    passes = [action for row in rows for action in row]
    assert {action.kind for action in passes} == {Kind.FORWARD} and all(action.overlapped_with is None for action in passes)
    assert len(passes) == 6 * (8 if SCHEDULES[name].virtual_stages != 1 else 4)


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_of_one_stage_the_collectives_are_those_of_accumulation(zero_stage):
    bare = [act(0, k) for k in range(3) for act in (forward, backward)]
    assert sharded(bare, zero_stage) == accumulate(3, zero_stage)


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_gradients_are_reduced_when_they_are_complete_as_often_as_the_planner_counts(name, zero_stage):
    for row in build_schedule(name, 4, 8):
        told = [part._replace(overlapped_with=None) for action in sharded(row, zero_stage) for part in action.parts]
        bare = [part._replace(overlapped_with=None) for action in row for part in action.parts]
        assert [part._replace(reduce_gradients=False, sum_replicas=False, keep_parameters=False) for part in told] == bare
        for stage in {part.stage for part in told}:
            own = [part for part in told if part.stage == stage]
            ends = [part for part in own if part.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)]
            reductions = [part for part in own if part.reduce_gradients]
            assert reductions == (ends if zero_stage >= 2 else ends[-1:])
            assert [part for part in own if part.sum_replicas] == ends[-1:] == own[-1:]
            assert [part.keep_parameters for part in own] == [zero_stage < 3] * (len(own) - 1) + [False]
