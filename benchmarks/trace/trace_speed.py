"""How long a trace takes and what it needs, at real sizes, against the budgets of the project; one rank each, two steps.

    python benchmarks/trace/trace_speed.py [--output benchmarks/trace/results/trace_speed.json]

Prints a table; exit code 1 if a budget is broken. Each job is traced in a process of its own, imports included. CPU seconds are
what the work costs, in one thread; on a machine that does something else too, wall seconds are more: the load is noted.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run

MOST_GIB = 8.0


class Job(NamedTuple):
    """A rank of a run, and what its trace may take."""

    model: str
    layout: Layout
    rank: int
    num_micro_batches: int
    seconds: float


JOBS = {
    "Llama-3 8B, 8 ranks, ZeRO-3": Job("llama-3-8b", Layout(dp=8, zero_stage=3, recompute="full", precision="bf16"), 3, 2, 20),
    "Llama-3 8B, 64 ranks, tp 2, pp 4": Job(
        "llama-3-8b", Layout(dp=8, tp=2, pp=4, zero_stage=1, recompute="selective", precision="bf16"), 17, 16, 20
    ),
    "Llama-3 70B, 512 ranks": Job(
        "llama-3-70b", Layout(dp=16, tp=8, pp=4, zero_stage=1, recompute="selective", precision="bf16"), 300, 8, 60
    ),
    "Llama-3.1 405B, 16,384 ranks": Job(
        "llama-3.1-405b", Layout(dp=128, tp=8, pp=16, zero_stage=2, recompute="selective", precision="bf16"), 9000, 16, 180
    ),
    "Mixtral 8x7B, 64 ranks, ep 8": Job(
        "mixtral-8x7b", Layout(dp=16, tp=4, ep=8, zero_stage=1, recompute="full", precision="bf16"), 5, 2, 60
    ),
    "DeepSeek-V3, 2,048 ranks, ep 64": Job(
        "deepseek-v3", Layout(dp=128, pp=16, ep=64, zero_stage=1, recompute="full", precision="bf16"), 700, 32, 180
    ),
}


def run_of(job: Job) -> Run:
    """Sequences of 8192 tokens."""
    sequences = job.layout.dp * job.layout.micro_batch_size * job.num_micro_batches
    return Run(preset(job.model), layout=job.layout, batch=Batch(8192, sequences), data=Data(document_mask=False))


def traced_here(name: str) -> dict[str, Any]:
    """Trace a job in this process."""
    from ultrascale.trace.planned import planned_rank
    from ultrascale.trace.rank import trace_rank

    job = JOBS[name]
    found = trace_rank(run_of(job), job.rank)
    planned = planned_rank(run_of(job), job.rank, "cuda")
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 1), "gib": round(usage.ru_maxrss / 2**20, 2),
        "operations": found.ticks, "peak_gib": round(found.peak_bytes(1) / 2**30, 3),
        "planned_gib": None if planned is None else round(planned.peak.total / 2**30, 3),
    }  # fmt: skip


def measure(name: str, job: Job) -> dict[str, Any]:
    """Trace a job in a process of its own: its numbers, the wall seconds, the load before, and whether the budget holds."""
    load, started = os.getloadavg()[0], time.perf_counter()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, __file__, "--job", name], env=environment, capture_output=True, text=True, check=True
    )
    row = json.loads(done.stdout.splitlines()[-1])
    row |= {"wall_seconds": round(time.perf_counter() - started, 1), "load_average": round(load, 1)}
    row["held"] = row["cpu_seconds"] <= job.seconds and row["gib"] <= MOST_GIB
    return {"job": name, "budget_seconds": job.seconds} | row


def main() -> int:
    """Every job, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="write every number here")
    parser.add_argument("--job", choices=JOBS, help="trace this one in this process")
    asked = parser.parse_args()
    if asked.job:
        print(json.dumps(traced_here(asked.job)))
        return 0
    about = {
        "date": time.strftime("%Y-%m-%d"), "machine": f"{platform.machine()}, {platform.platform()}",
        "processors": os.cpu_count(), "python": platform.python_version(), "torch": torch.__version__, "most_gib": MOST_GIB,
    }  # fmt: skip
    print(", ".join(f"{name} {value}" for name, value in about.items()) + "\n")
    print(f"{'job':<34}{'budget':>8}{'CPU s':>8}{'wall s':>8}{'load':>6}{'GiB':>6}{'ops':>9}{'peak GiB':>10}{'planned':>9}")
    rows = []
    for name, job in JOBS.items():
        rows.append(row := measure(name, job))
        planned = "" if row["planned_gib"] is None else f"{row['planned_gib']:.2f}"
        numbers = f"{row['cpu_seconds']:>8.1f}{row['wall_seconds']:>8.1f}{row['load_average']:>6.1f}{row['gib']:>6.2f}"
        peak = f"{row['operations']:>9,}{row['peak_gib']:>10.2f}{planned:>9}"
        print(f"{name:<34}{job.seconds:>8.0f}{numbers}{peak}{'' if row['held'] else '  OVER'}", flush=True)
    if asked.output:
        asked.output.write_text(json.dumps(about | {"jobs": rows}, indent=1) + "\n")
    return int(not all(row["held"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
