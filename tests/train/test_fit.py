"""What a run needs of its devices: said before it starts, and compared after it has run out."""

from __future__ import annotations

import subprocess
from bisect import bisect_left
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ultrascale.catalogue.cluster import Sourced, parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Data, Faults, Run
from ultrascale.description.units import format_bytes
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.columns.footprint import live_limit
from ultrascale.plan.report import plan_run
from ultrascale.trace.rank import trace_rank
from ultrascale.train.start.fit import Trace, _stage_plans, expect_fits, smallest_bytes, traced_by_first
from ultrascale.train.watch.out_of_memory import Measured, out_of_memory
from ultrascale.train.watch.traced_rank import NoTraceError, traced_rank

GIB, MIB = 2**30, 2**20
RUN = Run(
    preset("llama-3-8b"), layout=Layout(dp=4, tp=2, pp=2, zero_stage=1, recompute="full", precision="bf16"),
    batch=Batch(8192, 16), data=Data(document_mask=False),
)  # fmt: skip


def capacity_with(usable: int) -> int:
    """Of a device that has so much for tensors."""
    none, one = (live_limit(capacity, RUN.layout, joins_segments=False) for capacity in (0, GIB))
    return round((usable - none) / (one - none) * GIB)


def never(rank: int) -> str:
    raise AssertionError("the plan is enough")


def stage_peaks() -> list[int]:
    """Live bytes at the peak of every stage, as planned."""
    return [plan.peak.total for plan in _stage_plans(RUN)]


def test_each_stage_is_told_in_one_line() -> None:
    first, last = stage_peaks()
    line = expect_fits(RUN, 80 * GIB, trace=never)
    assert line is not None and "\n" not in line
    assert (
        f"the 2 pipeline stages need {first / GIB:.1f} GiB, {last / GIB:.1f} GiB of tensors, as planned; a device has 80 GiB"
        in line
    )


def test_what_cannot_fit_is_refused_unless_memory_is_to_be_ignored() -> None:
    with pytest.raises(SpecError, match="does not fit") as refused:
        expect_fits(RUN, 24 * GIB)
    assert "--explain-oom" in refused.value.problems[0].remedy
    assert expect_fits(RUN, 24 * GIB, anyway=True) is not None


def test_of_compiled_blocks_what_no_compiler_makes_smaller_is_refused() -> None:
    compiled = replace(RUN, compile=True)
    states = max(plan.before_update.total for plan in _stage_plans(RUN))
    assert 7 * GIB < states < 8 * GIB and min(stage_peaks()) > 12 * GIB
    with pytest.raises(SpecError, match="does not fit"):
        expect_fits(RUN, 12 * GIB)
    assert expect_fits(compiled, 12 * GIB) == expect_fits(RUN, 12 * GIB, anyway=True)
    with pytest.raises(SpecError, match=r"weights, gradients and optimizer states alone take 7\.\d+ GiB"):
        expect_fits(compiled, 8 * GIB)


@pytest.mark.parametrize("gib", [16, 24, 40])
def test_what_a_plan_calls_fitting_is_not_refused(gib: int) -> None:
    """By the longest sequences that it does so of."""
    cluster = parse_cluster("8xh100")
    device = replace(cluster.accelerator, memory_bytes=Sourced(gib * GIB, "a test", "now"))
    cluster = replace(cluster, node=replace(cluster.node, accelerator=device))
    alone = replace(RUN, model=preset("llama-3.2-1b"), layout=Layout(dp=8, zero_stage=3, recompute="full", precision="bf16"))
    runs = [replace(alone, batch=Batch(length, 16)) for length in range(1024, 16_384 * gib, 1024)]
    run = runs[bisect_left(runs, True, key=lambda one: not plan_run(one, cluster).fits) - 1]
    assert expect_fits(run, gib * GIB, trace=lambda rank: "none here") is not None


@pytest.mark.parametrize("share", [0.96, 1.04])
def test_a_plan_that_is_far_enough_from_the_limit_decides_without_a_trace(share: float) -> None:
    usable = round(max(stage_peaks()) * share)
    if share > 1:
        assert "trace" not in str(expect_fits(RUN, capacity_with(usable), trace=never))
    else:
        with pytest.raises(SpecError, match="does not fit"):
            expect_fits(RUN, capacity_with(usable), trace=never)


@pytest.mark.parametrize("share", [0.98, 1.02])
def test_near_the_limit_the_trace_of_the_fullest_stage_decides_whatever_the_plan_says(share: float) -> None:
    peaks = stage_peaks()
    fullest = peaks.index(max(peaks)) * 4
    usable = round(max(peaks) * share)
    asked: list[int] = []

    def traced(needed: int) -> Trace:
        return lambda rank: [asked.append(rank), str(needed)][1]

    line = expect_fits(RUN, capacity_with(usable), trace=traced(usable - MIB))
    assert line is not None and line.endswith(f"{format_bytes(usable - MIB)}, which fits") and "a trace decides" in line
    with pytest.raises(SpecError, match=f"rank {fullest} needs .*, which does not"):
        expect_fits(RUN, capacity_with(usable), trace=traced(usable + MIB))
    assert asked == [fullest] * 2
    assert expect_fits(RUN, capacity_with(usable), anyway=True, trace=never) is not None


def test_where_there_is_no_trace_the_plan_decides_and_the_line_says_why() -> None:
    peak = max(stage_peaks())
    line = expect_fits(RUN, capacity_with(round(1.01 * peak)), trace=lambda rank: "it took longer than 180 s")
    assert line is not None and line.endswith("there is no trace to decide (it took longer than 180 s), so the plan does")
    with pytest.raises(SpecError, match=r"no trace to decide \(it is Sunday\)"):
        expect_fits(RUN, capacity_with(round(0.99 * peak)), trace=lambda rank: "it is Sunday")


def test_the_first_rank_traces_a_stage_and_the_number_is_the_trace_s_own(capsys: pytest.CaptureFixture[str]) -> None:
    run = Run(preset("tiny-llama"), layout=Layout(precision="bf16"), batch=Batch(128, 4), data=Data(document_mask=False))
    ranks = Ranks(0, 1, torch.device("cpu"))
    assert smallest_bytes(ranks, 7) == 7
    traced = trace_rank(run, 0, device="cuda").peak_bytes(1)
    assert traced_by_first(run, ranks)(0) == str(traced)
    assert capsys.readouterr().out.startswith("memory: the plan is too near to the limit; tracing rank 0")


def test_jobs_larger_than_any_that_was_traced_and_hosts_without_memory_have_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    wide = replace(RUN, layout=replace(RUN.layout, dp=8192), batch=Batch(8192, 8192))
    with pytest.raises(NoTraceError, match="32768 ranks are more than the 16384"):
        traced_rank(wide, 0)

    def refused(words: list[str], **options: object) -> None:
        raise subprocess.CalledProcessError(2, words, stderr="a warning\nultrascale: trace would take about 9 GiB\n")

    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(NoTraceError, match=r"^ultrascale: trace would take about 9 GiB$"):
        traced_rank(RUN, 0)


@pytest.mark.catalogue(15)
def test_an_out_of_memory_compares_what_was_measured_planned_and_traced(tmp_path: Path) -> None:
    run = Run(preset("tiny-llama"), layout=Layout(dp=2, precision="bf16"), batch=Batch(128, 4), data=Data(document_mask=False))
    run = replace(run, faults=Faults(hang_seconds=300.0))  # a busy machine traces slowly
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")
    told = str(out_of_memory(run, 1, Measured(3 * GIB, 4 * GIB), tmp_path / "run.toml", error)).splitlines()
    assert told[0] == "rank 1 ran out of memory (CUDA out of memory. Tried to allocate 2 GiB.)"
    assert told[1].split() == ["measured", "3", "GiB", "allocated,", "4", "GiB", "reserved,", "until", "it", "failed"]
    planned, traced = (float(line.split()[1]) for line in told[2:4])
    assert traced == pytest.approx(planned, rel=0.03)
    assert "reserved; most: " in told[3] and told[4].endswith("says what fills it and what to change.")
