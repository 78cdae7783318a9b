"""The first step since a start, or since going back: ranks have met, and from here on wait no longer than asked."""

from __future__ import annotations

from ultrascale.train.session.moments import LoopObserver, Session, StepDone


class FirstStep(LoopObserver):
    """Ends the patience of the start, and tells that steps are done."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Limit waits, once."""
        if not session.has_stepped:
            session.has_stepped = True
            session.trainer.share.mesh.limit_waits(session.ranks, session.run.collective_timeout_seconds)
            session.metrics.event("stepped", step=session.trainer.steps_done)
