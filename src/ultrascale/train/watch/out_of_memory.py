"""Report on a rank that ran out of memory: its planned, traced and measured memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch

from ultrascale import heartbeat
from ultrascale.description.run import Run
from ultrascale.description.units import format_bytes
from ultrascale.plan.report import plan_rank
from ultrascale.train.watch.traced_rank import TRACE_SECONDS, NoTraceError, traced_rank

PATIENCE_SHARE = 2 / 3
"""Share of `faults.hang_seconds` that a trace may take; the rest is for reporting the error."""


class OutOfDeviceMemory(RuntimeError):
    """A device ran out of memory; the message compares planned, traced and measured bytes."""


class Measured(NamedTuple):
    """Peak bytes of this process that torch's allocator allocated and reserved."""

    allocated: int
    reserved: int


@contextmanager
def explained_out_of_memory(run: Run, rank: int, run_file: Path) -> Iterator[None]:
    """Context that replaces torch's error by `OutOfDeviceMemory`. `run_file`: path of the resolved run."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise out_of_memory(run, rank, measured_here(), run_file, error) from error


def measured_here() -> Measured:
    """Peak memory on this rank's CUDA device."""
    return Measured(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def out_of_memory(run: Run, rank: int, measured: Measured, run_file: Path, error: BaseException) -> OutOfDeviceMemory:
    """The error to raise in place of torch's. `run_file`: path of the resolved run."""
    peak = plan_rank(run, rank, "cuda").peak
    planned = f"{format_bytes(peak.total)} at the peak, in the {peak.phase} pass"
    allocated, reserved = map(format_bytes, measured)
    return OutOfDeviceMemory(
        f"rank {rank} ran out of memory ({str(error).strip().splitlines()[0]})\n"
        f"  measured  {allocated} allocated, {reserved} reserved, until it failed\n"
        f"  planned   {planned}\n"
        f"  traced    {_traced(run, rank)}\n"
        f"`ultrascale trace {run_file} --rank {rank} --explain-oom` says what fills it and what to change."
    )


def _traced(run: Run, rank: int) -> str:
    """Text on a trace of `rank`: its peak, reserved memory and largest parts, or why there is no trace."""
    patience = run.faults.hang_seconds
    seconds = TRACE_SECONDS if patience is None else min(TRACE_SECONDS, PATIENCE_SHARE * patience)
    heartbeat.beat("tracing, after it ran out of memory", extra_seconds=seconds)
    try:
        trace = traced_rank(run, rank, seconds=seconds)
    except NoTraceError as failure:
        return f"no: {failure}"
    parts = ", ".join(f"{part['what']} {format_bytes(part['num_bytes'])}" for part in trace["alive_at_peak"][:3])
    return f"{format_bytes(trace['peak_bytes'])} at the peak, {format_bytes(trace['reserved_bytes'])} reserved; most: {parts}"
