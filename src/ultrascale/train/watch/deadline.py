"""Orderly exit at the job's time limit or after a signal: the run finishes the step, saves and ends.

A batch system kills the remaining processes at its time limit. The launcher passes that time, in seconds of the wall clock;
after every step each rank compares the remaining time with the time that the next step and the last save may take. A rank with
too little left requests a stop from all, as after a signal, and all exit at the same step.

    left < SAFETY x (longest step + longest save) + LEAVING

Step times are from this attempt, save times also from the run's earlier metrics. The first step does not count: it compiles,
and waits for the other ranks.

SIGTERM, Ctrl-C, SIGHUP and SIGUSR1 also request a stop. A handler only sets a flag. Python runs handlers between bytecodes, so
a signal that arrives inside a collective waits for it; all ranks learn of the flag when they next count tokens together, and
stop before the same step. A second signal some seconds later has its default effect and ends the process at once; not sooner,
because a terminal and torchrun both deliver a Ctrl-C. The handler stays until the process exits: a signal between the save and
the end does not count as a crash.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ultrascale.launch.stopping import SAME_REQUEST_SECONDS, handled_by
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone

SAFETY = 2.0
LEAVING_SECONDS = 30.0
"""Time to end the processes of all ranks, and for clock differences between nodes."""


@dataclass
class Deadline:
    """Time limit of the processes, and the durations of past steps and saves."""

    leave_by: float | None
    """Seconds of the wall clock; None: no limit."""
    save_seconds: float = 0.0
    now: Callable[[], float] = time.time
    _steps: list[float] = field(default_factory=list)
    """The first step, and the longest of the others."""

    def after_step(self, seconds: float, save_seconds: float | None) -> str:
        """Record a step and the last save. Returns the reason to exit before the next step, or an empty string."""
        self._steps = [seconds] if not self._steps else [self._steps[0], max(seconds, *self._steps[1:], 0.0)]
        self.save_seconds = max(self.save_seconds, save_seconds or 0.0)
        return self.reason()

    def reason(self, margin: float = 1.0) -> str:
        """Reason to exit now, if less than `margin` times what a step, a save and leaving may take is left; else empty."""
        if self.leave_by is None or not self._steps:
            return ""
        left, needed = self.leave_by - self.now(), SAFETY * (self._steps[-1] + self.save_seconds) + LEAVING_SECONDS
        if left >= margin * needed:
            return ""
        return f"the job's time is over in {max(0.0, left):.0f} s, of which a step, a save and leaving may take {needed:.0f} s"


class LeftInTime(LoopObserver):
    """Requests a stop of all ranks if the job's time may end before another step is saved."""

    def __init__(self, deadline: Deadline):
        self.deadline = deadline
        self.step_seconds: float | None = None
        """Seconds of a step that is not yet recorded."""
        self.save_seconds: float | None = None
        self.asked = False
        """True once this rank has asked for the stop."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Store its duration."""
        self.step_seconds = done.seconds

    def saved(self, session: Session, seconds: float) -> None:
        """Record the duration of the save."""
        self.save_seconds = seconds

    def before_step(self, session: Session) -> None:
        """Request a stop if it is time; not before the first step."""
        if self.step_seconds is None:
            return
        why, self.step_seconds = self.deadline.after_step(self.step_seconds, self.save_seconds), None
        if why and not session.trainer.stop_requested:
            session.metrics.line(f"saving and leaving after step {session.trainer.steps_done}: {why}")
            session.trainer.request_stop()
            self.asked = True

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Log the reason if another rank, which logs nothing, asked first."""
        if outcome.stopped and not self.asked and (why := self.deadline.reason(SAFETY)):
            session.metrics.line(f"left after step {outcome.steps_done}: {why}")


@contextmanager
def on_stop_signal(take_note: Callable[[], None]) -> Iterator[None]:
    """Context in which the first stop signal that is not ignored calls `take_note` instead of ending the process. After one
    came, repeats of the same request are ignored, also after the context."""
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
