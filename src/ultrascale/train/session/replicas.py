"""Replicas compared every `faults.digest_every_steps`, and before anything is saved that they may have spoiled."""

from __future__ import annotations

from ultrascale.train.folder.resume import tensors_of
from ultrascale.train.observers.anomalies import CorruptStateError
from ultrascale.train.observers.digests import compare
from ultrascale.train.session.moments import LoopObserver, Session, StepDone


class ComparedReplicas(LoopObserver):
    """Raises CorruptStateError on every rank if ranks that must hold the same bits do not."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Compare, if it is due or the step comes to be saved."""
        is_saved = session.is_complete or session.saves.is_due(session.trainer.steps_done)
        if is_saved or session.is_due(session.run.faults.digest_every_steps):
            self.before_stop(session)

    def before_stop(self, session: Session) -> None:
        """Compare."""
        found = compare(tensors_of(session.trainer), session.ranks)
        if found.blamed:
            told = f"{found.text(session.trainer.steps_done)}: memory or arithmetic failed there"
            remedy = 'Go on from the newest checkpoint, without that machine; faults.on_anomaly = "rewind" goes back by itself.'
            raise CorruptStateError(f"{told}. {remedy}")
