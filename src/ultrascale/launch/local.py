"""Processes on this machine, through torchrun's agent.

The agent starts the ranks, watches them, and ends all of them when one dies. They are then started again with a rendezvous of
their own, and go on from the newest whole checkpoint. (The agent could restart them itself, but keeps its store while it does,
in which new workers of torch 2.11 to 2.13 find the addresses of dead ones: pytorch#135712.)
"""

from __future__ import annotations

import logging
import os
import sys
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ending:
    """How the processes ended."""

    reason: str
    """Empty when all of them ended well."""
    by_signal: bool = False
    """A signal ended a rank."""
    stopped: bool = False
    """This process was asked to stop, and passed that on."""


def launch_local(
    run_file: Path,
    num_processes: int,
    *,
    worker_arguments: tuple[str, ...] = (),
    max_restarts: int = 3,
    say: Callable[[str], None] = print,
    progress: Callable[[], str | None] = lambda: "",
) -> Ending:
    """Train the resolved run in `run_file` on `num_processes` processes of this machine, again after each crash.

    After a crash `progress` is asked how far the run is: None says that starting again is no use, and the same answer after two
    failures that were not signals says that the third would be no better.
    """
    before = ""
    for restarts_left in range(max_restarts, -1, -1):
        ending = _launch_once(run_file, num_processes, worker_arguments)
        if not ending.reason or ending.stopped:
            break
        now = progress()
        if now is None or not restarts_left or (now == before and not ending.by_signal):
            break
        before = "" if ending.by_signal else now
        say(f"{ending.reason}; starting again from the newest checkpoint ({restarts_left} restarts left)")
    return ending


def _launch_once(run_file: Path, num_processes: int, worker_arguments: tuple[str, ...]) -> Ending:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _share_out_cores(num_processes)
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # we tell the same in one line
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_processes, run_id=uuid.uuid4().hex,
        rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0, monitor_interval=0.1,
    )  # fmt: skip
    try:
        elastic_launch(config, sys.executable)("-m", "ultrascale.train.worker", str(run_file), *worker_arguments)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        how = f"was ended by {failure.signal_name()}" if failure.exitcode < 0 else f"failed with exit code {failure.exitcode}"
        return Ending(f"rank {rank} {how}", by_signal=failure.exitcode < 0)
    except (SignalException, KeyboardInterrupt) as error:
        return Ending(f"stopped by {error or 'Ctrl-C'}", stopped=True)
    return Ending("")


def _share_out_cores(num_processes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
