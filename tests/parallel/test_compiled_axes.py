"""Every axis with compiled blocks: the losses and gradient norms of eager ones, and what one graph of a block holds."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import run_ranks
from torch._dynamo.utils import counters

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.config.rules.run_rules import run_problems
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Log, Optimizer, Run
from ultrascale.description.schedules import SCHEDULES
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.context import context_operation
from ultrascale.parallel.mesh import Ranks
from ultrascale.schedules.actions import Kind
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.train.trainer import Trainer

LATENT = replace(EXPERT_FAMILIES["deepseek-v2"], first_k_dense_replace=2)
"""Attention of its own, and no layer of experts among two."""
SINKS = replace(FAMILIES["llama"], model_type="gpt_oss", attention_sinks=True, sliding_window=7)
LENGTH, STEPS = 24, 2
FP32 = 1e-5
"""Of losses and norms: the compiler adds up in another order."""


class Trained(NamedTuple):
    numbers: list[float]
    """Losses and gradient norms."""
    graphs: int
    breaks: int
    noted: int
    """Masks that compiled attention still finds by their numbers when all is done."""


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
    del trainer
    gc.collect()
    return Trained(
        numbers, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values()), len(context_operation._SETTINGS)
    )


def both(rank: int, model: Model, layout: Layout) -> list[Trained]:
    return [trained(rank, model, layout, compiled) for compiled in (False, True)]


HERE = [("llama", Layout(tp=2), False)]
"""Model, layout, and whether its blocks are more than one graph."""
GRAPHS_HERE = [
    ("llama", Layout(pp=2), False),
    ("llama", Layout(cp=2, cp_method="all-gather", recompute="full"), False),
    ("sinks", Layout(cp=2, cp_method="all-to-all", recompute="selective"), False),
    ("latent", Layout(cp=2), False),
    ("mixtral", Layout(dp=2, ep=2), True),  # experts sort and count
]  # fmt: skip
"""Here only their graphs and gradients are made and compared: kernels of C++, at night, take ten seconds and more each."""
AT_NIGHT = [
    ("llama", Layout(cp=2), False),
    ("llama", Layout(cp=4, cp_method="ring+all-to-all", cp_heads=2), False),
    ("latent", Layout(cp=2, cp_method="all-to-all", recompute="selective"), False),
]  # fmt: skip
"""These compile what others compile too, with other masks or dimensions."""


@pytest.mark.parametrize(("model", "layout", "breaks", "backend"), [
    *((*case, "inductor") for case in HERE),
    *((*case, "aot_eager") for case in GRAPHS_HERE),
    *(pytest.param(*case, "inductor", marks=pytest.mark.nightly) for case in (*GRAPHS_HERE, *AT_NIGHT)),
])  # fmt: skip
def test_compiled_blocks_compute_what_eager_ones_do(compiled_by, model, layout, breaks, backend):
    compiled_by(backend)
    chosen = replace((FAMILIES | EXPERT_FAMILIES | {"sinks": SINKS, "latent": LATENT})[model], num_hidden_layers=2)
    layout = replace(layout, precision="fp32")
    eager, compiled = run_ranks(layout.world_size, both, chosen, layout)[0]
    assert max(abs(a / b - 1) for a, b in zip(compiled.numbers, eager.numbers, strict=True)) < FP32
    assert eager.graphs == 0 and compiled.graphs > 0
    assert (compiled.breaks > 0) == breaks and (breaks or compiled.graphs <= 2)
    assert compiled.noted == 0


def test_compiled_blocks_whose_backward_passes_are_cut_are_refused(tmp_path):
    """W would find nothing to do, and a step last as long as one of 1f1b."""
    layout = Layout(pp=2, schedule="zb-h1")
    named = Run(FAMILIES["llama"], steps=9, layout=layout, compile=True, batch=Batch(LENGTH, 4))
    assert [problem.key for problem in run_problems(named)] == ["compile"]
    assert run_problems(replace(named, layout=Layout(pp=2))) == run_problems(replace(named, compile=False)) == []
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build_schedule("zb-h1", 2, 4)))
    of_file, ranks = replace(layout, schedule=str(path)), Ranks(0, 2, torch.device("cpu"))
    with pytest.raises(SpecError, match="compiled block is one piece"):
        build_share(FAMILIES["llama"], of_file, ranks, seed=0, compile_blocks=True)


def test_the_schedules_refused_by_name_are_those_that_cut_backward_passes():
    found = {
        name
        for name, named in SCHEDULES.items()
        if any(
            part.kind is Kind.INPUT_GRADIENT
            for row in build_schedule(name, 2, 4, named.virtual_stages)
            for action in row
            for part in action.parts
        )
    }
    assert found == {name for name, one in SCHEDULES.items() if one.splits_backward}
