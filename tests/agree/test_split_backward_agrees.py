"""Backward passes in two halves: seconds of I and W of every stage are those of the messages that the replay counts in them,
each at the planner's price for such a message, and of the products that are made in them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from agree.test_trace_agrees import EXPERTS, LENGTH, MODEL, PREDICTS, TIED
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.stacks.stack import Overheads
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.replay import rank_shape, stage_parts
from ultrascale.plan.memory.stage_replay import StageReplay
from ultrascale.plan.memory.tally import Pass, Tally, TrafficKey
from ultrascale.plan.pipeline.pipelined import stage_seconds
from ultrascale.plan.pipeline.play import compile_schedule, duration_table
from ultrascale.plan.split_backward import is_deferrable, split_shares
from ultrascale.plan.time.blocks import compute_seconds, product_derate
from ultrascale.plan.time.price import predict, price
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.schedules.actions import Action, Kind
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv
from ultrascale.work.sharding.places import Coordinates

CLUSTER = parse_cluster("16xh100")
STACK = replace(STACKS["ultrascale"], overheads=Overheads(op_seconds=0.0, collective_seconds=0.0))
"""Without what a device waits for Python."""


FIRST_HALVES = (Kind.BACKWARD, Kind.INPUT_GRADIENT)


class Listed(Tally):
    """Keeps every message instead of sums."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.listed: list[tuple[TrafficKey, int]] = []

    def send(self, kind: str, group: tuple[int, int], num_bytes: int, count: int = 1) -> None:
        if group[0] > 1 and num_bytes:
            self.listed += [(TrafficKey(kind, *group), num_bytes // count)] * count

    def send_all(self, known: Pass) -> None:
        self.listed += [(way, size // count) for way, count, size in known.messages]

    def seconds(self) -> float:
        """Of all since the last call."""
        listed, self.listed = self.listed, []
        return sum(float(collective_seconds(CLUSTER, way.kind, n, size=way.size, stride=way.stride)) for way, n in listed)


def halves_of(model: Model, layout: Layout, stage: int) -> tuple[float, float, float]:
    """Seconds of I, W and B of a micro-batch in a stage: messages as they are replayed, and products one by one."""
    shape = rank_shape(layout, LENGTH, documents=False, device="cuda")
    rank = layout.world_size // layout.pp * (stage if stage < layout.pp else 2 * layout.pp - 1 - stage)
    at = Coordinates.of(layout, rank)
    ledger = Ledger(keeps_timeline=True)  # applies no records of blocks, whose operations a tally does not see
    tally = Listed(layout, shape, 0)
    replay = StageReplay(ledger, tally, model, stage_parts(model, layout, LENGTH, at)[stage], at, splits=True)
    workload = Workload(model, CLUSTER, LENGTH, 16, STACK)
    derate = product_derate(workload, CONSTANTS)
    inputs = weights = late = 0.0
    part = replay.part
    ops = [(op, False) for op in replay.work.before()] + [(op, True) for op in replay.work.after()]
    ops += [(op, False) for layer in part.layers for op in replay.work.block(layer)]
    for op, is_head in ops:
        one = compute_seconds(workload, shape, [op], is_head)
        inputs += one.input_gradient * derate + one.input_elementwise
        of_weight = one.weight_gradient * derate + one.weight_elementwise
        weights += of_weight * (not is_deferrable(op))
        late += of_weight * is_deferrable(op)

    def forward() -> None:
        held = None if part.is_first else ledger.take("other", "given", replay.work.hidden_bytes)
        made = replay.forward(0, held)
        release(held)
        release(made)
        tally.seconds()

    def backward(kind: Kind) -> float:
        held = None if part.is_last else ledger.take("other", "gradient", replay.work.hidden_bytes)
        release(replay.backward(Action(kind, 0, stage), held))
        release(held)
        return tally.seconds()

    def release(held: Allocation | None) -> None:
        if held is not None:
            ledger.release(held)

    forward()
    whole = backward(Kind.BACKWARD) + inputs + weights + late
    forward()
    first = backward(Kind.INPUT_GRADIENT) + inputs + weights
    replay.weight_gradients(Action(Kind.WEIGHT_GRADIENT, 0, stage))
    return first, tally.seconds() + late, whole


layouts = st.builds(
    lambda tp, parallel, pp, schedule, recompute, size, precision, scaling: Layout(
        tp=tp, sequence_parallel=parallel, pp=pp, schedule=schedule[0], virtual_stages=schedule[1], recompute=recompute,
        micro_batch_size=size, precision=precision, fp8_scaling=scaling,
    ),
    st.sampled_from([1, 2, 4, 8]), st.booleans(), st.sampled_from([2, 4]),
    st.sampled_from([("zb-h1", 1), ("zb-v", 2), ("dualpipe-v", 2)]), st.sampled_from(["none", "selective"]),
    st.sampled_from([1, 2]), st.sampled_from(["bf16", "fp8"]), st.sampled_from(["row", "tensor", "delayed"]),
)  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True)
@given(layouts, st.sampled_from([MODEL, TIED, EXPERTS, replace(PREDICTS, num_nextn_predict_layers=0)]))
def test_seconds_of_i_and_w_are_those_of_their_messages_and_products(layout: Layout, model: Model):
    model = replace(model, num_hidden_layers=8)
    layout = replace(layout, recompute="none" if model.num_experts else layout.recompute)
    workload = Workload(model, CLUSTER, LENGTH, 16 * layout.micro_batch_size, STACK)
    seconds = stage_seconds(workload, layout)
    count, program = layout.num_stages, compile_schedule(build_schedule(layout.schedule, layout.pp, 8, layout.virtual_stages))
    table = duration_table(program, replace(seconds, forward_communication=0.0, backward_communication=0.0))[:, 0]
    again = 0.0 if layout.recompute == "none" else None
    for stage in range(1, count):
        of_input, of_weight, whole = halves_of(model, layout, stage)
        assert table[3 * count + stage] == pytest.approx(of_weight, rel=1e-9)
        if again is not None:
            assert table[2 * count + stage] == pytest.approx(of_input, rel=1e-9)
            assert table[count + stage] == pytest.approx(whole, rel=1e-9)
        else:  # what is computed again is in both, and is compared with its own price elsewhere
            assert table[2 * count + stage] - table[count + stage] == pytest.approx(of_input - whole, rel=1e-9)
    # Nobody waits for the first stage's I, so that all of it is W's, in one.
    assert table[2 * count] == 0 and table[3 * count] == pytest.approx(table[count], rel=1e-12)


@pytest.mark.parametrize("schedule, stages, share", [("zb-h1", 1, 1.0), ("zb-v", 2, 1.0), ("dualpipe-v", 2, 3 / 32)])
def test_what_w_gathers_lengthens_the_step_and_is_tps(schedule: str, stages: int, share: float):
    cut = (1, 2, 2, 3) if stages == 1 else (0, 1, 1, 1, 1, 1, 1, 2)
    layout = Layout(tp=4, pp=4, schedule=schedule, virtual_stages=stages, layers_per_stage=cut, precision="bf16")
    workload = Workload(replace(MODEL, num_hidden_layers=8), CLUSTER, LENGTH, 16, STACK)
    seconds, table = stage_seconds(workload, layout), LayoutTable.of([layout])
    more = (np.asarray(seconds.split_input) + np.asarray(seconds.split_weight))[:, 0]
    assert more[0] == 0 and (more[2:] > 0).all()
    of_rank = more if stages == 1 else more[:4] + more[:3:-1]
    stages_of_ranks = partition_stages(workload, table, cut)
    without = price(workload, table, stages=stages_of_ranks, adds_split_traffic=False).row(0)
    busiest = 3 if stages == 1 else 0
    told = predict(workload, layout)
    assert told.waterfall["tensor_parallel"] - without.waterfall["tensor_parallel"] == pytest.approx(
        16 * share * of_rank[busiest], rel=1e-9
    )
    assert sum(told.waterfall.values()) == pytest.approx(told.step_seconds, rel=1e-12)


@pytest.mark.parametrize("pp, count", [(2, 4), (4, 8), (4, 20)])
def test_the_share_of_passes_that_are_cut_is_the_schedules_own(pp: int, count: int):
    for name in ("zb-h1", "zb-v", "dualpipe-v", "dualpipe"):
        table = LayoutTable.of([Layout(pp=pp, schedule=name, virtual_stages=2 if name in ("zb-v", "dualpipe-v") else 1)])
        told = split_shares(table, np.array([count]))[:, 0]
        first, *_ = build_schedule(name, pp, count)
        kinds = [part.kind for action in first for part in action.parts if part.stage > 0 and part.kind is not Kind.FORWARD]
        assert told[0] == kinds.count(Kind.INPUT_GRADIENT) / sum(part.kind in FIRST_HALVES for a in first for part in a.parts)


def test_a_schedule_from_a_file_pays_for_what_it_cuts(tmp_path):
    layout = Layout(tp=8, pp=2, schedule="zb-h1", precision="bf16")
    workload = Workload(replace(MODEL, num_hidden_layers=8), CLUSTER, LENGTH, 16, STACK)
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build_schedule("zb-h1", 2, 16)))
    own, known = predict(workload, replace(layout, schedule=str(path))), predict(workload, layout)
    played = ("compute", "tensor_parallel", "pipeline_sends", "bubble")
    assert [own.waterfall[name] for name in played] == pytest.approx([known.waterfall[name] for name in played], rel=1e-9)
