"""The reference: a run on one process. Plain PyTorch in float64, one sequence at a time, with explicit optimizers.

It shares with the trainer only the decoder's code, the initial weights and the rounding of narrow moments: no FSDP2, no
schedule, no micro-batches, no fused optimizer, no norm over shards; Muon's iterations by singular values.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

import torch

from ultrascale.description.architecture.weights import Weight, weights
from ultrascale.description.progress import step_span
from ultrascale.description.run import Run
from ultrascale.kernels.dropout import token_keys
from ultrascale.kernels.optimizers.block_quantise import rounding_key
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND, round_trip
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import moe_layers, take_load, update_expert_bias
from ultrascale.models.initialise import initialise
from ultrascale.train.micro_batches import ReadsSequences
from ultrascale.train.optimizers.learning_rate import learning_rate
from ultrascale.train.optimizers.muon import COEFFICIENTS, update_size
from ultrascale.train.optimizers.optimizer import KINDS, moments_of
from ultrascale.work.sharding.owners import NEWTON_SCHULZ_STEPS


@dataclass(frozen=True)
class StepFacts:
    """All results of a step, float64 on the CPU, by global names."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    """Gradients of the mean loss of the global batch, before clipping."""
    weights: dict[str, torch.Tensor]
    """After the update."""
    moments: dict[str, torch.Tensor]
    """After the update: `exp_avg.<name>` and `exp_avg_sq.<name>`."""
    experts: dict[str, torch.Tensor] = field(default_factory=dict)
    """Load balance of models with experts: `load.<block>` (choices of the step), `bias.<block>` after it, and `auxiliary`
    (weighted load-balancing losses per valid target)."""
    differing: tuple[str, ...] = ()
    """Names of tensors whose replicas differ in bits between ranks."""
    messages: tuple[str, ...] = ()
    """Mistakes of ranks with messages in flight, as text (`check.oracle.messages`)."""


def rows_together(run: Run) -> int:
    """Sequences in one forward pass of the reference: one, unless a balance loss is defined over several."""
    model, layout = run.model, run.layout
    if not model.balance_loss_coef:
        return 1
    together = {"sequence": 1, "micro-batch": layout.micro_batch_size, "global": layout.dp * layout.micro_batch_size}
    return together[model.router_aux_loss_scope]


@dataclass
class Reference:
    """A run on one process."""

    run: Run
    loader: ReadsSequences
    steps_done: int = 0
    decoder: Decoder = field(init=False)
    moments: dict[str, torch.Tensor] = field(init=False)
    table: dict[str, Weight] = field(init=False)

    def __post_init__(self) -> None:
        self.decoder = Decoder(self.run.model).double()
        initialise(self.decoder, self.run.model, self.run.seed)
        named = self.named_weights()
        self.table = {weight.name: weight for weight in weights(self.run.model)}
        self.moments = {
            f"{moment}.{name}": torch.zeros_like(weight)
            for name, weight in named.items()
            for moment in moments_of(self.table[name], self.run.optimizer)
        }

    def named_weights(self) -> dict[str, torch.Tensor]:
        """The weights themselves, by name."""
        return {name: parameter.detach() for name, parameter in self.decoder.named_parameters()}

    def train_step(self, clip_share: float | None = None) -> StepFacts:
        """Run the next step, and clip at the run's own limit or, if given, at that share of the gradient's norm."""
        loss, gradients, num_targets = self._gradients()
        norm = sqrt(sum(float((g * g).sum()) for g in gradients.values()))
        limit = self.run.optimizer.clip_grad_norm if clip_share is None else clip_share * norm
        scale = limit / (norm + 1e-6) if limit is not None and norm > limit else 1.0
        self._update({name: g * scale for name, g in gradients.items()})
        experts = self._balance(num_targets)
        self.steps_done += 1
        copies = {name: w.clone() for name, w in self.named_weights().items()}
        moments = {name: m.clone() for name, m in self.moments.items()}
        return StepFacts(loss, norm, gradients, copies, moments, experts)

    def _gradients(self) -> tuple[float, dict[str, torch.Tensor], int]:
        """The mean loss, its gradients, and the number of valid targets. Losses for balance join on the way back."""
        batch = self.loader.read(step_span(self.run.batch, self.steps_done).numbers)
        num_targets = max(1, int((batch.targets >= 0).sum()))
        self.decoder.zero_grad()
        loss_sum = torch.zeros((), dtype=torch.float64)
        size, packed = rows_together(self.run), self.run.data.document_mask
        keys = token_keys(batch.numbers, batch.tokens.shape[1], self.run.seed)
        for first in range(0, len(batch.tokens), size):
            rows = slice(first, first + size)
            loss = self.decoder(
                torch.from_numpy(batch.tokens[rows]),
                targets=torch.from_numpy(batch.targets[rows]),
                positions=torch.from_numpy(batch.positions[rows]) if packed else None,
                document_ids=torch.from_numpy(batch.document_ids[rows]) if packed else None,
                dropout_keys=torch.from_numpy(keys[rows]),
            )
            loss.backward()
            loss_sum += loss.detach()
        named = dict(self.decoder.named_parameters())
        gradients = {n: (p.grad if p.grad is not None else torch.zeros_like(p)) / num_targets for n, p in named.items()}
        return float(loss_sum) / num_targets, gradients, num_targets

    def _balance(self, num_targets: int) -> dict[str, torch.Tensor]:
        """Expert loads and the auxiliary loss of this step, and the biases after their update by it."""
        if not self.run.model.num_experts:
            return {}
        load, auxiliary = take_load(self.decoder)
        update_expert_bias(self.decoder, load)
        facts = {f"load.{number}": counts.double() for number, counts in load.items()}
        for number, layer in moe_layers(self.decoder):
            if layer.router.e_score_correction_bias is not None:
                facts[f"bias.{number}"] = layer.router.e_score_correction_bias.double().clone()
        return facts | {"auxiliary": auxiliary / num_targets}

    @torch.no_grad()
    def _update(self, gradients: dict[str, torch.Tensor]) -> None:
        """Weight decay, scaled by the learning rate as in torch, and then the optimizer's update."""
        settings = self.run.optimizer
        rate = learning_rate(settings, self.steps_done, self.run.steps)
        for name, weight in self.named_weights().items():
            weight.mul_(1 - rate * settings.weight_decay * self.table[name].decay)
            is_muons = f"momentum_buffer.{name}" in self.moments
            weight.sub_(rate * (self._muon if is_muons else self._adamw)(name, gradients[name]))

    def _adamw(self, name: str, g: torch.Tensor) -> torch.Tensor:
        """Loshchilov and Hutter 2019, algorithm 2."""
        settings, count = self.run.optimizer, self.steps_done + 1
        first, second = self.moments[f"exp_avg.{name}"], self.moments[f"exp_avg_sq.{name}"]
        first.mul_(settings.beta1).add_(g, alpha=1 - settings.beta1)
        second.mul_(settings.beta2).addcmul_(g, g, value=1 - settings.beta2)
        mean, square = first / (1 - settings.beta1**count), second / (1 - settings.beta2**count)
        update = mean / (square.sqrt() + settings.eps)
        if (kind := KINDS.get(settings.name)) is not None:
            for moment, values in ((FIRST, first), (SECOND, second)):
                values.copy_(round_trip(values, kind, moment, rounding_key(self.run.seed, count, name, moment)))
        return update

    def _muon(self, name: str, g: torch.Tensor) -> torch.Tensor:
        """Jordan et al. 2024, each matrix by its singular values: what the iterations do to a matrix they do to these."""
        momentum = self.moments[f"momentum_buffer.{name}"]
        momentum.mul_(self.run.optimizer.momentum).add_(g)
        left, values, right = torch.linalg.svd(g + self.run.optimizer.momentum * momentum, full_matrices=False)
        values = values / values.norm(dim=-1, keepdim=True).clamp_min(1e-7)
        a, b, c = COEFFICIENTS
        for _ in range(NEWTON_SCHULZ_STEPS):
            values = a * values + b * values**3 + c * values**5
        return update_size(g.shape) * (left * values.unsqueeze(-2)) @ right
