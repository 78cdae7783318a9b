"""One training step on one rank: read, count, passes, norm, clip, update.

Everything optional (fp16's scale, anomalies, repeated passes, the noise scale, experts' load) is an `Observer` in
`train.observers`. It exists only if the run asks for it, and is called at these moments, in this order:

    around           called instead of the passes; runs them
    after_backward   of a micro-batch
    reduced          gradients are reduced over all ranks
    measured         loss and norm are known; the observer may mark the step as anomalous, or raise
    updated          the weights are updated; or
    passed_over      the step was skipped
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import isfinite, nan
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ultrascale import heartbeat
from ultrascale.description.progress import StepSpan, step_span
from ultrascale.train.micro_batches import MicroBatch
from ultrascale.train.optimizers.gradients import clip_gradients
from ultrascale.train.optimizers.learning_rate import learning_rate
from ultrascale.train.optimizers.optimizer import set_learning_rate

if TYPE_CHECKING:
    from ultrascale.train.observers.expert_balance import ExpertBalance
    from ultrascale.train.trainer import Trainer


class StopRequested(Exception):
    """Some rank received a stop request. Raised on all ranks before the same step."""


@dataclass
class Step:
    """State of a running step. Numbers are equal on every rank."""

    step: int
    """Steps completed before this one."""
    span: StepSpan
    micro_batches: list[MicroBatch]
    """Micro-batches of this rank."""
    data_seconds: float
    num_targets: int = 0
    """Valid targets of the global batch."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    """[4] fp64 on the CPU: summed loss, and three numbers for observers. This rank's until they are summed over ranks."""
    loss: float = nan
    """Mean over the valid targets of the global batch, in nats; NaN if there is none."""
    norm: float = nan
    """2-norm of the global gradient, before clipping, and without fp16's scale."""
    overflowed: bool = False
    """True if the scaled gradient overflowed fp16."""
    anomaly: str = ""
    """Description of the anomaly for which the step is skipped; empty if there is none."""
    loss_scale: float | None = None
    """Factor on the loss; None: not scaled."""
    noise_scale_tokens: float | None = None
    expert_balance: ExpertBalance | None = None
    """Load of the experts; None without experts, and in a step that did not update."""

    @property
    def is_passed_over(self) -> bool:
        """True if the step must not update anything."""
        return bool(self.anomaly) or not isfinite(self.norm)


class StepResult(NamedTuple):
    """Result of a completed step."""

    gradients: Step
    learning_rate: float
    skipped_steps: int = 0
    """Steps of the run so far that updated nothing."""
    outer: Mapping[str, int] = MappingProxyType({})
    """Outer steps and bytes of islands (DiLoCo), by the name of the metric."""


class Observer:
    """Observer of steps. Every method does nothing unless a subclass overrides it. All ranks have the same observers."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def around(self, step: Step, play: Callable[[], None]) -> None:
        """Call `play`, which runs the passes, reduces gradients into the parameters, and fills this rank's `step.sums`."""
        play()

    def after_backward(self, step: Step, micro_batch: int) -> None:
        """The backward pass of a micro-batch has finished; not called in a pipeline."""

    def reduced(self, step: Step) -> None:
        """The gradients in the parameters are reduced over all ranks."""

    def measured(self, step: Step) -> None:
        """`loss`, `norm` and `sums` are reduced over all ranks. May set the fields that `is_passed_over` reads, or raise."""

    def updated(self, step: Step) -> None:
        """The weights are updated, and the gradients freed."""

    def passed_over(self, step: Step) -> None:
        """The step was skipped: the gradients are freed, and nothing else has changed."""


def compute_gradients(trainer: Trainer) -> Step:
    """Read, count, passes, norm: leaves the reduced gradient of the next step in the parameters.

    Raises StopRequested (nothing done) if any rank received a stop request, and errors of observers (nothing updated).
    """
    span = step_span(trainer.run.batch, trainer.steps_done).of_island(trainer.ranks.island, trainer.run.degrees)
    started = time.perf_counter()
    heartbeat.beat("reading data")
    micro_batches = [trainer.to_device(sequences) for sequences in trainer.read_micro_batches(span)]
    step = Step(trainer.steps_done, span, micro_batches, time.perf_counter() - started)
    step.num_targets = trainer.agree_on_targets(micro_batches)
    play = partial(play_passes, trainer, step)
    for observer in reversed(trainer.observers):
        play = partial(observer.around, step, play)
    play()
    for observer in trainer.observers:
        observer.reduced(step)
    step.norm = float(trainer.share.gradient_norm())
    trainer.ranks.sum(step.sums)
    step.loss = float(step.sums[0]) / step.num_targets if step.num_targets else nan
    for observer in trainer.observers:
        observer.measured(step)
    return step


def play_passes(trainer: Trainer, step: Step) -> None:
    """Run the step's actions. Leaves the reduced gradients in the parameters, and fills this rank's `step.sums`."""
    step.sums.zero_()
    step.sums[0] = forward_backward(trainer, step)
    trainer.share.finish_gradients()


def forward_backward(trainer: Trainer, step: Step) -> Tensor:
    """Run the step's actions, without the reduction at its end. Returns this rank's summed loss, 0-d fp64 on the CPU."""
    trainer.passes.after_backward = partial(_notify_backward, trainer, step)
    return trainer.counted(trainer.passes.train(step.micro_batches, step.num_targets))


def update(trainer: Trainer, norm: float) -> float:
    """Clip by the gradient's `norm`, update the weights, free the gradients. Returns the learning rate used."""
    heartbeat.beat("optimizer")
    trainer.on_phase("optimizer", trainer.steps_done)
    clip_gradients(trainer.share.parameters(), norm, trainer.run.optimizer.clip_grad_norm)
    rate = learning_rate(trainer.run.optimizer, trainer.steps_done, trainer.run.steps)
    set_learning_rate(trainer.optimizer, rate)
    trainer.optimizer.step()
    _end(trainer)
    return rate


def apply(trainer: Trainer, step: Step) -> StepResult:
    """The rest of a step: update the weights, unless the step must be skipped. A skipped step still consumes its sequences and
    its place in the learning-rate schedule."""
    if step.is_passed_over:
        trainer.skipped_steps += 1
        rate = learning_rate(trainer.run.optimizer, trainer.steps_done, trainer.run.steps)
        _end(trainer)
    else:
        rate = trainer.update(step.norm)
    for observer in trainer.observers:
        (observer.passed_over if step.is_passed_over else observer.updated)(step)
    return StepResult(step, rate, trainer.skipped_steps)


def _end(trainer: Trainer) -> None:
    trainer.optimizer.zero_grad(set_to_none=True)
    trainer.on_phase("between", trainer.steps_done)
    trainer.steps_done += 1


def _notify_backward(trainer: Trainer, step: Step, micro_batch: int) -> None:
    for observer in trainer.observers:
        observer.after_backward(step, micro_batch)


def agree_on_targets(trainer: Trainer, micro_batches: list[MicroBatch]) -> int:
    """Valid targets of all ranks. Among ranks that see the same tokens, only the first counts them."""
    at = trainer.share.mesh.coordinates
    local_targets = sum(batch.num_targets for batch in micro_batches) if at.pp == 0 and at.leads_replica else 0
    targets, stop = trainer.ranks.sum(torch.tensor([local_targets, int(trainer.stop_requested)])).tolist()
    if stop:
        if trainer.outer is not None:
            trainer.outer.leave(trainer.steps_done)
        raise StopRequested
    return targets
