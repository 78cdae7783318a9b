"""The state of a session, and the moments of its loop at which observers are called.

    started        everything is restored; the first step is next
    before_step    a step is next
    after_step     a step is done; observers may add to its row of metrics; its checkpoint comes after
    saved          a checkpoint was saved
    failed         a step or a comparison of its state raised; an observer that goes back to a checkpoint returns True
    before_stop    the run stops before its last step; its state is about to be saved
    ended          everything is saved

Every rank has the same observers in the same order, since some moments are collective; `session.begin` lists them.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ultrascale.description.run import Run
    from ultrascale.parallel.mesh import Ranks
    from ultrascale.train.folder.lost_folder import CheckpointPlace
    from ultrascale.train.folder.run_folder import RunFolder
    from ultrascale.train.folder.run_store import RunStore
    from ultrascale.train.folder.saves import Saves
    from ultrascale.train.observers.anomalies import AnomalousStepError, CorruptStateError
    from ultrascale.train.observers.metrics import Metrics, Row
    from ultrascale.train.step import StepResult
    from ultrascale.train.trainer import Trainer


class Outcome(NamedTuple):
    """End of a run: steps done, last loss, and whether a signal stopped it."""

    steps_done: int
    stopped: bool
    """True if a signal ended the run before its last step."""
    last_loss: float | None


@dataclass
class StepDone:
    """A completed step and the values that observers add."""

    result: StepResult
    seconds: float
    values: Row = field(default_factory=dict)
    """Its row of metrics."""
    is_recorded: bool = False
    """True if the step's row is recorded although none is due."""


@dataclass
class Session:
    """One session of a run on one rank."""

    run: Run
    ranks: Ranks
    folder: RunFolder
    trainer: Trainer
    saves: Saves
    place: CheckpointPlace
    metrics: Metrics
    store: RunStore | None
    observers: list[LoopObserver]
    has_stepped: bool = False
    """True if a step was done since the start, or since the run last went back to a checkpoint."""

    @property
    def is_complete(self) -> bool:
        """True if every step of the run is done."""
        return self.trainer.steps_done >= self.run.steps

    def is_due(self, every: int | None) -> bool:
        """True if the steps done are a multiple of `every`; False if that is None."""
        return bool(every) and self.trainer.steps_done % every == 0


class LoopObserver:
    """Observer of the training loop. Every method does nothing unless a subclass overrides it."""

    def started(self, session: Session, until_end: ExitStack) -> None:
        """The first step is next. `until_end`: exits after the last step, however the run ends."""

    def before_step(self, session: Session) -> None:
        """A step is next, unless the run must stop."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """A step is done, not yet saved. May raise CorruptStateError."""

    def saved(self, session: Session, seconds: float) -> None:
        """A checkpoint was saved, or failed in a way that training may survive; training waited `seconds`."""

    def failed(self, session: Session, error: AnomalousStepError | CorruptStateError) -> bool:
        """True if the observer has taken the session back to an earlier step, so that `error` does not end the run."""
        return False

    def before_stop(self, session: Session) -> None:
        """The run stops early; its state, which no checkpoint holds yet, is about to be saved. May raise CorruptStateError."""

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Everything is saved."""
