"""What peers refuse or got wrong (docs/composition.md) and no other test covers; and that every row there names what exists."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP2 and optimizers load it at first use: seconds, here once and not on every forked rank
import torch.distributed.fsdp  # noqa: F401
from models.families import FAMILIES

from ultrascale.check.faults.table import FAULTS
from ultrascale.check.prove import Case, prove_all, shrink_model
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Optimizer, Run

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs" / "composition.md"
EXACT = 1e-11


def worst(layouts: dict[str, Layout], model: Model, *, length: int = 24) -> float:
    """The largest error of the losses, gradients, norms, weights and moments of two steps in float64, beside one process."""
    runs = {
        name: Run(
            model=model, layout=layout, steps=10, batch=Batch(sequence_length=length, sequences_per_batch=4 * layout.dp),
            optimizer=Optimizer(learning_rate=1e-2, clip_grad_norm=0.5, warmup_steps=1),
        )
        for name, layout in layouts.items()
    }  # fmt: skip
    verdicts = prove_all([Case(name, run) for name, run in runs.items()], steps=2)
    return max(one.error for verdict in verdicts for one in verdict.worst.values())


@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_context_parallelism_alone_has_the_gradients_of_all_its_ranks(method):
    """picotron sums gradients over dp x cp only where dp > 1; nanotron refuses cp without dp."""
    layouts = {f"ZeRO {stage}": Layout(cp=2, cp_method=method, zero_stage=stage, precision="fp64") for stage in (0, 3)}
    assert worst(layouts, shrink_model(FAMILIES["llama"])) < EXACT


def test_a_sequence_need_not_divide_twice_over():
    """26 tokens over two ranks: 13 each, where Megatron-LM wants a multiple of 2 x cp."""
    assert worst({"ring": Layout(cp=2, precision="fp64")}, shrink_model(FAMILIES["llama"]), length=26) < EXACT


def test_later_tokens_are_predicted_under_every_axis():
    """torchtitan refuses multi-token prediction with a pipeline and with context parallelism."""
    model = replace(shrink_model(FAMILIES["llama"]), num_nextn_predict_layers=1)
    layouts = {
        "pp": Layout(pp=2, precision="fp64"), "cp": Layout(cp=2, precision="fp64"), "tp": Layout(tp=2, precision="fp64"),
    }  # fmt: skip
    assert worst(layouts, model) < EXACT


def test_every_row_names_a_test_or_a_fault_that_exists():
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ") and (".py::" in line or "fault `" in line)]
    assert len(rows) > 30
    for row in rows:
        cell, file = row.split(" | ")[-1], ""
        for named, own in re.findall(r"`([\w/]*\.py)?::(\w+)`", cell):
            file = named or file
            assert f"def {own}(" in (TESTS / file).read_text(), (file, own)
        for fault in re.findall(r"(?<=`)[\w-]+(?=`)", cell.split("fault ")[-1].split(";")[0] if "fault `" in cell else ""):
            assert fault in FAULTS, (row, fault)
