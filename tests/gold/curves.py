"""Loss curves of a tiny model on real text, one for each precision and optimizer, and how far each may be from fp32's.

The text is `text.txt`, pages of this project's documentation as they once were, byte by byte. The model has 0.2 million
parameters, a step 1,024 tokens; 300 steps bring it from 4.9 nats a byte to about 2. Two runs of one kind that differ in
roundings come apart by some hundredths: tolerances are above that, and a fault is several times as far.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from ranks import run_ranks

from ultrascale.data.loader import Sequences
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Log, LossScale, Optimizer, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.trainer import Trainer

HERE = Path(__file__).parent
RECORD = HERE / "curves.json"
STEPS, PREFIX, WINDOW = 300, 16, 20
"""Of the record; of what CI runs again; of the mean by which curves are compared."""
MODEL = Model(
    vocab_size=128, hidden_size=64, intermediate_size=176, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, max_position_embeddings=64, name="gold",
)  # fmt: skip
PLAIN = Run(
    MODEL, steps=STEPS, seed=1, device="cpu", layout=Layout(precision="fp32", micro_batch_size=16),
    data=Data(document_mask=False), batch=Batch(sequence_length=64, sequences_per_batch=16),
    optimizer=Optimizer(learning_rate=3e-3, warmup_steps=20), log=Log(memory_steps=0),
)  # fmt: skip


@dataclass(frozen=True)
class Curve:
    """One way to train, and its tolerance."""

    run: Run
    beyond: float
    """Nats by which a mean over `WINDOW` steps may lie above that of the curve it is compared with."""
    below: float | None = None
    """And below; None: as much as it likes."""
    against: str = "fp32"


def _of(beyond: float, *, below: float | None = 0.1, optimizer: dict[str, Any] | None = None, **layout: Any) -> Curve:
    settings = replace(PLAIN.optimizer, **(optimizer or {}))
    return Curve(replace(PLAIN, layout=replace(PLAIN.layout, **layout), optimizer=settings), beyond, below)


CURVES: dict[str, Curve] = {
    "fp32": _of(0.0),
    "bf16": _of(0.06, precision="bf16"),
    "bf16, reduced in bf16": _of(0.06, precision="bf16", reduce_dtype="bf16", dp=2, micro_batch_size=8),
    "fp16": _of(0.06, precision="fp16"),
    "fp8 by row": _of(0.1, precision="fp8", fp8_scaling="row"),
    "fp8 by tensor": _of(0.1, precision="fp8", fp8_scaling="tensor"),
    "fp8 delayed": _of(0.1, precision="fp8", fp8_scaling="delayed"),
    "adamw-bf16": _of(0.06, optimizer={"name": "adamw-bf16"}),
    "adamw-8bit": _of(0.06, optimizer={"name": "adamw-8bit"}),
    "muon": _of(0.2, below=None, optimizer={"name": "muon"}),
}


class Found(NamedTuple):
    """Of every step."""

    losses: list[float]
    norms: list[float]
    """Of the gradient, before clipping."""


class Bytes:
    """A loader of the bytes of `text.txt`: sequence n begins at a place that a stride chooses."""

    def __init__(self, length: int):
        self.text: NDArray[np.int64] = np.frombuffer((HERE / "text.txt").read_bytes(), np.uint8).astype(np.int64)
        self.length = length

    def read(self, numbers: Iterable[int]) -> Sequences:
        """Sequences with these numbers."""
        numbers = list(numbers)
        places = [number * 7919 * 13 % (len(self.text) - self.length - 1) for number in numbers]
        rows = np.stack([self.text[place : place + self.length + 1] for place in places])
        shape = (len(rows), self.length)
        positions = np.broadcast_to(np.arange(self.length), shape).copy()
        return Sequences(rows[:, :-1].copy(), rows[:, 1:].copy(), positions, np.zeros(shape, np.int64), np.array(numbers))

    def fingerprint(self) -> str:
        return "gold"


def train(run: Run, steps: int, plant: Callable[[Trainer], None] | None = None) -> Found:
    """The first `steps` steps of `run`, on as many forked ranks as it has; `plant` is given each rank's trainer first."""
    if run.layout.world_size > 1:
        return run_ranks(run.layout.world_size, _train, run, steps, plant, timeout_seconds=1200.0)[0]
    return _train(0, run, steps, plant)


def _train(rank: int, run: Run, steps: int, plant: Callable[[Trainer], None] | None) -> Found:
    torch.set_num_threads(1)
    world, group = run.layout.world_size, None
    if world > 1:
        group = torch.distributed.group.WORLD
    trainer = Trainer(run, Ranks(rank, world, torch.device("cpu"), group), Bytes(run.batch.sequence_length))
    if plant is not None:
        plant(trainer)
    results = [trainer.train_step().gradients for _ in range(steps)]
    return Found([one.loss for one in results], [one.norm for one in results])


def recorded() -> dict[str, Found]:
    """What was committed."""
    rows = json.loads(RECORD.read_text())["curves"]
    return {name: Found(row["losses"], row["norms"]) for name, row in rows.items()}


def windows(losses: list[float]) -> NDArray[np.float64]:
    """Means over every `WINDOW` steps, or over all if they are fewer."""
    size = min(WINDOW, len(losses))
    return np.convolve(losses, np.ones(size) / size, mode="valid")


def furthest(losses: list[float], others: list[float]) -> tuple[float, float]:
    """How far means of `losses` lie above and below those of `others`, at most, in nats; over the steps that both have."""
    count = min(len(losses), len(others))
    losses, others = losses[:count], others[:count]
    apart = windows(losses) - windows(others)
    return float(apart.max()), float(-apart.min())


FOUR_MILLION_TOKENS = 2.0**-12
"""Gradients of a step of 1,024 tokens times this are those of a step of 4 million: the loss is divided by their number."""
NO_SCALE = LossScale(initial=FOUR_MILLION_TOKENS, lowest=2.0**-24, growth_steps=10**9)
