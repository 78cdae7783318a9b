"""Ranks on this machine in tenths of a second: forked from a process that has torch loaded already.

For short jobs on the CPU, such as a proof. torchrun starts each rank from nothing and watches over it: ten seconds.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ultrascale.launch.scratch import scratch_folder


class RankFailed(RuntimeError):
    """A forked rank raised or died; the others were ended."""


def run_forked(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rendezvous, *arguments)` in `world` processes and return their JSON-able results in order of rank.

    Each process finds RANK, LOCAL_RANK and WORLD_SIZE in its environment, and meets the others at `rendezvous`, a file:// URL.
    Raises RankFailed with the traceback of the first rank that failed.
    """
    context = multiprocessing.get_context("fork")
    with scratch_folder("ranks") as folder:
        processes = [
            context.Process(target=_rank_main, args=(folder, rank, world, function, arguments), daemon=True)
            for rank in range(world)
        ]
        gc.freeze()  # the caller's garbage is not a rank's to collect: stores of torch's join threads, which are not forked
        try:
            for process in processes:
                process.start()
        finally:
            gc.unfreeze()
        try:
            waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
            while waiting:
                for sentinel in wait(list(waiting)):
                    rank = waiting.pop(sentinel)  # pyright: ignore[reportArgumentType, reportCallIssue]
                    _expect_success(folder, rank, processes[rank])
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


def _expect_success(folder: Path, rank: int, process: Any) -> None:
    process.join()
    if (folder / f"{rank}.json").exists():
        return
    told = folder / f"{rank}.error"
    reason = told.read_text() if told.exists() else _ending(process.exitcode) + (folder / f"{rank}.crash").read_text()
    raise RankFailed(f"rank {rank}: {reason}")


def _ending(exit_code: int) -> str:
    """Description of the end of a process that reported nothing itself."""
    return f"was ended by {signal.Signals(-exit_code).name}\n" if exit_code < 0 else f"ended with exit status {exit_code}\n"


def _rank_main(folder: Path, rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told as well, and ends us
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.enable(open(folder / f"{rank}.crash", "w"))  # noqa: SIM115  (open as long as the process lives)
    try:
        result = function(f"file://{folder}/store", *arguments)
        partial = folder / f"{rank}.tmp"
        partial.write_text(json.dumps(result))
        partial.rename(folder / f"{rank}.json")
    except BaseException:
        (folder / f"{rank}.error").write_text(traceback.format_exc())
        raise SystemExit(1) from None


def _end_with_parent() -> None:
    """Wait until whoever called `run_forked` is gone. (The last rank sees it first: the others' pipes are open in it too.)"""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
