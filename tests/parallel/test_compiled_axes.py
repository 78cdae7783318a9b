"""Every axis with compiled blocks: the losses and gradient norms of eager ones, and what one graph of a block holds."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import run_ranks
from torch._dynamo.utils import counters

from ultrascale.check.documents import RandomDocuments
from ultrascale.parallel.mesh import Ranks
from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.run import Batch, Log, Optimizer, Run
from ultrascale.train.trainer import Trainer

LENGTH, STEPS = 24, 3
FP32 = 1e-5
"""Of losses and norms: the compiler adds up in another order."""


class Trained(NamedTuple):
    numbers: list[float]
    """Losses and gradient norms."""
    graphs: int
    breaks: int


def trained(rank: int, model: Model, layout: Layout, compiled: bool) -> Trained:
    torch._dynamo.reset()
    counters.clear()
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=4 * layout.dp)
    run = Run(
        model,
        steps=9,
        layout=layout,
        compile=compiled,
        batch=batch,
        optimizer=Optimizer(warmup_steps=1),
        log=Log(memory_steps=0),
    )
    loader = RandomDocuments(sequence_length=LENGTH, vocab_size=model.vocab_size, seed=0, document_mask=True)
    trainer = Trainer(run, Ranks(rank, layout.world_size, torch.device("cpu"), dist.group.WORLD), loader)
    steps = [trainer.train_step().gradients for _ in range(STEPS)]
    numbers = [number for step in steps for number in (step.loss, step.norm)]
    return Trained(numbers, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()))


def both(rank: int, model: Model, layout: Layout) -> list[Trained]:
    return [trained(rank, model, layout, compiled) for compiled in (False, True)]


@pytest.mark.parametrize(("model", "layout", "breaks"), [
    ("llama", Layout(tp=2), False),
    ("llama", Layout(pp=2, schedule="zb-h1"), False),
    ("llama", Layout(cp=2), True),  # attention over ranks asks for things that a graph cannot hold
    ("mixtral", Layout(dp=2, ep=2), True),  # and experts sort and count
])  # fmt: skip
def test_compiled_blocks_compute_what_eager_ones_do(model, layout, breaks):
    chosen = replace((FAMILIES | EXPERT_FAMILIES)[model], num_hidden_layers=2)
    layout = replace(layout, precision="fp32")
    eager, compiled = run_ranks(2, both, chosen, layout, timeout_seconds=240)[0]
    assert max(abs(a / b - 1) for a, b in zip(compiled.numbers, eager.numbers, strict=True)) < FP32
    assert eager.graphs == 0 and compiled.graphs > 0
    assert (compiled.breaks > 0) == breaks and (breaks or compiled.graphs <= 2)
