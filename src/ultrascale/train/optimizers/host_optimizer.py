"""AdamW offloaded to the host: masters and moments live, and are updated, in host memory (ZeRO-Offload, Ren et al. 2021).

    device   gradients (fp32, reduced)  --down-->          --up-->   parameters, for the next all-gathers
    host                                  masters, moments, gradients: 16 bytes per parameter of this rank's shard

    down     b0 b1 b2 b3 ...                    copies of gradients, all queued when the step begins
    update      b0 b1 b2 b3 ...                 the CPU, one block's parameters at a time
    up             b0 b1 b2 b3 ...              copies of updated parameters

While a block is updated, the gradients of the next are copied down and the parameters of the previous are copied up. Exposed
time: the slowest of the three, plus the first or last block of the others. The device keeps its fp32 parameters (FSDP2
all-gathers from them) and gradients: 8 bytes a parameter less.

The maths is torch's fused AdamW, the operation that updates on a CPU without offload: there the results have the same bits.

Without offload `LocalAdamW` does the same on the device: the fused update of this rank's local shards, without DTensor's
dispatch. An element-wise update of tensors with equal sharding needs no communication, so DTensor, which would inspect five
lists of tensors every step, has nothing to decide. The operation is the one that torch.optim.AdamW(fused=True) calls, with the
same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ultrascale.description.run import Optimizer
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND
from ultrascale.parallel.activations.host_memory import host_tensor, host_twin
from ultrascale.parallel.share import LocalParameter, local
from ultrascale.torch_private import fused_adamw

MASTER, GRADIENT = "master", "gradient"


class HostParameters(NamedTuple):
    """Parameters of one block with the same optimizer settings."""

    parameters: list[nn.Parameter]
    group: dict[str, Any]


class HostAdamW(AdamW):
    """AdamW over `groups`, as torch's. `shards` gives each parameter's block; a block is copied and updated together."""

    def __init__(self, groups: list[dict[str, Any]], shards: list[LocalParameter], **settings: Any):
        super().__init__(groups, **settings)
        layer = {shard.parameter: shard.weight.layer for shard in shards}
        blocks: dict[tuple[int | None, int], HostParameters] = {}
        for number, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                key = (layer[parameter], number)
                blocks.setdefault(key, HostParameters([], group)).parameters.append(parameter)
        self.pieces = list(blocks.values())
        on_cuda = any(parameter.is_cuda for parameter in layer)
        self.down, self.up = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)

    def create_state(self) -> None:
        """Give every parameter zero moments, a count of updates, the master, and a buffer for the gradient, on the host."""
        for parameter in (parameter for group in self.param_groups for parameter in group["params"]):
            count = host_tensor(torch.empty((), dtype=torch.float32, device=parameter.device)).zero_()
            twins = {name: host_twin(parameter) for name in (FIRST, SECOND, MASTER, GRADIENT)}
            for moment in (FIRST, SECOND):
                local(twins[moment]).zero_()
            self.state[parameter] = {"step": count, **twins}
        self.read_parameters()

    @torch.no_grad()
    def read_parameters(self) -> None:
        """Set the masters from the parameters, which were drawn or loaded. Not needed after a step."""
        for parameter, state in self.state.items():
            local(state[MASTER]).copy_(local(parameter))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient. On return gradients are no longer read, and work queued on the device
        next sees the new parameters."""
        under_way = [self._bring_down(piece) for piece in self.pieces]
        for piece, event in zip(self.pieces, under_way, strict=True):
            if event is not None:
                event.synchronize()
            self._update(piece)
            self._bring_up(piece)
        if self.up is not None:
            torch.cuda.current_stream().wait_stream(self.up)

    def _bring_down(self, piece: HostParameters) -> torch.Event | None:
        if self.down is not None:
            self.down.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self.down is None else torch.cuda.stream(self.down):
            for parameter in piece.parameters:
                if parameter.grad is not None:
                    local(self.state[parameter][GRADIENT]).copy_(local(parameter.grad), non_blocking=True)
        return None if self.down is None else self.down.record_event()

    def _update(self, piece: HostParameters) -> None:
        changed = [self.state[parameter] for parameter in piece.parameters if parameter.grad is not None]
        if not changed:
            return
        update(piece.group, [state[MASTER] for state in changed], [state[GRADIENT] for state in changed], changed)

    def _bring_up(self, piece: HostParameters) -> None:
        with nullcontext() if self.up is None else torch.cuda.stream(self.up):
            for parameter in piece.parameters:
                if parameter.grad is not None:
                    local(parameter).copy_(local(self.state[parameter][MASTER]), non_blocking=True)


class LocalAdamW(AdamW):
    """torch's AdamW with the same state, over parameters of one dtype on one device, sharded or not."""

    def create_state(self) -> None:
        """Give every parameter zero moments."""
        for group in self.param_groups:
            create_moments(group, self.state)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            update_changed(group, self.state)


def adamw_groups(shards: Sequence[LocalParameter], settings: Optimizer) -> list[dict[str, Any]]:
    """The parameters that decay and those that do not, with AdamW's settings."""
    return [
        {
            "params": parameters, "weight_decay": decay, "lr": settings.learning_rate,
            "betas": (settings.beta1, settings.beta2), "eps": settings.eps,
        }
        for decays, decay in ((True, settings.weight_decay), (False, 0.0))
        if (parameters := [shard.parameter for shard in shards if shard.weight.decay is decays])
    ]  # fmt: skip


def create_moments(group: dict[str, Any], states: dict[Tensor, Any]) -> None:
    """Give the parameters of a group zero moments and a count of updates, as torch's first step would."""
    for parameter in group["params"]:
        count = torch.zeros((), dtype=torch.float32, device=parameter.device)
        states[parameter] = {"step": count, **{moment: torch.zeros_like(parameter) for moment in (FIRST, SECOND)}}


def update_changed(group: dict[str, Any], states: dict[Tensor, Any]) -> None:
    """Update the parameters of a group that have a gradient."""
    changed = [parameter for parameter in group["params"] if parameter.grad is not None]
    update(group, changed, [parameter.grad for parameter in changed], [states[parameter] for parameter in changed])


def update(group: dict[str, Any], parameters: list[Any], gradients: list[Any], states: list[dict[str, Tensor]]) -> None:
    """Update `parameters` and the moments in their `states` with the settings of `group`; increments each state's "step"."""
    if not parameters:
        return
    first, second = ([local(state[name]) for state in states] for name in (FIRST, SECOND))
    beta1, beta2 = group["betas"]
    fused_adamw(
        [local(tensor) for tensor in parameters], [local(tensor) for tensor in gradients], first, second,
        [state["step"] for state in states], lr=group["lr"], beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
