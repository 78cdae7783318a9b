"""A rank that dies or hangs in the middle of a step: the others stop, and say whom they waited for and in what."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import RankError, run_ranks
from torch import nn

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Log, Optimizer, Run
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.trainer import Trainer

LENGTH = 12
PATIENCE_SECONDS = 15.0


@dataclass(frozen=True)
class Lost:
    """How rank 1 leaves the others."""

    model: Model
    layout: Layout
    hangs_until: Path | None = None
    """It does not die but hangs, until this is there: the other has given it up."""


def train_until_one_is_lost(rank: int, lost: Lost) -> str:
    layout = replace(lost.layout, precision="fp64")
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=2 * layout.dp)
    run = Run(lost.model, steps=9, layout=layout, batch=batch, optimizer=Optimizer(warmup_steps=1), log=Log(memory_steps=0))
    loader = RandomDocuments(sequence_length=LENGTH, vocab_size=lost.model.vocab_size, seed=0, document_mask=True)
    ranks = Ranks(rank, layout.world_size, torch.device("cpu"), dist.group.WORLD)
    trainer = Trainer(run, ranks, loader)
    trainer.train_step()
    if lost.hangs_until is not None:
        trainer.share.mesh.limit_waits(ranks, PATIENCE_SECONDS)
    if rank == 1:
        last_block(next(iter(trainer.share.stages.values()))).register_forward_pre_hook(lambda *unused: leave(lost.hangs_until))
    try:
        trainer.train_step()
    except LostRankError as error:
        if rank == 0 and lost.hangs_until is not None:
            lost.hangs_until.touch()
        return str(error)
    return "nothing was missed"


def last_block(decoder: Decoder) -> nn.Module:
    return [block for _, block in decoder.blocks()][-1] if len(decoder.layers) else next(iter(decoder.children()))


def leave(hangs_until: Path | None) -> None:
    end = time.monotonic() + 100.0  # of a hang that nobody sees
    while hangs_until is not None and not hangs_until.exists() and time.monotonic() < end:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.catalogue(24)
@pytest.mark.parametrize(("model", "layout", "what"), [
    ("llama", Layout(tp=2), "a gather over tp"),
    ("llama", Layout(tp=2, sequence_parallel=False), "a sum over tp"),
    ("llama", Layout(cp=2), "an exchange of keys over cp"),
    ("llama", Layout(pp=2), "waited for"),
    ("llama", Layout(dp=2, zero_stage=3), "bucket"),
    ("mixtral", Layout(dp=2, ep=2), "experts"),
])  # fmt: skip
def test_when_a_rank_dies_the_other_names_it_and_what_it_waited_for(model, layout, what):
    outcomes = run_ranks(2, train_until_one_is_lost, Lost((FAMILIES | EXPERT_FAMILIES)[model], layout), failures="return")
    said, gone = outcomes
    assert isinstance(gone, RankError) and gone.kind == "died"
    assert isinstance(said, str) and what in said
    assert "rank 0 waited for rank 1 in" in said or "(pipeline rank 1)" in said


def test_a_rank_that_hangs_is_waited_for_as_long_as_the_timeout_of_collectives_and_no_longer(tmp_path):
    lost = Lost(FAMILIES["llama"], Layout(tp=2, dp=2), hangs_until=tmp_path / "given-up")
    outcomes = run_ranks(4, train_until_one_is_lost, lost, timeout_seconds=250, failures="return")
    assert "rank 0 waited for rank 1 in a" in outcomes[0] and "over tp" in outcomes[0]
    assert "it did not come in time" in outcomes[0], "only once it had ended"
