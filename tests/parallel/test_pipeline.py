"""A pipeline computes what one process does, in fp64: every schedule, every gradient; and planted faults are seen."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from itertools import pairwise
from os import getpid, kill
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel.pipelines import MODEL, Step, build, layout_of, one_process, rank_step, tied, whole_of, worst_difference
from ranks import RankError, run_ranks

from ultrascale.description.problems import SpecError
from ultrascale.parallel.pipeline.pipeline_messages import Mailbox
from ultrascale.parallel.pipeline.pipeline_parallel import Executed, build_evaluation, build_orders
from ultrascale.parallel.tensor.tensor_ops import Factor
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import stages_of_ranks
from ultrascale.schedules.executable import dependencies_of
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.schedules.kinds.one_f_one_b import one_f_one_b
from ultrascale.schedules.kinds.zb_v import zb_v

SCHEDULES = (
    ("afab", 1), ("1f1b", 1), ("interleaved", 2), ("breadth-first", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2),
    ("dualpipe", 1),
)  # fmt: skip
LIMIT = 1e-12


def many(rank: int, steps: list[Step]) -> list[Any]:
    return [rank_step(rank, step) for step in steps]


def worst_of(world: int, steps: list[Step]) -> list[float]:
    """Of each step, all of them done in the same processes."""
    by_rank = run_ranks(world, many, steps)
    return [worst_difference(step, list(results)) for step, results in zip(steps, zip(*by_rank, strict=True), strict=True)]


@pytest.mark.parametrize("schedule, virtual", SCHEDULES)
def test_every_number_of_micro_batches_gives_the_gradients_of_one_process(schedule, virtual):
    layout = layout_of(schedule, 2, virtual, micro_batch_size=2)
    assert max(worst_of(2, [Step(layout, count) for count in range(1, 10)])) < LIMIT


def test_four_ranks_uneven_stages_and_ties_give_the_gradients_of_one_process():
    steps = [Step(layout_of(schedule, 4, virtual), 6, replace(MODEL, num_hidden_layers=9)) for schedule, virtual in SCHEDULES]
    steps += [tied(step) for step in steps]
    steps.append(Step(layout_of("1f1b", 4, layers_per_stage=(0, 3, 1, 0)), 2))
    assert max(worst_of(4, steps)) < LIMIT


@pytest.mark.parametrize("recompute", ["selective", "full", "every-k"])
def test_documents_and_recomputation_pass_along(recompute):
    layouts = [layout_of(schedule, 2, v, recompute=recompute, micro_batch_size=2) for schedule, v in SCHEDULES[1:]]
    assert max(worst_of(2, [tied(Step(layout, 3, documents=True)) for layout in layouts])) < LIMIT


def test_documents_change_the_result():
    step = Step(layout_of("1f1b", 2), 3)
    assert one_process(step)[0] != one_process(replace(step, documents=True))[0]


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_every_zero_stage_under_every_schedule_gives_the_gradients_of_one_process(zero_stage):
    layouts = [layout_of(schedule, 2, v, dp=2, zero_stage=zero_stage) for schedule, v in SCHEDULES]
    layouts += [replace(layout, layers_per_bucket=2, recompute="full") for layout in layouts[3:5]]
    assert max(worst_of(4, [tied(Step(layout, 3)) for layout in layouts])) < LIMIT


@pytest.mark.parametrize("dp, zero_stage", [(1, 0), (2, 1), (2, 3)])
def test_in_bf16_gradients_are_summed_in_fp32_whether_backward_passes_are_cut_or_not(dp, zero_stage):
    """Nothing but the order of sums differs between schedules; between bf16 and one process in fp64 it is rounding."""
    options: dict[str, Any] = {"precision": "bf16", "dp": dp, "zero_stage": zero_stage}
    layouts = [layout_of("1f1b", 2, **options), layout_of("zb-h1", 2, **options), layout_of("dualpipe-v", 2, 2, **options)]
    by_rank = run_ranks(2 * dp, many, [Step(layout, 4) for layout in layouts])
    whole, *cut = [
        whole_of(Step(layout, 4), list(results))[1] for layout, results in zip(layouts, zip(*by_rank, strict=True), strict=True)
    ]
    expected = one_process(Step(layouts[0], 4))[1]
    assert {gradient.dtype for gradient in whole.values()} == {torch.float32}
    for name, gradient in whole.items():
        assert (gradient - expected[name]).norm() < 0.05 * expected[name].norm()
        assert all((gradient - other[name]).norm() < 1e-6 * gradient.norm() for other in cut)


def test_a_schedule_from_a_file_is_executed_also_with_two_copies_of_the_weights(tmp_path):
    path, both_ends = tmp_path / "mine.csv", tmp_path / "both_ends.csv"
    path.write_text("0F1,0F0,0B0,0B1\n1F1,1I1,1F0,1B0,1W1\n".replace("0B0,0B1", "0B1,0B0"))
    both_ends.write_text("0F0,1F1,1B1,0B0\n0F1,1F0,1B0,0B1\n")
    assert max(worst_of(2, [Step(layout_of(str(one), 2), 2) for one in (path, both_ends)])) < LIMIT
    evaluated = build_evaluation(layout_of(str(both_ends), 2), 3).schedule
    assert [[action.cell for action in row] for row in evaluated] == [["0F0", "1F1", "0F2"], ["1F0", "0F1", "1F2"]]


class Faults:
    """What may go wrong in an executor, done on purpose."""

    @staticmethod
    def swap_micro_batches(running):
        if running.pipeline.rank == 1:
            running.micro_batch = {0: 1, 1: 0, 2: 2}.__getitem__

    @staticmethod
    def drop_a_weight_gradient(running):
        defer = running.pipeline._weights.add
        seen = []

        def lossy(weight, grad_output, given):
            seen.append(0)
            return defer(weight, Factor(grad_output.local * (len(seen) != 9)), given)

        running.pipeline._weights.add = lossy

    @staticmethod
    def reduce_before_the_last_weight_gradient(running):
        from ultrascale.parallel.pipeline import pipeline_parallel as pipeline

        def too_early(actions, zero_stage):
            told = list(original(actions, zero_stage))
            marks = [k for k, action in enumerate(told) if action.kind is Kind.WEIGHT_GRADIENT]
            first, last = marks[0], marks[-1]
            told[first] = told[first]._replace(reduce_gradients=True, sum_replicas=True)
            told[last] = told[last]._replace(reduce_gradients=False, sum_replicas=False)
            return told

        original, pipeline.sharded = pipeline.sharded, too_early


def faulty(rank: int, step: Step, fault: str) -> Any:
    running = build(rank, step)
    if fault != "none":
        getattr(Faults, fault)(running)
    running.train()
    dist.barrier()
    return sum(running.losses.values()), running.gradients()


@pytest.mark.parametrize(
    "fault", ["none", "swap_micro_batches", "drop_a_weight_gradient", "reduce_before_the_last_weight_gradient"]
)
def test_planted_faults_are_seen(fault):
    step = Step(layout_of("zb-h1", 2, dp=2, zero_stage=1), 3)
    difference = worst_difference(step, run_ranks(4, faulty, step, fault))
    assert difference < LIMIT if fault == "none" else difference > 1e-3


def evaluated(rank: int, step: Step) -> tuple[float, bool]:
    running = build(rank, step)
    running.evaluate()
    return sum(running.losses.values()), any(
        p.grad is not None for s in running.pipeline.stages.values() for p in s.parameters()
    )


@pytest.mark.parametrize("schedule, virtual", SCHEDULES)
def test_an_evaluation_has_the_loss_of_one_process_and_leaves_no_gradient(schedule, virtual):
    step = Step(layout_of(schedule, 2, virtual), 5)
    results = run_ranks(2, evaluated, step)
    assert sum(loss for loss, _ in results) == pytest.approx(one_process(step)[0], rel=LIMIT)
    assert not any(has_gradients for _, has_gradients in results)


def test_an_evaluation_may_have_more_micro_batches_than_a_file(tmp_path):
    path = tmp_path / "two.csv"
    path.write_text(to_csv(one_f_one_b(2, 2)))
    rows = build_evaluation(layout_of(str(path), 2), 5).schedule
    assert [[action.cell for action in row] for row in rows] == [[f"{rank}F{k}" for k in range(5)] for rank in range(2)]
    path = tmp_path / "v.csv"  # two stages a rank, of which one needs what the other's neighbour makes
    path.write_text(to_csv(zb_v(2, 3)))
    rows = build_evaluation(layout_of(str(path), 2, 2), 5).schedule
    assert [len(row) for row in rows] == [10, 10] and len(dependencies_of(rows).ranks) == 20


def is_forward(one: Executed) -> bool:
    return one.action.kind is Kind.FORWARD


def executed(rank: int, step: Step) -> list[Executed]:
    running = build(rank, step)
    running.train()
    return running.pipeline.executed


@pytest.mark.parametrize("schedule, virtual", SCHEDULES)
def test_what_was_executed_is_what_was_planned_in_order_and_each_waits_for_its_source(schedule, virtual):
    step = Step(layout_of(schedule, 2, virtual), 4)
    rows = run_ranks(2, executed, step)
    planned = build_orders(step.layout, 4).schedule
    bare = [[(one.action.kind, one.action.stage, one.action.micro_batch) for one in row] for row in rows]
    assert bare == [[(part.kind, part.stage, part.micro_batch) for action in row for part in action.parts] for row in planned]
    starts = {(one.action.stage, one.action.micro_batch): one.start for row in rows for one in row if is_forward(one)}
    for row in rows:
        assert all(one.start <= one.end for one in row)
        assert all(first.end <= second.start for first, second in pairwise(row))
        for one in row:
            if is_forward(one) and one.action.stage:
                assert one.start > starts[one.action.stage - 1, one.action.micro_batch]


def dying(rank: int, step: Step) -> None:
    running = build(rank, step)

    def die(action: Action) -> None:
        if rank == 1 and action.micro_batch == 1:
            kill(getpid(), signal.SIGKILL)

    running.pipeline.on_action = die
    running.train()


def test_when_a_rank_dies_its_neighbour_says_what_it_waited_for_and_from_whom():
    outcomes = run_ranks(2, dying, Step(layout_of("1f1b", 2), 4), failures="return")
    assert [outcome.kind for outcome in outcomes] == ["PipelineError", "died"]
    assert isinstance(outcomes[0], RankError)
    waited = r"waited for the gradient of micro-batch \d from stage 1 \(pipeline rank 1\)"
    sent = r"could not send the \w+ of micro-batch \d from stage 0 \(pipeline rank 0\) to pipeline rank 1"  # if it was slower
    assert re.search(rf"pipeline rank 0 \(rank 0 of the run\) ({waited}|{sent}): ", outcomes[0].text)


def test_a_schedule_that_cannot_be_executed_is_refused_before_anything_starts(tmp_path):
    path = tmp_path / "wrong.csv"
    for text, said in (
        ("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n", "can never start"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0\n", "B, or I and W, is on no rank"),
        ("0F0,0F1,0B0,0B1\n1F0,1F1,1B0,1B1\n2F0,2F1,2B0,2B1\n", "has 3 ranks, not 2"),
        ("0F0,0B0\n1F0,1B0\n", "has 1 micro-batch, not 2"),
    ):
        path.write_text(text)
        with pytest.raises(SpecError, match=said):
            build_orders(layout_of(str(path), 2), 2)


def test_a_file_with_other_stages_than_the_layout_and_copies_on_ranks_that_hold_others_are_refused(tmp_path):
    path = tmp_path / "v.csv"
    path.write_text("0F0,3F0,3B0,0B0\n1F0,2F0,2B0,1B0\n")
    with pytest.raises(SpecError, match="Set it to 2"):
        build_orders(layout_of(str(path), 2), 1)
    assert stages_of_ranks(str(path), 2) == [[0, 3], [1, 2]]
    path.write_text("0F0,0F1,0B0,0B1\n1F0,2F0,2B0,1B0,2F1,2B1\n1F1,1B1\n")
    with pytest.raises(SpecError, match="stage 1 on ranks 1, 2") as told:
        build_orders(layout_of(str(path), 3), 2)
    assert "two that hold the same stages" in told.value.problems[-1].remedy


def back_and_forth(rank: int) -> int:
    """How many messages wait to be let go of, at most, in a long 1F1B."""
    group = dist.new_group([0, 1])
    assert isinstance(group, dist.ProcessGroup)
    orders = build_orders(layout_of("1f1b", 2), 40)
    mailbox = Mailbox(
        orders.messages, (group, group), orders.num_stages - 1, shape=(2,), dtype=torch.float64, device=torch.device("cpu")
    )
    most = 0
    for position, action in enumerate(orders.schedule[rank]):
        mailbox.expect(position)
        key = (action.kind is not Kind.FORWARD, action.stage, action.micro_batch)
        if key in mailbox.incoming:
            assert mailbox.take(mailbox.incoming[key]).tolist() == [action.micro_batch, key[0]]
        out = (key[0], action.stage - 1 if key[0] else action.stage + 1, action.micro_batch)
        if out in mailbox.outgoing:
            mailbox.send(mailbox.outgoing[out], torch.tensor([action.micro_batch, key[0]], dtype=torch.float64))
        most = max(most, sum(map(len, mailbox._leaving.values())))
    mailbox.close()
    return most


def test_sent_tensors_are_let_go_of_when_an_answer_shows_that_they_were_read():
    assert max(run_ranks(2, back_and_forth)) <= 3
