"""The gradient noise scale against a truth that is known, and between layouts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from train.small_runs import MODEL, rows, small_run, train_here, train_ranks

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.oracle.reference import Reference
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Log, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.observers.noise_scale import NoiseScale
from ultrascale.train.trainer import Trainer


@pytest.mark.parametrize("sizes", [[16] * 8, [1, 2, 3, 5, 8, 13, 40, 56]], ids=["equal", "unequal"])
def test_the_estimate_is_the_trace_of_the_covariance_over_the_squared_gradient(sizes):
    """Gradients of one token: a signal of squared norm 2, and noise with a known, uneven covariance of trace 600."""
    random = np.random.default_rng(0)
    dims, tokens = 40, np.array(sizes, float)
    signal = np.full(dims, np.sqrt(2 / dims))
    deviations = np.sqrt(600 * np.arange(1, dims + 1) / np.arange(1, dims + 1).sum())
    estimate, found = NoiseScale(smoothing=0.999), None
    for _ in range(4000):
        parts = signal + random.normal(size=(len(sizes), dims)) * deviations / np.sqrt(tokens)[:, None]
        whole = (parts * tokens[:, None]).sum(0) / tokens.sum()
        found = estimate.update(
            small_square=float((parts**2).sum(1).mean()),
            small_tokens=len(sizes) / float((1 / tokens).sum()),
            big_square=float((whole**2).sum()),
            big_tokens=float(tokens.sum()),
        )
    assert found == pytest.approx(300, rel=0.1)


def test_nothing_is_told_while_signal_or_noise_is_not_yet_above_zero():
    estimate = NoiseScale()
    assert estimate.update(small_square=1.0, small_tokens=4.0, big_square=1.0, big_tokens=4.0) is None
    assert estimate.update(small_square=1.0, small_tokens=1.0, big_square=0.1, big_tokens=4.0) is None  # signal -0.2
    assert estimate.update(small_square=4.0, small_tokens=1.0, big_square=2.0, big_tokens=4.0) == pytest.approx(
        (0.95 * 1.2 + 8 / 3) / (4 / 3 - 0.95 * 0.2)
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_two_ranks_estimate_what_one_does_and_a_resumed_run_goes_on_with_it(home, stage):
    one = small_run(
        home, name="one", seed=1, layout=Layout(micro_batch_size=2, precision="fp64"), batch=Batch(sequence_length=11),
        log=Log(memory_steps=0, gradient_noise_scale=True),
    )  # fmt: skip
    # Not every seed has a signal in most of 12 steps; this one has.
    two = replace(one, name="two", layout=Layout(dp=2, zero_stage=stage, micro_batch_size=2, precision="fp64"))
    train_here(one)
    train_ranks(replace(two, steps=6, optimizer=replace(two.optimizer, schedule="constant", decay_steps=None)))
    train_ranks(two)
    found, expected = (known(run) for run in (two, one))
    assert len(expected) >= 6
    constant = {step: value for step, value in expected.items() if step <= 6}
    assert {step: value for step, value in found.items() if step <= 6} == pytest.approx(constant, rel=1e-9)
    assert found == pytest.approx(expected, rel=1e-9)


def test_a_step_gives_it_the_mean_square_of_micro_batches_and_the_harmonic_mean_of_their_targets():
    """Micro-batches of very uneven numbers of targets, each by itself in another decoder."""
    log = Log(memory_steps=0, gradient_noise_scale=True)
    run = Run(MODEL, device="cpu", layout=Layout(precision="fp64"), batch=Batch(11, 5), log=log)
    loader = RandomDocuments(sequence_length=11, vocab_size=MODEL.vocab_size, seed=1)
    trainer = Trainer(run, Ranks(0, 1, torch.device("cpu")), loader)
    trainer.compute_gradients()
    parts = [trainer.to_device(loader.read([number])) for number in range(5)]
    squares, gradients, counts = [], [], [part.num_targets for part in parts]
    for part in parts:
        decoder = Reference(run, loader).decoder
        decoder(part.tokens, targets=part.targets, positions=part.positions, document_ids=part.document_ids).backward()
        gradient = torch.cat([parameter.grad.flatten() for parameter in decoder.parameters() if parameter.grad is not None])
        squares.append(float((gradient / part.num_targets).square().sum()))
        gradients.append(gradient)
    assert min(counts) * 2 < max(counts)
    expected = NoiseScale()
    expected.update(
        small_square=float(np.mean(squares)), small_tokens=float(1 / np.mean(1 / np.array(counts))),
        big_square=float((torch.stack(gradients).sum(0) / sum(counts)).square().sum()), big_tokens=sum(counts),
    )  # fmt: skip
    assert trainer.noise_scale is not None
    assert trainer.noise_scale.state() == pytest.approx(expected.state(), rel=1e-9)


def known(run: Run) -> dict[int, float]:
    lines = (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()
    parsed = [json.loads(line) for line in lines]
    return {row["step"]: row["train/noise_scale_tokens"] for row in parsed if "train/noise_scale_tokens" in row}


def test_watching_gradients_changes_no_bit_of_the_training(home):
    plain, watched = (small_run(home, name=name, layout=Layout(micro_batch_size=2)) for name in ("plain", "watched"))
    train_here(plain)
    train_here(replace(watched, log=replace(watched.log, gradient_noise_scale=True)))
    assert rows(plain, "train/loss", "train/grad_norm") == rows(watched, "train/loss", "train/grad_norm")
