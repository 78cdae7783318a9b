"""How fast the planner is: one layout, and every layout of large clusters, on one core.

    python benchmarks/plan/search_speed.py [--json FILE]

CPU seconds of this process with one thread, best of `--repeats`; the first search, with nothing cached, is told apart.
Beside them stand figures of peers as the project's brief gives them: quoted, not measured here, on other machines. None of
the peers installs from a package registry, so that the same machine cannot run them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.pipeline.pipeline_program import program_of
from ultrascale.plan.pipeline.pipeline_steady import long_step_seconds
from ultrascale.plan.pipeline.pipelined import stage_seconds, with_and_without_sends
from ultrascale.plan.pipeline.play import step_seconds
from ultrascale.plan.search.search import SearchResult, search
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload

PEERS = (
    ("Calculon", "one layout of many", 13e-3, "quoted: 4,866 layouts in 71 s"),
    ("SimuMax", "one layout", 100e-3, "quoted"),
    ("PyTorch MemTracker", "one layout, memory only", 30.0, "quoted: fake tensors, Llama-3 8B"),
)
"""Name, what it does, seconds, where that comes from."""


@dataclass(frozen=True)
class Case:
    """A search whose time has a limit."""

    name: str
    model: str
    gpus: str
    sequence_length: int
    sequences_per_batch: int
    limit_seconds: float


CASES = (
    Case("GPT-3 175B on 512 A100", "gpt3-175b", "512xa100", 2048, 1536, 2.0),
    Case("Llama-3 405B on 16,384 H100", "llama-3.1-405b", "16384xh100", 8192, 2048, 2.0),
    Case("DeepSeek-V3 on 2,048 H800", "deepseek-v3", "2048xh800", 4096, 15360, 6.0),
)
ONE_LAYOUT_LIMIT = 2e-3
PIPELINES = (
    ("1f1b", 1), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 1), ("zb-v", 2), ("dualpipe", 1), ("dualpipe-v", 2),
    ("afab", 1), ("breadth-first", 2),
)  # fmt: skip
"""Schedules, and stages a rank."""


def main() -> int:
    """Time everything, print a table, and write the numbers where asked."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [_one_layout(), *_long_pipelines(options.repeats), *(_searched(case, options.repeats) for case in CASES)]
    for row in rows:
        verdict = "within" if row["seconds"] <= row["limit_seconds"] else "OVER"
        print(f"{row['name']:<36} {row['seconds']:>9.4f} s  {verdict} {row['limit_seconds']:g} s   {row['note']}")
    for name, what, seconds, source in PEERS:
        print(f"{name:<36} {seconds:>9.4f} s  {what}   ({source})")
    if options.json:
        about = {"machine": platform.processor() or platform.machine(), "python": platform.python_version(), "threads": 1}
        options.json.write_text(json.dumps(about | {"rows": rows, "peers": PEERS}, indent=2) + "\n")
    return int(any(row["seconds"] > row["limit_seconds"] for row in rows))


def _one_layout() -> dict[str, Any]:
    """A layout of GPT-3 at a time, each with a shape of its own or one seen before, as a slider would ask."""
    case = CASES[0]
    workload = _workload(case)
    layouts = [
        Layout(dp=512 // (tp * pp), tp=tp, pp=pp, micro_batch_size=size, zero_stage=1, precision="bf16", recompute=way)
        for tp in (1, 2, 4, 8)
        for pp in (8, 16, 32)
        for size in (1, 2)
        for way in ("none", "full")
    ]
    predict(workload, layouts[0])  # imports and fits are read once
    seconds = [_seconds(lambda layout=layout: predict(workload, layout)) for layout in layouts * 2]
    note = f"median of {len(seconds)}; slowest {max(seconds) * 1e3:.1f} ms"
    return {"name": "one layout", "seconds": statistics.median(seconds), "limit_seconds": ONE_LAYOUT_LIMIT, "note": note}


def _long_pipelines(repeats: int) -> list[dict[str, Any]]:
    """Layouts of every schedule with 16 to 512 micro-batches on 4 to 16 ranks; and their pipelines played to the end."""
    return [_pipelines_of(schedule, virtual, repeats) for schedule, virtual in PIPELINES]


def _pipelines_of(schedule: str, virtual: int, repeats: int) -> dict[str, Any]:
    first, again, played, rounds = [], [], [], []
    for pp in (4, 8, 16):
        for count in (16, 64, 128, 512):
            dp, case = 64 // pp, CASES[0]
            layout = Layout(dp=dp, tp=8, pp=pp, zero_stage=1, precision="bf16", schedule=schedule, virtual_stages=virtual)
            workload = replace(_workload(case), sequences_per_batch=count * dp)
            seconds = with_and_without_sends(stage_seconds(workload, layout), layout.num_stages)
            first.append(_seconds(lambda w=workload, at=layout: predict(w, at)))
            whole, asked = program_of(schedule, pp, count, virtual), (schedule, pp, count, seconds)
            step_seconds(whole, seconds)
            times: tuple[list[float], ...] = ([], [], [])
            for _ in range(repeats):
                times[0].append(_seconds(lambda w=workload, at=layout: predict(w, at)))
                times[1].append(_seconds(lambda program=whole, one=seconds: step_seconds(program, one)))
                times[2].append(_seconds(lambda asked=asked: long_step_seconds(*asked, virtual_stages=virtual)))
            for best, found in zip((again, played, rounds), times, strict=True):
                best.append(min(found))
    ratio = sum(played) / sum(rounds)
    slowest, never_seen = max(again) * 1e3, max(first) * 1e3
    note = (
        f"slowest {slowest:.1f}, never seen {never_seen:.0f} ms; {ratio:.1f} times faster than its pipeline played to the end"
    )
    return {
        "name": f"one layout, {schedule}, v = {virtual}", "seconds": statistics.median(again), "first_seconds": max(first),
        "slowest_seconds": max(again), "limit_seconds": ONE_LAYOUT_LIMIT, "played_over_rounds": ratio, "note": note,
    }  # fmt: skip


def _searched(case: Case, repeats: int) -> dict[str, Any]:
    found: list[SearchResult] = []
    seconds = [_seconds(lambda: found.append(search(_workload(case)))) for _ in range(repeats)]
    priced = found[0].priced
    note = f"first {seconds[0]:.2f} s; {len(priced.fits):,} layouts, {int(priced.was_priced.sum()):,} priced"
    return {
        "name": case.name,
        "seconds": min(seconds),
        "first_seconds": seconds[0],
        "limit_seconds": case.limit_seconds,
        "note": note,
    }


def _workload(case: Case) -> Workload:
    return Workload(
        preset(case.model), parse_cluster(case.gpus), case.sequence_length, case.sequences_per_batch, STACKS["ultrascale"]
    )


def _seconds(run: Callable[[], object]) -> float:
    """CPU seconds of one call: neighbours on the machine do not count."""
    started = time.process_time()
    run()
    return time.process_time() - started


if __name__ == "__main__":
    sys.exit(main())
