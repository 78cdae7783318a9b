"""A step of the trainer on one rank of any layout, for whoever watches it: memory, messages, FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ultrascale.data.loader import Sequences
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import Share
from ultrascale.schedules.actions import Action, Kind
from ultrascale.train.micro_batches import MicroBatch, micro_batch
from ultrascale.train.optimizers.optimizer import build_optimizer
from ultrascale.train.passes import Passes

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Case:
    """A layout to be tried."""

    model: Model
    layout: Layout
    length: int = 64
    num_micro_batches: int = 2
    documents: bool = False

    def __str__(self) -> str:
        told = [f"{name}={value}" for name, value in vars(self.layout).items() if value != getattr(Layout, name, None)]
        rest = ["documents"] if self.documents else []
        return ", ".join([self.model.name or self.model.model_type, *told, f"{self.num_micro_batches} micro-batches", *rest])


@dataclass
class RankStep:
    """One rank's share of a case, and its steps."""

    case: Case
    rank: int
    compile_blocks: bool = False
    share: Share = field(init=False)
    passes: Passes = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        ranks = Ranks(self.rank, case.layout.world_size, CPU)
        options = {"seed": 0, "sequence_length": case.length, "compile_blocks": self.compile_blocks}
        self.share = build_share(case.model, case.layout, ranks, **options)
        self.passes = Passes(self.share)

    def batches(self) -> list[MicroBatch]:
        """The micro-batches of a step, the same for all ranks that see the same sequences."""
        coordinates, case = self.share.mesh.coordinates, self.case
        return [
            micro_batch(
                sequences_of(case, coordinates.dp * case.num_micro_batches + number), packed=case.documents, layout=case.layout,
                coordinates=coordinates,
                device=CPU, dropout_seed=0 if case.model.dropout else None,
            )
            for number in range(case.num_micro_batches)
        ]  # fmt: skip

    def train(self, batches: Sequence[MicroBatch]) -> None:
        """Forward and backward passes, and what is left to sum."""
        self.passes.train(batches, 1000)
        self.share.finish_gradients()


def sequences_of(case: Case, seed: int) -> Sequences:
    """A micro-batch of random tokens; with documents, two of them in every sequence."""
    rows, length = case.layout.micro_batch_size, case.length
    tokens = np.random.default_rng(seed).integers(0, case.model.vocab_size, (rows, length))
    ids = np.broadcast_to(np.arange(length) >= length // 2, (rows, length)).astype(np.int64)
    positions = np.broadcast_to(np.arange(length) % (length // 2), (rows, length)).copy()
    return Sequences(tokens, tokens.copy(), positions, ids, np.arange(rows))


LIKE_STEPS = 3


def peak_of(rank: int, case: Case) -> dict[str, int]:
    """Bytes by category at the peak of a step of a rank, after the first: of some steps the lowest, since gloo's thread may
    let go of a buffer late, when the machine is busy."""
    step = RankStep(case, rank)
    optimizer = build_optimizer(step.share, Optimizer())
    with LiveMemory(torch.nn.ModuleList(step.share.stages.values()), optimizer) as memory:

        def mark(action: Action) -> None:
            memory.mark("forward" if action.kind is Kind.FORWARD else "backward")

        step.passes.on_action = mark
        for number in range(1 + LIKE_STEPS):
            memory.mark("forward", number)
            step.train(step.batches())
            memory.mark("optimizer")
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    steps = [[sample for sample in memory.samples if sample.step == 1 + number] for number in range(LIKE_STEPS)]
    peaks = [max(samples, key=lambda sample: sample.total) for samples in steps]
    return min(peaks, key=lambda sample: sample.total).by_category
