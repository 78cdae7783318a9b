"""A step's gradient computed twice, to detect transient arithmetic errors: they do not repeat with the same bits.

Digests (`train.observers.digests`) compare replicas; a rank's contribution to a summed gradient has no replica, and a wrong
product there reaches every replica alike. In the same layout the same step gives the same bits, so its passes run twice, and
these are compared bit by bit:

    a rank's local gradients  before any reduction over ranks: they name the rank
    the reduced gradients     which also reveal an error in the reduction
    the loss

Nothing has been updated then. It costs the passes of one step in `faults.repeat_every_steps`, hardly any memory, and detects
only errors in those steps. On GPUs, kernels that add in any order would look like faults, so it is refused with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ultrascale.description.problems import mistake
from ultrascale.description.units import first_few
from ultrascale.parallel.share import local_gradient
from ultrascale.train.observers.anomalies import CorruptStateError
from ultrascale.train.observers.digests import digest
from ultrascale.train.observers.expert_balance import forget_load
from ultrascale.train.optimizers.gradients import watched_gradients
from ultrascale.train.step import Observer, Step

if TYPE_CHECKING:
    from ultrascale.train.trainer import Trainer

MOST_NAMED = 3


@dataclass
class RecordedExecution:
    """Gradient digests and losses of one execution of a step's passes on this rank."""

    local: dict[str, Tensor] = field(default_factory=dict)
    """Per parameter, the sum modulo 2^64 of the digests of its gradients over all micro-batches."""
    summed: dict[str, Tensor] = field(default_factory=dict)
    loss: Tensor = field(default_factory=lambda: torch.zeros(0))

    def see(self, name: str, gradient: Tensor) -> None:
        """Add one parameter's gradient of one micro-batch."""
        bits = digest(gradient)
        self.local[name] = self.local[name] + bits if name in self.local else bits


def expect_repeatable(trainer: Trainer) -> None:
    """Raises SpecError if bits need not repeat."""
    if trainer.run.faults.repeat_every_steps is not None and trainer.ranks.device.type != "cpu":
        rule = f"compares bits, which need not repeat on {trainer.ranks.device.type}: some kernels add in any order"
        raise mistake("faults.repeat_every_steps", rule, "Leave it out on GPUs.")


class RepeatedSteps(Observer):
    """Runs the passes of every `faults.repeat_every_steps`th step twice."""

    def around(self, step: Step, play: Callable[[], None]) -> None:
        """Run the passes once, or twice if that is due."""
        if step.step % (self.trainer.run.faults.repeat_every_steps or 1) == 0:
            _played_twice(self.trainer, step, play)
        else:
            play()


def _played_twice(trainer: Trainer, step: Step, play: Callable[[], None]) -> None:
    """Run the passes twice. Collective. Raises CorruptStateError on every rank if any rank found a difference; gradients are
    freed."""
    first = _observed(trainer, step, play)
    trainer.optimizer.zero_grad(set_to_none=True)
    forget_load(trainer.share)
    second = _observed(trainer, step, play)
    reports = trainer.ranks.gather_text(_difference(first, second))
    if any(reports):
        trainer.optimizer.zero_grad(set_to_none=True)
        forget_load(trainer.share)
        raise CorruptStateError(_problem_text(trainer.steps_done + 1, reports))


def _observed(trainer: Trainer, step: Step, play: Callable[[], None]) -> RecordedExecution:
    passes = RecordedExecution()
    with watched_gradients(trainer.share.stages.values(), passes.see):
        play()
    for name, parameter in trainer.share.named():
        if (gradient := local_gradient(parameter)) is not None:
            passes.summed[name] = digest(gradient)
    passes.loss = step.sums[0].clone()
    return passes


def _difference(first: RecordedExecution, second: RecordedExecution) -> str:
    """Difference on this rank: `own ...` if it arose here, `summed ...` if only a sum over ranks differs; else empty."""
    for kind, before, after in (("own", first.local, second.local), ("summed", first.summed, second.summed)):
        names = [name for name in after if name not in before or not torch.equal(before[name], after[name])]
        if names:
            return f"{kind} gradient of {first_few(names, MOST_NAMED)}"
    return "own loss" if not torch.equal(first.loss, second.loss) else ""


def _problem_text(step: int, reports: list[str]) -> str:
    """Ranks where the error arose; if none, ranks whose reduced gradients differ."""
    began = [f"rank {rank}: {text.removeprefix('own ')}" for rank, text in enumerate(reports) if text.startswith("own ")]
    summed = [f"rank {rank}: {text}" for rank, text in enumerate(reports) if text]
    where = "; ".join(began or summed)
    return (
        f"step {step} done twice gave other bits ({where}): memory, arithmetic or a message failed there. Nothing was updated. "
        'Go on from the newest checkpoint, without that machine; faults.on_anomaly = "rewind" goes back by itself.'
    )
