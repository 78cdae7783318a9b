"""One training step on one rank: read, count, passes, norm, clip, update.

Everything rare (fp16's scale, anomalies, repeated passes, the noise scale, experts' load) is an `Observer` in
`train.observers`, which is told of a step's moments in this order, and is not there where a run does not ask for it:

    around           the passes are played inside
    after_backward   of a micro-batch
    reduced          the gradient of all ranks is in the parameters
    measured         loss and norm are known; it may say what is wrong with the step, or raise
    updated          the weights are new; or
    passed_over      they are not
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
    """Some rank was asked to stop; raised on all of them before the same step."""


@dataclass
class Step:
    """State of a step while it runs; numbers are equal on every rank."""

    step: int
    """Steps done before it."""
    span: StepSpan
    micro_batches: list[MicroBatch]
    """This rank's."""
    data_seconds: float
    num_targets: int = 0
    """Valid targets of the global batch."""
    sums: Tensor = field(default_factory=lambda: torch.zeros(4, dtype=torch.float64))
    """[4] fp64, on the CPU, until they are summed over ranks: this rank's summed loss, and three numbers for observers."""
    loss: float = nan
    """Mean over the valid targets of the global batch, in nats; NaN if there is none."""
    norm: float = nan
    """2-norm of the whole gradient, before clipping, and without fp16's scale."""
    overflowed: bool = False
    """True if the scaled gradient overflowed fp16."""
    anomaly: str = ""
    """Anomaly in words, for which the step is passed over; empty if there is none."""
    loss_scale: float | None = None
    """By which the loss was multiplied; None: by nothing."""
    noise_scale_tokens: float | None = None
    expert_balance: ExpertBalance | None = None
    """Expert load; None without experts, and in a step that did not update."""

    @property
    def num_sequences(self) -> int:
        """Sequences of the global batch."""
        return self.span.num_sequences

    @property
    def is_passed_over(self) -> bool:
        """True if the step must not update anything."""
        return bool(self.anomaly) or not isfinite(self.norm)


class StepResult(NamedTuple):
    """A step that is done."""

    gradients: Step
    learning_rate: float
    skipped_steps: int = 0
    """Steps of the run so far that updated nothing."""
    outer: Mapping[str, int] = MappingProxyType({})
    """Outer steps and bytes of islands, by the name of the metric."""

    @property
    def expert_balance(self) -> ExpertBalance | None:
        """Expert load; None without experts, and in a step that did not update."""
        return self.gradients.expert_balance


class Observer:
    """Observer of steps. Each moment does nothing unless a subclass overrides it; all ranks have the same observers."""

    def around(self, step: Step, play: Callable[[], None]) -> None:
        """Let the passes be played, which leaves the gradient of all ranks in the parameters and `step.sums` of this rank."""
        play()

    def after_backward(self, step: Step, micro_batch: int) -> None:
        """The backward pass of a micro-batch is done; not told in a pipeline."""

    def reduced(self, step: Step) -> None:
        """The gradient of all ranks is in the parameters."""

    def measured(self, step: Step) -> None:
        """`loss`, `norm` and `sums` are those of all ranks. May set what `is_passed_over` reads, or raise."""

    def updated(self, step: Step) -> None:
        """The weights are new, and the gradients gone."""

    def passed_over(self, step: Step) -> None:
        """The gradients are gone, and nothing else has changed."""


def compute_gradients(trainer: Trainer) -> Step:
    """Read, count, passes, norm: the gradient of the next step is left in the parameters.

    Raises StopRequested (nothing done) if any rank was asked to stop, and what observers raise (nothing updated).
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
    """Play the step's actions; leaves the gradient of all ranks in the parameters, and this rank's `step.sums`."""
    step.sums.zero_()
    step.sums[0] = forward_backward(trainer, step)
    trainer.share.finish_gradients()


def forward_backward(trainer: Trainer, step: Step) -> Tensor:
    """Play the step's actions up to what ranks still sum at its end. Returns this rank's summed loss, 0-d fp64 on the CPU."""
    trainer.passes.after_backward = partial(_notify_backward, trainer, step)
    return trainer.counted(trainer.passes.train(step.micro_batches, step.num_targets))


def update(trainer: Trainer, norm: float) -> float:
    """Clip by the gradient's `norm`, update the weights, forget the gradients. Returns the learning rate used."""
    heartbeat.beat("optimizer")
    trainer.on_phase("optimizer", trainer.steps_done)
    clip_gradients(trainer.share.parameters(), norm, trainer.run.optimizer.clip_grad_norm)
    rate = learning_rate(trainer.run.optimizer, trainer.steps_done, trainer.run.steps)
    set_learning_rate(trainer.optimizer, rate)
    trainer.optimizer.step()
    _end(trainer)
    return rate


def apply(trainer: Trainer, step: Step) -> StepResult:
    """The rest of a step: update the weights, unless it must be passed over. Then its sequences were read, and its learning
    rate is used up, all the same."""
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
    """Valid targets of all ranks. Of the ranks that see the same tokens only the first counts them."""
    at = trainer.share.mesh.coordinates
    local_targets = sum(batch.num_targets for batch in micro_batches) if at.pp == 0 and at.leads_replica else 0
    targets, stop = trainer.ranks.sum(torch.tensor([local_targets, int(trainer.stop_requested)])).tolist()
    if stop:
        if trainer.outer is not None:
            trainer.outer.leave(trainer.steps_done)
        raise StopRequested
    return targets
