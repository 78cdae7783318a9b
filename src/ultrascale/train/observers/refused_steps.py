"""Steps that must not update: judged by loss and norm (`train.observers.anomalies`), and diagnosed before the run ends."""

from __future__ import annotations

from math import isfinite

import torch

from ultrascale.train.observers.anomalies import INSPECT, NO_TARGET, AnomalousStepError, NonFiniteError
from ultrascale.train.optimizers.gradients import name_bad_gradients, watched_gradients
from ultrascale.train.session.moments import LoopObserver, Session, StepDone
from ultrascale.train.step import Observer, Step, forward_backward


class RefusalLines(LoopObserver):
    """Logs which steps were skipped, and why."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Log a skipped step."""
        if cause := done.result.gradients.anomaly:
            session.metrics.line(f"step {session.trainer.steps_done} passed over: {cause}")
            session.metrics.event("skip", step=session.trainer.steps_done, cause=cause)


class RefusedSteps(Observer):
    """Skips an anomalous step, or raises an error with its diagnosis, as `faults.on_anomaly` says."""

    def measured(self, step: Step) -> None:
        """Judge the step. Raises AnomalousStepError, or NonFiniteError with the rank and the parameter."""
        trainer = self.trainer
        if step.num_targets == 0:
            step.anomaly = NO_TARGET
        elif not step.overflowed:
            step.anomaly = trainer.norms.judge(step.loss, step.norm)
        if step.anomaly and trainer.run.faults.on_anomaly != "skip" and step.step not in trainer.to_pass_over:
            raise self._explained(step)
        if step.anomaly:
            trainer.norms.pass_over(step.step + 1, step.anomaly)

    def updated(self, step: Step) -> None:
        """Count an update."""
        self.trainer.norms.accept(step.norm)

    def _explained(self, step: Step) -> AnomalousStepError:
        if step.anomaly != NO_TARGET and "times the usual" not in step.anomaly:
            return self._not_finite(step)
        self.trainer.optimizer.zero_grad(set_to_none=True)
        what, numbers = f"step {step.step + 1}", step.span.numbers
        if step.anomaly != NO_TARGET:
            return AnomalousStepError(f"{what}: {step.anomaly}. Nothing was updated (faults.spike_factor).")
        remedy = f'{INSPECT}, or pass over such steps with faults.on_anomaly = "skip"'
        where = f"{what}, sequences {numbers[0]} to {numbers[-1]}"
        return AnomalousStepError(f"{where}: {step.anomaly}. Nothing was updated. {remedy}.")

    def _not_finite(self, step: Step) -> NonFiniteError:
        """The error for this step. The reduced gradient does not show where the fault began, so the step is run once more."""
        trainer = self.trainer
        reduced = name_bad_gradients(trainer.share.named())
        trainer.optimizer.zero_grad(set_to_none=True)
        bad: dict[str, None] = {}  # in the order of the backward pass: the fault began in the first

        def see(name: str, gradient: torch.Tensor) -> None:
            if not gradient.isfinite().all():
                bad[name] = None

        history = trainer.share.amax_history
        if history is not None:
            history.forget()
        with watched_gradients(trainer.share.stages.values(), see):
            loss = float(forward_backward(trainer, step))
        trainer.optimizer.zero_grad(set_to_none=True)
        signs = [] if isfinite(loss) else [f"loss {loss}"]
        signs += [f"gradient of {name}" for name in list(bad)[:3]] + ([f"and of {len(bad) - 3} more"] if len(bad) > 3 else [])
        signs += [] if history is None or signs else history.infinite()[:1]
        reports = trainer.ranks.gather_text(", ".join(signs))
        culprits = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
        where = "; ".join(culprits) or (
            f"gradient of {', '.join(reduced[:3]) or 'no parameter, only the norm'}; not so when the step was done once more, "
            "so suspect the machine"
        )
        numbers = step.span.numbers
        return NonFiniteError(
            f"step {step.step + 1}, sequences {numbers[0]} to {numbers[-1]}: not finite: {where}. Nothing was updated "
            f"and nothing saved. {self._lowest_scale()}Lower optimizer.learning_rate, or look at the data with "
            "`ultrascale data inspect`."
        )

    def _lowest_scale(self) -> str:
        """Advice for fp16, whose loss scale did not help; empty for other precisions."""
        if self.trainer.loss_scale is None:
            return ""
        return f'fp16 at loss scale {self.trainer.loss_scale.value:g}: layout.precision = "bf16" has the range of fp32. '
