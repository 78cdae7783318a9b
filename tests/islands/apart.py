"""Islands that are started by themselves, and may be killed, stopped and started again, in forked processes of this machine."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from train.small_runs import train_here

from ultrascale.description.run import Run
from ultrascale.launch.forked import (
    AMID_LOOKUP,
    MOST_RETRIES,
    freeze_inherited_objects,
    leave_if_amid_lookup,
    nothing_collected,
)
from ultrascale.train.trainer import Trainer

BeforeStep = Callable[[Trainer], None]
LONGEST_SECONDS = 300.0


class Started:
    """All ranks of one island."""

    def __init__(self, run: Run, island: int, folder: Path, before_step: BeforeStep | None):
        self.island, self.folder = island, folder / f"{island}-{uuid.uuid4().hex[:6]}"
        self.folder.mkdir(parents=True)
        context, world, retries = multiprocessing.get_context("fork"), run.worlds[island], [0] * run.worlds[island]

        def fork(rank: int) -> Any:
            work = (run, island, rank, world, self.folder, before_step, retries[rank] < MOST_RETRIES)
            process = context.Process(target=_rank, args=work, daemon=True)
            with nothing_collected():
                process.start()
            return process

        self.processes = [fork(rank) for rank in range(world)]
        for rank in range(world):
            until(lambda: self._has_begun(rank), f"rank {rank} of island {island} to begin")  # noqa: B023 (called before the next)
            while self.processes[rank].exitcode == AMID_LOOKUP and retries[rank] < MOST_RETRIES:
                retries[rank] += 1
                self.processes[rank] = fork(rank)
                until(lambda: self._has_begun(rank), f"rank {rank} of island {island} to begin again")  # noqa: B023

    def _has_begun(self, rank: int) -> bool:
        return (self.folder / f"{rank}.begun").exists() or self.processes[rank].exitcode is not None

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send all ranks a signal."""
        for process in self.processes:
            assert process.pid is not None
            os.kill(process.pid, number)

    def outcome(self) -> dict[str, Any]:
        """Of rank 0, once all have ended."""
        for process in self.processes:
            process.join(LONGEST_SECONDS)
            if process.is_alive():
                process.kill()
        told = self.folder / "0.json"
        return json.loads(told.read_text()) if told.exists() else {"exit": self.processes[0].exitcode}


def _rank(run: Run, island: int, rank: int, world: int, folder: Path, before_step: BeforeStep | None, looks_up: bool) -> None:
    freeze_inherited_objects()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()
    if looks_up:
        leave_if_amid_lookup()
    (folder / f"{rank}.begun").touch()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    try:
        outcome = train_here(run, before_step=before_step, rendezvous=f"file://{folder}/store", island=island)
        found = {"steps_done": outcome.steps_done, "stopped": outcome.stopped}
    except Exception as error:
        found = {"error": type(error).__name__, "text": str(error)}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    os._exit(0)


def start(run: Run, home: Path, *, before_step: BeforeStep | None = None) -> list[Started]:
    """All islands of a run."""
    return [Started(run, island, home / "processes", before_step) for island in range(run.islands.count)]


def until(true: Callable[[], object], what: str) -> None:
    """Wait for it."""
    end = time.monotonic() + LONGEST_SECONDS
    while not true():
        assert time.monotonic() < end, f"waited in vain for {what}"
        time.sleep(0.02)
