"""A step done twice: what a rank got wrong once is told before anything is updated, and what is right is never suspected."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from train.small_runs import BeforeStep, at_step, curve, same, small_run, state, train_here, train_ranks
from train.test_anomalies import events, run_of

from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.parallel.share import local_gradient
from ultrascale.train.observers import repeat
from ultrascale.train.trainer import Trainer

COPIES = Layout(dp=2, zero_stage=0, micro_batch_size=2)
STEP = 7


def once(step: int, rank: int, fault: BeforeStep) -> BeforeStep:
    """Before that step on that rank, but not again when the run comes by once more."""
    done: list[int] = []

    def act(trainer: Trainer) -> None:
        if trainer.steps_done == step and trainer.ranks.rank == rank and not done:
            done.append(step)
            fault(trainer)

    return act


def multiply_wrongly(trainer: Trainer) -> None:
    """Of one micro-batch, once: the last bit but three of what it brings into every gradient."""
    forward = trainer.passes.forward

    def wrong(*arguments, **at):
        trainer.passes.forward = forward  # type: ignore[method-assign]
        return forward(*arguments, **at) * (1 + 2.0**-20)

    trainer.passes.forward = wrong  # type: ignore[method-assign]


def sum_wrongly(trainer: Trainer) -> None:
    """One bit of one gradient, once, after it was summed over ranks."""
    finish = trainer.share.finish_gradients

    def wrong() -> None:
        trainer.share.finish_gradients = finish  # type: ignore[method-assign]
        finish()
        gradient = local_gradient(dict(trainer.share.named())["norm.weight"])
        assert gradient is not None
        gradient.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    trainer.share.finish_gradients = wrong  # type: ignore[method-assign]


@pytest.mark.catalogue(52)
@pytest.mark.parametrize("layout", [COPIES, replace(COPIES, zero_stage=3)], ids=["copies", "cut"])
def test_a_wrong_contribution_to_a_sum_is_told_with_its_rank_and_gone_after_a_rewind(home, layout):
    run = run_of(home, "stops", layout, repeat_every_steps=1)
    outcomes = train_ranks(run, before_step=once(STEP, 1, multiply_wrongly))
    assert [one["error"] for one in outcomes] == ["CorruptStateError"] * 2
    assert f"step {STEP + 1} done twice gave other bits (rank 1: gradient of " in outcomes[0]["text"]
    assert "rank 0" not in outcomes[0]["text"]
    calm, run = run_of(home, "calm", layout), run_of(home, "rewinds", layout, repeat_every_steps=1, on_anomaly="rewind")
    train_ranks(calm)
    train_ranks(run, before_step=once(STEP, 1, multiply_wrongly))
    assert [row["step"] for row in events(run, "rewind")] == [STEP]
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.catalogue(52)
def test_a_sum_that_came_out_otherwise_on_one_rank_is_told(home):
    outcomes = train_ranks(run_of(home, "sum", COPIES, repeat_every_steps=1), before_step=once(STEP, 1, sum_wrongly))
    assert f"step {STEP + 1} done twice gave other bits (rank 1: summed gradient of norm.weight)" in outcomes[0]["text"]


@pytest.mark.catalogue(52)
def test_control_what_is_not_done_twice_is_not_seen_and_spoils_the_run(home):
    calm, run = run_of(home, "calm", COPIES), run_of(home, "spoilt", COPIES, repeat_every_steps=STEP + 1)
    train_ranks(calm)
    outcomes = train_ranks(run, before_step=once(STEP, 1, multiply_wrongly))
    assert outcomes[0]["steps_done"] == run.steps
    assert not same(state(run), state(calm))


@pytest.mark.catalogue(52)
@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, zero_stage=2, micro_batch_size=1), Layout(tp=2, micro_batch_size=2), Layout(cp=2, micro_batch_size=2),
        Layout(pp=2, micro_batch_size=2), Layout(pp=2, schedule="zb-h1", micro_batch_size=2),
    ],
    ids=["dp", "tp", "cp", "pp", "zero bubble"],
)  # fmt: skip
def test_steps_done_twice_are_never_suspected_and_change_no_bit(home, layout):
    changes = {"layout": layout, "batch": replace(small_run(home).batch, sequence_length=8), "steps": 6}
    calm, run = (replace(run_of(home, name), **changes) for name in ("calm", "twice"))
    run = replace(run, faults=replace(run.faults, repeat_every_steps=1))
    train_ranks(calm)
    assert train_ranks(run)[0].get("steps_done") == run.steps
    assert curve(run) == curve(calm) and same(state(run), state(calm))


@pytest.mark.nightly
@pytest.mark.catalogue(52)
@pytest.mark.timeout(1200)
def test_a_thousand_steps_done_twice_are_never_suspected(home):
    run = replace(run_of(home, "long", Layout(dp=2, zero_stage=3, micro_batch_size=2), repeat_every_steps=1), steps=1000)
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=None))
    assert train_ranks(run)[0]["steps_done"] == 1000
    assert events(run, "rewind") == []


def test_where_bits_need_not_repeat_doing_a_step_twice_is_refused(home):
    run = replace(small_run(home), faults=replace(small_run(home).faults, repeat_every_steps=5))
    trainers: list[Trainer] = []
    train_here(run, before_step=at_step(0, trainers.append))
    ranks = replace(trainers[0].ranks, device=torch.device("cuda"))
    trainers[0].ranks = ranks
    with pytest.raises(SpecError, match=r"faults\.repeat_every_steps"):
        repeat.expect_repeatable(trainers[0])
