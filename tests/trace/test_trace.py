"""What a trace tells of itself: its repeats, files, allocator, lines, and what it refuses."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from agree.layouts import EXPERTS, MODEL
from agree.traced import run_of
from torch.distributed.tensor import DTensor, Replicate, Shard

from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.models import feed_forward
from ultrascale.parallel.mesh import Mesh
from ultrascale.trace.allocator import LARGE_SEGMENT, SMALL_SEGMENT, Allocator, allocated_bytes, reserved_bytes
from ultrascale.trace.groups import crosses_nodes
from ultrascale.trace.planned import planned_rank
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.recording.pretend import pretended_rank
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.recording.recorder import TraceError
from ultrascale.trace.views.compare import compare, traffic_of
from ultrascale.trace.views.explain import biggest_parts
from ultrascale.trace.views.files import perfetto, snapshot, write_file

RUN = run_of(MODEL, Layout(dp=2, tp=2, zero_stage=2, precision="bf16"))


@pytest.fixture(scope="module")
def traced() -> RankTrace:
    return trace_rank(RUN, 3, round_to=1)


def test_a_sum_of_tensors_in_two_layouts_is_traced() -> None:
    """DTensor chooses the layout by what moves cost, for which it asks how many devices a node has. From torch 2.14 on it does
    so for a single shard too, which FSDP2 detaches."""
    with pretended_rank(1, 2, "cuda") as (ranks, _):
        mesh = Mesh(MODEL, Layout(dp=2, zero_stage=3), ranks).data
        assert mesh is not None
        shard, full = torch.empty(4, device="meta"), torch.empty(8, device="meta")
        total = DTensor.from_local(shard, mesh, [Replicate(), Shard(0)]) + DTensor.from_local(full, mesh, [Replicate()] * 2)
        assert total.shape == (8,)


def test_micro_batches_that_are_alike_are_traced_once_and_counted_all() -> None:
    run = run_of(MODEL, Layout(dp=2, zero_stage=3, recompute="selective"), num_micro_batches=6)
    short, whole = trace_rank(run, 1), trace_rank(run, 1, plays_all=True)
    assert (short.micro_batches, whole.micro_batches) == ((3, 6), (6, 6))
    assert short.ticks < 0.6 * whole.ticks
    losses = 3 * whole.round_to  # of three more micro-batches, a number each
    assert short.peak_bytes(1) + losses == whole.peak_bytes(1)
    assert short.flops == whole.flops
    assert traffic_of(short, 1) == traffic_of(whole, 1)


def test_the_second_step_is_like_all_that_follow(traced: RankTrace) -> None:
    longer = trace_rank(RUN, 3, steps=4, round_to=1)
    assert traced.peak_bytes(1) == longer.peak_bytes(2) == longer.peak_bytes(3)
    assert traffic_of(traced, 1) == traffic_of(longer, 3)


def test_tracebacks_after_a_trace_are_the_caller_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def callers(*_: object) -> None: ...  # torch takes the place of whatever hook it finds

    monkeypatch.setattr(sys, "excepthook", callers)
    trace_rank(RUN, 3, round_to=1)
    assert sys.excepthook is callers


def test_categories_sum_to_what_lives_at_every_moment(traced: RankTrace) -> None:
    for (_, by_category), total in zip(traced.timeline(), traced.totals(), strict=True):
        assert sum(by_category.values()) == total
    index = traced.peak_at(1)
    assert list(traced.timeline())[index][1] == traced.by_category(index)


def test_messages_name_the_line_of_ours_that_sent_them(traced: RankTrace) -> None:
    of_tp = {sent.line.split(":")[0] for sent in traced.sent if sent.axis == "tp" and sent.kind == "reduce_scatter"}
    assert of_tp == {"parallel/tensor/tensor_traffic.py"}
    source = Path(feed_forward.__file__).parents[1]
    for sent in traced.sent:
        file, _, line = sent.line.rpartition(":")
        assert 0 < int(line) <= len((source / file).read_text().splitlines())


def test_a_trace_stands_beside_the_plan_row_by_row(traced: RankTrace) -> None:
    planned = planned_rank(RUN, 3, "cuda")
    rows = compare(traced, planned)
    assert [row.percent for row in rows.flops] == [0.0, 0.0]
    assert all(row.traced == row.planned for row in rows.traffic)
    assert {row.axis for row in rows.traffic} == {"tp", "dp", "all"}
    assert rows.memory[-1].name == "peak" and abs(rows.memory[-1].percent or 99) < 3


def test_experts_are_chosen_equally_often_and_the_rest_is_exact() -> None:
    run = run_of(EXPERTS, Layout(dp=4, ep=4, zero_stage=1))
    traced, planned = trace_rank(run, 2, round_to=1), planned_rank(run, 2, "cuda")
    assert planned is not None
    assert traffic_of(traced, 1) == planned.traffic
    assert abs(planned.peak.total / traced.peak_bytes(1) - 1) < 0.001


@pytest.mark.parametrize(("rank", "copies"), [(4_100, {("tp copies", 2, 1)}), (9_000, set())])
def test_a_job_of_16384_ranks_takes_no_longer_than_its_own_share(rank: int, copies: set[tuple[str, int, int]]) -> None:
    """Of a weight shorter than dp is wide only the first ranks of dp have a part, whose copies are summed over tp."""
    run = run_of(MODEL, Layout(tp=4, pp=4, dp=1024, zero_stage=1, precision="bf16"), num_micro_batches=4)
    traced = trace_rank(run, rank)
    assert {(sent.axis, sent.size, sent.stride) for sent in traced.sent if not sent.is_host} == {
        ("tp", 4, 1), ("dp", 1024, 4), ("pp", 4, 4096), ("all", 16384, 1), *copies,
    }  # fmt: skip


def test_the_allocator_takes_segments_as_torch_does() -> None:
    allocator = Allocator()
    first, small = allocator.take(1000, "compute")
    second, _ = allocator.take(2**20, "compute")
    assert allocator.reserved == SMALL_SEGMENT and second - first == 1024
    address, pool = allocator.take(3 * 2**20, "compute")
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT
    allocator.give_back(address, pool)
    assert allocator.take(15 * 2**20, "compute")[0] == address, "a freed block joins what is left of its segment"
    allocator.take(33 * 2**20 + 1, "compute")
    assert allocator.reserved == SMALL_SEGMENT + LARGE_SEGMENT + 34 * 2**20
    allocator.give_back(first, small)
    allocator.take(512, "another")
    assert allocator.reserved == 2 * SMALL_SEGMENT + LARGE_SEGMENT + 34 * 2**20, "each stream has segments of its own"


def test_a_block_that_is_not_split_counts_as_allocated_in_whole() -> None:
    allocator = Allocator()
    address, pool = allocator.take(LARGE_SEGMENT - 2**19, "compute")
    assert allocator.allocated == LARGE_SEGMENT, "half a MiB is too little for another block"
    other, _ = allocator.take(SMALL_SEGMENT, "compute")
    assert allocator.allocated == LARGE_SEGMENT + SMALL_SEGMENT
    allocator.give_back(address, pool)
    allocator.give_back(other, pool)
    assert (allocator.allocated, allocator.peak_allocated) == (0, LARGE_SEGMENT + SMALL_SEGMENT)


def test_what_is_reserved_holds_what_lives(traced: RankTrace) -> None:
    assert (
        traced.peak_bytes() <= allocated_bytes(traced) <= reserved_bytes(traced) < 3 * traced.peak_bytes() + 20 * LARGE_SEGMENT
    )


def test_a_snapshot_opens_in_torchs_own_visualiser(traced: RankTrace, tmp_path: Path) -> None:
    from torch.cuda import _memory_viz

    path = write_file(traced, tmp_path / "memory.pickle")
    found = pickle.loads(path.read_bytes())
    assert len(found["device_traces"][0]) > len(traced.changes)
    assert "pytorch" in _memory_viz.trace_plot(found).lower()
    assert _memory_viz.segsum(found)
    live = sum(
        block["requested_size"]
        for one in snapshot(traced)["segments"]
        for block in one["blocks"]
        if block["state"] != "inactive"
    )
    assert live == traced.totals()[-1]


def test_a_perfetto_trace_has_every_action_and_message(traced: RankTrace, tmp_path: Path) -> None:
    events = json.loads(write_file(traced, tmp_path / "trace.json").read_text())["traceEvents"]
    assert events == perfetto(traced)["traceEvents"]
    names = [event["name"] for event in events if event["ph"] == "X"]
    assert [name for name in names if name.startswith("step ")] == ["step 1", "step 2"]
    assert {event["args"]["step"] for event in events if "step" in event.get("args", {})} == {1, 2}
    assert sum(name in ("F0", "B0", "F1", "B1") for name in names) == 8
    assert sum(name == "reduce_scatter dp" for name in names) == sum(
        sent.kind == "reduce_scatter" and sent.axis == "dp" for sent in traced.sent
    )


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_memory_is_drawn(traced: RankTrace, tmp_path: Path, ending: str) -> None:
    assert write_file(traced, tmp_path / f"memory.{ending}", planned_peak_bytes=traced.peak_bytes()).stat().st_size > 10_000


def test_the_biggest_parts_at_the_peak_are_all_of_it(traced: RankTrace) -> None:
    parts = biggest_parts(traced, traced.peak_at(1), most=1000)
    assert sum(part.num_bytes for part in parts) == traced.peak_bytes(1)
    assert parts == sorted(parts, key=lambda part: -part.num_bytes)


def test_what_the_trainer_refuses_is_refused_in_its_words() -> None:
    run = run_of(MODEL, Layout(precision="mxfp8"), num_micro_batches=4)
    with pytest.raises(SpecError, match="mxfp8"):
        trace_rank(run, 0)


@torch.library.custom_op("tests::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


ODD = {
    "aten.nonzero": lambda x: x.nonzero(),
    "aten.index": lambda x: x[x > 0],
    "aten._local_scalar_dense": lambda x: torch.zeros(int((x > 0).sum())),
    "aten._to_copy": lambda x: x.cpu().numpy(),
    "TypeError: can't convert meta": lambda x: x.detach().numpy(),
    "no fake impl registered for .*twice": lambda x: twice(x.detach()),
    "RuntimeError: .*broadcast": lambda x: x + torch.ones(3, device=x.device),
}
"""What shapes alone cannot do, by what is told of it."""


@pytest.mark.parametrize("name", ODD)
def test_an_operation_that_needs_values_is_named_with_the_line_of_the_custom_model(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    activate = feed_forward.activate

    def custom(kind: str, *gates: torch.Tensor) -> torch.Tensor:
        ODD[name](gates[0])
        return activate(kind, *gates)

    monkeypatch.setattr(feed_forward, "activate", custom)
    with pytest.raises(TraceError, match=name) as told:
        trace_rank(replace(RUN, layout=Layout()), 0)
    line = ODD[name].__code__.co_firstlineno
    assert f"tests/trace/test_trace.py:{line}" in str(told.value)
    assert "shapes alone" in str(told.value) and "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("rank", "size", "stride", "expected"),
    [
        (7, 3, 1, True),
        (6, 3, 1, True),
        (5, 3, 1, False),
        (9, 3, 1, False),
        (0, 2, 4, False),
        (0, 2, 8, True),
        (15, 8, 1, False),
    ],
)
def test_a_group_goes_over_the_network_if_its_ranks_are_not_of_one_node(rank, size, stride, expected) -> None:
    assert crosses_nodes(rank, size, stride, 8) == expected
