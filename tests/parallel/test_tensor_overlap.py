"""Products of tp beside their messages: what torch's operations are given is right, and they are used where they can be.

Their plain forms stand in for them, over gloo: torch's own, which its operations have on devices without symmetric memory.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from models.families import FAMILIES
from ranks import run_ranks
from torch import Tensor
from torch.distributed import _symmetric_memory as symmetric

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.oracle.reference import Reference
from ultrascale.check.small import shrink_model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Log, Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.tensor import tensor_overlap
from ultrascale.torch_private import load_symmetric_memory
from ultrascale.train.trainer import Trainer

LLAMA, GPT2 = (shrink_model(FAMILIES[name], Layout(tp=4)) for name in ("llama", "gpt2"))
CUTS = [{"tp": 2}, {"tp": 4}, {"tp": 2, "pp": 2, "schedule": "zb-h1"}, {"tp": 2, "recompute": "full"}]


class PlainForms:
    """Stands in for `torch.ops.symm_mem`, and counts."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def fused_all_gather_matmul(self, part: Tensor, weights: list[Tensor], dim: int, group: Any) -> Any:
        self.calls["gather"] += 1
        return symmetric._fused_all_gather_matmul_fallback(part, weights, dim, group)

    def fused_matmul_reduce_scatter(self, inner: Tensor, weight: Tensor, kind: str, dim: int, group: Any) -> Tensor:
        self.calls["scatter"] += 1
        return symmetric._fused_matmul_reduce_scatter_fallback(inner, weight, kind, dim, group)


def run_of(length: int, **changes: Any) -> Run:
    layout = Layout(precision="fp64", micro_batch_size=2, tp_overlap=True, **changes)
    return Run(LLAMA, device="cpu", layout=layout, batch=Batch(length, 4), log=Log(memory_steps=0))


def train(rank: int, run: Run) -> tuple[list[float], dict[str, int]]:
    """Loss and norm of two steps, and how often each operation was called."""
    plain = PlainForms()
    loader = RandomDocuments(sequence_length=run.batch.sequence_length, vocab_size=run.model.vocab_size, seed=1)
    with patch.object(tensor_overlap, "runs_on", lambda given: True), patch.object(torch.ops, "symm_mem", plain):
        trainer = Trainer(run, Ranks(rank, run.layout.world_size, torch.device("cpu"), dist.group.WORLD), loader)
        found = [trainer.train_step() for _ in range(2)]
    return [figure for step in found for figure in (step.gradients.loss, step.gradients.norm)], dict(plain.calls)


@pytest.mark.parametrize("model", [LLAMA, GPT2], ids=["llama", "gpt2"])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_overlapped_products_compute_what_one_process_does(model, cut):
    run = replace(run_of(24, **cut), model=model)
    reference = Reference(run, RandomDocuments(sequence_length=24, vocab_size=model.vocab_size, seed=1))
    expected = [figure for step in (reference.train_step(), reference.train_step()) for figure in (step.loss, step.norm)]
    for figures, calls in run_ranks(run.layout.world_size, train, run):
        assert figures == pytest.approx(expected, rel=1e-11)
        assert calls["gather"] >= 2 * 2 * 2 and calls["scatter"] >= 2 * 2


def test_sequences_that_do_not_divide_take_the_plain_way():
    run = run_of(25, tp=2)
    assert [calls for _, calls in run_ranks(2, train, run)] == [{}, {}]


def test_ranks_of_tp_must_be_in_one_node(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")

    class Two:
        group_name = "two"

        def size(self) -> int:
            return 2

    with pytest.raises(SpecError, match="2 ranks of tp in one node, which has 1"):
        tensor_overlap.overlap_in(Two())  # pyright: ignore[reportArgumentType]


def test_it_is_refused_where_nothing_is_cut_along_the_sequence():
    (problem,) = Layout(tp=2, sequence_parallel=False, tp_overlap=True).problems()
    assert problem.key == "layout.tp_overlap"


class One:
    group_name = "one"

    def size(self) -> int:
        return 1


def test_torchs_operations_are_made_known_once_a_group_overlaps(monkeypatch):
    """Torch 2.11 registers them where their Python part is imported: by this file, by nothing of a run (seen on an H200)."""
    loaded = []
    monkeypatch.setattr(tensor_overlap, "load_symmetric_memory", lambda: loaded.append(load_symmetric_memory()))
    tensor_overlap.overlap_in(One())  # pyright: ignore[reportArgumentType]
    assert len(loaded) == 1
    assert torch.ops.symm_mem.fused_all_gather_matmul and torch.ops.symm_mem.fused_matmul_reduce_scatter
