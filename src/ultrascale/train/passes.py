"""The forward and backward passes of a step on one rank: executes the actions of `schedules`, with or without a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ultrascale import heartbeat
from ultrascale.models.experts import scale_auxiliary_losses
from ultrascale.parallel.data.data_parallel import prepare_action
from ultrascale.parallel.pipeline.pipeline_parallel import Pipeline, pipeline_of
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
from ultrascale.parallel.share import Share
from ultrascale.schedules.accumulate import accumulate
from ultrascale.schedules.actions import Action, Kind
from ultrascale.train.micro_batches import MicroBatch, activation_shape

EVALUATED_TOGETHER = 4
"""Micro-batches per pipeline rank that an evaluation runs at once. Over gloo a rank keeps every sent tensor until the end."""


@dataclass
class Passes:
    """Runs micro-batches through this rank's part of the model."""

    share: Share
    on_action: Callable[[Action], None] = lambda action: None
    """Called with each action before it starts."""
    after_backward: Callable[[int], None] = lambda micro_batch: None
    """Called with the index of the micro-batch whose backward pass has finished; not called in a pipeline."""
    loss_scale: float = 1.0
    """Factor on the losses before their backward passes, for fp16. Gradients after `train` are larger by this factor."""
    pipeline: Pipeline | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        share = self.share
        if share.layout.pp > 1:
            groups, device = share.mesh.pipeline_groups(), share.mesh.device
            self.pipeline = pipeline_of(share.layout)(
                share.layout, share.stages, groups, device, lambda action: self.on_action(action)
            )

    def train(self, micro_batches: Sequence[MicroBatch], num_targets: int) -> list[Tensor]:
        """Accumulate the gradients of (sum of losses) / `num_targets` x `loss_scale` in the parameters. Returns the losses,
        summed over valid targets, 0-d each; in a pipeline only on ranks that hold the last stage (DualPipe: at both ends)."""
        losses: list[Tensor] = []
        scale = self.loss_scale / max(1, num_targets)
        for stage in self.share.stages.values():
            scale_auxiliary_losses(stage, scale)
        if self.pipeline is not None:
            self._through(self.pipeline.train, micro_batches, losses, scale)
            return losses
        decoder, under_way = self.share.decoder, {}
        for action in accumulate(len(micro_batches), self.share.layout.zero_stage):
            prepare_action(decoder, action)
            self.on_action(action)
            if action.kind is Kind.FORWARD:
                loss = self.forward(micro_batches[action.micro_batch])
                losses.append(loss.detach())
                under_way[action.micro_batch] = loss * scale
                del loss  # else its graph and the tensors it references (masks) would live until the next loss
            else:
                under_way.pop(action.micro_batch).backward()
                self.after_backward(action.micro_batch)
        return losses

    @torch.no_grad()
    def evaluate(self, micro_batches: Sequence[MicroBatch]) -> list[Tensor]:
        """Losses as returned by `train`, without gradients."""
        if self.pipeline is None:
            return [self.forward(batch) for batch in micro_batches]
        losses: list[Tensor] = []
        together = EVALUATED_TOGETHER * self.share.layout.pp
        for first in range(0, len(micro_batches), together):
            self._through(self.pipeline.evaluate, micro_batches[first : first + together], losses, 1.0)
        return losses

    def forward(self, batch: MicroBatch, *, stage: int = 0, received: Tensor | None = None) -> Tensor:
        """Output of a stage. Last stage: the loss summed over the valid targets of `batch`, 0-d; other stages: activations for
        the next stage. `received`: activations of the previous stage."""
        if not torch.is_grad_enabled():
            heartbeat.beat("evaluating")
        decoder, inputs = self.share.stages[stage], batch.tokens if received is None else received
        keys = batch.dropout_keys if torch.is_grad_enabled() else None
        return decoder(
            inputs, targets=batch.targets, positions=batch.positions, document_ids=batch.document_ids, dropout_keys=keys
        )

    def _through(
        self, run: Callable[..., None], micro_batches: Sequence[MicroBatch], losses: list[Tensor], scale: float
    ) -> None:
        """Call the pipeline's `run` on the micro-batches; appends the last stage's losses to `losses`."""
        layout, last = self.share.layout, self.share.layout.num_stages - 1

        def run_stage(stage: int, micro_batch: int, received: Tensor | None) -> Tensor:
            result = self.forward(micro_batches[micro_batch], stage=stage, received=received)
            if stage != last:
                return result
            losses.append(result.detach())
            return result * scale

        shape = activation_shape(micro_batches[0], self.share.model.hidden_size, layout, self.share.mesh.coordinates)
        run(len(micro_batches), run_stage, shape=shape, dtype=TORCH_DTYPE[layout.precision])
