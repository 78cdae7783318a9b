"""Training as a separate command, monitored from outside, with one of its processes killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.demo.claims import DemoError
from ultrascale.launch.events import read_rows
from ultrascale.launch.orphans import terminate_with_parent
from ultrascale.measure.plots import read_metrics

POLL_SECONDS = 0.2
LEAVING_SECONDS = 40
WORKER = "ultrascale.train.worker"
FORK_SERVER = "multiprocessing.forkserver"
"""Fork server of the launcher, whose children are the ranks if there is no CUDA."""


@dataclass(frozen=True)
class Interruption:
    """Cost of a SIGKILL."""

    killed_pid: int
    steps_before: int
    """Steps done before the kill."""
    resumed_at: int
    """Step of the checkpoint from which training resumed."""
    recovery_seconds: float
    """Seconds from the kill to the end of the first step after it."""
    redone_losses: list[tuple[float, float]] = field(default_factory=list)
    """Losses of the steps that were done twice: before the kill and after."""

    @property
    def steps_redone(self) -> int:
        return self.steps_before - self.resumed_at

    @property
    def same_losses(self) -> bool:
        """True if the steps that were done twice had the same losses, to the last bit."""
        return bool(self.redone_losses) and all(before == after for before, after in self.redone_losses)


Watcher = Callable[[list[dict[str, Any]]], None]


def train_and_kill(run_file: Path, folder: Path, *, processes: int, kill_at: int, log: Path, watch: Watcher) -> Interruption:
    """Run `ultrascale train`, kill one of its ranks once `kill_at` steps are done, and wait for the end of the run.

    `folder` is the run's, new; `watch` receives its metrics during training. Raises DemoError if training fails, was not
    interrupted or did not resume by itself.
    """
    with _training(run_file, processes, log) as training:
        before = _watch_until(training, folder, lambda rows: len(rows) >= kill_at, watch, log)
        victim = worker_pids(training.pid)[-1]
        os.kill(victim, signal.SIGKILL)
        killed_at = time.time()

        def is_back(rows: list[dict[str, Any]]) -> bool:
            before.update({row["step"]: row for row in rows if row["time"] < killed_at})
            return any(row["time"] > killed_at and len(_starts(folder)) > 1 for row in rows)

        _watch_until(training, folder, is_back, watch, log)
        after = _watch_until(training, folder, lambda rows: training.poll() is not None, watch, log)
    if training.returncode != 0:
        raise DemoError(f"training failed after the kill (exit code {training.returncode}):\n{_tail(log)}")
    return _account(victim, killed_at, before, after, _starts(folder))


def worker_pids(launcher: int) -> list[int]:
    """Processes that train for `launcher`, in order of their start. Raises DemoError if there are none."""
    listed = _processes_of_proc() if Path("/proc/self/stat").exists() else _processes_of_ps()
    servers = {pid for pid, parent, command in listed if parent == launcher and FORK_SERVER in command}
    cold = {pid for pid, parent, command in listed if parent == launcher and WORKER in command}
    pids = sorted({pid for pid, parent, _ in listed if parent in servers} | cold - servers)
    if not pids:
        raise DemoError(f"process {launcher} has no worker to kill")
    return pids


def _account(
    victim: int, killed_at: float, before: dict[int, Any], after: dict[int, Any], starts: list[dict[str, Any]]
) -> Interruption:
    resumed_at, steps_before = starts[-1]["step"], max(before)
    pairs = [(before[n]["train/loss"], after[n]["train/loss"]) for n in range(resumed_at + 1, steps_before + 1)]
    return Interruption(victim, steps_before, resumed_at, after[resumed_at + 1]["time"] - killed_at, pairs)


@contextmanager
def _training(run_file: Path, processes: int, log: Path) -> Iterator[subprocess.Popen]:
    """The command, stopped in order (it saves and exits) if this process must exit before it."""
    words = [sys.executable, "-m", "ultrascale", "train", str(run_file), "--processes", str(processes)]
    with open(log, "w") as out:
        training = subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, preexec_fn=terminate_with_parent
        )
    try:
        yield training
    finally:
        if training.poll() is None:
            training.terminate()
            _wait_or_kill(training)


def _wait_or_kill(training: subprocess.Popen) -> None:
    try:
        training.wait(LEAVING_SECONDS)
    except subprocess.TimeoutExpired:
        with suppress(DemoError, ProcessLookupError):  # they may have ended by themselves
            for pid in worker_pids(training.pid):
                os.kill(pid, signal.SIGKILL)
        training.kill()
        training.wait()


def _watch_until(
    training: subprocess.Popen, folder: Path, reached: Callable[[list[dict[str, Any]]], bool], watch: Watcher, log: Path
) -> dict[int, dict[str, Any]]:
    """Rows by step as soon as `reached`. Raises DemoError if the command ended before."""
    while True:
        ended = training.poll() is not None
        rows = read_metrics(folder / "metrics.jsonl") if (folder / "metrics.jsonl").exists() else []
        watch(rows)
        if reached(rows):
            return {row["step"]: row for row in rows}
        if ended:
            raise DemoError(f"training ended too early (exit code {training.returncode}):\n{_tail(log)}")
        time.sleep(POLL_SECONDS)


def _starts(folder: Path) -> list[dict[str, Any]]:
    """Starts of the run so far, from its events."""
    return [row for row in read_rows(folder / "events.jsonl") if isinstance(row, dict) and row["event"] == "start"]


def _processes_of_proc() -> list[tuple[int, int, str]]:
    """(pid, parent, command) of all processes, on Linux."""
    processes = []
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit():
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                processes.append((int(folder.name), parent, (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()))
        except (OSError, UnicodeDecodeError):  # it has ended meanwhile, or belongs to another user
            continue
    return processes


def _processes_of_ps() -> list[tuple[int, int, str]]:
    """Processes by `ps`, for systems without /proc."""
    listing = subprocess.run(["ps", "-axo", "pid=,ppid=,command="], capture_output=True, text=True, check=True).stdout
    parts = (line.split(None, 2) for line in listing.splitlines())
    return [(int(row[0]), int(row[1]), row[2]) for row in parts if len(row) == 3]


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
