"""Traces the first rank of every pipeline stage: ranks of a stage differ only in the padding of their shards."""

from __future__ import annotations

import multiprocessing
import signal
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import NamedTuple

from ultrascale.catalogue.machines import usable_cores
from ultrascale.description.run import Run, run_of_island
from ultrascale.kernels.choice.device_kind import Kind
from ultrascale.launch.stopping import STOP_SIGNALS
from ultrascale.main_module import end_with_parent, hidden_main
from ultrascale.plan.report import plan_rank
from ultrascale.trace.allocator import reserved_bytes
from ultrascale.trace.rank import trace_rank
from ultrascale.work.sharding.places import Coordinates


class StagePeak(NamedTuple):
    """Bytes of one rank of a stage, in a step after the first."""

    pp: int
    rank: int
    traced_bytes: int
    planned_bytes: int | None
    reserved_bytes: int

    @property
    def percent(self) -> float | None:
        """Planned minus traced bytes, in percent of traced."""
        return None if self.planned_bytes is None else 100 * (self.planned_bytes / self.traced_bytes - 1)


def trace_stages(run: Run, *, device: Kind) -> list[StagePeak]:
    """Trace each stage in a separate process, as many in parallel as there are cores."""
    run, in_stage = run_of_island(run), run.layout.world_size // run.layout.pp
    todo = range(0, run.layout.world_size, in_stage)
    workers = min(len(todo), usable_cores())
    trace_one = partial(peak_of, run, device=device)
    if workers == 1:
        return list(map(trace_one, todo))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])  # torch is imported once, and not by each process
    with ProcessPoolExecutor(workers, context, _begin) as pool:
        with hidden_main():
            peaks = pool.map(trace_one, todo)  # starts the processes
        return list(peaks)


def _begin() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C ends it without a word
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # as a fork server of ranks has them
    end_with_parent()


def peak_of(run: Run, rank: int, *, device: Kind) -> StagePeak:
    """Trace one rank, and return only its peak."""
    trace = trace_rank(run, rank, device=device)
    planned = plan_rank(run, rank, device, steps=2).peak_by_step[1].total
    return StagePeak(Coordinates.of(run.layout, rank).pp, rank, trace.peak_bytes(1), planned, reserved_bytes(trace))
