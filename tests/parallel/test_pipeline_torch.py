"""The runtime of torch.distributed.pipelining does the same steps: the same passes in the same order, so the same bits."""

from __future__ import annotations

import re
import signal
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import replace
from os import getpid, kill
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining  # a second, here once and not on every rank
from parallel.pipelines import Step, build, layout_of, rank_step, tied, worst_difference
from ranks import RankError, run_ranks

from ultrascale.description.layout import Layout
from ultrascale.parallel.pipeline.pipeline_parallel import build_orders
from ultrascale.schedules.actions import Action
from ultrascale.schedules.messages import receive_order, torch_actions

SCHEDULES = (
    ("afab", 1), ("1f1b", 1), ("interleaved", 2), ("breadth-first", 2), ("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2),
    ("dualpipe", 1),
)  # fmt: skip


def by_torch(layout: Layout) -> Layout:
    return replace(layout, pipeline_runtime="torch")


def both(rank: int, steps: list[Step]) -> list[Any]:
    return [(rank_step(rank, step), rank_step(rank, replace(step, layout=by_torch(step.layout)))) for step in steps]


def assert_same_bits(world: int, steps: list[Step]) -> None:
    by_rank = run_ranks(world, both, steps)
    for step, results in zip(steps, zip(*by_rank, strict=True), strict=True):
        assert worst_difference(step, [theirs for _, theirs in results]) < 1e-12
        for (loss, gradients), (their_loss, theirs) in results:
            assert loss == their_loss and gradients.keys() == theirs.keys()
            assert all(torch.equal(gradients[name], theirs[name]) for name in gradients)


@pytest.mark.parametrize("zero_stage", [0, 3, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (1, 2))])
def test_every_schedule_under_every_zero_stage_has_the_bits_of_our_runtime(zero_stage):
    layouts = [layout_of(name, 2, v, dp=2, zero_stage=zero_stage, recompute="full") for name, v in SCHEDULES]
    assert_same_bits(4, [tied(Step(layout, 3, documents=True)) for layout in layouts])


def test_four_ranks_and_any_number_of_micro_batches_have_the_bits_of_our_runtime():
    model = replace(Step(Layout(), 1).model, num_hidden_layers=8)
    assert_same_bits(4, [Step(layout_of(name, 4, v), count, model) for name, v in SCHEDULES for count in (1, 6)])


def test_a_schedule_from_a_file_has_the_bits_of_our_runtime(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("0F1,0F0,0B1,0B0\n1F1,1I1,1F0,1B0,1W1\n")
    assert_same_bits(2, [Step(layout_of(str(path), 2), 2)])


def evaluated(rank: int, step: Step) -> dict[int, float]:
    running = build(rank, step)
    running.evaluate()
    return running.losses


def test_evaluations_have_the_bits_of_our_runtime():
    steps = [Step(layout_of(name, 2, v), 3) for name, v in SCHEDULES[1:3]]
    for step in steps:
        theirs = replace(step, layout=by_torch(step.layout))
        assert run_ranks(2, evaluated, step) == run_ranks(2, evaluated, theirs)


def executed_by(rank: int, step: Step) -> tuple[int, list[tuple[str, float, float]]]:
    """Steps that torch's runtime has begun, and what was done in them."""
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime as Runtime

    begun: list[int] = []
    with pytest.MonkeyPatch.context() as patch:
        original = Runtime._step_microbatches
        patch.setattr(Runtime, "_step_microbatches", lambda *some, **more: (begun.append(rank), original(*some, **more)))
        running = build(rank, step)
        running.train()
    return len(begun), [(str(one.action), one.start, one.end) for one in running.pipeline.executed]


def test_it_is_torchs_runtime_that_executes_the_list_and_says_when():
    step = Step(layout_of("zb-v", 2, 2), 3)
    ours = run_ranks(2, executed_by, step)
    theirs = run_ranks(2, executed_by, replace(step, layout=by_torch(step.layout)))
    assert [begun for begun, _ in (*ours, *theirs)] == [0, 0, 1, 1]
    for (_, own), (_, done) in zip(ours, theirs, strict=True):
        assert [action for action, *_ in own] == [action for action, *_ in done]
        assert all(start <= end for _, start, end in done)


def dying(rank: int, step: Step, doomed: int) -> None:
    running = build(rank, step)
    dist.barrier()  # nobody dies while another connects to it

    def die(action: Action) -> None:
        if rank == doomed and action.micro_batch == 1:
            kill(getpid(), signal.SIGKILL)

    running.pipeline.on_action = die
    running.train()


@pytest.mark.parametrize("doomed", [0, 1])
def test_when_a_rank_dies_its_neighbour_says_what_it_waited_for_and_from_whom(doomed):
    step = Step(by_torch(layout_of("1f1b", 2)), 4)
    outcomes = run_ranks(2, dying, step, doomed, failures="return")
    other, what = 1 - doomed, "gradient" if doomed else "activation"
    assert [outcomes[rank].kind for rank in (doomed, other)] == ["died", "PipelineError"]
    waited = rf"waited for the {what} of micro-batch \d from stage {doomed} \(pipeline rank {doomed}\)"
    sent = rf"could not send the \w+ of micro-batch \d from stage {other} \(pipeline rank {other}\) to pipeline rank {doomed}"
    assert re.search(rf"pipeline rank {other} \(rank {other} of the run\) ({waited}|{sent}): ", outcomes[other].text)


def waits_of(rank: int, step: Step) -> list[str]:
    running = build(rank, step)
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ultrascale.heartbeat.waits", lambda what, **_: nullcontext(said.append(what)))
        running.train()
    return said


def test_a_rank_says_what_it_waits_for_to_the_last_message():
    step = Step(by_torch(layout_of("afab", 2)), 3)
    first, second = run_ranks(2, waits_of, step)
    assert sum("waited for the gradient" in what for what in first) == 3
    assert sum("which did not take it" in what for what in first + second) == 3  # gradients: nothing answers them


def fails_in_a_pass(rank: int, step: Step) -> None:
    running = build(rank, step)

    def fail(stage: int, number: int, hidden: torch.Tensor | None) -> torch.Tensor:
        raise RuntimeError("gloo is only a word here")

    if rank == 0:
        object.__setattr__(running, "passes", fail)
    running.train()


def test_an_error_of_a_pass_keeps_its_words():
    with pytest.raises(RankError, match="gloo is only a word here"):
        run_ranks(2, fails_in_a_pass, Step(by_torch(layout_of("1f1b", 2)), 2))


@pytest.mark.parametrize("name, virtual", SCHEDULES)
@pytest.mark.parametrize("pp, count", [(2, 3), (4, 8)])
def test_lists_with_messages_match_and_receive_before_they_read(name, virtual, pp, count):
    orders = build_orders(layout_of(name, pp, virtual), count)
    parts = [(part, rank) for rank, row in enumerate(orders.schedule) for action in row for part in action.parts]
    holder = {(part.stage, part.micro_batch): rank for part, rank in parts}
    sent, received = defaultdict(list), defaultdict(list)
    for rank, row in enumerate(orders.schedule):
        cells = list(torch_actions(row, orders.messages, rank, orders.num_stages))
        passes = [part._replace(overlapped_with=None).cell for action in row for part in action.parts]
        assert [cell for cell in cells if "_" not in cell] == passes
        for position, cell in enumerate(cells):
            if found := re.fullmatch(r"(\d+)(SEND|RECV)_([FB])(\d+)", cell):
                stage, way, number = int(found[1]), found[3], found[4]
                users = [f"{stage}F{number}"] if way == "F" else [f"{stage}B{number}", f"{stage}I{number}"]
                step = 1 if way == "F" else -1
                if found[2] == "RECV":
                    received[holder[stage - step, int(number)], rank].append(f"{way}{number} to {stage}")
                    assert any(user in cells[position:] for user in users)
                else:
                    sent[rank, holder[stage + step, int(number)]].append(f"{way}{number} to {stage + step}")
                    assert any(user in cells[:position] for user in users)
    assert sent == received  # from each rank to each other in one order: NCCL goes by nothing else
    assert sum(map(len, sent.values())) == len(orders.messages) > 0


def test_one_message_more_than_is_needed_is_on_its_way():
    orders = build_orders(layout_of("afab", 2), 3)
    started = [(position, str(message.micro_batch)) for position, message in receive_order(orders.messages, 1)]
    assert started == [(0, "0"), (0, "1"), (1, "2")]
