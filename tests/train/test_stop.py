"""Signals, numbers that are not finite, damaged checkpoints and other ends of a run."""

from __future__ import annotations

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch
from train.small_runs import (
    STEPS,
    at_step,
    before_each_step,
    curve,
    make_corpus,
    same,
    small_run,
    state,
    stop_at,
    train_here,
    train_ranks,
)

from ultrascale.checkpoint import CheckpointError
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.models.decoder import Block
from ultrascale.models.feed_forward import MLP
from ultrascale.train.loop import train
from ultrascale.train.observers.anomalies import NonFiniteError
from ultrascale.train.trainer import Trainer
from ultrascale.train.worker import run_or_explain

ZERO_2 = Layout(dp=2, zero_stage=2, micro_batch_size=2)


def checkpoints(run) -> list[Path]:
    return sorted((Path(run.folder) / run.name / "checkpoints").glob("step-*"))


@pytest.mark.catalogue(10, 12)
@pytest.mark.parametrize(
    "rank, number",
    [(None, signal.SIGTERM), (1, signal.SIGTERM), (0, signal.SIGINT), (1, signal.SIGHUP), (None, signal.SIGUSR1)],
    ids=["all", "rank 1", "Ctrl-C on rank 0", "SIGHUP on rank 1", "SIGUSR1 on all"],
)
def test_a_signal_to_some_rank_saves_on_all_at_the_same_step(home, rank, number):
    run = small_run(home, layout=ZERO_2)
    outcomes = train_ranks(run, before_step=stop_at(5, rank=rank, number=number))
    assert [(o["steps_done"], o["stopped"]) for o in outcomes] == [(5, True)] * 2
    assert [folder.name for folder in checkpoints(run)] == ["step-00000005"]


@pytest.mark.catalogue(12)
def test_a_second_signal_within_seconds_is_the_same_wish(home):
    run = small_run(home)
    (outcome,) = train_ranks(run, before_step=at_step(5, send_two))
    assert (outcome["steps_done"], outcome["stopped"]) == (5, True)
    assert [folder.name for folder in checkpoints(run)] == ["step-00000005"]


def send_two(trainer: Trainer) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP):
        os.kill(os.getpid(), number)


def test_a_signal_is_a_good_end(home):
    assert run_or_explain(lambda: train(small_run(home))) == 0
    run = small_run(home, name="stopped")
    with before_each_step(stop_at(4)):
        assert run_or_explain(lambda: train(run)) == 0
    assert json.loads((home / "stopped" / "events.jsonl").read_text().splitlines()[-1])["event"] == "stop"


def make_loss_nan(trainer: Trainer) -> None:
    forward = trainer.passes.forward
    trainer.passes.forward = lambda batch, **at: forward(batch, **at) * float("nan")  # type: ignore[method-assign]


def make_gradient_infinite(trainer: Trainer) -> None:
    """In the backward pass of the second block, from here on."""
    projection = cast(MLP, cast(Block, trainer.decoder.layers["1"]).mlp).down_proj
    projection.register_forward_hook(lambda module, inputs, output: output.register_hook(lambda g: g * float("inf")) and None)


@pytest.mark.catalogue(39, 49)
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_the_one(home, stage):
    run = small_run(
        home, layout=replace(ZERO_2, zero_stage=stage), checkpoint=replace(small_run(home).checkpoint, every_steps=3)
    )
    outcomes = train_ranks(run, before_step=at_step(7, make_loss_nan, rank=1))
    assert {outcome["error"] for outcome in outcomes} == {"NonFiniteError"}
    assert "step 8, sequences 40 to 47: not finite: rank 1: loss nan, gradient of lm_head.weight" in outcomes[0]["text"]
    assert "rank 0" not in outcomes[0]["text"]
    assert checkpoints(run)[-1].name == "step-00000006"


@pytest.mark.catalogue(49)
@pytest.mark.parametrize("stage", [0, 3])
def test_a_gradient_that_is_not_finite_is_named_with_its_rank_and_where_it_began(home, stage):
    run = small_run(home, layout=replace(ZERO_2, zero_stage=stage))
    text = train_ranks(run, before_step=at_step(2, make_gradient_infinite, rank=1))[0]["text"]
    assert "step 3, sequences 8 to 11: not finite: rank 1: gradient of layers.1.mlp.down_proj.weight" in text
    assert "rank 0" not in text and "loss" not in text


def test_a_gradient_that_was_not_finite_once_points_at_the_machine(home):
    def once(trainer: Trainer) -> None:
        def spoil(gradient: torch.Tensor) -> torch.Tensor:
            handle.remove()
            return gradient * float("nan")

        handle = trainer.decoder.get_parameter("norm.weight").register_hook(spoil)

    with pytest.raises(NonFiniteError, match=r"gradient of norm\.weight; not so when .* suspect the machine"):
        train_here(small_run(home), before_step=at_step(1, once))


@pytest.mark.catalogue(49)
def test_nothing_changes_when_a_number_is_not_finite(home):
    seen = {}

    def keep(trainer: Trainer) -> None:
        if trainer.steps_done == 3:
            seen["weights"] = {n: p.detach().clone() for n, p in trainer.decoder.named_parameters()}
            seen["trainer"] = trainer
            make_loss_nan(trainer)

    with pytest.raises(NonFiniteError, match="step 4"):
        train_here(small_run(home), before_step=keep)
    trainer = seen["trainer"]
    assert same({n: p.detach() for n, p in trainer.decoder.named_parameters()}, seen["weights"])
    assert {float(s["step"]) for s in trainer.optimizer.state.values()} == {3.0} and trainer.steps_done == 3


@pytest.mark.catalogue(27)
def test_a_damaged_newest_checkpoint_is_named_and_the_one_before_is_used(home):
    whole = small_run(home, name="whole")
    train_here(whole)
    run = small_run(home, name="hurt", checkpoint=replace(whole.checkpoint, every_steps=4))
    train_here(run, before_step=stop_at(9))
    newest = checkpoints(run)[-1]
    shard = next(newest.glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-100] ^= 4
    shard.write_bytes(data)
    train_here(run)
    told = (home / "hurt" / "log.txt").read_text()
    assert f"damaged checkpoint passed over: {newest}" in told and shard.name in told
    assert f"resumed from {checkpoints(run)[1]} at step 8" in told
    assert curve(run) == curve(whole) and same(state(run), state(whole))


def test_when_every_checkpoint_is_damaged_the_run_says_so_and_does_not_start_over(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    (checkpoints(run)[0] / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole. Bring one back(.|\n)*step-00000004: .*manifest"):
        train_here(run)
    assert [step for step, *_ in curve(run)] == [1, 2, 3, 4]


@pytest.mark.catalogue(43)
@pytest.mark.parametrize(
    "change, key",
    [
        (lambda run: replace(run, seed=4), "seed: is 4, but step-00000004 was trained with 3"),
        (lambda run: replace(run, model=replace(run.model, norm_eps=1e-6)), "model.norm_eps: is 1e-06"),
        (lambda run: replace(run, data=replace(run.data, document_mask=False)), "data.document_mask: is False"),
    ],
    ids=["seed", "model", "mask"],
)
def test_what_decides_a_run_cannot_change_on_the_way_unless_asked_for(home, change, key):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    with pytest.raises(SpecError) as caught:
        train_here(change(run))
    assert key in str(caught.value) and "--allow-changes" in str(caught.value)
    assert train_here(change(run), allow_changes=True).steps_done == STEPS


@pytest.mark.parametrize("allow_changes", [False, True])
@pytest.mark.parametrize(
    "change", [{"vocab_size": 62}, {"num_hidden_layers": 3}, {"intermediate_size": 40}, {"qkv_bias": True}]
)
def test_shapes_of_weights_cannot_change_on_the_way_and_no_flag_that_would_not_help_is_named(home, change, allow_changes):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    with pytest.raises(SpecError) as caught:
        train_here(replace(run, model=replace(run.model, **change)), allow_changes=allow_changes)
    (problem,) = caught.value.problems
    assert problem.key == f"model.{next(iter(change))}"
    assert problem.remedy == "Set it back, or start another run with --name: the saved weights do not fit."


@pytest.mark.catalogue(43)
@pytest.mark.parametrize("allow_changes", [False, True])
@pytest.mark.parametrize(
    "change, remedy",
    [
        ({"sequences_per_batch": 4}, "Set it back with --batch.sequences-per-batch 8,"),
        ({"sequence_length": 12}, "Set it back with --batch.sequence-length 11,"),
        ({"ramp": ()}, "Set it back as the run.toml in the run's folder has it,"),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else "",
)
def test_the_batch_cannot_change_on_the_way_even_if_changes_are_allowed(home, change, remedy, allow_changes):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    with pytest.raises(SpecError) as caught:
        train_here(replace(run, batch=replace(run.batch, **change)), allow_changes=allow_changes)
    assert remedy in str(caught.value) and "--allow-changes" not in str(caught.value)


@pytest.mark.catalogue(44)
def test_other_data_in_the_same_place_is_refused_and_the_same_data_elsewhere_is_not(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    for suffix in ("bin", "idx"):
        (home / f"tokens.{suffix}").rename(home / f"moved.{suffix}")
    moved = replace(run, data=replace(run.data, sources=(replace(run.data.sources[0], path=str(home / "moved")),)))
    make_corpus(home / "tokens", seed=1)
    with pytest.raises(SpecError, match="fingerprint differs"):
        train_here(run)
    assert train_here(moved).steps_done == STEPS


@pytest.mark.catalogue(26)
def test_a_full_disk_for_metrics_is_told_once_and_the_run_goes_on(home, capsys):
    run = small_run(home)
    (home / "small").mkdir()
    for name in ("log.txt", "events.jsonl"):
        (home / "small" / name).symlink_to("/dev/full")

    def fill(trainer: Trainer) -> None:
        (home / "small" / "metrics.jsonl").unlink(missing_ok=True)
        (home / "small" / "metrics.jsonl").symlink_to("/dev/full")

    assert train_here(run, before_step=at_step(1, fill)).steps_done == STEPS
    told = capsys.readouterr().err
    assert told.count("No space left on device") == 1 and "is not being written" in told
    assert checkpoints(run)[-1].name == "step-00000012"


@pytest.mark.catalogue(14)
def test_two_processes_cannot_train_in_one_folder(home):
    run = small_run(home)

    seen = []
    train_here(run, before_step=at_step(3, lambda trainer: seen.append(train_ranks(run)[0])))
    assert seen[0].get("error") == "SpecError" and "another process is training in this folder" in seen[0]["text"]


@pytest.mark.catalogue(6)
def test_rank_0_alone_failing_ends_the_others(home):
    run = small_run(home, layout=ZERO_2)
    (home / "small").mkdir()
    (home / "small" / "checkpoints").write_text("in the way")
    first, second = train_ranks(run)
    assert first["error"] == "CheckpointError" and "checkpoints cannot be written here" in first["text"]
    assert second["error"] == "LostRankError" and "rank 1 waited for rank 0" in second["text"]


@pytest.mark.parametrize(
    "environment, message",
    [
        (
            {"WORLD_SIZE": "3", "RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1"},
            "layout is for 1 process, but 3 were started",
        ),
        ({"WORLD_SIZE": "two"}, "must be a positive number, is 'two'"),
        ({"WORLD_SIZE": "2", "RANK": "0"}, "MASTER_ADDR (environment): is missing, but WORLD_SIZE is 2"),
    ],
    ids=["other size", "no number", "no address"],
)
def test_an_environment_that_does_not_fit_is_told(home, monkeypatch, environment, message):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SpecError) as caught:
        train_here(small_run(home))
    assert message in str(caught.value)


@pytest.mark.parametrize("tracker", ["tensorboard", "wandb"])
def test_a_tracker_that_is_not_installed_is_refused_before_anything_starts(home, monkeypatch, tracker):
    monkeypatch.setitem(sys.modules, tracker, None)
    run = small_run(home, log=replace(small_run(home).log, sinks=(tracker,)))
    with pytest.raises(SpecError, match=f"log.sinks: names {tracker}, which is not installed. pip install {tracker}"):
        train_here(run)
    assert not (home / "small").exists()
