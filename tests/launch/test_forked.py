"""Forked ranks: results, failures, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ultrascale.launch import forked
from ultrascale.launch.forked import RankFailed, forks_compute, run_forked


def place(rendezvous: str, greeting: str) -> list[str]:
    return [greeting, os.environ["RANK"], os.environ["WORLD_SIZE"], rendezvous.partition(":")[0]]


def raise_on_rank_1(rendezvous: str) -> None:
    if os.environ["RANK"] == "1":
        raise ValueError("not me")
    signal.pause()


def die_on_rank_0(rendezvous: str) -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


class Lost(RuntimeError):
    lost_another = True


def lose_rank_0(rendezvous: str, ending: str) -> None:
    if os.environ["RANK"] == "1":
        raise Lost("rank 0 has ended")
    time.sleep(0.5)  # its connections are closed, and it is still on its way out
    if ending == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if ending == "raises":
        raise ValueError("why")


class Threaded:
    """What owns a thread of the process that made it, as a store of torch's does, and waits for it when it is collected."""

    def __init__(self) -> None:
        self.owner, self.itself = os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.owner:
            os.abort()


def collect(rendezvous: str) -> int:
    return gc.collect()


@pytest.fixture(params=[True, False], ids=["forked here", "forked apart"])
def from_here(request, forks_here) -> None:
    forks_here(request.param)


def test_results_come_in_order_of_rank(from_here):
    assert run_forked(3, place, "hello") == [["hello", str(rank), "3", "file"] for rank in range(3)]


def test_an_exception_is_raised_with_its_rank_and_traceback_and_the_others_are_ended(from_here):
    before = set(psutil.Process().children())  # other tests of this process may have left a fork server waiting
    with pytest.raises(RankFailed, match=r"rank 1: Traceback(.|\n)*raise_on_rank_1(.|\n)*not me"):
        run_forked(2, raise_on_rank_1)
    left = set(psutil.Process().children()) - before
    assert [child for child in left if child.status() != psutil.STATUS_ZOMBIE] == []


def test_a_killed_rank_is_told(from_here):
    with pytest.raises(RankFailed, match="rank 0: was ended by SIGKILL"):
        run_forked(2, die_on_rank_0)


@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("raises", r"rank 0: (.|\n)*ValueError: why"),
        ("killed", "rank 0: was ended by SIGKILL"),
        ("returns", "rank 1: (.|\n)*has ended"),
    ],
)
def test_of_a_rank_that_was_lost_and_one_that_lost_it_the_first_says_why(monkeypatch, ending, told):
    """The time for a rank that is on its way out is not waited for once all have left."""
    monkeypatch.setattr(forked, "OTHERS_SECONDS", 100.0)
    began = time.monotonic()
    with pytest.raises(RankFailed, match=told):
        run_forked(2, lose_rank_0, ending)
    assert time.monotonic() - began < forked.OTHERS_SECONDS


def test_a_rank_does_not_collect_its_parents_garbage():
    gc.disable()
    try:
        Threaded()
        run_forked(2, collect)
        assert not gc.isenabled()
    finally:
        gc.enable()
        gc.collect()  # or a fork of another test collects it
    frozen = gc.get_freeze_count()
    run_forked(2, collect)
    assert gc.isenabled() and gc.get_freeze_count() == frozen


@pytest.fixture
def lookups(monkeypatch) -> Callable[[Callable[..., Any], float], None]:
    """Has ranks look up names by what is given, and wait for it for so many seconds."""

    def replaced(look_up: Callable[..., Any], seconds: float) -> None:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        monkeypatch.setattr(forked, "LOCK_SECONDS", seconds)

    return replaced


def test_a_rank_that_was_forked_while_a_name_was_looked_up_is_forked_again(lookups, tmp_path):
    """As the resolver's lock is there, held by a thread that was not forked: for ever."""
    look_up = socket.getaddrinfo

    def held(*arguments: Any) -> Any:
        with suppress(FileExistsError):
            (tmp_path / "held").mkdir()
            time.sleep(600)
        return look_up(*arguments)

    lookups(held, 0.5)
    assert run_forked(2, place, "hello") == [["hello", str(rank), "2", "file"] for rank in range(2)]
    assert (tmp_path / "held").exists()


def test_ranks_run_where_looking_up_a_name_takes_for_ever(lookups):
    lookups(lambda *arguments: time.sleep(600), 0.2)
    assert run_forked(1, place, "hello") == [["hello", "0", "1", "file"]]


def test_what_is_found_out_of_forks_is_remembered_where_they_cannot_compute(forks_here, monkeypatch):
    asked = []
    forks_here(True)
    monkeypatch.setattr(forked, "forks_compute", lambda: asked.append(1))
    for _ in range(2):
        assert run_forked(1, place, "hello") == [["hello", "0", "1", "file"]]
    assert asked == [1]


@contextmanager
def another_thread() -> Iterator[None]:
    """While inside, this process has a thread that it did not have."""
    ends = threading.Event()
    thread = threading.Thread(target=ends.wait)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
        while os.path.exists(f"/proc/self/task/{thread.native_id}"):  # which ends a moment after
            time.sleep(0.001)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a backward pass starts threads for GPUs that there are")
def test_forks_compute_here_although_a_trace_makes_up_devices():
    """With torch built for CUDA only: any other makes up none."""
    with FakeTensorMode():
        pass
    torch.ones(1, requires_grad=True).sum().backward()
    assert forks_compute()


def test_whether_a_fork_can_do_a_backward_pass_is_tried_once_for_the_threads_that_there_are(monkeypatch):
    assert forks_compute()
    for broken in (lambda tensor: time.sleep(60), lambda tensor: 1 / 0):
        monkeypatch.setattr(torch.Tensor, "backward", broken)
        if sys.platform == "linux":
            assert forks_compute()
        with another_thread():
            assert not forks_compute(seconds=0.2)
