"""Ranks on this machine in tenths of a second: forked from a process that has already imported torch.

For short CPU jobs, such as `ultrascale check`. torchrun starts and supervises fresh processes, which takes ten seconds.

If torch is built for a GPU, its first backward pass starts threads, and a fork of a process with such threads (a notebook that
has trained something) cannot run a backward pass. Ranks are then forked from a separate process.

A fork also copies locks that other threads hold at that instant. The C library's resolver has one that nothing releases in the
child, and even the end of a thread that has looked up a name (as gloo's threads do) acquires it. A rank that finds it held is
forked again.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from ultrascale.launch.scratch import scratch_folder
from ultrascale.main_module import end_with_parent, hidden_main

OTHERS_SECONDS = 5.0
"""Time for a rank that lost another one to exit; after that the other's report is used alone."""
PROBE_SECONDS = 60.0
"""Time limit of a backward pass of one number in a fork: it may wait for a lock of a thread that was not forked."""
LOCK_SECONDS = 10.0
"""Time limit of a lookup of `localhost` in a rank, on a busy machine."""
AMID_LOOKUP, MOST_RETRIES = 87, 2
"""Exit code of a rank that was forked while another thread looked up a name, and how often a rank is forked again for it: if
that repeats, lookups are slow and no lock is held.
"""
_forks_here = True
"""False once a fork of this process failed to compute: its threads stay."""
_threads_of_proof: frozenset[str] = frozenset()
"""Threads of this process when a fork of it last computed (Linux)."""


class RankFailed(RuntimeError):
    """A forked rank raised or died; the others were ended."""


def run_forked(world: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call `function(rendezvous, *arguments)` in `world` processes and return their JSON-able results in order of rank.

    Each process has RANK, LOCAL_RANK and WORLD_SIZE in its environment, and joins the others at `rendezvous`, a file:// URL.
    Raises RankFailed with the traceback of the first rank that failed, or of the rank whose loss made it fail.
    """
    global _forks_here
    _forks_here = _forks_here and forks_compute()
    return (_run_here if _forks_here else _run_apart)(world, function, arguments)


def forks_compute(seconds: float = PROBE_SECONDS) -> bool:
    """True if a fork of this process can run a backward pass within so many seconds, as tested by a first fork; again only once
    this process has a thread that it did not have then."""
    global _threads_of_proof
    import torch

    threads = frozenset(os.listdir("/proc/self/task") if sys.platform == "linux" else ())
    if threads and threads <= _threads_of_proof:
        return True
    if (process := os.fork()) == 0:
        code = 1
        try:
            torch.ones(1, requires_grad=True).sum().backward()
            code = 0
        finally:
            os._exit(code)
    until = time.monotonic() + seconds
    while (ended := os.waitpid(process, os.WNOHANG))[0] == 0:
        if time.monotonic() > until:  # it waits for a lock of a thread that was not forked
            os.kill(process, signal.SIGKILL)
            until = float("inf")
        time.sleep(0.001)
    if computes := ended[1] == 0:
        _threads_of_proof = threads
    return computes


def _run_apart(world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    """Fork the ranks from a fresh process that has computed nothing; `function` and `arguments` are pickled to it."""
    with scratch_folder("forking") as folder:
        process = multiprocessing.get_context("spawn").Process(target=_fork_ranks, args=(folder, world, function, arguments))
        with hidden_main():
            process.start()
        try:
            process.join()
        finally:
            process.kill()
            process.join()
        if (failed := folder / "failed").exists():
            raise RankFailed(failed.read_text())
        if process.exitcode != 0:
            raise RankFailed(f"the process that forks the ranks {_ending(process.exitcode or 0)}")
        return json.loads((folder / "results").read_text())


def _fork_ranks(folder: Path, world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives the signal too, and ends us
    end_with_parent()
    try:
        results = _run_here(world, function, arguments)
    except RankFailed as error:
        (folder / "failed").write_text(str(error))
    else:
        (folder / "results").write_text(json.dumps(results))


def _run_here(world: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> list[Any]:
    context = multiprocessing.get_context("fork")
    with scratch_folder("ranks") as folder:

        def fork(rank: int) -> Any:
            work = (folder, rank, world, function, arguments, retries[rank] < MOST_RETRIES)
            process = context.Process(target=_rank_main, args=work, daemon=True)
            with nothing_collected():
                process.start()
            return process

        retries = [0] * world
        processes = [fork(rank) for rank in range(world)]
        try:
            waiting = {process.sentinel: rank for rank, process in enumerate(processes)}
            while waiting:
                for sentinel in wait(list(waiting)):
                    rank = waiting.pop(sentinel)  # pyright: ignore[reportArgumentType, reportCallIssue]
                    processes[rank].join()
                    if processes[rank].exitcode == AMID_LOOKUP and retries[rank] < MOST_RETRIES:
                        retries[rank] += 1
                        processes[rank] = fork(rank)
                        waiting[processes[rank].sentinel] = rank
                    elif not (folder / f"{rank}.json").exists():
                        raise RankFailed(_first_cause(folder, rank, processes))
        finally:
            for process in processes:
                process.kill()
                process.join()
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world)]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Context for forking: until it calls `freeze_inherited_objects`, no process garbage-collects objects of its caller."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def leave_if_amid_lookup() -> None:
    """End this forked process with AMID_LOOKUP if the resolver's lock is held by a thread that was not forked."""

    def look_up() -> None:
        with suppress(OSError):
            socket.getaddrinfo("localhost", None)

    asking = threading.Thread(target=look_up, daemon=True)
    asking.start()
    asking.join(LOCK_SECONDS)
    if asking.is_alive():
        os._exit(AMID_LOOKUP)


def freeze_inherited_objects() -> None:
    """Exclude objects from before the fork from garbage collection: torch's stores wait for threads that were not forked, and
    traversing a large process copies its pages."""
    gc.freeze()
    gc.enable()


def _first_cause(folder: Path, failed: int, processes: list[Any]) -> str:
    """Cause of the failure of rank `failed`; if it lost another rank, which may still be exiting, the cause of that one."""
    if (folder / f"{failed}.lost").exists():
        deadline, running = time.monotonic() + OTHERS_SECONDS, {child.sentinel: rank for rank, child in enumerate(processes)}
        while running and (ended := wait(list(running), timeout=max(0.0, deadline - time.monotonic()))):
            ranks = [running.pop(sentinel) for sentinel in ended]  # pyright: ignore[reportArgumentType, reportCallIssue]
            first = [rank for rank in ranks if not any((folder / f"{rank}.{ending}").exists() for ending in ("json", "lost"))]
            if first:
                failed = first[0]
                processes[failed].join()
                break
    file = next((path for path in (folder / f"{failed}.error", folder / f"{failed}.lost") if path.exists()), None)
    crash = folder / f"{failed}.crash"
    reason = file.read_text() if file else _ending(processes[failed].exitcode) + (crash.read_text() if crash.exists() else "")
    return f"rank {failed}: {reason}"


def _ending(exit_code: int) -> str:
    """Description of the end of a process that wrote no report."""
    return f"was ended by {signal.Signals(-exit_code).name}\n" if exit_code < 0 else f"ended with exit status {exit_code}\n"


def _rank_main(
    folder: Path, rank: int, world: int, function: Callable[..., Any], arguments: tuple[Any, ...], looks_up: bool
) -> None:
    freeze_inherited_objects()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives the signal too, and ends us
    end_with_parent()
    if looks_up:
        leave_if_amid_lookup()
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    faulthandler.enable(open(folder / f"{rank}.crash", "w"))  # noqa: SIM115  (open as long as the process lives)
    try:
        result = function(f"file://{folder}/store", *arguments)
        partial = folder / f"{rank}.tmp"
        partial.write_text(json.dumps(result))
        partial.rename(folder / f"{rank}.json")
    except BaseException as error:
        ending = "lost" if getattr(error, "lost_another", False) else "error"
        (folder / f"{rank}.{ending}").write_text(traceback.format_exc())
        raise SystemExit(1) from None
