"""A run leaves in order when it is asked to, by its job's time limit or by a signal: it finishes the step, saves and ends.

A batch system kills what is still there when the time is over. Whoever starts the ranks says when that is, in seconds of the
wall clock; after every step each rank compares what is left with what the next step and the last save may take. One that finds
too little asks all to stop, as after a signal, and all leave at the same step.

    left < SAFETY x (longest step + longest save) + LEAVING

Steps and saves are this attempt's, saves also those that the run's metrics tell of earlier ones. The first step is left out: it
compiles, and meets the others.

SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 ask for the same. A handler only takes a note. Python runs handlers between bytecodes, so
one that arrives inside a collective waits for it; all ranks then learn of the note when they next count tokens together, and
stop before the same step. A second signal some seconds later is the usual one and ends the process at once; not sooner, because
a terminal and torchrun both deliver a Ctrl-C. That holds until the process has left: one that comes between the save and the
end is not taken for a crash.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ultrascale.launch.stopping import SAME_REQUEST_SECONDS, handled_by
from ultrascale.train.session.moments import LoopObserver, Session, StepDone

SAFETY = 2.0
LEAVING_SECONDS = 30.0
"""To end the processes of all ranks, and for clocks of nodes that differ."""


@dataclass
class Deadline:
    """When the processes must be gone, and how long what is still to do has taken so far."""

    leave_by: float | None
    """Seconds of the wall clock; None: nobody has said."""
    save_seconds: float = 0.0
    now: Callable[[], float] = time.time
    _steps: list[float] = field(default_factory=list)
    """The first, and the longest of the others."""

    def after_step(self, seconds: float, save_seconds: float | None) -> str:
        """Take note of a step and of the last save; why to leave before the next step, or nothing."""
        self._steps = [seconds] if not self._steps else [self._steps[0], max(seconds, *self._steps[1:], 0.0)]
        self.save_seconds = max(self.save_seconds, save_seconds or 0.0)
        if self.leave_by is None:
            return ""
        left, needed = self.leave_by - self.now(), SAFETY * (self._steps[-1] + self.save_seconds) + LEAVING_SECONDS
        if left >= needed:
            return ""
        return f"the job's time is over in {max(0.0, left):.0f} s, of which a step, a save and leaving may take {needed:.0f} s"


class LeftInTime(LoopObserver):
    """Asks all ranks to stop if the job's time may end before another step is saved."""

    def __init__(self, deadline: Deadline):
        self.deadline = deadline
        self.step_seconds: float | None = None
        """Seconds of a step that is not yet counted."""
        self.save_seconds: float | None = None

    def after_step(self, session: Session, done: StepDone) -> None:
        """Keep how long it took."""
        self.step_seconds = done.seconds

    def saved(self, session: Session, seconds: float) -> None:
        """Keep how long it took."""
        self.save_seconds = seconds

    def before_step(self, session: Session) -> None:
        """Ask, if it is time; not before the first step."""
        if self.step_seconds is None:
            return
        why, self.step_seconds = self.deadline.after_step(self.step_seconds, self.save_seconds), None
        if why and not session.trainer.stop_requested:
            session.metrics.line(f"saving and leaving after step {session.trainer.steps_done}: {why}")
            session.trainer.request_stop()


@contextmanager
def on_stop_signal(take_note: Callable[[], None]) -> Iterator[None]:
    """While inside, the first stop signal that is not ignored calls `take_note` instead of ending the process. If one came, the
    same wish is passed over afterwards as well."""
    noted: list[float] = []

    def handler(number: int, frame: object) -> None:
        if noted and not is_the_same():
            signal.signal(number, before[number])
            signal.raise_signal(number)
        elif not noted:
            noted.append(time.monotonic())
            take_note()

    def is_the_same() -> bool:
        return bool(noted) and time.monotonic() - noted[0] <= SAME_REQUEST_SECONDS

    with handled_by(handler, and_after=is_the_same) as before:
        yield
