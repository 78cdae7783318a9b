"""A run whose documents and windows are told to the attention kernel equals one with masks, family by family."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import run_ranks

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.config.resolve import resolve
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import AttentionCore, Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Log, Run
from ultrascale.kernels.attention import attention_spans
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.trainer import Trainer

MODELS = {**FAMILIES, **EXPERT_FAMILIES}


def trained(rank: int, model: Model, layout: Layout, core: AttentionCore) -> list[float]:
    """Losses and gradient norms of two steps, and how often documents were told by their ends."""
    told = 0
    ends_of = attention_spans._all_ends

    def counting(*arguments):
        nonlocal told
        told += 1
        return ends_of(*arguments)

    attention_spans._all_ends = counting
    try:
        layout = replace(layout, precision="fp64", attention=core)
        run = Run(model, layout=layout, batch=Batch(24, 4), log=Log(memory_steps=0))
        loader = RandomDocuments(sequence_length=24, vocab_size=model.vocab_size, seed=0)
        trainer = Trainer(run, Ranks(rank, layout.world_size, torch.device("cpu"), dist.group.WORLD), loader)
        steps = [trainer.train_step().gradients for _ in range(2)]
    finally:
        attention_spans._all_ends = ends_of
    return [number for step in steps for number in (step.loss, step.norm)] + [float(told)]


@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt-oss", "deepseek-v3"])
def test_documents_told_to_the_kernel_train_as_masked_ones(family, recompute):
    layout = Layout(micro_batch_size=2, recompute=recompute)
    *masked, never = trained(0, MODELS[family], layout, "sdpa")
    *told, often = trained(0, MODELS[family], layout, "varlen")
    assert told == pytest.approx(masked, rel=1e-11)
    assert never == 0 and often > 0


def test_so_do_those_of_ranks_that_cut_heads_and_state():
    layout = Layout(tp=2, dp=2, zero_stage=3)
    masked = trained(0, MODELS["mistral"], Layout(), "sdpa")
    for told in run_ranks(4, trained, MODELS["mistral"], layout, "varlen"):
        assert told[:-1] == pytest.approx(masked[:-1], rel=1e-11)


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"layout.attention": "varlen", "layout.cp": 2}, "masks of its own"),
        ({"layout.attention": "flex", "layout.cp": 2}, "masks of its own"),
        ({"layout.attention": "varlen", "device": "cuda"}, "16 bits only"),
        ({"layout.attention": "flex", "device": "cpu"}, "makes all scores"),
        ({"layout.attention": "flash"}, "must be one of"),
    ],
)
def test_a_core_that_cannot_run_is_refused(settings, word):
    with pytest.raises(SpecError, match=word):
        resolve(None, {"model.preset": "tiny-llama", "batch.sequence_length": 128, **settings})
