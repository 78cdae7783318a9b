"""AdamW over a rank's parameters, with weight decay where the weights table says."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.graph import increment_version
from torch.optim import AdamW

from ultrascale.parallel.host_memory import host_tensor
from ultrascale.parallel.share import Share
from ultrascale.spec.run import Optimizer
from ultrascale.train.host_optimizer import HostAdamW

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(share: Share, settings: Optimizer) -> AdamW:
    """Fused AdamW in two groups, with and without weight decay. Its state exists from the start, so that it can be saved,
    loaded and planned at any step."""
    groups = [
        {"params": [one.parameter for one in share.held if one.weight.decay], "weight_decay": settings.weight_decay},
        {"params": [one.parameter for one in share.held if not one.weight.decay], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.eps, "fused": True,
    }  # fmt: skip
    optimizer = HostAdamW(used, share.held, **options) if share.layout.offload_optimizer else AdamW(used, **options)
    # The fused update does not tell autograd that it wrote; `parallel.precision` has to know.
    optimizer.register_step_post_hook(lambda *unused: increment_version(share.parameters()))
    return optimizer


def create_state(optimizer: AdamW, steps_done: int) -> None:
    """Give every parameter its moments (zero) and its count of updates, as AdamW's first step would."""
    offloads = isinstance(optimizer, HostAdamW)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.empty((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {
                "step": (host_tensor(count) if offloads else count).fill_(float(steps_done)),
                **(optimizer.create_host_state(parameter, MOMENTS) if offloads else _zeros(parameter)),
            }
    if offloads:
        optimizer.read_parameters()


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {moment: torch.zeros_like(parameter) for moment in MOMENTS}


def set_steps_done(optimizer: AdamW, steps_done: int) -> None:
    """Go on after so many updates, with parameters that were loaded: AdamW's bias correction depends on the count."""
    for state in optimizer.state.values():
        state["step"].fill_(float(steps_done))
    if isinstance(optimizer, HostAdamW):
        optimizer.read_parameters()


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Use `rate` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
