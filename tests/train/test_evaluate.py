"""Held-out loss: the same for every layout, and no trace of it in training."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from train.small_runs import MODEL, curve, make_corpus, same, small_run, state, stop_at, train_here, train_ranks

from ultrascale.data.indexed import ShardWriter
from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.run import Evaluation, Run, Source
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import local
from ultrascale.train.corpora import build_loader, validation_loaders
from ultrascale.train.evaluate import evaluate
from ultrascale.train.trainer import Trainer


@pytest.fixture
def run(home) -> Run:
    """Evaluates 7 sequences, which no layout divides, every 4 steps and at the end, where it also saves."""
    make_corpus(home / "held-out", seed=9)
    base = small_run(home, name="whole")
    return replace(
        base,
        data=replace(base.data, validation=(Source(str(home / "held-out")),)),
        evaluation=Evaluation(every_steps=4, sequences=7),
        checkpoint=replace(base.checkpoint, every_steps=4),
    )


LAYOUTS = [
    Layout(micro_batch_size=4),
    Layout(dp=2, zero_stage=0, micro_batch_size=1),
    Layout(dp=2, zero_stage=3, micro_batch_size=2, recompute="full"),
    Layout(dp=4, zero_stage=2, dp_shard=2, micro_batch_size=1),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"dp {layout.dp}, {layout.micro_batch_size} sequences")
def test_the_held_out_loss_is_that_of_one_process_for_every_layout(run, layout):
    whole = replace(run, layout=Layout(micro_batch_size=1, precision="fp64"))
    train_here(whole)
    cut = replace(run, name="cut", layout=replace(layout, precision="fp64"))
    train_ranks(cut)
    found, expected = (torch.tensor(validation_losses(r), dtype=torch.float64) for r in (cut, whole))
    assert (found / expected - 1).abs().max() < 1e-11


def test_no_sequence_of_a_small_corpus_counts_twice_and_the_log_says_over_how_many_the_loss_is(run):
    whole = sum(build_loader(run, run.data.validation).sequences_per_epoch)
    runs = [
        replace(run, name=f"over-{sequences}", evaluation=Evaluation(every_steps=4, sequences=sequences))
        for sequences in (whole, whole + whole // 2, 7)
    ]
    for each in runs:
        train_here(each)
    all_once, more, seven = (validation_losses(each) for each in runs)
    assert all_once == more != seven
    logs = [(Path(each.folder) / each.name / "log.txt").read_text() for each in runs]
    for log, sequences in zip(logs, (whole, whole, 7), strict=True):
        assert f"val/loss: the mean over {sequences:,} of {whole:,} sequences of {run.data.validation[0].path} (" in log


def test_runs_with_other_seeds_are_measured_on_the_same_sequences(run):
    (first,), (second,) = (validation_loaders(replace(run, seed=seed)).values() for seed in (1, 2))
    assert np.array_equal(first.read(range(7)).tokens, second.read(range(7)).tokens)


def losses_before_and_after(rank: int, run: Run) -> tuple[float, float, float]:
    """With the weights halved in between, as loading a checkpoint writes them; and with them from the start."""
    ranks = Ranks(rank, 2, torch.device("cpu"), dist.group.WORLD)
    loader, found = build_loader(run, run.data.sources), []
    for halved in (False, True):
        trainer = Trainer(run, ranks, loader)
        for again in range(2 - halved):
            if halved or again:
                with torch.no_grad():
                    for parameter in trainer.share.parameters():
                        local(parameter).mul_(0.5)
            found.append(evaluate(trainer, loader, 3))
    return found[0], found[1], found[2]


@pytest.mark.parametrize("stage", [1, 3])
def test_an_evaluation_reads_weights_that_have_changed_since_the_last_one(run, stage):
    cut = replace(run, layout=Layout(dp=2, zero_stage=stage))
    for before, after, fresh in run_ranks(2, losses_before_and_after, cut):
        assert before != after == fresh


def validation_losses(run: Run) -> list[float]:
    lines = (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: row["val/loss"] for row in map(json.loads, lines) if "val/loss" in row}
    assert list(found) == [4, 8, 12]
    return list(found.values())


def test_held_out_sequences_without_a_valid_target_have_no_loss(run, home, capsys):
    """Each of their tokens is a document of its own, after which nothing is to be predicted: of all 3,000 but the last two."""
    writer = ShardWriter(home / "single", "uint16")
    writer.add_documents(np.arange(3000) % MODEL.vocab_size, [1] * 2998 + [2])
    writer.finish()
    train_here(replace(run, data=replace(run.data, validation=(Source(str(home / "single")),))))
    assert "val/loss" not in (Path(run.folder) / run.name / "metrics.jsonl").read_text()
    assert capsys.readouterr().out.count("val unknown (no valid target)") == 3


def test_a_run_is_evaluated_at_its_end_whatever_the_interval(run):
    run = replace(run, evaluation=replace(run.evaluation, every_steps=5))
    train_here(run)
    lines = (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()
    assert [row["step"] for row in map(json.loads, lines) if "val/loss" in row] == [5, 10, 12]


def test_the_held_out_loss_is_the_sum_over_its_first_sequences_by_their_valid_targets(run):
    train_here(run)
    decoder = Decoder(MODEL)
    decoder.load_state_dict({n.removeprefix("model."): t for n, t in state(run).items() if n.startswith("model.")})
    loader = Loader(run.data.validation, sequence_length=11, vocab_size=MODEL.vocab_size, seed=0)
    batch = loader.read(range(7))
    with torch.no_grad():
        loss = decoder(
            torch.from_numpy(batch.tokens), targets=torch.from_numpy(batch.targets),
            positions=torch.from_numpy(batch.positions), document_ids=torch.from_numpy(batch.document_ids),
        )  # fmt: skip
    assert validation_losses(run)[-1] == pytest.approx(float(loss) / (batch.targets >= 0).sum(), rel=1e-6)


@pytest.mark.parametrize("layout", [Layout(micro_batch_size=2), Layout(dp=2, zero_stage=3, micro_batch_size=1)], ids=["1", "2"])
def test_evaluating_and_saving_in_the_same_step_changes_no_bit_of_the_training(run, layout):
    evaluated = replace(run, layout=layout)
    plain = replace(small_run(Path(run.folder)), layout=layout)
    for each in (evaluated, plain):
        train_ranks(each)
    assert curve(evaluated) == curve(plain) and same(state(evaluated), state(plain))


def test_saving_in_the_background_saves_the_same_and_resumes_to_the_same_bits(run):
    run = replace(run, layout=Layout(dp=2, zero_stage=3, micro_batch_size=1))
    behind = replace(run, name="behind", checkpoint=replace(run.checkpoint, every_steps=1, asynchronous=True, keep=2))
    train_ranks(run)
    train_ranks(behind, before_step=stop_at(7))
    train_ranks(behind)
    assert curve(behind) == curve(run) and same(state(behind), state(run))
    assert len(list((Path(run.folder) / "behind" / "checkpoints").iterdir())) == 2


def test_what_was_evaluated_is_told_also_at_steps_that_are_not_logged(run):
    run = replace(run, log=replace(run.log, every_steps=4), evaluation=replace(run.evaluation, every_steps=3))
    train_here(run)
    lines = (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()
    found = {row["step"]: "val/loss" in row and row["perf/eval_s"] > 0 for row in map(json.loads, lines)}
    assert found == {3: True, 4: False, 6: True, 8: False, 9: True, 12: True}


def test_several_held_out_corpora_have_a_metric_each_even_if_their_folders_have_one_name(run):
    home = Path(run.folder)
    (home / "other").mkdir()
    make_corpus(home / "other" / "held-out", seed=8)
    paths = [str(home / "held-out"), str(home / "other" / "held-out")]
    run = replace(
        run,
        steps=4,
        optimizer=replace(run.optimizer, decay_steps=None),
        data=replace(run.data, validation=tuple(map(Source, paths))),
    )
    train_here(run)
    last = (home / "whole" / "metrics.jsonl").read_text().splitlines()[-1]
    assert all(f'"val/loss/{path}": ' in last for path in ("held-out", "other/held-out"))
