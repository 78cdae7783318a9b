"""Where the time of a step went, in traces made by hand: each moment's right category is known."""

from __future__ import annotations

import ast
import gzip
import json
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import ultrascale
from ultrascale.measure.step.categories import AXIS_OF, CORE, EVERYBODY, PHASE, READING, RECOMPUTED, axis_of, axis_of_group
from ultrascale.measure.step.spans import STEP, RankEvents, SpanPiece, events_of
from ultrascale.measure.step.step_report import RankSteps, StepReport, hidden_lines, waterfall_table, write_merged
from ultrascale.measure.step.waterfall import Waterfall, top, waterfall
from ultrascale.parallel.lost import AWAITED
from ultrascale.parallel.pipeline.pipeline_messages import BETWEEN_STAGES
from ultrascale.parallel.tags import Tag

MAIN, BACKWARD_THREAD = 7, 8
MICROSECONDS = 1e-6


def host(name: str, start: float, end: float, *, thread: int = MAIN, op: bool = True, link: int | None = None):
    """With the arrow from a forward operation or to its backward pass."""
    category = "cpu_op" if op else "user_annotation"
    ran = {"ph": "X", "cat": category, "name": name, "tid": thread, "ts": start, "dur": end - start, "args": {}}
    return (
        (ran,)
        if link is None
        else (ran, {"ph": "s", "cat": "fwdbwd", "name": "fwdbwd", "tid": thread, "ts": start, "id": link})
    )


def mark(name: str, start: float, end: float, thread: int = MAIN):
    return host(name, start, end, thread=thread, op=False)


def kernel(name: str, start: float, end: float, *, launched: float, stream: int = 7, thread: int = MAIN, group: str = ""):
    """With the call that launched it, which returned at `launched`."""
    number = int(start * 100 + stream)
    arguments: dict[str, Any] = {"correlation": number, "stream": stream}
    if group:
        arguments["Process Group Description"] = group
    launch = {
        "ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "tid": thread, "ts": launched - 1, "dur": 1,
        "args": {"correlation": number},
    }  # fmt: skip
    return launch, {"ph": "X", "cat": "kernel", "name": name, "tid": stream, "ts": start, "dur": end - start, "args": arguments}


def read(*events) -> RankEvents:
    flat = [one for event in events for one in (event if isinstance(event, tuple) else (event,))]
    return events_of({"traceEvents": [*flat, {"ph": "M", "name": "process_name"}, {"ph": "s", "cat": "other", "name": "x"}]})


def microseconds(found: Waterfall) -> dict[str, float]:
    return {name: round(seconds / MICROSECONDS, 3) for name, seconds in found.mean.items() if seconds}


def test_on_a_cpu_the_innermost_operation_of_the_main_thread_tells():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 1000),
        mark(READING, 0, 50),
        host("aten::index_select", 10, 40),
        mark(f"{AWAITED}a sum over all ranks", 60, 90),
        mark(f"{PHASE}forward", 100, 400),
        host("aten::linear", 110, 160), host("aten::t", 111, 121), host("aten::mm", 121, 160),
        mark(CORE, 160, 260), host("aten::scaled_dot_product_attention", 165, 245, link=5), host("aten::bmm", 170, 240),
        host("aten::silu", 270, 300),
        mark(f"{AWAITED}{Tag.SEQUENCE_SUMS.what}", 300, 340),
        mark(f"{PHASE}backward", 400, 800),
        host("autograd::engine::evaluate_function: SomethingBackward0", 400, 500, link=5), host("aten::mul", 420, 490),
        mark("FSDP::post_backward_reduce", 500, 600), host("aten::cat", 510, 530), host("c10d::allreduce_", 530, 540),
        mark(f"{PHASE}optimizer", 800, 950), host("aten::_fused_adamw_", 810, 940),
        mark("gloo:recv", 30, 900),
        host("aten::mm", 0, 900, thread=99),
    ))  # fmt: skip
    assert microseconds(found) == {
        "data wait": 50, "all ranks": 30, "matrix products": 39, "element-wise": 1 + 10 + 30 + 20, "attention": 80 + 70,
        "tp": 40, "dp": 80, "optimizer": 150,
        "launch gaps": 10 + 10 + 10 + 5 + 15 + 10 + 60 + 20 + 10 + 200 + 50,
    }  # fmt: skip
    assert found.step_seconds == pytest.approx(1000 * MICROSECONDS)
    assert found.communication == {}


def test_a_block_inside_a_backward_pass_is_recomputation():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 100),
        mark(f"{PHASE}forward", 0, 40), mark(RECOMPUTED, 0, 40), host("aten::mm", 0, 40, link=1),
        mark(f"{PHASE}backward", 40, 100), host("autograd::engine::evaluate_function: MmBackward0", 40, 100, link=1),
        mark(RECOMPUTED, 40, 70), mark(CORE, 40, 50), host("aten::bmm", 41, 50, link=2),
        host("aten::mm", 50, 70, link=3),
        host("aten::mm", 70, 100),
    ))  # fmt: skip
    assert microseconds(found) == {"matrix products": 40 + 30, "recomputation": 29, "launch gaps": 1}


def test_on_a_device_computing_hides_messages_and_the_host_explains_the_gaps():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 1000),
        mark(f"{PHASE}forward", 0, 500), mark(f"{PHASE}backward", 500, 800), mark(f"{PHASE}optimizer", 800, 1000),
        kernel("sm90_xmma_gemm_bf16", 100, 200, launched=90),               # the host was late: 90 us, and 10 to start
        kernel("ncclDevKernel_AllGather", 150, 260, launched=100, stream=20, group="data shard"),  # 60 us not hidden
        kernel("flash_fwd_kernel", 260, 300, launched=110),
        kernel("vectorized_elementwise_kernel", 290, 320, launched=120),      # 10 us beside attention
        kernel("ncclDevKernel_SendRecv", 330, 400, launched=130, stream=21, group="pp"),  # 10 us idle before it
        mark(READING, 400, 430),
        mark(f"{AWAITED}a sum over all ranks", 430, 460),
        kernel("nvjet_hsh_128x256", 500, 600, launched=480),                  # data 30, all ranks 30, host 20, starts 20
        kernel("ncclDevKernel_AllReduce", 560, 700, launched=490, stream=20, group="tp"),
        kernel("multi_tensor_apply_kernel", 810, 900, launched=805),
    ))  # fmt: skip
    assert microseconds(found) == {
        "matrix products": 100 + 100, "attention": 40, "element-wise": 20, "optimizer": 90,
        "dp": 60, "tp": 100, "pp": 70, "data wait": 30, "all ranks": 30,
        "launch gaps": 90 + 20 + 105 + 100, "idle": 10 + 10 + 20 + 5,
    }  # fmt: skip
    assert {axis: round(s / MICROSECONDS) for axis, s in found.communication.items()} == {"dp": 110, "tp": 140, "pp": 70}


def test_several_streams_of_one_axis_count_once_and_ranges_say_more_than_groups():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 100), mark(f"{AWAITED}an exchange of tokens between experts", 0, 10),
        kernel("ncclDevKernel_SendRecv", 20, 60, launched=5, stream=20, group="default_pg"),
        kernel("ncclDevKernel_SendRecv", 40, 90, launched=6, stream=21, group="default_pg"),
        kernel("Memcpy HtoD", 90, 100, launched=20),
    ))  # fmt: skip
    assert microseconds(found) == {"ep": 70, "launch gaps": 5, "idle": 15, "element-wise": 10}


def test_a_kernel_of_nccl_that_fsdp_launched_without_a_named_group_is_dp():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 100), mark("FSDP::all_gather (layers.0)", 0, 30),
        kernel("ncclDevKernel_AllGather", 20, 60, launched=5),
        kernel("ncclDevKernel_AllReduce", 60, 90, launched=40),
    ))  # fmt: skip
    assert microseconds(found) == {"dp": 40, "all ranks": 30, "launch gaps": 15, "idle": 15}


def test_what_the_backward_thread_launches_belongs_to_the_main_threads_phase():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 100), mark(f"{PHASE}forward", 0, 20), mark(CORE, 0, 20), host("aten::bmm", 1, 9, link=3),
        kernel("gemm_scores", 0, 20, launched=8),
        mark(f"{PHASE}backward", 20, 100),
        host("autograd::engine::evaluate_function: BmmBackward0", 21, 30, thread=BACKWARD_THREAD, link=3),
        kernel("gemm_scores_backward", 20, 60, launched=25, thread=BACKWARD_THREAD),
        mark(RECOMPUTED, 31, 40, thread=BACKWARD_THREAD),
        kernel("gemm_again", 60, 100, launched=35, thread=BACKWARD_THREAD),
    ))  # fmt: skip
    assert microseconds(found) == {"attention": 60, "recomputation": 40}


def test_steps_are_told_apart_and_the_time_between_them_is_the_first_ones():
    found = waterfall(read(
        mark(f"{STEP}8", 0, 100), host("aten::mm", 0, 80), mark(f"{STEP}9", 110, 200), host("aten::mm", 110, 130),
    ))  # fmt: skip
    assert [{name: round(s / MICROSECONDS) for name, s in step.items()} for step in found.steps] == [
        {"matrix products": 80, "launch gaps": 30}, {"matrix products": 20, "launch gaps": 70},
    ]  # fmt: skip


def test_the_top_list_counts_own_time_of_a_name():
    rows = top(read(
        mark(f"{STEP}8", 0, 100), host("aten::linear", 0, 50), host("aten::mm", 10, 50), host("aten::mm", 60, 90),
    ))  # fmt: skip
    assert [(row.name, row.category, round(row.seconds / MICROSECONDS), row.count) for row in rows[:2]] == [
        ("aten::mm", "matrix products", 70, 2), (f"{STEP}8", "launch gaps", 20, 2),
    ]  # fmt: skip


def test_a_trace_of_something_else_is_refused():
    with pytest.raises(ValueError, match="no step of ours"):
        read(host("aten::mm", 0, 1))


def test_times_are_those_of_the_clock_that_ranks_of_a_machine_share():
    trace = {"baseTimeNanoseconds": 5_000_000_000, "traceEvents": [*mark(f"{STEP}1", 1e6, 2e6)]}
    found = events_of(trace)
    assert (found.steps[0][:2], found.origin) == ((0.0, 1.0), 6.0)


def waited_for() -> set[str]:
    """The words of every `waiting(...)` in the package that are written there."""
    found = set()
    for path in Path(ultrascale.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("waiting", "profiler_range") and node.args:
                found |= {node.args[0].value} if isinstance(node.args[0], ast.Constant) else set()
    return found | {tag.what for tag in Tag}


def test_what_is_known_of_an_axis_is_still_said_so():
    assert set(AXIS_OF) - waited_for() - {BETWEEN_STAGES} == set()


def test_messages_of_every_axis_have_it():
    told = {what: axis_of(what) for what in ("a sum over tp", "scales of blocks that tp cuts", "the norm of the gradient")}
    assert list(told.values()) == ["tp", "tp", EVERYBODY]
    assert {axis_of(tag.what) for tag in Tag} == {"dp", "tp", "cp", "pp", EVERYBODY}
    assert axis_of(BETWEEN_STAGES) == "pp" and axis_of("an exchange of tokens between experts") == "ep"


@pytest.mark.parametrize(
    ("group", "axis"),
    [("data shard", "dp"), ("expert data replicate", "dp"), ("dp", "dp"), ("tp", "tp"), ("expert_tp", "tp"), ("4 copies", "tp"),
     ("cp", "cp"), ("pp, downwards", "pp"), ("ep", "ep"), ("default_pg", EVERYBODY), ("", EVERYBODY)],
)  # fmt: skip
def test_process_groups_have_axes(group, axis):
    assert axis_of_group(group) == axis


REPORT = StepReport(
    steps=[8],
    ranks=[RankSteps(0, [0.1], {**dict.fromkeys(("matrix products",), 0.06), "dp": 0.04}, {"dp": 0.1}, [])],
    planned={"matrix products": 0.05, "dp": 0.01}, planned_origin="a plan", unprofiled_step_seconds=0.09, facts={},
)  # fmt: skip


def full(report: StepReport) -> StepReport:
    """With zeros for categories that are left out."""
    from ultrascale.measure.step.categories import CATEGORIES

    ranks = [RankSteps(**{**vars(rank), "mean": dict.fromkeys(CATEGORIES, 0.0) | rank.mean}) for rank in report.ranks]
    return StepReport(**{**vars(report), "ranks": ranks})


def test_the_table_puts_planned_beside_measured_line_by_line():
    console = Console(width=100, record=True, file=StringIO())
    console.print(waterfall_table(full(REPORT)))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert rows[0][:4] == ["ms", "of", "a", "step"]
    assert rows[1][:5] == ["matrix", "products", "50.00", "60.00", "+10.00"]
    assert rows[2][:5] == ["dp,", "exposed", "10.00", "40.00", "+30.00"]
    assert rows[3] == ["step", "100.00"]


def test_on_eighty_columns_no_number_of_a_run_of_two_ranks_is_cut():
    twice = StepReport(**{**vars(full(REPORT)), "ranks": [*full(REPORT).ranks] * 2})
    console = Console(width=80, record=True, file=StringIO())
    console.print(waterfall_table(twice))
    assert "…" not in console.export_text()


def test_what_is_hidden_of_messages_is_told():
    assert hidden_lines(full(REPORT)) == ["dp: 100.00 ms of messages a step, 60% of it behind computing"]


def test_a_report_survives_its_file():
    report = full(REPORT)
    assert StepReport.from_json(json.loads(json.dumps(report.to_json()))) == report


def test_the_merged_trace_has_a_track_a_rank(tmp_path):
    write_merged(tmp_path / "merged.json.gz", {0: [SpanPiece(5, 6, "dp")], 3: [SpanPiece(5.5, 7, "idle")]}, title="x")
    events = json.loads(gzip.decompress((tmp_path / "merged.json.gz").read_bytes()))["traceEvents"]
    drawn = [(event["tid"], event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert drawn == [(0, "dp, exposed", 0, 1e6), (3, "idle", 0.5e6, 1.5e6)]
