"""Rewind to the newest checkpoint after a step that cannot be right (`faults.on_anomaly = "rewind"`)."""

from __future__ import annotations

from ultrascale import heartbeat
from ultrascale.train.folder.resume import restore_newest
from ultrascale.train.observers.anomalies import AnomalousStepError, CorruptStateError
from ultrascale.train.session.moments import LoopObserver, Session
from ultrascale.train.watch.slow_parts import slow_part

MOST_REWINDS = 3
"""Times that a run goes back to a checkpoint because of the same step, before it gives up."""


class Rewind(LoopObserver):
    """Goes back, if there is a checkpoint."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Steps done at each time that the run went back."""

    def failed(self, session: Session, error: AnomalousStepError | CorruptStateError) -> bool:
        """Go back. Collective; raises `error` if what was saved is not there any more."""
        trainer, saves = session.trainer, session.saves
        step = trainer.steps_done
        if saves.saved_at < 0 or self.steps.count(step) >= MOST_REWINDS:
            return False
        if isinstance(error, AnomalousStepError) and step in self.steps:
            trainer.to_pass_over.add(step)  # it was tried again and failed again, so the machine is not to blame
        self.steps.append(step)
        trainer.optimizer.zero_grad(set_to_none=True)
        with slow_part(trainer, "going back to a checkpoint", session.run.collective_timeout_seconds):
            saves.settle(step)
            session.place.settle(step)
            if session.place.loss is not None or saves.saved_at < 0:
                raise error
            restore_newest(trainer, session.folder.checkpoints, allow_changes=True)
        if session.ranks.is_first:
            session.folder.forget_metrics_from(trainer.steps_done)
        heartbeat.steps_done(trainer.steps_done)
        saves.restored(trainer.steps_done)
        session.has_stepped = False
        session.metrics.line(f"{error} Back to step {trainer.steps_done}.")
        session.metrics.event("rewind", step=step, to=trainer.steps_done, cause=str(error))
        return True
