"""What one process computes: the oracle. Plain PyTorch in float64, one sequence at a time, and AdamW written out.

It shares the decoder's code and the initial weights with the trainer and nothing else: no FSDP2, no schedule, no micro-batches,
no fused optimizer, no norm over shards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import torch

from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise
from ultrascale.spec.progress import step_span
from ultrascale.spec.run import Run
from ultrascale.spec.weights import weights
from ultrascale.train.learning_rate import learning_rate
from ultrascale.train.micro_batches import ReadsSequences


@dataclass(frozen=True)
class StepFacts:
    """All that a step computes, float64 on the CPU, by global names."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    """Of the mean loss of the global batch, before clipping."""
    weights: dict[str, torch.Tensor]
    """After the update."""
    moments: dict[str, torch.Tensor]
    """After the update: `exp_avg.<name>` and `exp_avg_sq.<name>`."""
    differing: tuple[str, ...] = ()
    """What several ranks hold and should be the same bits on all of them, and is not."""


@dataclass
class Reference:
    """A run on one process."""

    run: Run
    loader: ReadsSequences
    steps_done: int = 0
    decoder: Decoder = field(init=False)
    moments: dict[str, torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.run.model).double()
        initialise(self.decoder, self.run.model, self.run.seed)
        named = self.named_weights()
        self.moments = {f"{kind}.{n}": torch.zeros_like(w) for kind in ("exp_avg", "exp_avg_sq") for n, w in named.items()}

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The weights themselves, by name."""
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}

    def train_step(self) -> StepFacts:
        """Do the next step."""
        loss, gradients = self._gradients()
        norm = sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        limit = self.run.optimizer.clip_grad_norm
        scale = limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
        self._adamw({name: g * scale for name, g in gradients.items()})
        self.steps_done += 1
        copies = {name: w.clone() for name, w in self.named_weights().items()}
        return StepFacts(loss, norm, gradients, copies, {name: m.clone() for name, m in self.moments.items()})

    def _gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        batch = self.loader.read(step_span(self.run.batch, self.steps_done).numbers)
        num_targets = max(1, int((batch.targets >= 0).sum()))
        self.decoder.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch.tokens)):
            packed = self.run.data.document_mask
            loss = self.decoder(
                torch.from_numpy(batch.tokens[row : row + 1]),
                targets=torch.from_numpy(batch.targets[row : row + 1]),
                positions=torch.from_numpy(batch.positions[row : row + 1]) if packed else None,
                document_ids=torch.from_numpy(batch.document_ids[row : row + 1]) if packed else None,
            )
            loss.backward()
            loss_sum += loss.detach()
        named = dict(self.decoder.named_parameters())
        gradients = {n: (p.grad if p.grad is not None else torch.zeros_like(p)) / num_targets for n, p in named.items()}
        return float(loss_sum) / num_targets, gradients

    @torch.no_grad()
    def _adamw(self, gradients: dict[str, torch.Tensor]) -> None:
        """Loshchilov and Hutter 2019, algorithm 2, with decay scaled by the learning rate as torch does."""
        settings, count = self.run.optimizer, self.steps_done + 1
        rate = learning_rate(settings, self.steps_done, self.run.steps)
        decays = {weight.name: settings.weight_decay if weight.decay else 0.0 for weight in weights(self.run.model)}
        for name, weight in self.named_weights().items():
            first, second, g = self.moments[f"exp_avg.{name}"], self.moments[f"exp_avg_sq.{name}"], gradients[name]
            weight.mul_(1 - rate * decays[name])
            first.mul_(settings.beta1).add_(g, alpha=1 - settings.beta1)
            second.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
            mean, square = first / (1 - settings.beta1**count), second / (1 - settings.beta2**count)
            weight.sub_(rate * mean / (square.sqrt() + settings.eps))
