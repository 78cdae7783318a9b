"""Offload and recomputation on one CUDA device: python -m pytest -m gpu."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from gpu.test_cuda import loader_of, run_with

from ultrascale.description.layout import Precision
from ultrascale.description.recomputed import KINDS, mode_name
from ultrascale.parallel.mesh import process_group
from ultrascale.train.trainer import Trainer

pytestmark = pytest.mark.gpu


def losses_and_peak(precision: Precision, steps: int = 4, **layout: Any) -> tuple[list[float], int]:
    """Losses of some steps, and bytes at the peak of the later ones beyond what lay on the device before."""
    gc.collect()  # an earlier trainer
    before = torch.cuda.memory_allocated()
    run = run_with(precision)
    run = replace(run, layout=replace(run.layout, **layout))
    with process_group(run.layout, device=run.device) as ranks:
        trainer = Trainer(run, ranks, loader_of(run))
        losses = [trainer.train_step().gradients.loss for _ in range(2)]
        torch.cuda.reset_peak_memory_stats()
        losses += [trainer.train_step().gradients.loss for _ in range(steps - 2)]
        torch.cuda.synchronize()
        return losses, torch.cuda.max_memory_allocated() - before


@pytest.fixture
def workspaces() -> None:
    """cuBLAS takes its workspaces once, for good: 32 MiB each on Hopper, more than this model."""
    for precision in ("fp32", "bf16", "fp64"):
        losses_and_peak(precision, steps=3)


@pytest.mark.usefixtures("workspaces")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
def test_an_optimizer_on_the_host_trains_alike_in_less_memory(precision: Precision) -> None:
    here, more = losses_and_peak(precision)
    there, less = losses_and_peak(precision, offload_optimizer=True)
    assert there == pytest.approx(here, rel=1e-10 if precision == "fp64" else 1e-3)
    assert less < more


@pytest.mark.parametrize("kinds", [(), ("down",), ("mlp", "down"), ("qkv", "output"), ("attention",), KINDS])
def test_kinds_computed_again_give_the_losses_of_none(kinds: tuple[str, ...]) -> None:
    plain, _ = losses_and_peak("fp64")
    again, _ = losses_and_peak("fp64", recompute="blocks", recompute_blocks=(f"{mode_name(kinds)} x 2", "full"))
    assert again == plain


@pytest.mark.parametrize("recompute", ["none", "full", "every-k"])
@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_activations_on_the_host_come_back_as_they_went(precision: Precision, recompute: str) -> None:
    """Any copy that is read too early, or whose memory is taken too early, shows in a loss of the next steps."""
    plain, _ = losses_and_peak(precision, steps=8, recompute=recompute)
    there, _ = losses_and_peak(precision, steps=8, recompute=recompute, offload_activations=True)
    assert there == plain


@pytest.mark.usefixtures("workspaces")
def test_activations_on_the_host_are_not_on_the_device() -> None:
    wide = {"micro_batch_size": 4}
    _, more = losses_and_peak("fp32", **wide)
    _, less = losses_and_peak("fp32", offload_activations=True, **wide)
    assert less < more
