"""Ranks that start warm end well: nobody waits for one that has left."""

from __future__ import annotations

import gc
import multiprocessing
import threading
from multiprocessing.synchronize import Event

from train.small_runs import make_corpus, small_run, stop_at, train_here

from ultrascale.garbage import collect_as_usual, collect_rarely
from ultrascale.launch.warm import leave_soon


def rank(read: Event) -> None:
    """What torch has a rank do at its end."""
    leave_soon()
    read.wait()
    raise AssertionError("nobody has set it")


def test_a_rank_that_nobody_reads_leaves_and_the_agent_can_still_tell_the_others():
    """An event of Python's waits for all that sleep in it, also for those that have died there."""
    context = multiprocessing.get_context("fork")
    read = context.Event()
    process = context.Process(target=rank, args=(read,))
    process.start()
    process.join(200)
    assert process.exitcode == 0
    telling = threading.Thread(target=read.set, daemon=True)
    telling.start()
    telling.join(200)
    assert not telling.is_alive() and read.is_set()


def test_garbage_is_collected_rarely_from_the_start_of_a_command_until_something_is_trained(tmp_path):
    usual = gc.get_threshold()
    collect_rarely()
    try:
        assert gc.get_threshold() > usual
        make_corpus(tmp_path / "tokens")
        train_here(small_run(tmp_path), before_step=stop_at(1))
        assert gc.get_threshold() == usual
    finally:
        collect_as_usual()
