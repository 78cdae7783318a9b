"""How long a trace takes and what it needs, at real sizes, against the budgets of the project; one rank each, two steps.

    python benchmarks/trace/trace_speed.py            prints a table; exit code 1 if a budget is broken

Each job is traced in a process of its own, imports included. CPU seconds are what the work costs; on a machine that does
something else too, wall seconds are more.
"""

from __future__ import annotations

import json
import platform
import resource
import subprocess
import sys
import time
from typing import Any, NamedTuple

from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset
from ultrascale.spec.run import Batch, Data, Run

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
        "cpu_seconds": usage.ru_utime + usage.ru_stime, "gib": usage.ru_maxrss / 2**20, "operations": found.ticks,
        "peak_gib": found.peak_bytes(1) / 2**30, "planned_gib": None if planned is None else planned.peak.total / 2**30,
    }  # fmt: skip


def main() -> int:
    """Every job, one after the other."""
    if len(sys.argv) == 2:
        print(json.dumps(traced_here(sys.argv[1])))
        return 0
    print(f"{platform.machine()}, {platform.platform()}, Python {platform.python_version()}\n")
    print(f"{'job':<34}{'budget':>8}{'CPU s':>8}{'wall s':>8}{'GiB':>6}{'ops':>9}{'peak GiB':>10}{'planned':>9}")
    broken = 0
    for name, job in JOBS.items():
        started = time.perf_counter()
        done = subprocess.run([sys.executable, __file__, name], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout.splitlines()[-1])
        wall = time.perf_counter() - started
        broken += row["cpu_seconds"] > job.seconds or row["gib"] > MOST_GIB
        planned = "" if row["planned_gib"] is None else f"{row['planned_gib']:.2f}"
        numbers = f"{row['cpu_seconds']:>8.1f}{wall:>8.1f}{row['gib']:>6.2f}{row['operations']:>9,}{row['peak_gib']:>10.2f}"
        print(f"{name:<34}{job.seconds:>8.0f}{numbers}{planned:>9}", flush=True)
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
