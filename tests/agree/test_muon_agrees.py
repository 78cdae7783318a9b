"""Muon's update, planned and traced: matrices that go to their owners and back, and what orthogonalising them takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import EXPERTS, LENGTH, MODEL, Traced, compared, products_of
from agree.traced import last_before

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, is_hidden_matrix, weights
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Optimizer, Run
from ultrascale.plan.memory.muon_update import muon_update_bytes
from ultrascale.plan.memory.replay import muon_matrices, stage_parts
from ultrascale.trace.planned import planned_rank
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.views.compare import traffic_of
from ultrascale.work.sharding.owners import exchanges, owned_shapes
from ultrascale.work.sharding.places import Coordinates

SMALL = {"dense": replace(MODEL, num_hidden_layers=2, vocab_size=512), "experts": replace(EXPERTS, num_hidden_layers=2)}


def run_of(model: Model, layout: Layout, count: int = 2) -> Run:
    batch = Batch(LENGTH // 4, count * layout.dp * layout.micro_batch_size)
    return Run(model, layout=layout, batch=batch, data=Data(document_mask=False), optimizer=Optimizer(name="muon"))


@pytest.mark.parametrize(
    "name, layout",
    [
        ("dense", Layout(precision="bf16")),
        ("dense", Layout(tp=16, precision="bf16")),  # more than heads of keys and values
        ("dense", Layout(dp=3, zero_stage=1, precision="bf16")),
        ("dense", Layout(dp=4, dp_shard=2, tp=2, zero_stage=3, precision="fp32")),
        ("dense", Layout(dp=2, cp=2, pp=2, zero_stage=2, precision="bf16")),
        ("experts", Layout(dp=4, ep=2, expert_tp=2, zero_stage=2, precision="bf16")),
        ("experts", Layout(dp=4, tp=2, ep=4, expert_tp=2, zero_stage=0, precision="bf16")),
        ("experts", Layout(dp=16, zero_stage=3, precision="bf16")),  # rows of experts, which meet first
        ("experts", Layout(dp=6, dp_shard=3, tp=2, expert_tp=2, zero_stage=1, precision="bf16")),
    ],
    ids=str,
)
def test_messages_products_and_memory_of_an_update_are_planned_on_every_rank(name: str, layout: Layout) -> None:
    run = run_of(SMALL[name], layout)
    _, wrong = compared(Traced(run, 0))
    assert not wrong
    for rank in {1, 2, 3, layout.world_size - 1} & set(range(layout.world_size)):
        found, planned = trace_rank(run, rank, round_to=1), planned_rank(run, rank, "cuda")
        assert planned is not None
        assert traffic_of(found, 1) == planned.traffic
        assert products_of(found) == planned.flops
        assert update_bytes(found) == pytest.approx(muon_update_bytes(matrices_of(run, rank), layout, rank), rel=0.001)


def update_bytes(found: RankTrace) -> int:
    """What the second step's update took at most, beside what was there."""
    totals, start = found.totals(), last_before(found, 1, "optimizer")
    return max(totals[start:]) - totals[start]


def matrices_of(run: Run, rank: int) -> list[Weight]:
    return muon_matrices(run.model, stage_parts(run.model, run.layout, LENGTH // 4, Coordinates.of(run.layout, rank)))


@pytest.mark.parametrize("tp, dp", [(1, 4), (4, 1), (2, 3)])
def test_every_matrix_has_one_owner_in_each_copy_of_the_state(tp: int, dp: int) -> None:
    layout = Layout(tp=tp, dp=dp, zero_stage=1 if dp > 1 else 0)
    some = [weight for weight in weights(MODEL) if is_hidden_matrix(weight)]
    owned = [shape for rank in range(tp * dp) for shape in owned_shapes(some, layout, rank)]
    assert sorted(owned) == sorted(weight.shape for weight in some)
    for rank in range(tp * dp):
        sent = [one.sent_elements for one in exchanges(some, layout, rank)]
        assert len(sent) == (tp > 1) + (dp > 1) and all(there and back for there, back in sent)
