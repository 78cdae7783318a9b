"""Load of the experts in a step, over all ranks, and the resulting update of the balancing biases."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from ultrascale.models.experts import take_load, update_expert_bias
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import Share
from ultrascale.train.step import Observer, Step


class ExpertBalance(NamedTuple):
    """Expert load and auxiliary loss of one step, equal on every rank."""

    load: Tensor
    """[layers, experts] int64: number of tokens routed to each expert, dropped ones included. Layers without experts have
    zeros."""
    auxiliary_loss: float
    """Weighted auxiliary losses for balance, per valid target, summed over layers."""

    @property
    def worst(self) -> float:
        """Load of the busiest expert of any layer over the mean of its layer: 1 is even. The step waits for this expert."""
        return self._over_mean(self.load.amax(dim=1)).amax().item()

    @property
    def idlest(self) -> float:
        """Load of the least busy expert of any layer over the mean of its layer; 0: it received no token."""
        return self._over_mean(self.load.amin(dim=1)).amin().item()

    def _over_mean(self, chosen: Tensor) -> Tensor:
        has_experts = self.load.sum(dim=1) > 0
        return chosen[has_experts] / self.load[has_experts].double().mean(dim=1)


def balance_experts(share: Share, ranks: Ranks, num_targets: int) -> ExpertBalance | None:
    """Sum the loads of a step's backward passes over all ranks, and update the biases that balance them. None without experts.

    Collective; call once a step, after the update.
    """
    if not share.model.num_experts:
        return None
    layers = share.model.num_hidden_layers + share.model.num_nextn_predict_layers
    sums = torch.zeros(layers * share.model.num_experts + 1, dtype=torch.float64)  # exact for counts below 2^53
    load = sums[:-1].view(layers, -1)
    # Without sequence parallelism all ranks of tp see the same tokens, so one of them counts.
    counts = share.layout.sequence_parallel or share.mesh.coordinates.leads_replica
    if counts:
        load[:], sums[-1] = _local_sums(share, load.shape)
    forget_load(share)
    ranks.sum(sums)
    on_device = load.to(share.mesh.device)  # one message, not one per layer
    for stage in share.stages.values():
        update_expert_bias(stage, dict(enumerate(on_device)))
    return ExpertBalance(load.long(), sums[-1].item() / max(1, num_targets))


def _local_sums(share: Share, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Sums over this rank's backward passes: loads [layers, experts] and the auxiliary losses, 0-d; fp64 on the CPU.

    One copy from the device for all of them, because each copy waits for all work queued there.
    """
    auxiliary = torch.zeros(1, dtype=torch.float64, device=share.mesh.device)
    numbers: list[int] = []
    loads: list[Tensor] = []
    for counted, losses in _take_loads(share):
        auxiliary += losses.to(auxiliary)
        numbers += counted
        loads += [chosen.double() for chosen in counted.values()]
    together = torch.cat([auxiliary, *loads]).cpu()
    load = torch.zeros(shape, dtype=torch.float64)
    load[numbers] = together[1:].view(-1, shape[1])
    return load, together[0]


def forget_load(share: Share) -> None:
    """Reset the counts of the last passes."""
    for _ in _take_loads(share):
        pass


def _take_loads(share: Share) -> Iterable[tuple[dict[int, Tensor], Tensor]]:
    return (take_load(stage) for stage in share.stages.values())


class BalancedExperts(Observer):
    """Updates the biases that balance the experts' loads, after an update of the weights."""

    def updated(self, step: Step) -> None:
        """Sum the loads over all ranks and update the biases."""
        step.expert_balance = balance_experts(self.trainer.share, self.trainer.ranks, step.num_targets)

    def passed_over(self, step: Step) -> None:
        """Reset the counts of the passes."""
        forget_load(self.trainer.share)
