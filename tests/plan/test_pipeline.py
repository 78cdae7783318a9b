"""The simulator against hand-made steps and against an independent one."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.pipeline.pipeline_board import acquire_board, release_board
from ultrascale.plan.pipeline.pipeline_steady import few_micro_batches, long_step_seconds, rounds_of
from ultrascale.plan.pipeline.play import (
    StageSeconds,
    compile_schedule,
    in_flight,
    peak_activation_bytes,
    play,
    play_many,
    program_of,
    simulate,
    step_seconds,
)  # fmt: skip
from ultrascale.schedules.actions import Kind, backward, forward
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import parse_schedule

EVEN = StageSeconds(1.0, 1.0, 1.0)


def priced(costs, send: ArrayLike = 0.0, talk: ArrayLike = 0.0, *, blocks=False):
    """Prices from forward, input gradient and weight gradient of every stage."""
    forward, inputs, weights = costs
    return StageSeconds(forward, inputs, weights, send, talk, talk, blocks)


def step_by_recursion(schedule, costs, send, blocks):
    """The step's end by the definition, action by action with memory: nothing shared with the simulator but the lists."""
    forward, inputs, weights = costs
    place, ends, stages = {}, {}, len(forward)
    for rank, row in enumerate(schedule):
        for at, action in enumerate(row):
            for part in action.parts:
                direction = {"F": "F", "B": "G", "I": "G", "W": "W"}[part.kind.value]
                place[direction, part.stage, part.micro_batch] = (rank, at)

    def end(rank, at):
        if (rank, at) not in ends:
            free = end(rank, at - 1) if at else 0.0
            arrived, latest, duration = 0.0, 0.0, 0.0
            for part in schedule[rank][at].parts:
                ahead = part.kind is Kind.FORWARD
                source = ("F", part.stage - 1) if ahead else ("G", part.stage + 1)
                duration += {"F": forward[part.stage], "B": inputs[part.stage] + weights[part.stage],
                             "I": inputs[part.stage], "W": weights[part.stage]}[part.kind.value]  # fmt: skip
                if part.kind is Kind.WEIGHT_GRADIENT or not 0 <= source[1] < stages:
                    continue
                where = place[(*source, part.micro_batch)]
                lag = send[min(part.stage, source[1])] if where[0] != rank else 0.0
                arrived = max(arrived, end(*where) + (0.0 if blocks else lag))
                latest = max(latest, lag if blocks else 0.0)
            ends[rank, at] = max(free, arrived) + latest + duration
        return ends[rank, at]

    return max(end(rank, at) for rank, row in enumerate(schedule) for at in range(len(row)))


times = st.floats(0.05, 3.0)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)), pp=st.integers(1, 5), count=st.integers(1, 12), virtual=st.integers(1, 3),
    blocks=st.booleans(), data=st.data(),
)  # fmt: skip
def test_a_step_is_what_its_definition_gives(name, pp, count, virtual, blocks, data):
    pp += pp % 2 if name == "dualpipe" else 0
    schedule = build_schedule(name, pp, count, virtual if SCHEDULES[name].virtual_stages is None else None)
    stages = compile_schedule(schedule).num_stages
    costs = [data.draw(st.lists(times, min_size=stages, max_size=stages)) for _ in range(3)]
    send = data.draw(st.lists(st.floats(0.0, 1.0), min_size=stages - 1, max_size=stages - 1))
    timeline = simulate(schedule, priced(costs, send, blocks=blocks))
    assert timeline.step_seconds == pytest.approx(step_by_recursion(schedule, costs, send, blocks), rel=1e-12)


def test_a_two_stage_step_is_as_worked_out_by_hand():
    """Rank 0: F0 0-1, F1 1-2, B0 6-8, B1 11-13. Rank 1: F0 1-3, B0 3-6, F1 6-8, B1 8-11."""
    schedule = build_schedule("1f1b", 2, 2)
    timeline = simulate(schedule, StageSeconds([1.0, 2.0], [1.0, 1.5], [1.0, 1.5]))
    assert timeline.end == [[1.0, 2.0, 8.0, 13.0], [3.0, 6.0, 8.0, 11.0]]
    assert timeline.start[0] == [0.0, 1.0, 6.0, 11.0]
    assert (timeline.step_seconds, timeline.busy_seconds, timeline.bubble_seconds) == (13.0, [6.0, 10.0], [7.0, 3.0])
    assert timeline.bubble_fraction == pytest.approx(1 - 16 / 26)


def test_messages_delay_but_do_not_occupy_unless_receives_block():
    schedule = build_schedule("afab", 2, 2)
    costs = ([1.0, 1.0], [1.0, 1.0], [1.0, 1.0])
    beside = simulate(schedule, priced(costs, 0.5))
    blocking = simulate(schedule, priced(costs, 0.5, blocks=True))
    assert beside.end == [[1.0, 2.0, 8.0, 10.0], [2.5, 3.5, 5.5, 7.5]]
    assert blocking.end == [[1.0, 2.0, 8.5, 11.0], [2.5, 4.0, 6.0, 8.0]]


def test_stages_of_one_rank_pass_on_without_a_message():
    assert simulate(build_schedule("zb-v", 1, 3), StageSeconds(1.0, 1.0, 1.0, 9.0)).step_seconds == 18.0


def test_a_pair_takes_as_long_as_its_computing_or_its_communication():
    schedule = parse_schedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"]])

    def pair(forward_talk, backward_talk):
        costs = StageSeconds(2.0, 2.0, 1.0, forward_communication=forward_talk, backward_communication=backward_talk)
        return simulate(schedule, costs).step_seconds - 5.0

    assert pair(0.0, 0.0) == 5.0
    assert pair(0.5, 1.0) == pytest.approx(3.5)
    assert pair(2.0, 2.0) == pytest.approx(4.0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_many_cases_at_once_are_each_what_one_alone_is(name):
    rng = np.random.default_rng(0)
    program = program_of(name, 4, 9)
    stages = program.num_stages
    costs = rng.uniform(0.1, 2.0, (3, stages, 5))
    send = rng.uniform(0.0, 0.5, (stages - 1, 5))
    talk = rng.uniform(0.0, 0.1, (stages, 5))
    for blocks in (False, True):
        together = step_seconds(program, priced(costs, send, talk, blocks=blocks))
        alone = [
            play(program, priced(costs[..., case], send[:, case], talk[:, case], blocks=blocks)).step_seconds
            for case in range(5)
        ]
        assert together.tolist() == pytest.approx(alone, rel=1e-12)


def test_ends_of_all_actions_are_in_the_program_s_order():
    program = program_of("interleaved", 3, 6, 2)
    ends = play_many(program, EVEN)[:, 0]
    timeline = play(program, EVEN)
    assert [ends[nodes].tolist() for nodes in program.node_of] == timeline.end


def test_a_board_that_was_played_on_leaves_nothing_for_the_next_prices():
    """Its arrays are used again: other prices, other numbers of cases and messages between them change no end."""
    program = program_of("dualpipe-v", 4, 12)
    random = np.random.default_rng(5)
    asked = [
        priced(random.random((3, 8, cases)) + 0.5, random.random((7, cases)), 0.1, blocks=blocks)
        for cases, blocks in ((2, False), (3, False), (2, True), (2, False))
    ]
    found = [play_many(program, one) for one in (*asked, *asked)]
    fresh = [play_many(compile_schedule(build_schedule("dualpipe-v", 4, 12)), one) for one in (*asked, *asked)]
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(found, fresh, strict=True))


def test_boards_that_two_threads_play_on_are_not_one():
    program = program_of("zb-v", 2, 8)
    first, second = acquire_board(program, 2), acquire_board(program, 2)
    assert first is not second
    release_board(program, first)
    assert acquire_board(program, 2) is first


@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)), pp=st.integers(1, 6), count=st.integers(1, 70), virtual=st.integers(1, 3),
    spread=st.sampled_from([0.0, 0.01, 1.5]), send=st.sampled_from([0.0, 0.01, 2.0]), blocks=st.booleans(),
    seed=st.integers(0, 99),
)  # fmt: skip
def test_a_step_whose_rounds_are_multiplied_is_the_step_played_to_its_end(name, pp, count, virtual, spread, send, blocks, seed):
    pp += pp % 2 if name == "dualpipe" else 0
    stages_a_rank = virtual if SCHEDULES[name].virtual_stages is None else None
    program, random = program_of(name, pp, count, stages_a_rank), np.random.default_rng(seed)
    ahead, inputs, weights = np.exp(random.uniform(-spread, spread, (3, program.num_stages, 2)))
    sends = random.random((program.num_stages - 1, 2)) * [0.0, send]
    seconds = StageSeconds(ahead, inputs, weights, sends, 0.1 * ahead, 0.2 * inputs, blocks, 0.03, -0.02)
    found = long_step_seconds(name, pp, count, seconds, virtual_stages=stages_a_rank)
    np.testing.assert_allclose(found, step_seconds(program, seconds), rtol=1e-12)


@pytest.mark.parametrize(("name", "virtual", "most_carried"), [("zb-h1", None, 21), ("zb-v", None, 36), ("interleaved", 4, 32)])
def test_between_rounds_of_16_ranks_two_ends_or_so_a_rank_are_all_that_is_read(name, virtual, most_carried):
    few, _ = few_micro_batches(name, 16, 512)
    rounds = rounds_of(name, 16, few, virtual)
    assert rounds is not None
    assert (len(rounds.carried), few <= 64) == (most_carried, True)


@settings(max_examples=40, deadline=None)
@given(
    pp=st.sampled_from([2, 3, 8, 24]), more=st.integers(0, 60), spread=st.sampled_from([0.0, 0.1, 1.5]),
    send=st.sampled_from([0.0, 0.01, 3.0]), seed=st.integers(0, 99),
)  # fmt: skip
def test_1f1b_of_uneven_stages_ends_when_its_actions_do(pp, more, spread, send, seed):
    program, random = program_of("1f1b", pp, pp + more), np.random.default_rng(seed)
    costs, sends = np.exp(random.uniform(-spread, spread, (3, pp, 2))), send * random.random((pp - 1, 2))
    forward, inputs, weights = costs
    seconds = StageSeconds(forward, inputs, weights, sends)
    np.testing.assert_allclose(long_step_seconds("1f1b", pp, pp + more, seconds), step_seconds(program, seconds), rtol=1e-11)


@pytest.mark.parametrize("name", ["zb-h1", "zb-v", "dualpipe", "dualpipe-v", "interleaved"])
def test_rounds_of_deep_pipelines_are_found_among_few_micro_batches(name):
    for pp in (12, 24):
        few, _ = few_micro_batches(name, pp, 960)
        rounds = rounds_of(name, pp, few, None)
        assert rounds is not None
        assert few <= 3 * pp + 6
        assert len(rounds.carried) <= 2.4 * pp


def test_the_rhythm_of_even_stages_is_found_without_playing_a_long_step(monkeypatch):
    import ultrascale.plan.pipeline.pipeline_steady as steady

    played = []

    def noted(name, pp, count, virtual=None):
        played.append(count)
        return program_of(name, pp, count, virtual)

    monkeypatch.setattr(steady, "program_of", noted)
    assert long_step_seconds("1f1b", 4, 100_000, EVEN).tolist() == [3.0 * 100_003]
    assert long_step_seconds("interleaved", 4, 100_000, EVEN).tolist() == [pytest.approx(6.0 * 100_000 + 9.0)]
    with_messages = StageSeconds(1.0, 1.0, 1.0, 0.25)
    crossings = 3 + 3 * 99_999 // 4
    assert long_step_seconds("1f1b", 4, 100_000, with_messages).tolist() == [3.0 * 100_003 + 0.5 * crossings]
    assert max(played) < 60


def test_activations_at_once_follow_from_the_order():
    assert [held.total for held in in_flight("1f1b", 4, None, 8)] == [4, 3, 2, 1]
    assert [(held.total, held.waiting) for held in in_flight("zb-h1", 4, None, 8)] == [(4, 0), (4, 1), (4, 2), (4, 3)]
    first = in_flight("interleaved", 4, 2, 8)[0]
    assert (first.total, first.by_stage) == (11, {0: 8, 4: 4})
    assert simulate(build_schedule("1f1b", 4, 8), EVEN).in_flight == in_flight("1f1b", 4, None, 8)


def test_bytes_at_once_count_what_weight_gradients_need_until_they_are_done():
    rows = build_schedule("zb-h1", 4, 8)
    assert [peak_activation_bytes(row, [[10.0] * 4], [0.4]) for row in rows] == [[40.0], [34.0], [28.0], [22.0]]
    assert peak_activation_bytes(build_schedule("1f1b", 4, 8)[0], [[10.0] * 4], [0.4]) == [40.0]


def test_a_deadlock_is_named_instead_of_played():
    rank_0 = [forward(0, 0), backward(0, 0), forward(0, 1), backward(0, 1)]
    rank_1 = [forward(1, 1), backward(1, 1), forward(1, 0), backward(1, 0)]
    with pytest.raises(SpecError, match=r"rank 1, action 0 \(1F1\)"):
        simulate([rank_0, rank_1], EVEN)
