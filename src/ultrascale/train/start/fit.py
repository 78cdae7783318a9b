"""Memory check: whether a run fits its devices, logged in one line before it starts.

The plan is consulted first: it takes no time, and tests hold it to traces within `AGREES_WITHIN`. Where a stage needs nearly
all memory, so that this margin cannot decide, the fullest stage is traced, and the trace decides. The line names the source.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ultrascale import console, heartbeat
from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes
from ultrascale.measure.machine.ceilings import this_gpu
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.columns.footprint import live_limit
from ultrascale.plan.memory.replay import MemoryPlan
from ultrascale.plan.report import plan_rank
from ultrascale.train.watch.traced_rank import TRACE_SECONDS, NoTraceError, traced_rank

AGREES_WITHIN = 0.03
"""Relative difference in peak memory within which plans and traces agree (`tests/agree/test_trace_agrees.py`)."""
SHARE_OF_TIMEOUT = 0.5
"""Share of the collective timeout that a trace may take; the rest is for ranks to reach the collective."""
Trace = Callable[[int], str]
"""Live bytes at the peak of a rank, as a number; or a message why there is no trace of it."""


def _stage_plans(run: Run) -> list[MemoryPlan]:
    """Memory plans of the first rank of every pipeline stage, for CUDA."""
    world, pp = run.layout.world_size, run.layout.pp
    return [plan_rank(run, rank, "cuda", steps=2) for rank in range(0, world, world // pp)]


def expect_fits(run: Run, capacity_bytes: int, *, anyway: bool = False, trace: Trace | None = None) -> str | None:
    """Log line on the memory that each stage needs of a device with `capacity_bytes`.

    `trace`: called for the fullest stage, if its plan is too close to the capacity. Raises SpecError if a stage cannot fit,
    unless `anyway`. Compiled blocks may save less for the backward pass than planned, so only their weights, gradients and
    optimizer states must fit; those are exact, and not traced.
    """
    plans = _stage_plans(run)
    peaks = [plan.peak.total for plan in plans]
    least = [plan.before_update.total for plan in plans] if run.compile else peaks
    usable = live_limit(capacity_bytes, run.layout, joins_segments=STACKS["ultrascale"].joins_segments)
    worst = max(range(len(least)), key=least.__getitem__)
    rank = worst * (run.layout.world_size // run.layout.pp)
    needs = ", ".join(map(format_bytes, peaks)) if len(set(map(format_bytes, peaks))) > 1 else format_bytes(max(peaks))
    whom = f"the {len(peaks)} pipeline stages need" if len(peaks) > 1 else "each rank needs"
    has = f"a device has {format_bytes(capacity_bytes)}, {format_bytes(usable)} for them"
    is_near = abs(least[worst] - usable) <= AGREES_WITHIN * least[worst]
    judged = FitVerdict(least[worst], "")
    if is_near and trace is not None and not run.compile and not anyway:
        judged = _verdict_of_trace(rank, trace, least[worst], usable)
    line = f"memory: {whom} {needs} of tensors, as planned; {has}{judged.clause}"
    if judged.needed > usable and not anyway:
        states = f"; weights, gradients and optimizer states alone take {format_bytes(least[worst])}" if run.compile else ""
        rule = f"does not fit: {line.removeprefix('memory: ')}{states}"
        remedy = (
            f"`ultrascale trace RUN.TOML --rank {rank} --explain-oom` says what to change; --ignore-memory starts it anyway."
        )
        raise mistake("layout", rule, remedy)
    return line


@dataclass(frozen=True)
class FitVerdict:
    """Basis for deciding whether the fullest stage fits."""

    needed: int
    clause: str
    """Clause of the line about the trace; empty if there was no trace."""


def _verdict_of_trace(rank: int, trace: Trace, planned: int, usable: int) -> FitVerdict:
    """Verdict from a trace of `rank`, or from the plan if there is no trace."""
    margin, answer = f"; that is within {AGREES_WITHIN:.0%}", trace(rank)
    if not answer.isdigit():
        return FitVerdict(planned, f"{margin}, and there is no trace to decide ({answer}), so the plan does")
    traced = int(answer)
    does = "fits" if traced <= usable else "does not"
    return FitVerdict(traced, f"{margin}, so a trace decides: rank {rank} needs {format_bytes(traced)}, which {does}")


def smallest_bytes(ranks: Ranks, capacity_bytes: int) -> int:
    """Bytes of the smallest device of all ranks. Collective, so that all ranks decide alike and request a trace together."""
    return min(map(int, ranks.gather_text(str(capacity_bytes))))


def traced_by_first(run: Run, ranks: Ranks) -> Trace:
    """A trace by rank 0, on its host's CPU, while the others wait; for `expect_fits`. The returned function is collective."""
    limit = SHARE_OF_TIMEOUT * run.collective_timeout_seconds
    seconds = min(TRACE_SECONDS, limit)

    def trace(rank: int) -> str:
        heartbeat.beat("waiting for the trace of a stage that hardly fits", extra_seconds=seconds)
        return ranks.gather_text(_peak_or_why(run, rank, seconds) if ranks.is_first else "")[0]

    return trace


def _peak_or_why(run: Run, rank: int, seconds: float) -> str:
    console.print_line(
        f"memory: the plan is too near to the limit; tracing rank {rank}, some ten seconds, {seconds:.0f} at most"
    )
    try:
        return str(traced_rank(run, rank, seconds=seconds)["peak_bytes"])
    except NoTraceError as failure:
        return str(failure)


def cluster_of(run: Run, device: torch.device) -> Cluster:
    """The cluster of a run: the one it names, or as many of this rank's device as the run has ranks."""
    if run.cluster != "auto":
        return parse_cluster(run.cluster)
    gpu = this_gpu(device)
    return parse_cluster(f"{run.layout.world_size}x{gpu.name if gpu is not None else 'cpu'}")


def memory_bytes(run: Run, device: torch.device) -> int:
    """Memory of this rank's device, in bytes; on a CPU an equal share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(parse_cluster(f"{run.layout.world_size}xcpu").accelerator.memory_bytes.value)
