"""Small runs on a small corpus, and ways to train them here: on forked ranks, interrupted where a test says."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from stand_ins import made_up_peak

from ultrascale.checkpoint import load_full, newest_valid
from ultrascale.data.indexed import ShardWriter
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint, Data, Log, Optimizer, RampStage, Run, Source
from ultrascale.launch.forked import run_forked
from ultrascale.measure.machine import ceilings
from ultrascale.train import loop
from ultrascale.train.step import StepResult
from ultrascale.train.trainer import Trainer

MODEL = Model(
    vocab_size=61, hidden_size=16, intermediate_size=20, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    head_dim=8, max_position_embeddings=16, initializer_range=0.1, name="smallest",
)  # fmt: skip
STEPS = 12
MEASURED_PEAK = ceilings.peak_flops
BeforeStep = Callable[[Trainer], None]


def make_corpus(prefix: Path, *, num_tokens: int = 490, seed: int = 0) -> Path:
    """Random tokens in documents of uneven length, as a Megatron prefix."""
    random = np.random.default_rng(seed)
    lengths = []
    while sum(lengths) < num_tokens:
        lengths.append(int(random.integers(1, 40)))
    writer = ShardWriter(prefix, "uint16")
    writer.add_documents(random.integers(0, MODEL.vocab_size, sum(lengths)), lengths)
    writer.finish()
    return prefix


def small_run(folder: Path, **changes: Any) -> Run:
    """12 steps with warm-up, a batch ramp (4, then 8 sequences) and some 45 sequences an epoch, so that the corpus is read more
    than once. Expects a corpus at `folder/tokens`."""
    run = Run(
        model=MODEL, name="small", folder=str(folder), steps=STEPS, seed=3, device="cpu",
        layout=Layout(micro_batch_size=2),
        batch=Batch(sequence_length=11, sequences_per_batch=8, ramp=(RampStage(4 * 4 * 11, 4),)),
        data=Data(sources=(Source(str(folder / "tokens")),)),
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=3, schedule="wsd", decay_steps=4),
        checkpoint=Checkpoint(every_steps=None, keep=0, export=False),
        log=Log(memory_steps=0),
    )  # fmt: skip
    return replace(run, **changes)


@contextmanager
def before_each_step(before_step: BeforeStep | None) -> Iterator[None]:
    """`before_step` is called with the trainer before each step of runs of this process, to do what a test wants."""
    train_step = Trainer.train_step

    def step(trainer: Trainer) -> StepResult:
        if before_step is not None:
            before_step(trainer)
        return train_step(trainer)

    Trainer.train_step = step  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield
    finally:
        Trainer.train_step = train_step


def train_here(run: Run, *, before_step: BeforeStep | None = None, rendezvous: str = "env://", **options: Any) -> loop.Outcome:
    """Train in this process, with `before_step` before each step; MFU is by a made-up peak, or that of the test's own."""
    with before_each_step(before_step), made_up_peak() if ceilings.peak_flops is MEASURED_PEAK else nullcontext():
        return loop.train(run, rendezvous=rendezvous, **options)


def train_ranks(run: Run, *, before_step: BeforeStep | None = None, **options: Any) -> list[dict[str, Any]]:
    """Train on as many forked ranks as all islands of the run have; each rank's outcome, or its error's class and text."""
    return [outcomes[0] for outcomes in run_forked(run.num_processes, _train_rank, [(run, before_step)], options)]


def train_in_turn(trainings: Sequence[tuple[Run, BeforeStep | None]]) -> list[dict[str, Any]]:
    """Train these, all of one number of ranks, in turn on the same ones; the outcomes on rank 0. Saves the starting."""
    return run_forked(trainings[0][0].layout.world_size, _train_rank, trainings, {})[0]


def _train_rank(
    rendezvous: str, trainings: Sequence[tuple[Run, BeforeStep | None]], options: dict[str, Any]
) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    outcomes = []
    for number, (run, before_step) in enumerate(trainings):
        try:
            outcome = train_here(run, before_step=before_step, rendezvous=f"{rendezvous}-{number}", **options)
        except Exception as error:
            outcomes.append({"error": type(error).__name__, "text": str(error)})
        else:
            outcomes.append({"steps_done": outcome.steps_done, "stopped": outcome.stopped, "last_loss": outcome.last_loss})
    return outcomes


def at_step(step: int, do: Callable[[Trainer], None], *, rank: int | None = None) -> BeforeStep:
    """`before_step` that does something before step `step` (counted from zero), on one rank or on all."""

    def act(trainer: Trainer) -> None:
        if trainer.steps_done == step and rank in (None, trainer.ranks.rank):
            do(trainer)

    return act


def stop_at(step: int, *, rank: int | None = None, number: signal.Signals = signal.SIGTERM) -> BeforeStep:
    """`before_step` that sends this process a signal before step `step`, on one rank or on all."""
    return at_step(step, lambda trainer: os.kill(os.getpid(), number), rank=rank)


def whole_rows(run: Run, file: str) -> list[dict[str, Any]]:
    """Rows of a file that a run may be writing: what follows the last end of a line is not there yet, nor may the file be."""
    path = Path(run.folder) / run.name / file
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def rows(run: Run, *keys: str) -> list[tuple[Any, ...]]:
    """These values of every row of the run's metrics, in the order of the file."""
    lines = (Path(run.folder) / run.name / "metrics.jsonl").read_text().splitlines()
    return [tuple(json.loads(line)[key] for key in keys) for line in lines]


def curve(run: Run) -> list[tuple[Any, ...]]:
    """What must be the same however a run was interrupted: step, loss, gradient norm, learning rate, tokens."""
    return rows(run, "step", "train/loss", "train/grad_norm", "train/lr", "progress/tokens")


def state(run: Run) -> dict[str, torch.Tensor]:
    """Weights and moments in the newest whole checkpoint."""
    folder = newest_valid(Path(run.folder) / run.name / "checkpoints")
    assert folder is not None
    return load_full(folder)[0]


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    """Whether all tensors have the same bits."""
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def largest_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest ||difference|| / ||expected|| of any tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[n] - e).norm() / e.norm().clamp_min(1e-300)) for n, e in expected.items())
