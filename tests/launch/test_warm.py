"""Ranks that start warm end well: nobody waits for one that has left."""

from __future__ import annotations

import multiprocessing
import threading
from multiprocessing.synchronize import Event

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
