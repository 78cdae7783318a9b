"""A step's row of metrics and line on the console, and how the run ended."""

from __future__ import annotations

from ultrascale.train.observers.metrics import console_line
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone


class Recorded(LoopObserver):
    """Writes what observers before it know of a step.

    The row is written before the step is saved, so that a kill while saving cannot lose it; how long training waited for a save
    is therefore in the row of the next step.
    """

    def __init__(self) -> None:
        self.save_seconds: float | None = None

    def after_step(self, session: Session, done: StepDone) -> None:
        """Write the row, if it is due."""
        run, steps_done = session.run, session.trainer.steps_done
        self._tell_of_islands(session)
        if done.is_told or session.is_due(run.log.every_steps) or session.is_complete:
            done.values["perf/save_s"], self.save_seconds = self.save_seconds, None
            balance = done.result.expert_balance
            tables = None if balance is None else {"moe/load": balance.load.tolist()}
            session.metrics.row(steps_done, done.values, tables=tables)
            session.metrics.line(console_line(run, done.values, steps_done))
        session.metrics.advance(steps_done)

    def saved(self, session: Session, seconds: float) -> None:
        """Keep it for the next row."""
        self.save_seconds = seconds

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Say how."""
        self._tell_of_islands(session)
        if outcome.stopped:
            session.metrics.line(f"stopped at step {outcome.steps_done}: saved; the same command goes on from here")
        session.metrics.event("stop" if outcome.stopped else "end", step=outcome.steps_done)

    def _tell_of_islands(self, session: Session) -> None:
        """Say which islands came and went."""
        for line in () if session.trainer.outer is None else session.trainer.outer.lines():
            session.metrics.line(line)
