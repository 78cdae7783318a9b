"""fp16: the scale passes through every axis, an overflow anywhere is one everywhere, and a skipped step changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.hooks import RemovableHandle
from train.small_runs import MODEL, at_step, rows, same, small_run, state, stop_at, train_here, train_in_turn, train_ranks
from train.test_resume_layouts import EXPERTS

from ultrascale.check.faults.all_faults import PLANTS
from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.prove import Case, prove_all
from ultrascale.check.small import provable
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.run_rules import run_notes, run_problems
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Log, LossScale, Optimizer, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import local, local_gradient
from ultrascale.train.optimizers.loss_scale import DynamicScale, LossScaling
from ultrascale.train.trainer import Trainer

FP16 = Layout(precision="fp16")
MODEL4 = replace(MODEL, num_hidden_layers=4, num_key_value_heads=2)


def test_the_scale_falls_at_once_and_rises_after_so_many_updates():
    scale = DynamicScale(LossScale(initial=8.0, growth_steps=3, growth_factor=4.0, backoff_factor=0.25, lowest=2.0))
    seen = []
    for overflowed in (False, False, True, False, False, False, False, False, False):
        scale.after_step(overflowed=overflowed)
        seen.append(scale.value)
    assert seen == [8, 8, 2, 2, 2, 8, 8, 8, 32]
    scale.after_step(overflowed=True)
    assert scale.value == 8 and not scale.is_lowest
    scale.after_step(overflowed=True)
    assert scale.value == 2 and scale.is_lowest


AXES = {
    "zero 1": (MODEL4, {"dp": 2, "zero_stage": 1}),
    "zero 3, recomputed": (MODEL4, {"dp": 2, "zero_stage": 3, "recompute": "full"}),
    "tp": (MODEL4, {"tp": 2}),
    "cp": (MODEL4, {"cp": 2}),
    "zb-v": (MODEL4, {"pp": 2, "schedule": "zb-v", "virtual_stages": 2}),
    "dualpipe": (MODEL4, {"pp": 2, "schedule": "dualpipe"}),
    "ep": (replace(EXPERTS, num_hidden_layers=4), {"dp": 2, "ep": 2}),
}


@contextmanager
def scaled(trainer: Trainer) -> Iterator[None]:
    """Scales the loss from 1024 on, and twice as much after each step, where a fault would be planted."""
    trainer.loss_scale = DynamicScale(LossScale(initial=1024.0, growth_steps=1))
    trainer.observers.insert(0, LossScaling(trainer))
    yield


def cases() -> list[Case]:
    optimizer = Optimizer(learning_rate=1e-2, clip_grad_norm=0.5, warmup_steps=1)
    found = []
    for name, (model, layout) in AXES.items():
        run = provable(Run(model, steps=10, layout=Layout(**layout), optimizer=optimizer, batch=Batch(11, 4)))
        sequences = 4 * run.layout.dp
        found.append(Case(name, replace(run, batch=Batch(11, sequences)), fault="scaled"))
    return found


def test_a_scale_that_doubles_each_step_changes_no_gradient_norm_or_weight_of_any_axis(monkeypatch):
    """In float64, where nothing overflows, against one process without a scale; gradients are clipped."""
    monkeypatch.setitem(PLANTS, "scaled", scaled)
    for verdict in prove_all(cases(), steps=2):
        assert verdict.holds, verdict


OVERFLOWS = {
    "one rank": (MODEL4, FP16),
    "zero 3": (MODEL4, replace(FP16, dp=2, zero_stage=3)),
    "hybrid": (MODEL4, replace(FP16, dp=2, dp_shard=1, zero_stage=1)),
    "tp, pp": (MODEL4, replace(FP16, tp=2, pp=2)),
    "dualpipe": (MODEL4, replace(FP16, pp=2, schedule="dualpipe")),
    "dualpipe, zero 3": (MODEL4, replace(FP16, pp=2, schedule="dualpipe", dp=2, zero_stage=3)),
    "cp": (MODEL4, replace(FP16, cp=2, zero_stage=2)),
    "ep": (EXPERTS, replace(FP16, dp=2, ep=2)),
}


def state_of(trainer: Trainer) -> list[torch.Tensor]:
    parts = [one.parameter for one in trainer.share.local_parameters]
    moments = [value for state in trainer.optimizer.state.values() for value in state.values()]
    buffers = [buffer for stage in trainer.share.stages.values() for buffer in stage.buffers()]
    return [local(tensor.detach()).clone() for tensor in (*parts, *moments, *buffers)]


@pytest.mark.parametrize("case", OVERFLOWS)
def test_an_overflow_on_the_last_rank_is_skipped_by_all_and_changes_no_bit(home, case):
    model, layout = OVERFLOWS[case]
    run = small_run(home, model=model, layout=layout, steps=4, loss_scale=LossScale(initial=1024.0))
    kept: list[list[torch.Tensor]] = []
    hooks: list[RemovableHandle] = []

    def overflow(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            assert trainer.skipped_steps == 1
            assert all(map(torch.equal, kept.pop(), state_of(trainer)))
        if trainer.steps_done != 2:
            return
        kept.append(state_of(trainer))
        if trainer.ranks.rank == trainer.ranks.world - 1:
            _, block = list(list(trainer.share.stages.values())[-1].blocks())[-1]
            hooks.append(block.register_forward_hook(lambda module, inputs, output: poison(output)))

    def poison(output: Any) -> None:
        """One element of what flows back through the last block, of one micro-batch, is too large."""

        def overflow_once(gradient: torch.Tensor) -> torch.Tensor:
            for hook in hooks:
                hook.remove()
            hooks.clear()
            gradient = gradient.clone()
            gradient.flatten()[-1:] = torch.inf
            return gradient

        output.register_hook(overflow_once)

    outcomes = train_ranks(run, before_step=overflow)
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [4] * layout.world_size
    assert rows(run, "train/loss_scale", "train/skipped_steps") == [(1024, 0), (1024, 0), (1024, 1), (512, 1)]
    lines = (home / run.name / "log.txt").read_text()
    assert lines.count("skipped: overflow at loss scale 1024") == 1


@pytest.mark.parametrize("layout", [FP16, replace(FP16, dp=2, zero_stage=2, reduce_dtype="fp16"), replace(FP16, tp=2)])
def test_a_run_that_skipped_steps_goes_on_to_the_same_bits(home, layout):
    """The scale starts so high that fp16 itself overflows, and rises again after two updates."""
    changes = {"layout": layout, "steps": 10, "loss_scale": LossScale(initial=2.0**20, growth_steps=2)}
    whole, run = (small_run(home, name=name, **changes) for name in ("whole", "stopped"))
    outcomes = train_in_turn([(whole, None), (run, stop_at(5)), (run, None)])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [10, 5, 10]
    keys = ("step", "train/loss", "train/loss_scale", "train/skipped_steps", "train/lr")
    found = rows(run, *keys)
    assert found == rows(whole, *keys) and 2 <= found[-1][3] < 8
    assert same(state(run), state(whole))


def test_a_run_that_changes_its_layout_keeps_its_scale_and_the_count_of_updates(home):
    run = small_run(home, layout=FP16, steps=8, loss_scale=LossScale(initial=2.0**20))
    train_here(run, before_step=stop_at(6))
    skipped, value = rows(run, "train/skipped_steps", "train/loss_scale")[-1]
    assert skipped >= 2 and value < 2.0**20
    moved, seen = replace(run, layout=replace(FP16, dp=2, zero_stage=3)), []

    def look(trainer: Trainer) -> None:
        counts = {float(one["step"]) for one in trainer.optimizer.state.values()}
        assert counts == {6.0 - skipped}, counts
        seen.append(trainer.loss_scale.value if trainer.loss_scale else None)

    outcomes = train_ranks(moved, before_step=at_step(6, look))
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [8, 8]
    assert rows(run, "train/loss_scale")[6] == (value,)


def test_gradients_that_overflow_at_the_lowest_scale_end_the_run(home):
    def explode(trainer: Trainer) -> None:
        parameter = trainer.share.local_parameters[0].parameter
        trainer.share.finish_gradients = lambda: local_gradient(parameter).fill_(torch.inf)  # pyright: ignore

    run = small_run(home, layout=FP16, loss_scale=LossScale(initial=2.0))
    (outcome,) = train_ranks(run, before_step=at_step(2, explode))
    assert outcome["error"] == "NonFiniteError" and "loss scale 1" in outcome["text"] and "bf16" in outcome["text"]
    assert rows(run, "train/skipped_steps")[-1] == (1,)


def test_a_step_that_was_passed_over_for_a_spike_counts_as_no_update_of_the_scale():
    run = Run(MODEL, device="cpu", layout=FP16, batch=Batch(8, 2), loss_scale=LossScale(initial=4.0), log=Log(memory_steps=0))
    loader = RandomDocuments(sequence_length=8, vocab_size=MODEL.vocab_size, seed=1)
    trainer = Trainer(run, Ranks(0, 1, torch.device("cpu")), loader)
    trainer.train_step()
    assert trainer.loss_scale is not None and trainer.loss_scale.state() == {"value": 4.0, "steps_since_change": 1}
    trainer.apply(replace(trainer.compute_gradients(), anomaly="as the test says"))
    assert trainer.loss_scale.state() == {"value": 4.0, "steps_since_change": 1}


def test_a_loss_that_is_no_number_is_no_overflow_and_ends_the_run(home):
    """No scale would mend it; to lower it and go on would be to skip bad data in silence."""

    def spoil(trainer: Trainer) -> None:
        forward = trainer.passes.forward
        trainer.passes.forward = lambda *arguments, **at: forward(*arguments, **at) + torch.nan  # pyright: ignore

    (outcome,) = train_ranks(small_run(home, layout=FP16), before_step=at_step(2, spoil))
    assert outcome["error"] == "NonFiniteError" and "loss nan" in outcome["text"]


def test_the_noise_scale_is_that_of_gradients_without_the_loss_scale(home):
    found = []
    for name, scale in (("low", 4.0), ("high", 4096.0)):
        run = small_run(home, name=name, layout=FP16, steps=3, loss_scale=LossScale(initial=scale))
        run = replace(run, layout=replace(FP16, micro_batch_size=2), log=replace(run.log, gradient_noise_scale=True))
        seen = []
        train_here(run, before_step=lambda trainer, seen=seen: seen.append(trainer.noise_scale))
        found.append(seen[-1].state())
    assert found[0]["signal"] == pytest.approx(found[1]["signal"], rel=0.05)
    assert found[0]["noise"] == pytest.approx(found[1]["noise"], rel=0.05)


@pytest.mark.parametrize("field", ["initial", "growth_factor", "backoff_factor", "lowest"])
def test_scales_that_are_no_powers_of_two_are_refused_by_name(field):
    with pytest.raises(SpecError) as caught:
        resolve(None, {"model.preset": "tiny-llama", "batch.sequence_length": 64, f"loss_scale.{field}": 3.0})
    assert [problem.key for problem in caught.value.problems] == [f"loss_scale.{field}"]


def test_fp16_sums_of_bf16_gradients_and_scales_nobody_reads_are_told():
    run = Run(MODEL, layout=Layout(precision="bf16", reduce_dtype="fp16"), loss_scale=LossScale(initial=2.0))
    assert [problem.key for problem in run.layout.problems()] == ["layout.reduce_dtype"]
    assert any("loss_scale has no effect" in note for note in run_notes(run))
    assert not any("loss_scale" in problem.key for problem in run_problems(run))
