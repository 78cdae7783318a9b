"""Delayed scaling in the trainer: what enters the history, what does not, and that nothing of it is lost on the way."""

from __future__ import annotations

from dataclasses import replace
from math import isfinite
from typing import Any

import pytest
import torch
from gold.curves import CURVES, Bytes
from torch import Tensor
from train.small_runs import same, small_run, state, stop_at, train_in_turn

from ultrascale.checkpoint import newest_valid
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run
from ultrascale.kernels.fp8.fp8_linear import record_amaxes, round_by
from ultrascale.kernels.fp8.fp8_matrices import FORWARD
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.precision.fp8_history import AmaxHistory
from ultrascale.train.folder.resume import restore
from ultrascale.train.trainer import Trainer
from ultrascale.work.fp8_slots import block_slots, num_block_slots

GOLD = CURVES["fp8 delayed"].run
ONE = Ranks(0, 1, torch.device("cpu"))


def trainer_of(run: Run = GOLD, **layout: Any) -> tuple[Trainer, AmaxHistory]:
    run = replace(run, layout=replace(run.layout, **layout), model=replace(run.model, num_hidden_layers=2))
    trainer = Trainer(run, ONE, Bytes(run.batch.sequence_length))
    assert trainer.share.amax_history is not None
    return trainer, trainer.share.amax_history


def test_each_step_takes_its_place_and_scales_have_room_for_the_largest_or_follow_the_last() -> None:
    for algorithm, expected in (("max", [5.0, 5.0, 4.0, 4.0]), ("most_recent", [5.0, 1.0, 4.0, 2.0])):
        trainer, history = trainer_of(fp8_amax_history_len=2, fp8_amax_compute_algo=algorithm)
        query = block_slots(trainer.run.model, 1)["self_attn.q_proj"]
        found, block = [], history.blocks[1]
        assert block.largest is not None and block.scales is not None
        for seen in (5.0, 1.0, 4.0, 2.0):
            block.largest[query.input] = seen
            history.accept()
            found.append(float(block.scales[query.input]) * torch.finfo(FORWARD).max)
        assert found == pytest.approx(expected)
        assert float(history.scales[0]) == 1.0  # never seen: a scale of 1
        assert not history.largest.any()


def test_what_the_history_does_not_know_saturates() -> None:
    (found,) = round_by(torch.tensor([1.0 / 448]), [torch.tensor([[0.5, 1.0, 30.0, -1e9]])], (0,), FORWARD)
    assert (found.values.float() * found.scale).tolist() == [pytest.approx([0.5, 1.0, 1.0, -1.0], rel=1e-6)]


def test_the_largest_of_all_micro_batches_is_what_the_whole_batch_has() -> None:
    record_amaxes: list[Tensor] = []
    for size in (16, 4):
        trainer, history = trainer_of(micro_batch_size=size)
        trainer.compute_gradients()
        inputs = [slots.input for slots in block_slots(trainer.run.model, 0).values()]
        record_amaxes.append(history.largest[inputs[:1]].clone())  # what comes later depends on scales of this first step
    assert torch.equal(*record_amaxes) and float(record_amaxes[0]) > 0


def test_a_slot_keeps_the_largest_magnitude_that_was_noted_in_it() -> None:
    largest = torch.zeros(4)
    for found in (2.0, 3.0, 1.0):
        record_amaxes([torch.ones(1, 1)], largest, [torch.tensor([found, found / 2])], [1])
    assert largest.tolist() == [0.0, 3.0, 1.5, 0.0]


def test_evaluations_and_steps_that_are_passed_over_leave_history_and_scales() -> None:
    trainer, history = trainer_of()
    trainer.train_step()
    before, scales = history.history.clone(), history.scales.clone()
    numbers = trainer.loader.read(range(16))
    trainer.passes.evaluate([trainer.to_device(numbers)])
    assert not history.largest.any()
    gradients = trainer.compute_gradients()
    assert history.largest.all() or history.largest.count_nonzero() > 0
    trainer.apply(replace(gradients, anomaly="as the test says"))
    assert not history.largest.any()
    assert torch.equal(history.history, before) and torch.equal(history.scales, scales) and history.updates == 1


def test_recomputation_rounds_by_the_scales_of_the_forward_pass() -> None:
    weights: list[list[Tensor]] = []
    for recompute in ("none", "selective", "full"):
        trainer, _ = trainer_of(recompute=recompute)
        for _ in range(3):
            trainer.train_step()
        weights.append([parameter.detach().clone() for parameter in trainer.share.parameters()])
    for plain, *others in zip(*weights, strict=True):
        assert all(torch.equal(plain, other) for other in others)


def test_an_infinite_magnitude_shows_in_the_norm_although_it_saturates() -> None:
    trainer, history = trainer_of()
    trainer.compute_gradients()
    assert isfinite(float(trainer.share.gradient_norm()))
    history.largest[3] = torch.inf
    assert not isfinite(float(trainer.share.gradient_norm()))
    assert history.infinite() == ["input, weight or gradient of a product of layers.0"]


def test_a_stopped_run_goes_on_to_the_same_bits_and_another_layout_reads_its_history(home) -> None:
    layout = Layout(precision="fp8", fp8_scaling="delayed", fp8_amax_history_len=4, dp=2, zero_stage=3)
    changes: dict[str, Any] = {"layout": layout, "steps": 5}
    changes["optimizer"] = replace(small_run(home).optimizer, warmup_steps=1, decay_steps=2)
    whole, run = (small_run(home, name=name, **changes) for name in ("whole", "stopped"))
    outcomes = train_in_turn([(whole, None), (run, stop_at(3)), (run, None)])
    assert [outcome.get("steps_done", outcome) for outcome in outcomes] == [5, 3, 5]
    kept = state(run)
    assert same(kept, state(whole))
    assert kept["fp8.amax_history.layers.0"].shape == (num_block_slots(run.model, 0), 4)
    checkpoint = newest_valid(home / "stopped" / "checkpoints")
    assert checkpoint is not None
    by_row = Trainer(replace(run, layout=Layout(precision="fp8")), ONE, Reads(outcomes))
    restore(by_row, checkpoint, allow_changes=True)
    assert by_row.steps_done == 5
    for length, updates in ((4, 5), (8, 0)):  # a history of another length is begun anew
        alone = replace(run, layout=replace(layout, dp=1, zero_stage=0, fp8_amax_history_len=length))
        trainer = Trainer(alone, ONE, Reads(outcomes))
        history = trainer.share.amax_history
        assert history is not None
        restore(trainer, checkpoint, allow_changes=True)
        assert history.updates == updates and history.blocks[0].is_known == (updates > 0)
        for name, table in history.tables():
            assert torch.equal(table, kept[f"fp8.amax_history.{name}"]) if updates else not table.any()


class Reads(Bytes):
    def __init__(self, unused: object):
        super().__init__(11)


def test_a_history_that_is_none_is_refused_and_one_that_nobody_reads_is_told() -> None:
    base = {"model.preset": "tiny-llama", "batch.sequence_length": 64, "layout.precision": "fp8"}
    for length in (0, 5000):
        with pytest.raises(SpecError) as caught:
            resolve(None, base | {"layout.fp8_scaling": "delayed", "layout.fp8_amax_history_len": length})
        assert [problem.key for problem in caught.value.problems] == ["layout.fp8_amax_history_len"]
    told = run_notes(replace(GOLD, layout=Layout(precision="fp8", fp8_amax_compute_algo="most_recent")))
    assert any("fp8_amax_compute_algo" in note for note in told)
