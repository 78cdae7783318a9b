"""Ranks for tests: `run_ranks(4, fn)` calls `fn(rank)` in four processes joined by gloo and returns what each returned.

    def sum_of_ranks(rank: int) -> float:
        total = torch.tensor(float(rank))
        dist.all_reduce(total)
        return total.item()

    def test_ranks_add_up():
        assert run_ranks(3, sum_of_ranks) == [3.0, 3.0, 3.0]

Processes are forked with torch already loaded: two start in 0.1 s (a spawned one takes 10 s). Where there is CUDA, the
threads of autograd make forks unsafe and a fork server is used: let `fn` be a function of a module with picklable arguments.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch._dynamo  # FSDP2 and optimizers load it at first use: seconds, here once and not on every rank
import torch.distributed as dist
import torch.distributed.fsdp

from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.launch.forked import (
    AMID_LOOKUP,
    forks_compute,
    freeze_inherited_objects,
    leave_if_amid_lookup,
    nothing_collected,
)

GRACE_SECONDS = 60.0
"""How long the other ranks may go on after one has failed; a rank blocked in a collective learns of it much sooner."""


class RankError(AssertionError):
    """A rank raised, died or took too long."""

    def __init__(self, rank: int, kind: str, text: str, exitcode: int | None = None, *, seconds: float = float("inf")):
        super().__init__(f"rank {rank}: {kind}\n{text}")
        self.rank = rank
        self.kind = kind
        """Name of the exception's class, `died` or `timeout`."""
        self.text = text
        self.exitcode = exitcode
        """For `died`: the exit status, negative for a signal."""
        self.seconds = seconds
        """When it raised, on the clock that all processes of a machine share."""


def run_ranks(
    world: int,
    fn: Callable[..., Any],
    *arguments: Any,
    timeout_seconds: float = 840.0,  # a busy machine gives a rank a tenth of a processor, an old one bf16 in software
    environment: dict[str, str] | None = None,
    failures: str = "raise",
) -> list[Any]:
    """Call `fn(rank, *arguments)` in `world` processes of one gloo process group; the results in order of rank.

    `environment` is set in every rank before `fn` runs. Collectives time out with the test. `failures="return"` puts a
    `RankError` in the place of a failed rank's result instead of raising the first one; that is for tests that kill ranks.
    """
    options = (timeout_seconds, environment or {})
    outcomes = _run_once(world, fn, arguments, *options)
    for _ in range(2):
        if any(isinstance(one, RankError) and one.exitcode == AMID_LOOKUP for one in outcomes):
            outcomes = _run_once(world, fn, arguments, *options)
    if failures == "raise" and _only_missed_each_other(outcomes):
        outcomes = _run_once(world, fn, arguments, *options)
    failed = [one for one in outcomes if isinstance(one, RankError)]
    if failed and failures == "raise":
        raise min(failed, key=lambda error: (error.kind != "died", error.seconds))
    return outcomes


def _only_missed_each_other(outcomes: list[Any]) -> bool:
    """True if no rank failed but in connecting to others, in a group that `fn` makes: a rank that ends at once closes what
    another is still opening."""
    failed = [one for one in outcomes if isinstance(one, RankError)]
    return bool(failed) and all("connectFullMesh failed" in one.text for one in failed)


def _run_once(
    world: int, fn: Callable[..., Any], arguments: tuple[Any, ...], timeout_seconds: float, environment: dict[str, str]
) -> list[Any]:
    """Every rank's result or `RankError`."""
    built = torch.backends.cuda.is_built()  # compiling starts threads of autograd there, also where there is no GPU
    apart = torch.cuda.is_available() or (built and not forks_compute())
    context: Any = multiprocessing.get_context("forkserver" if apart else "fork")
    context.set_forkserver_preload(["torch._dynamo", "torch.distributed.fsdp"])
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = os.path.join(folder, "store")
        ends, processes = [], []
        with nothing_collected():
            for rank in range(world):
                receiving, sending = context.Pipe(duplex=False)
                work = (rank, world, store, timeout_seconds, environment, fn, arguments)
                process = context.Process(target=_rank_main, args=(sending, *work), name=f"rank-{rank}", daemon=True)
                process.start()
                sending.close()
                ends.append(receiving)
                processes.append(process)
        try:
            return _collect(ends, processes, timeout_seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank_main(
    sending: Connection,
    rank: int,
    world: int,
    store: str,
    timeout_seconds: float,
    environment: dict[str, str],
    fn: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    freeze_inherited_objects()
    leave_if_amid_lookup()
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= environment
    torch.set_num_threads(1)
    torch.manual_seed(0)
    try:
        with gloo_threads_as_batch():
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=timeout_seconds),
            )
        dist.barrier()  # no rank may end while another is connecting: torch itself does not wait for all
        outcome = (True, fn(rank, *arguments))
    except BaseException as error:
        outcome = (False, type(error).__name__, traceback.format_exc(), time.monotonic())
    # Plain pickle copies tensors; multiprocessing's own would share memory of a process that is about to end.
    sending.send_bytes(pickle.dumps(outcome))
    sending.close()
    if outcome[0] and dist.is_initialized():
        dist.destroy_process_group()


def _collect(ends: list[Connection], processes: list[Any], timeout_seconds: float) -> list[Any]:
    """Every rank's result or `RankError`."""
    outcomes: list[Any] = [None] * len(ends)
    deadline = time.monotonic() + timeout_seconds
    waiting = dict(zip(ends, range(len(ends)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for end in ready:
            rank = waiting.pop(end)  # type: ignore[arg-type]
            outcomes[rank] = _outcome(rank, end, processes[rank])
            if isinstance(outcomes[rank], RankError):
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
    for rank in waiting.values():
        outcomes[rank] = RankError(
            rank, "timeout", f"no result after {timeout_seconds} s, or {GRACE_SECONDS} s after a failure"
        )
    return outcomes


def _outcome(rank: int, end: Any, process: Any) -> Any:
    try:
        good, *rest = pickle.loads(end.recv_bytes())
    except EOFError:
        process.join(GRACE_SECONDS)
        return RankError(rank, "died", f"exit status {process.exitcode} before it returned", process.exitcode)
    return rest[0] if good else RankError(rank, rest[0], rest[1], seconds=rest[2])
