"""Memory of each pipeline rank, messages by axis and the roofline are the planner's and the trace's own numbers."""

from __future__ import annotations

from collections import Counter

import pytest

from ultrascale.api.planning.plan import answer as answer_of
from ultrascale.cli.plan.plan_command import request_of
from ultrascale.page.step.ranks import rank_memories
from ultrascale.page.step.roofline import operation_costs, peak_flops
from ultrascale.page.step.sent import communication_per_step, leaving_share
from ultrascale.plan.time.step_parts import step_parts
from ultrascale.trace.views.compare import traffic_of

ASKED = ["--model", "llama-3-8b", "--gpus", "16xh100", "--seq-len", "4096", "--tokens-per-batch", "512k"]
CUT = ["--tp", "2", "--pp", "4", "--zero-stage", "1", "--micro-batch-size", "1", "--recompute", "none", "--schedule", "1f1b"]


def chosen(*words, cut=tuple(CUT)):
    """(run, prediction) of a plan."""
    plan = answer_of(request_of([*ASKED, *cut, *words])).chosen
    assert plan.prediction is not None
    return plan.run, plan.prediction


@pytest.mark.parametrize("stack", ["ultrascale", "megatron"])
def test_the_fullest_rank_is_the_one_of_the_plan(stack):
    _, plan = chosen("--stack", stack)
    rows = rank_memories(plan)
    fullest = max((categories for _, categories in rows), key=lambda one: sum(one.values()))
    assert fullest == pytest.approx({name: float(value) for name, value in plan.memory.categories.items()})


def test_of_our_layouts_every_rank_is_told_and_earlier_ones_keep_more():
    rows = rank_memories(chosen()[1])
    assert [name for name, _ in rows] == ["rank 0", "rank 1", "rank 2", "rank 3"]
    kept = [categories["activations"] for _, categories in rows]
    assert kept == sorted(kept, reverse=True)


def test_of_other_trainers_every_rank_is_told_too():
    assert [name for name, _ in rank_memories(chosen("--stack", "megatron")[1])] == ["rank 0", "rank 1", "rank 2", "rank 3"]


def test_no_pipeline_has_no_ranks():
    assert rank_memories(chosen("--pp", "1", cut=())[1]) == []


def test_what_is_sent_is_what_a_trace_of_that_rank_sends():
    pytest.importorskip("torch")
    from ultrascale.trace.rank import trace_rank

    run, plan = chosen("--gpus", "8xh100", "--tokens-per-batch", "64k")
    rank, rows = communication_per_step(run, plan)
    assert rank == 4
    traced = traffic_of(trace_rank(run, rank, device="cuda"), 1)
    expected: Counter[str] = Counter()
    for way, traffic in traced.items():
        expected[way.kind.replace("_", "-")] += round(traffic.num_bytes * leaving_share(way.kind, way.size))
    found: Counter[str] = Counter()
    for row in rows:
        found[row.kind] += row.num_bytes
    for kind, num_bytes in found.items():
        assert num_bytes == pytest.approx(expected[kind], rel=0.01), kind
    assert {row.axis for row in rows} == {"tp", "pp"}
    assert {row.over for row in rows} == {"node"}


def test_of_other_trainers_and_of_one_rank_nothing_is_told():
    assert communication_per_step(*chosen("--stack", "megatron"))[1] == []


def test_operations_add_up_to_the_computing_of_the_step():
    _, plan = chosen()
    work, parts = operation_costs(plan), step_parts(plan)
    for kind in ("matrix products", "attention", "element-wise"):
        assert sum(one.seconds for one in work if one.kind == kind) == pytest.approx(parts[kind], rel=0.01)


def test_no_operation_is_above_the_roof_and_a_product_is_what_it_is():
    _, plan = chosen()
    listed = plan.workload.cluster.accelerator.memory_bytes_per_second
    assert listed is not None
    bandwidth = listed.value
    for one in operation_costs(plan):
        roof = min(peak_flops(plan), one.intensity * bandwidth) if one.flops else None
        assert roof is None or one.flops / one.seconds <= roof
        assert one.num_bytes / one.seconds <= bandwidth
    (gate,) = [one for one in operation_costs(plan) if one.name == "mlp.gate_proj"]
    tokens, wide, hidden = 4096, 14336 // 2, 4096
    layers = gate.count / plan.num_micro_batches
    assert layers in (7, 8, 9)
    assert gate.flops == 3 * 2 * tokens * wide * hidden * gate.count
    assert gate.num_bytes == 3 * 2 * (tokens * hidden + hidden * wide + tokens * wide) * gate.count


def test_casts_to_fp8_are_counted_once():
    """As element-wise work: an operation that does nothing else is no product."""
    _, plan = chosen("--stack", "megatron", "--precision", "fp8")
    casts = [one for one in operation_costs(plan) if one.name.endswith(".quantise")]
    assert casts and {one.kind for one in casts} == {"element-wise"}
