"""Small runs of islands in float64, and ways to start them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from train.small_runs import small_run, state, train_ranks

from ultrascale.description.layout import Layout
from ultrascale.description.run import Data, Optimizer, Run, Source

ONE = Layout(precision="fp64", micro_batch_size=1)


def run_of(home: Path, name: str, layout: Layout = ONE, **changes: Any) -> Run:
    """Every position is a target, so that islands have as many of them. Expects a corpus at `home/tokens`."""
    data = Data(sources=(Source(str(home / "tokens")),), document_mask=False)
    optimizer = Optimizer(learning_rate=0.05, warmup_steps=3, schedule="constant", clip_grad_norm=None)
    return small_run(home, **({"name": name, "layout": layout, "data": data, "optimizer": optimizer} | changes))


def trained(run: Run, **options: Any) -> dict[str, torch.Tensor]:
    """Train, and the state of the first island at the end."""
    found = train_ranks(run, **options)
    assert not any("error" in one for one in found), found
    return state(run)


def island(run: Run, number: int) -> Run:
    """As another island than the first keeps its files."""
    return replace(run, folder=f"{run.folder}/{run.name}/islands", name=str(number))


def weights(run: Run) -> dict[str, torch.Tensor]:
    """In the newest checkpoint."""
    return {name: tensor for name, tensor in state(run).items() if name.startswith("model.")}
