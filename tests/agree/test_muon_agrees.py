"""Muon's update, planned and traced: matrices that go to their owners and back, and what orthogonalising them takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from agree.test_trace_agrees import EXPERTS, LENGTH, MODEL, Traced, compared, products_of

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.owners import exchanges, owned_shapes
from ultrascale.spec.run import Batch, Data, Optimizer, Run
from ultrascale.spec.weights import is_hidden_matrix, weights
from ultrascale.trace.compare import traffic_of
from ultrascale.trace.planned import planned_rank
from ultrascale.trace.rank import trace_rank

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
    ],
    ids=str,
)
def test_messages_and_products_of_an_update_are_planned_on_every_rank(name: str, layout: Layout) -> None:
    run = run_of(SMALL[name], layout)
    _, wrong = compared(Traced(run, 0))
    assert not [one for one in wrong if not one.startswith("peak")]
    for rank in range(1, min(layout.world_size, 4)):
        found, planned = trace_rank(run, rank), planned_rank(run, rank, "cuda")
        assert planned is not None
        assert traffic_of(found, 1) == planned.traffic
        assert products_of(found) == planned.flops


@pytest.mark.parametrize("tp, dp", [(1, 4), (4, 1), (2, 3)])
def test_every_matrix_has_one_owner_in_each_copy_of_the_state(tp: int, dp: int) -> None:
    layout = Layout(tp=tp, dp=dp, zero_stage=1 if dp > 1 else 0)
    some = [weight for weight in weights(MODEL) if is_hidden_matrix(weight)]
    owned = [shape for rank in range(tp * dp) for shape in owned_shapes(some, layout, rank)]
    assert sorted(owned) == sorted(weight.shape for weight in some)
    for rank in range(tp * dp):
        sent = [one.sent_elements for one in exchanges(some, layout, rank)]
        assert len(sent) == (tp > 1) + (dp > 1) and all(there and back for there, back in sent)
