"""Processes on this machine, through torchrun's agent.

The agent starts the ranks, watches them, and ends all of them when one dies. They are then started again with a rendezvous of
their own, and go on from the newest whole checkpoint. (The agent could restart them itself, but keeps its store while it does,
in which new workers of torch 2.11 to 2.13 find the addresses of dead ones: pytorch#135712.)

All of them are on one machine, so they meet in a file and talk over loopback: no port is open to the network.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

STOP_SECONDS = "120"
"""Time the ranks get to save after SIGTERM or Ctrl-C before they are killed; torch's own is 30."""
QUIET = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api")
"""Loggers of torch. The second has a level of its own, which the first one's does not reach."""


@dataclass(frozen=True)
class Ending:
    """How the processes ended."""

    reason: str
    """Empty when all of them ended well."""
    exit_code: int = 1
    """For the command: 1 failed, 2 the description is wrong."""
    by_signal: bool = False
    """A signal ended a rank."""
    stopped: bool = False
    """This process was asked to stop, and passed that on."""
    saved: bool = False
    """Stopped in order: the ranks have said that everything is saved."""
    explained: bool = False
    """A rank has said what is wrong, and it would be wrong again."""


def launch_local(
    run_file: Path,
    num_processes: int,
    *,
    worker_arguments: tuple[str, ...] = (),
    max_restarts: int = 3,
    say: Callable[[str], None] = print,
    progress: Callable[[], str] = lambda: "",
) -> Ending:
    """Train the resolved run in `run_file` on `num_processes` processes of this machine, again after each crash.

    After a crash `progress` is asked how far the run is: the same answer after two failures that were not signals says that the
    third would be no better.
    """
    before = None
    for restarts_left in range(max_restarts, -1, -1):
        with tempfile.TemporaryDirectory(prefix="ultrascale-launch-") as folder:
            ending = _launch_once(run_file, num_processes, worker_arguments, Path(folder))
        if not ending.reason or ending.stopped or ending.explained or not restarts_left:
            break
        now = progress()
        if now == before and not ending.by_signal:
            break
        before = None if ending.by_signal else now
        say(f"{ending.reason}; starting again from the newest checkpoint ({restarts_left} restarts left)")
    return ending


def _launch_once(run_file: Path, num_processes: int, worker_arguments: tuple[str, ...], folder: Path) -> Ending:
    """`folder` is empty and for this attempt alone."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    _prepare_environment(num_processes)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we tell the same in one line
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_processes, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1,
        rdzv_backend="c10d", rdzv_endpoint=str(folder / "agent-store"), rdzv_configs={"store_type": "file"},
    )  # fmt: skip
    failure, saved = folder / "failure.json", folder / "saved"
    arguments = ("--rendezvous", f"file://{folder}/store", "--failure", str(failure), "--saved", str(saved))
    arguments = (*arguments, "--launcher", str(os.getpid()))
    try:
        elastic_launch(config, sys.executable)("-m", "ultrascale.train.worker", str(run_file), *arguments, *worker_arguments)
    except ChildFailedError as error:
        return _failed(error, failure)
    except (SignalException, KeyboardInterrupt) as error:
        return _stopped(f"stopped by {error or 'Ctrl-C'}", failure, saved)
    return Ending("")


def _stopped(reason: str, failure: Path, saved: Path) -> Ending:
    """The ending after a signal to this process. Torch does not tell how the ranks took it; what they wrote does."""
    if failure.exists():
        told = json.loads(failure.read_text())
        return Ending(f"{reason}; rank {told['rank']} failed", exit_code=told["exit_code"], stopped=True, explained=True)
    if not saved.exists():
        return Ending(f"{reason}, and the ranks ended without saving", stopped=True)
    return Ending(reason, stopped=True, saved=True)


def _failed(error: object, failure: Path) -> Ending:
    """The ending when ranks failed: one that a signal ended comes first, since the others fail for want of it."""
    ranks = sorted(getattr(error, "failures").items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))  # noqa: B009
    rank, first = ranks[0]
    if failure.exists():
        told = json.loads(failure.read_text())
        return Ending(f"rank {told['rank']} failed", exit_code=told["exit_code"], explained=True)
    if first.exitcode < 0:
        return Ending(f"rank {rank} was ended by {first.signal_name()}", by_signal=True)
    return Ending(f"rank {rank} failed with exit code {first.exitcode}")


def _prepare_environment(num_processes: int) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_processes)))
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", STOP_SECONDS)
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # the agent would open a port that nobody needs
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
