from types import SimpleNamespace

import pytest

from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.actions import Kind
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.executable import check_executable, ranks_of_stages, shape_of
from ultrascale.schedules.kinds.interleaved import rounds

SIZES = [(p, m) for p in (1, 2, 3, 4, 6, 7) for m in (1, 2, 3, 5, 6, 8, 13, 14, 15, 24)]


def cells(schedule):
    return [" ".join(action.cell for action in row) for row in schedule]


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_rank_can_execute_its_list_for_any_number_of_micro_batches(name):
    for pp, count in SIZES:
        if name == "dualpipe" and pp % 2:
            continue
        for virtual in (1, 2, 3, 4) if SCHEDULES[name].virtual_stages is None else (None,):
            schedule = build_schedule(name, pp, count, virtual)
            check_executable(schedule)
            stages = pp * (virtual or SCHEDULES[name].virtual_stages or 2)
            assert (len(schedule), shape_of(schedule)) == (pp, (stages, count)), (pp, count, virtual)


def test_one_f_one_b_is_as_in_the_paper():
    assert cells(build_schedule("1f1b", 2, 3)) == ["0F0 0F1 0B0 0F2 0B1 0B2", "1F0 1B0 1F1 1B1 1F2 1B2"]


def test_all_forward_all_backward_is_as_its_name():
    assert cells(build_schedule("afab", 2, 2)) == ["0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"]


def test_breadth_first_uses_each_stage_in_one_stretch():
    assert cells(build_schedule("breadth-first", 2, 2))[1] == "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"


def test_zero_bubble_runs_weight_gradients_late_by_the_rank():
    schedule = build_schedule("zb-h1", 4, 12)
    for rank, row in enumerate(schedule):
        names = [action.cell for action in row]
        late = [sum(f"{rank}I{n}" in names[: names.index(f"{rank}W{k}")] for n in range(12)) - k - 1 for k in range(12 - rank)]
        assert set(late) == {rank}


def test_v_schedules_put_first_and_last_stage_on_the_first_rank():
    for name in ("zb-v", "dualpipe-v"):
        assert ranks_of_stages(build_schedule(name, 3, 6)) == [[0], [1], [2], [2], [1], [0]]


def test_dualpipe_holds_every_stage_twice_and_sends_half_of_the_micro_batches_each_way():
    schedule = build_schedule("dualpipe", 4, 10)
    assert ranks_of_stages(schedule) == [[0, 3], [1, 2], [1, 2], [0, 3]]
    parts = [part for action in schedule[3] for part in action.parts if part.kind is Kind.FORWARD]
    assert sorted(part.micro_batch for part in parts if part.stage == 3) == [0, 1, 2, 3, 4]
    assert sorted(part.micro_batch for part in parts if part.stage == 0) == [5, 6, 7, 8, 9]


def test_interleaved_rounds_are_of_the_ranks_or_a_few_more():
    assert [list(map(len, rounds(4, m))) for m in (1, 3, 4, 8, 10, 11, 13)] == [
        [1], [3], [4], [4, 4], [5, 5], [6, 5], [5, 4, 4],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "torch_class", "virtual"),
    [("zb-v", "ScheduleZBVZeroBubble", 2), ("dualpipe-v", "ScheduleDualPipeV", 2),
     ("zb-h1", "ScheduleInterleavedZeroBubble", 1), ("interleaved", "ScheduleInterleaved1F1B", 3)],
)  # fmt: skip
def test_orders_are_those_of_torch(name, torch_class, virtual):
    torch_schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    operations = getattr(torch_schedules, torch_class)._calculate_single_rank_operations
    for pp, count in ((2, 4), (3, 9), (4, 8), (4, 16), (8, 24)):
        torch_self = SimpleNamespace(
            pp_group_size=pp, _n_microbatches=count, num_stages=2 * pp, n_local_stages=virtual,
            microbatches_per_round=count // max(1, count // pp),
        )  # fmt: skip
        ours = build_schedule(name, pp, count, virtual)
        for rank in range(pp):
            theirs = [str(action) for action in operations(torch_self, rank) if action is not None]
            assert [action.cell for action in ours[rank]] == theirs


@pytest.mark.parametrize(
    ("words", "key", "told"),
    [(("1f2b", 4, 8), "schedule", "dualpipe-v"), (("dualpipe", 3, 8), "pp", "Take 4"),
     (("zb-v", 4, 8, 3), "virtual_stages", "Set 2"),
     (("1f1b", 4, 8, 2), "virtual_stages", "interleaved"), (("1f1b", 0, 8), "pp", "at least 1"),
     (("interleaved", 4, 0), "micro_batches", "at least 1")],
)  # fmt: skip
def test_numbers_that_do_not_suit_a_schedule_are_told_with_what_does(words, key, told):
    with pytest.raises(SpecError) as caught:
        build_schedule(*words)
    assert caught.value.problems[0].key == key
    assert told in str(caught.value)
