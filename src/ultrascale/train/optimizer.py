"""AdamW over a rank's parameters, with weight decay where the weights table says."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version
from torch.optim import AdamW

from ultrascale.parallel.share import Share
from ultrascale.spec.run import Optimizer

MOMENTS = ("exp_avg", "exp_avg_sq")


def build_optimizer(share: Share, settings: Optimizer) -> AdamW:
    """Fused AdamW in two groups, with and without weight decay. Its state exists from the start, so that it can be saved,
    loaded and planned at any step."""
    groups = [
        {"params": [one.parameter for one in share.held if one.weight.decay], "weight_decay": settings.weight_decay},
        {"params": [one.parameter for one in share.held if not one.weight.decay], "weight_decay": 0.0},
    ]
    optimizer = AdamW(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.eps,
        fused=True,
    )
    # The fused update does not tell autograd that it wrote; `parallel.precision` has to know.
    optimizer.register_step_post_hook(lambda *unused: increment_version(share.parameters()))
    return optimizer


def create_state(optimizer: AdamW, steps_done: int) -> None:
    """Give every parameter its moments (zero) and its count of updates, as AdamW's first step would."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(steps_done), dtype=torch.float32, device=parameter.device),
                **{moment: torch.zeros_like(parameter) for moment in MOMENTS},
            }


def set_steps_done(optimizer: AdamW, steps_done: int) -> None:
    """Set every parameter's count of updates, on which AdamW's bias correction depends."""
    for state in optimizer.state.values():
        state["step"].fill_(float(steps_done))


def set_learning_rate(optimizer: AdamW, rate: float) -> None:
    """Use `rate` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate
