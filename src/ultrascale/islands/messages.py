"""The communication thread that exchanges deltas while training continues: one for each set of islands, with the same
lifetime."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from ultrascale.islands.link import Groups, LostIslandError

T = TypeVar("T")


class Messages:
    """Groups, and the thread that communicates in them. Gloo calls cannot be interrupted: an abandoned thread waits for its
    time-out."""

    def __init__(self, members: tuple[str, ...], make: Callable[[], Groups]):
        self.members, self.broken = members, False
        self._make, self._jobs = make, queue.SimpleQueue[tuple[Callable[[Groups], Any], Future[Any]] | None]()
        threading.Thread(target=self._work, daemon=True, name="islands").start()

    def submit(self, job: Callable[[Groups], T]) -> Future[T]:
        """Queue `job` behind those submitted before it."""
        future: Future[T] = Future()
        self._jobs.put((job, future))
        return future

    def give_up(self) -> None:
        """Abandon the thread; jobs that have not started fail."""
        self.broken = True
        self.end()

    def end(self) -> None:
        """Stop after the queued jobs."""
        self._jobs.put(None)

    def _work(self) -> None:
        groups: Groups | None = None
        while (task := self._jobs.get()) is not None:
            job, future = task
            try:
                if self.broken:
                    raise LostIslandError("an exchange before it failed")
                groups = self._make() if groups is None else groups
                result = job(groups)
            except Exception as error:
                self.broken = True
                future.set_exception(error)
            else:
                future.set_result(result)
