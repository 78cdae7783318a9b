"""partition_checkpoints: a block's input cut over tp and gathered again is the same bits, at the planned price."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import MODEL
from agree.small_models import DEMO
from agree.test_axes_memory_agrees import differences
from ranks import run_ranks

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Data, Log, Run
from ultrascale.parallel.activations import partitioned_checkpoints
from ultrascale.parallel.share import local
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.trace.planned import planned_rank
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.views.compare import compare

WHOLE = Layout(tp=2, sequence_parallel=False, micro_batch_size=2)
LAYOUTS = {
    "full": replace(WHOLE, recompute="full"),
    "every-k, ZeRO 3, bf16": replace(WHOLE, recompute="every-k", dp=2, zero_stage=3, precision="bf16"),
    "blocks, pp": replace(WHOLE, recompute="blocks", recompute_blocks=("full x 2", "selective+mlp", "full"), pp=2),
}  # fmt: skip


def gradients_of(rank: int, case: Case) -> tuple[list[torch.Tensor], int]:
    """The rank's gradients of a step, and how many inputs were gathered for them."""
    step, gathered, gather = RankStep(case, rank), 0, partitioned_checkpoints.gathered_sequence

    def counted(*arguments: Any) -> torch.Tensor:
        nonlocal gathered
        gathered += 1
        return gather(*arguments)

    partitioned_checkpoints.gathered_sequence = counted
    try:
        step.train(step.batches())
    finally:
        partitioned_checkpoints.gathered_sequence = gather
    return [local(one.grad).clone() for one in step.share.parameters() if one.grad is not None], gathered


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_are_the_bits_of_those_with_whole_inputs(layout: Layout) -> None:
    cases = [
        Case(MODEL, replace(layout, partition_checkpoints=cut), length=63, num_micro_batches=4 if layout.pp > 1 else 2)
        for cut in (False, True)
    ]
    whole, cut = (run_ranks(layout.world_size, gradients_of, case) for case in cases)
    for (expected, none), (found, gathered) in zip(whole, cut, strict=True):
        assert none == 0 < gathered
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))


def test_ranks_peak_at_the_planned_bytes_which_are_less() -> None:
    model = replace(DEMO, num_hidden_layers=8, vocab_size=256)
    layout = replace(WHOLE, recompute="full", partition_checkpoints=True)
    found = differences(Case(model, layout, length=128, num_micro_batches=1))
    assert max(map(abs, found)) < 1.5, found


@pytest.mark.parametrize("pp", [1, 2])
def test_what_is_gathered_is_what_the_trainer_sends(pp: int) -> None:
    run = Run(
        PRESETS["tiny-llama"], layout=replace(WHOLE, recompute="full", partition_checkpoints=True, pp=pp, micro_batch_size=1),
        batch=Batch(64, 4), data=Data(document_mask=False), log=Log(memory_steps=0),
    )  # fmt: skip
    rank = (pp - 1) * 2
    found = compare(trace_rank(run, rank, device="cuda", plays_all=True), planned_rank(run, rank, "cuda"), step=1)
    told = [row for row in found.traffic if row.planned is not None]
    assert told and all(row.traced == row.planned for row in told), told


def test_the_planner_counts_less_memory_and_one_more_gather_a_block() -> None:
    workload = Workload(PRESETS["llama-3-8b"], parse_cluster("8xh100"), 8192, 8)
    layout = Layout(tp=8, sequence_parallel=False, recompute="full", precision="bf16", micro_batch_size=4)
    whole, cut = (predict(workload, replace(layout, partition_checkpoints=cut)) for cut in (False, True))
    inputs = 32 * 4 * 8192 * 4096 * 2
    assert float(whole.memory.allocated - cut.memory.allocated) == pytest.approx(inputs * 7 / 8, rel=0.05)
    assert 0 < cut.waterfall["tensor_parallel"] - whole.waterfall["tensor_parallel"] < 0.25 * whole.waterfall["tensor_parallel"]


@pytest.mark.parametrize(
    "layout", [Layout(tp=2, recompute="full"), Layout(recompute="full"), Layout(tp=2, sequence_parallel=False)], ids=str
)
def test_where_there_is_nothing_to_cut_it_is_refused(layout: Layout) -> None:
    assert [p.key for p in replace(layout, partition_checkpoints=True).problems()] == ["layout.partition_checkpoints"]


def test_a_cut_input_does_not_go_to_the_host_as_well() -> None:
    layout = replace(WHOLE, recompute="full", partition_checkpoints=True, offload_activations=True)
    with pytest.raises(SpecError, match="cuts a block's input over tp or sends it"):
        expect_trainable(MODEL, layout)
