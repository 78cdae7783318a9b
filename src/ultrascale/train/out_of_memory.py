"""After a rank has run out of memory: what was planned for it, what a trace of it says, and what was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from ultrascale.plan.memory import is_replayed, plan_memory
from ultrascale.spec.run import Run
from ultrascale.spec.units import format_bytes

TRACE_SECONDS = 180.0
"""A trace takes some ten seconds; nobody should wait longer for an error."""


class OutOfDeviceMemory(RuntimeError):
    """A device had no memory left; the text compares."""


class Measured(NamedTuple):
    """Most bytes of this process that torch's allocator gave out and took."""

    allocated: int
    reserved: int


def measured_here() -> Measured:
    """On this rank's CUDA device."""
    return Measured(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())


def out_of_memory(run: Run, rank: int, measured: Measured, run_file: Path, error: BaseException) -> OutOfDeviceMemory:
    """The error to raise in place of torch's. `run_file`: the run as it was resolved."""
    planned = "not planned"
    if is_replayed(run.model, run.layout):
        peak = plan_memory(
            run.model, run.layout, sequence_length=run.batch.sequence_length,
            sequences_per_batch=run.batch.sequences_per_batch, documents=run.data.document_mask, device="cuda", rank=rank,
            optimizer=run.optimizer.name,
        ).peak  # fmt: skip
        planned = f"{format_bytes(peak.total)} at the peak, in the {peak.phase} pass"
    allocated, reserved = map(format_bytes, measured)
    return OutOfDeviceMemory(
        f"rank {rank} ran out of memory ({str(error).strip().splitlines()[0]})\n"
        f"  measured  {allocated} allocated, {reserved} reserved, until it failed\n"
        f"  planned   {planned}\n"
        f"  traced    {_traced(run_file, rank)}\n"
        f"`ultrascale trace {run_file} --rank {rank} --explain-oom` says what fills it and what to change."
    )


def _traced(run_file: Path, rank: int) -> str:
    """In a process of its own: this one is a rank of a run."""
    words = [sys.executable, "-m", "ultrascale", "trace", str(run_file), "--rank", str(rank), "--device", "cuda", "--json"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=TRACE_SECONDS, check=True)
        found = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.SubprocessError) as failure:
        return f"no: {type(failure).__name__}"
    parts = ", ".join(f"{part['what']} {format_bytes(part['num_bytes'])}" for part in found["alive_at_peak"][:3])
    return f"{format_bytes(found['peak_bytes'])} at the peak, {format_bytes(found['reserved_bytes'])} reserved; most: {parts}"
