"""Ranks that start late or never, and a store of the rendezvous that goes away before the ranks have met or after."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist
from planted import fails
from torch._C._distributed_c10d import TCPStore
from train.small_runs import BeforeStep, curve, make_corpus, same, small_run, state, train_here, train_ranks

from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.launch.forked import run_forked
from ultrascale.parallel import arrival
from ultrascale.parallel.mesh import Mesh
from ultrascale.torch_private import PrefixStore
from ultrascale.train.session import begin as joined
from ultrascale.train.trainer import Trainer

COPIES = Layout(dp=2, zero_stage=2, micro_batch_size=2)


@pytest.fixture
def run(tmp_path) -> Run:
    make_corpus(tmp_path / "tokens")
    return small_run(tmp_path, layout=COPIES, steps=4)


def outcome(train: Any) -> dict[str, Any]:
    try:
        return {"steps_done": train().steps_done}
    except Exception as error:
        return {"error": type(error).__name__, "text": str(error)}


# --- late --------------------------------------------------------------------------------------------------------------------


def start_late(rendezvous: str, run: Run, patience: float, late_seconds: float | None) -> dict[str, Any]:
    """Rank 1 starts so much later than rank 0; None: when that has given up. Collectives of steps take what they take here."""
    arrival.ARRIVAL_SECONDS = joined.START_SECONDS = patience  # a group's limit counts too, if it is more
    Mesh.limit_waits = lambda *arguments: None  # pyright: ignore[reportAttributeAccessIssue]
    given_up = Path(run.folder) / "given-up"
    if os.environ["RANK"] == "1":
        time.sleep(late_seconds or 0.0)
        while late_seconds is None and not given_up.exists():
            time.sleep(0.05)
    found = outcome(lambda: train_here(run, rendezvous=rendezvous))
    given_up.touch()
    return found


@pytest.mark.catalogue(23)
def test_a_rank_that_starts_late_is_waited_for_longer_than_a_collective_may_take(run):
    run = replace(run, collective_timeout_seconds=2.0)
    assert run_forked(2, start_late, run, 200.0, 4.0) == [{"steps_done": 4}] * 2


@pytest.mark.catalogue(23)
def test_control_a_rank_that_is_later_than_is_waited_for_is_named(run):
    run = replace(run, collective_timeout_seconds=1.0)
    first = run_forked(2, start_late, run, 2.0, None)[0]
    assert first["error"] == "LostRankError"
    assert "rank 0 waited 2 s for rank 1 of 2, which did not start" in first["text"]


# --- one store for all attempts, as torchrun has it ------------------------------------------------------------------------


def names_agreed(store: TCPStore, world: int, *, first_last: bool) -> set[str]:
    """What ranks call their attempt, rank 0 coming first or last."""

    def agree(rank: int) -> str:
        if (rank == 0) is first_last:
            time.sleep(0.5)
        own = TCPStore("127.0.0.1", store.port, is_master=False)
        return arrival.agree_on_attempt(own, rank, world, timedelta(seconds=60))

    with ThreadPoolExecutor(world) as pool:
        return set(pool.map(agree, range(world)))


@pytest.mark.catalogue(4)
def test_in_a_store_that_outlives_attempts_each_has_a_name_of_its_own_on_all_ranks():
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    names = [names_agreed(store, 3, first_last=last) for last in (True, False, True, True)]
    assert [len(of_one) for of_one in names] == [1] * 4 and len(set().union(*names)) == 4


# --- the store ---------------------------------------------------------------------------------------------------------------


HOLD_A_STORE = """
import sys
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def kill_and_wait(pid: int) -> None:
    """Until a process that is no child of this one is gone, or waits for its parent to look."""
    os.kill(pid, signal.SIGKILL)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)


@contextmanager
def store_elsewhere() -> Iterator[tuple[int, int]]:
    """(port, pid) of a store in a process of its own, as torchrun's agent is. No fork: a server's thread of an earlier
    test that resolves a name meanwhile would leave its lock held there for ever."""
    process = subprocess.Popen([sys.executable, "-c", HOLD_A_STORE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield int(process.stdout.readline()), process.pid
    finally:
        process.kill()
        process.communicate()


def train_with_store(
    rendezvous: str, run: Run, port: int, before_step: BeforeStep | None = None, kill_before: int = 0
) -> dict[str, Any]:
    """`kill_before`: the process that rank 0 kills while rank 1 has not come to the store; rank 1 comes once it is gone."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    wait_for_all = arrival.wait_for_all

    def go_away(store: PrefixStore, rank: int, world: int, timeout: timedelta) -> None:
        if kill_before and rank == 1:
            kill_and_wait(kill_before)
        wait_for_all(store, rank, world, timeout)

    arrival.wait_for_all = go_away
    return outcome(lambda: train_here(run, rendezvous="env://", before_step=before_step))


@pytest.mark.catalogue(22)
def test_a_store_that_goes_away_before_the_ranks_have_met_ends_all_of_them_at_once_and_is_named(run):
    with store_elsewhere() as (port, pid):
        found = run_forked(2, train_with_store, run, port, None, pid)
    assert [one["error"] for one in found] == ["LostRankError"] * 2
    assert all("lost the store of the rendezvous" in one["text"] for one in found)


def give_up_at_the_second(rendezvous: str, port: int, number: int) -> str:
    """What ends an attempt whose store an agent lends, empty if nothing does; the second asks for no other."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    try:
        arrival.meet("env://", 0, 1, timedelta(seconds=60))
    except arrival.GivenUpError as error:
        return str(error)
    if number == 2:
        arrival.give_up("the run's folder was removed")
    return ""


def test_attempts_after_one_that_gave_up_are_refused_with_its_words():
    with store_elsewhere() as (port, _):
        found = [run_forked(1, give_up_at_the_second, port, number) for number in (1, 2, 3)]
    assert found == [[""], [""], ["this run: not started again: the run's folder was removed"]]


@pytest.mark.catalogue(22)
def test_ranks_that_have_met_need_the_store_no_more(run, before_step=lambda trainer: None):
    calm = replace(run, name="calm")
    train_ranks(calm)
    with store_elsewhere() as (port, pid):

        def kill_first(trainer: Trainer) -> None:
            if trainer.steps_done == 1 and trainer.ranks.is_first:
                kill_and_wait(pid)
            before_step(trainer)

        assert run_forked(2, train_with_store, run, port, kill_first) == [{"steps_done": 4}] * 2
    assert curve(run) == curve(calm) and same(state(run), state(calm))
    assert Path(run.folder, run.name, "checkpoints").exists()


@pytest.mark.catalogue(22)
def test_control_ranks_that_first_meet_in_a_step_need_the_store_in_it(run):
    """As groups do that are made, or connected, at first use."""

    def meet_again(trainer: Trainer) -> None:
        if trainer.steps_done == 2:
            dist.new_group(backend="gloo")

    fails(test_ranks_that_have_met_need_the_store_no_more, run, meet_again, told="error")
