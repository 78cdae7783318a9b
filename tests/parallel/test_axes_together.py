"""Where axes meet: what one of them replaces in the model is still there when the next has been put on."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from ranks import run_ranks
from torch.distributed.fsdp import FSDPModule

from ultrascale.check.prove import Case, prove_all
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Optimizer, Run
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.pipeline import pipeline_data, pipeline_passes
from ultrascale.parallel.pipeline.pipeline_weights import Waiting
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.passes import Passes

LENGTH, MICRO_BATCHES = 12, 3
LIMIT = 1e-12
PREDICTS = replace(EXPERT_FAMILIES["deepseek-v3"], num_nextn_predict_layers=1)
"""Latent attention, experts and shared experts, and a block that reads a later token."""


def case(model: Model, **cut: Any) -> Case:
    layout = Layout(precision="fp64", **cut)
    batch = Batch(sequence_length=LENGTH, sequences_per_batch=MICRO_BATCHES * layout.dp)
    return Case(str(cut), Run(model=model, steps=9, layout=layout, batch=batch, optimizer=Optimizer(warmup_steps=1)))


def expect_proven(*cases: Case) -> None:
    verdicts = prove_all(list(cases), steps=2)
    assert [(one.case, one.beyond) for one in verdicts if not one.holds] == []
    assert max(found.error for one in verdicts for found in one.worst.values()) < LIMIT


def test_backward_passes_cut_in_two_leave_alone_what_tensor_parallelism_has_put_in_place():
    options: dict[str, Any] = {"tp": 2, "pp": 2}
    expect_proven(
        case(PREDICTS, schedule="zb-h1", **options),
        case(PREDICTS, schedule="zb-v", virtual_stages=2, **options),
        case(EXPERT_FAMILIES["gpt-oss"], schedule="dualpipe-v", virtual_stages=2, sequence_parallel=False, **options),
        case(EXPERT_FAMILIES["mixtral"], schedule="zb-h1", expert_tp=2, recompute="full", **options),
    )


def test_a_norm_that_reads_after_its_block_is_done_is_gathered_under_zero_3():
    expect_proven(*(case(PREDICTS, dp=2, zero_stage=3, layers_per_bucket=size) for size in (1, 4)))


def test_a_shared_embedding_is_summed_wherever_a_file_puts_the_last_stage(tmp_path):
    path = tmp_path / "last_stage_in_the_middle.csv"
    first, second, third = build_schedule("1f1b", 3, MICRO_BATCHES)
    path.write_text(to_csv([second, third, first]))
    tied = replace(FAMILIES["llama"], tie_word_embeddings=True, num_hidden_layers=3)
    expect_proven(*(case(model, pp=3, schedule=str(path)) for model in (tied, PREDICTS)))


def made_in_i(rank: int, layout: Layout) -> tuple[set[str], set[str]]:
    """Weights of linear layers of the last stage, and the parameters that have a gradient when the first W begins."""
    ranks = Ranks(rank, dist.get_world_size(), torch.device("cpu"), dist.group.WORLD)
    share = build_share(replace(FAMILIES["llama"], tie_word_embeddings=False), layout, ranks, seed=0, sequence_length=LENGTH)
    made: list[set[str]] = []

    def see(action: Action) -> None:
        if action.kind is Kind.WEIGHT_GRADIENT and not made:
            made.append({name for name, parameter in share.named() if parameter.grad is not None})

    tokens = torch.arange(LENGTH)[None] % 7
    batch = MicroBatch(tokens, tokens, torch.arange(LENGTH), None, LENGTH)
    Passes(share, see).train([batch] * MICRO_BATCHES, LENGTH)
    dist.barrier()
    linear = {name for name, _ in share.named() if "_proj." in name}
    return (linear, made[0]) if share.mesh.coordinates.pp else (set(), set())


def positions_that_wait(rank: int, layout: Layout) -> set[tuple[int, int]]:
    """Of each product of the last stage that waits for W: positions kept of its output's gradient, and of its input."""
    found: set[tuple[int, int]] = set()
    make = pipeline_passes.make_gradients

    def noting(waiting: Waiting) -> None:
        found.update((grad_output.local.shape[1], given.local.shape[1]) for _, grad_output, given, _ in waiting)
        sizes = {factor.local.untyped_storage().nbytes() for _, *factors, _ in waiting for factor in factors}
        assert max(sizes) <= LENGTH * FAMILIES["llama"].intermediate_size * 8
        make(waiting)

    pipeline_passes.make_gradients = noting
    made_in_i(rank, layout)
    return found


def test_ranks_of_tp_keep_for_w_what_is_theirs_of_a_sequence():
    local, whole = LENGTH // 2, LENGTH
    layout = Layout(tp=2, pp=2, schedule="zb-h1", precision="fp64")
    assert run_ranks(4, positions_that_wait, layout)[2:] == [{(whole, local), (local, whole)}] * 2
    assert run_ranks(4, positions_that_wait, replace(layout, sequence_parallel=False))[2:] == [{(whole, whole)}] * 2


@pytest.mark.parametrize("layout", [
    Layout(tp=2, pp=2, schedule="zb-h1", precision="fp64"),
    Layout(tp=2, pp=2, schedule="zb-h1", sequence_parallel=False, recompute="selective", precision="fp64"),
    Layout(pp=2, schedule="zb-h1", precision="bf16"),
])  # fmt: skip
def test_i_leaves_every_linear_layers_gradient_to_w(layout):
    for linear, made in run_ranks(layout.world_size, made_in_i, layout)[layout.world_size // 2 :]:
        assert len(linear) >= 7 and not linear & made
        assert any(name.endswith("layernorm.weight") for name in made)


def test_fsdp2_hears_of_the_end_of_a_w_once_all_its_buckets_are_reduced(monkeypatch):
    """There it waits for what is under way on a GPU's streams; on the CPU nothing is."""
    told: list[str] = []
    buckets = [SimpleNamespace(fsdp_params=[], post_backward=partial(told.append, name)) for name in ("last", "first")]
    monkeypatch.setattr(pipeline_data, "fsdp_buckets", lambda stage: buckets)
    monkeypatch.setattr(pipeline_data, "prepare_action", lambda stage, action: told.append("told"))
    monkeypatch.setattr(pipeline_data, "end_backward", lambda stage: told.append("end"))
    stage = cast(Any, object.__new__(FSDPModule))
    pipeline_data.reduce_weight_gradients(stage, Action(Kind.WEIGHT_GRADIENT, 0, reduce_gradients=True))
    assert told == ["told", "last", "first", "end"]
