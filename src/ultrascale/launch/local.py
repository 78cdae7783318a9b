"""Processes on this machine, through torchrun's agent.

The agent starts the ranks, watches them, and ends all of them when one dies. They are then restarted with a new rendezvous, and
resume from the newest complete checkpoint. (The agent could restart them itself, but it would keep its store, in which new
workers of torch 2.11 to 2.13 find the addresses of dead ones: pytorch#135712.)

All of them are on one machine, so their rendezvous is a file and they communicate over loopback: no port is open to the
network.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

from ultrascale.catalogue.machines import usable_cores
from ultrascale.config.rules.early import expect_processes
from ultrascale.config.rules.time_limits import GRACE_SECONDS, TORCHRUN_GRACE
from ultrascale.description.units import count_of
from ultrascale.heartbeat import Heartbeat, read
from ultrascale.launch.events import stamp
from ultrascale.launch.orphans import launcher_here
from ultrascale.launch.restarts import RestartBudget
from ultrascale.launch.scratch import folder_with_space, launcher_scratch
from ultrascale.launch.stopping import StopRequests, stop_signals_kept, stop_signals_raise
from ultrascale.launch.warm import (
    LOST_EXIT_CODE,
    LostForkServer,
    entry,
    fork_server_ending,
    fork_server_watched,
    prepare,
)
from ultrascale.launch.watchdog import HANG_FILE, disagreement, keep_hang, meanwhile

WORKER = "ultrascale.train.worker"
QUIET = ("torch.distributed.elastic", "torch.distributed.elastic.agent.server.api", "torch.multiprocessing.spawn")
"""Loggers of torch. The second sets its own level, so that the first one's does not apply."""
LEFT_TO_TORCH = "SIGQUIT"
"""The signal that torch's agent handles; the others are ours (`stopping`)."""
INTERRUPTED = 130


@dataclass(frozen=True)
class Ending:
    """Result of an attempt: the end of all its processes."""

    reason: str
    """Empty if all of them succeeded."""
    exit_code: int = 1
    """Exit code of the command: 1 failed, 2 invalid configuration, 130 stopped by Ctrl-C before it could save."""
    stopped: bool = False
    """True if this process received a stop signal, and forwarded it."""
    saved: bool = False
    """True if it stopped in order: the ranks reported that everything is saved."""
    explained: bool = False
    """True if a rank reported an error that a restart would repeat."""
    rank: int | None = None
    """The rank that failed first, or hung."""
    step: int | None = None
    """Steps done at the failure; None before any step began."""
    after_failures: bool = False
    """True if an earlier attempt of the same command has failed."""

    @property
    def refused(self) -> bool:
        """True if a rank reported an error, such as an invalid description or data that do not fit, before any attempt began a
        step or failed: the run has neither failed nor lost anything."""
        return self.explained and self.step is None and not self.after_failures


def launch_local(
    run_toml: str,
    num_processes: int,
    *,
    worker_arguments: tuple[str, ...] = (),
    max_restarts: int = 3,
    say: Callable[[str], None] = print,
    progress: Callable[[], str] = lambda: "",
    record: Callable[[dict[str, Any]], None] = lambda event: None,
    keep: Path | None = None,
    grace: float = GRACE_SECONDS,
    worker: str = WORKER,
) -> Ending:
    """Train the resolved run given as text in `run_toml` on `num_processes` processes of this machine, with restarts after
    crashes. Each attempt reads the text from its own folder, to which nothing else writes.

    `max_restarts`: without a new checkpoint in between; `progress` names the newest one. `record` is called with each failure
    as a row of the run's events. Reports of hung ranks are copied into a new folder under `keep`. `grace`: seconds from a stop
    signal until ranks are killed. `worker`: the module that each rank runs. Raises SpecError for more processes than one
    machine starts.
    """
    expect_processes(num_processes)
    attempt = Attempt(run_toml, num_processes, worker_arguments, worker, grace, keep)
    with stop_signals_kept() as stop_requests:
        return _run_with_restarts(attempt, RestartBudget(max_restarts), stop_requests, say, progress, record)


@dataclass(frozen=True)
class Attempt:
    """The processes that `launch_local` starts in one attempt."""

    run_toml: str
    num_processes: int
    worker_arguments: tuple[str, ...]
    worker: str
    grace: float
    keep: Path | None


def _run_with_restarts(
    attempt: Attempt, budget: RestartBudget, stop_requests: StopRequests,
    say: Callable[[str], None], progress: Callable[[], str], record: Callable[[dict[str, Any]], None],
) -> Ending:  # fmt: skip
    previous = Ending("")
    while True:
        ending = (
            _stopped_between_attempts(stop_requests.first, previous)
            if stop_requests.first is not None
            else _run_attempt(attempt, stop_requests)
        )
        ending = replace(ending, after_failures=previous.reason != "")
        stop_requests.are_kept = True
        if not ending.reason or ending.saved:
            return ending
        is_final = ending.stopped or ending.explained
        refusal = "" if is_final else budget.refusal(ending.step, progress())
        facts = {"rank": ending.rank, "node": platform.node(), "step": ending.step, "cause": ending.reason}
        if not ending.refused:
            record({**stamp(), "event": "failure", **facts, "again": not (is_final or refusal)})
        if is_final:
            return ending
        if refusal:
            return replace(ending, reason=f"{ending.reason.rstrip('.')}. {refusal}")
        say(f"{ending.reason}; starting again from the newest checkpoint ({count_of(budget.left + 1, 'restart')} left)")
        previous = ending


def _run_attempt(attempt: Attempt, stop_requests: StopRequests) -> Ending:
    import torch.distributed.launcher.api  # noqa: F401  (takes seconds, in which Ctrl-C leaves at once: no folder yet)

    folder = folder_with_space("attempt-", attempt.num_processes, attempt.keep, first=launcher_scratch())
    try:
        ending = _launch_once(attempt, folder, stop_requests)
        if attempt.keep is not None and (folder / HANG_FILE).exists():
            keep_hang(folder, attempt.keep)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return ending


def _stopped_between_attempts(number: signal.Signals, before: Ending) -> Ending:
    """The ending if a stop signal arrived when no rank was running, just after a failure."""
    reason = f"stopped by {number.name} before the ranks were started again"
    return Ending(reason, _exit_code(number), stopped=True, step=before.step)


def _exit_code(number: int) -> int:
    return INTERRUPTED if number == signal.SIGINT else 1


def _launch_once(attempt: Attempt, folder: Path, stop_requests: StopRequests) -> Ending:
    """Run one attempt. `folder` is empty and used by this attempt alone."""
    import torch
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    num_processes, worker = attempt.num_processes, attempt.worker
    _prepare_environment(num_processes, attempt.grace)
    warm = not torch.cuda.is_available()
    try:
        prepare(worker, warm=warm)
    except LostForkServer as error:
        return Ending(str(error))
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.CRITICAL)  # we report the same in one line
    # Older releases have no such option and handle SIGTERM and Ctrl-C themselves, in nearly the same way.
    ours: dict[str, Any] = (
        {"signals_to_handle": LEFT_TO_TORCH} if "signals_to_handle" in LaunchConfig.__dataclass_fields__ else {}
    )
    config = LaunchConfig(
        min_nodes=1, max_nodes=1, nproc_per_node=num_processes, run_id=uuid.uuid4().hex, max_restarts=0, monitor_interval=0.1,
        start_method="forkserver",
        rdzv_backend="c10d", rdzv_endpoint=str(folder / "agent-store"), rdzv_configs={"store_type": "file"},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder / "logs")),  # its default is a folder that nothing removes
        **ours,
    )  # fmt: skip
    run_file, failure, saved = folder / "run.toml", folder / "failure.json", folder / "saved"
    run_file.write_text(attempt.run_toml)
    arguments = ("--rendezvous", f"file://{folder}/store", "--failure", str(failure), "--saved", str(saved))
    arguments = (str(run_file), *arguments, "--launcher", str(os.getpid()), *attempt.worker_arguments)
    start, words = entry(worker, arguments, folder, warm=warm)
    watchdog = subprocess.Popen(
        [sys.executable, "-m", "ultrascale.launch.watchdog", str(folder), "--parent", str(os.getpid())],
        stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        with stop_signals_raise(stop_requests), launcher_here(folder), fork_server_watched():
            elastic_launch(config, start)(*words)
    except LostForkServer as error:
        return Ending(str(error), step=_steps_done(read(folder)))
    except ChildFailedError as error:
        if stop_requests.passed_on is not None:  # the ranks received it, but torch's agent did not pass it to us
            return _stopped(stop_requests.passed_on, failure, saved)
        return _failed(error, failure, folder)
    except SignalException as error:
        return _stopped(signal.Signals(error.sigval), failure, saved)
    finally:
        watchdog.terminate()
        watchdog.wait()
    return Ending("")


def _stopped(number: signal.Signals, failure: Path, saved: Path) -> Ending:
    """The ending after a signal to this process. Torch does not report how the ranks responded; their files do."""
    reason = f"stopped by {number.name}"
    step = _steps_done(read(failure.parent))
    if failure.exists():
        details = json.loads(failure.read_text())
        with_rank = f"{reason}; rank {details['rank']} failed"
        return Ending(with_rank, details["exit_code"], stopped=True, explained=True, rank=details["rank"], step=step)
    if saved.exists():
        return Ending(reason, stopped=True, saved=True)
    hang = failure.parent / HANG_FILE
    why = f" (hang: {json.loads(hang.read_text())['reason']})" if hang.exists() else ""
    return Ending(f"{reason}, and the ranks ended without saving{why}", _exit_code(number), stopped=True, step=step)


def _steps_done(beats: Iterable[Heartbeat]) -> int | None:
    """Steps done by the rank that is furthest; None if no rank has begun a step."""
    return max((beat.steps_done for beat in beats if beat.started_at >= 0), default=None)


def _failed(error: object, failure: Path, folder: Path) -> Ending:
    """The ending when ranks failed. Blame in this order: a hang; a rank ended by a signal; a rank that failed for another
    reason than the loss of a peer."""
    beats = {beat.rank: beat for beat in read(folder)}
    step = _steps_done(beats.values())
    if failure.exists():
        details = json.loads(failure.read_text())
        text = details["message"].partition("\n")[0]
        reason = f"rank {details['rank']} failed: {text}"
        return Ending(reason, details["exit_code"], explained=True, rank=details["rank"], step=step)
    if (folder / HANG_FILE).exists():
        hang = json.loads((folder / HANG_FILE).read_text())
        return Ending(f"hang: {hang['reason']}", rank=min(hang["culprits"], default=None), step=step)
    if any(child.exitcode == LOST_EXIT_CODE for child in getattr(error, "failures").values()) and (how := fork_server_ending()):  # noqa: B009
        return Ending(how, step=step)
    causes = [json.loads(path.read_text()) for path in folder.glob("*.cause")]
    ranks = sorted(getattr(error, "failures").items(), key=lambda item: (item[1].exitcode >= 0, item[1].timestamp))  # noqa: B009
    rank, first = ranks[0]
    root_cause = next((cause for cause in causes if not cause["lost_contact"]), None)
    if root_cause is not None:
        return Ending(f"rank {root_cause['rank']} failed: {root_cause['text']}", rank=root_cause["rank"], step=step)
    dissent = disagreement([*beats.values()])
    if dissent is not None and first.exitcode in (1, -signal.SIGABRT):  # gloo raises or aborts if message sizes differ
        return Ending(f"the ranks do not agree: {dissent[1]}", rank=min(dissent[0]), step=step)
    if first.exitcode < 0:
        missed = sorted(cause["text"].partition(": ")[2] for cause in causes if cause["rank"] != rank)
        reason = f"rank {rank} was ended by {first.signal_name()}{meanwhile([*beats.values()], rank, missed)}"
        return Ending(reason, rank=rank, step=step)
    why = f": {causes[0]['text']}" if causes else meanwhile([*beats.values()], rank, [])
    return Ending(f"rank {rank} failed with exit code {first.exitcode}{why}", rank=rank, step=step)


def _prepare_environment(num_processes: int, grace: float) -> None:
    os.environ.setdefault(TORCHRUN_GRACE, str(ceil(grace)))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cores() // num_processes)))
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # else the agent would open a port that nothing needs
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "512")  # collectives that torch's flight recorder remembers
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
