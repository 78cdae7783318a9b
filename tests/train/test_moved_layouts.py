"""A checkpoint that one layout wrote, and another read and wrote again, has the same bits: weights, moments, biases of experts.

No step is done in between, so that nothing may be rounded. Which layouts meet is drawn, always alike; at most four ranks.
"""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train.small_runs import same, small_run, train_here
from train.test_resume_layouts import EXPERTS, TIED_MODEL

from ultrascale.checkpoint import load_full, newest_valid, save
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.train.corpora import build_loader
from ultrascale.train.folder.resume import facts_of, restore, tensors_of
from ultrascale.train.trainer import Trainer

STEPS = 3
ZB_V = {"schedule": "zb-v", "virtual_stages": 2}
LAYOUTS: dict[str, tuple[Model, dict[str, Layout]]] = {
    "dense": (
        replace(TIED_MODEL, num_hidden_layers=4),
        {
            "one": Layout(),
            "dp 3, ZeRO 3": Layout(dp=3, zero_stage=3),
            "tp x cp": Layout(tp=2, cp=2, zero_stage=1),
            "tp 4, sequences whole": Layout(tp=4, sequence_parallel=False),
            "ring and all-to-all": Layout(cp=4, cp_method="ring+all-to-all", cp_heads=2, zero_stage=2),
            "pp 4": Layout(pp=4),
            "pp, zb-v, dp": Layout(pp=2, dp=2, zero_stage=1, **ZB_V),
            "pp, dualpipe, dp": Layout(pp=2, dp=2, zero_stage=1, schedule="dualpipe"),
            "tp x pp, interleaved": Layout(tp=2, pp=2, schedule="interleaved", virtual_stages=2),
            "groups of 2": Layout(dp=4, dp_shard=2, zero_stage=2),
        },
    ),
    "experts": (
        replace(EXPERTS, num_hidden_layers=4),
        {
            "one": Layout(),
            "ep 4": Layout(dp=4, ep=4),
            "dp 3, ZeRO 3: rows of experts": Layout(dp=3, zero_stage=3),
            "cp, ep in it": Layout(cp=2, ep=2),
            "cp x dp, ep, ZeRO 3": Layout(cp=2, dp=2, ep=2, zero_stage=3),
            "expert_tp": Layout(tp=2, expert_tp=2),
            "ep x expert_tp": Layout(tp=2, dp=2, ep=2, expert_tp=2, zero_stage=2),
            "tp x cp": Layout(tp=2, cp=2),
            "pp, zb-v": Layout(pp=2, **ZB_V),
            "pp 4, dualpipe": Layout(pp=4, schedule="dualpipe"),
            "pp x ep": Layout(pp=2, dp=2, ep=2),
        },
    ),
}
PRECISIONS = {"dense": "fp64", "experts": "bf16"}
"""In bf16 the masters, fp32, are what is saved."""


@pytest.mark.parametrize("orders", [1, pytest.param(6, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("model", LAYOUTS)
def test_weights_and_optimizer_state_go_from_any_layout_to_any_other_bit_for_bit(home, model, orders):
    """Along a drawn chain in which each layout reads what another wrote, and is read by another."""
    precision = PRECISIONS[model]
    run = run_of(home, model, Layout(), precision)
    train_here(run)
    folder = newest_valid(home / "small" / "checkpoints")
    assert folder is not None
    original, facts = load_full(folder)
    assert any(name.startswith("optimizer.exp_avg_sq.") and tensor.abs().max() > 0 for name, tensor in original.items())
    for number, name in enumerate(chain_of(list(LAYOUTS[model][1]), orders)):
        moved = run_of(home, model, LAYOUTS[model][1][name], precision)
        folder = Path(run_forked(moved.layout.world_size, read_and_write, moved, folder, home / f"moved-{number}")[0])
        found, now = load_full(folder)
        assert same(found, original), f"link {number}: {name}"
        assert {tensor.dtype for tensor in found.values()} == {tensor.dtype for tensor in original.values()}
        assert (now["steps_done"], now["decides"]) == (facts["steps_done"], facts["decides"])


def chain_of(names: list[str], orders: int) -> list[str]:
    """So many drawn orders after one another, in which nobody reads what itself wrote."""
    draw, found = random.Random(4), [""]
    for _ in range(orders):
        order = draw.sample(names, len(names))
        found += order if order[0] != found[-1] else order[::-1]
    return found[1:]


def run_of(home: Path, model: str, layout: Layout, precision: Any) -> Run:
    return small_run(
        home, model=LAYOUTS[model][0], layout=replace(layout, precision=precision, micro_batch_size=1), steps=STEPS,
        optimizer=Optimizer(learning_rate=5e-3, warmup_steps=1),
    )  # fmt: skip


def read_and_write(rendezvous: str, run: Run, source: Path, target: Path) -> str:
    """Restore from `source` as a run does, and save into `target`: the new checkpoint. Copies are compared."""
    torch.set_num_threads(1)
    with process_group(run.layout, device="cpu", rendezvous=rendezvous) as ranks:
        return str(moved(run, ranks, source, target))


def moved(run: Run, ranks: Ranks, source: Path, target: Path) -> Path:
    trainer = Trainer(run, ranks, build_loader(run, run.data.sources))
    restore(trainer, source)
    return save(
        target, trainer.steps_done, tensors_of(trainer), facts_of(trainer), compare_copies=True, process_group=ranks.host_group
    )  # fmt: skip
