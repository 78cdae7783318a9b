"""AdamW on what this rank holds: torch's fused update of the local parts, without a distributed tensor's dispatch.

An element-wise update of parts that are cut alike needs no message, so there is nothing for DTensor to find out, which would
look at five lists of tensors every step. The operation is the one that torch.optim.AdamW(fused=True) calls, with the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW

from ultrascale.parallel.share import local
from ultrascale.torch_private import fused_adamw


class LocalAdamW(AdamW):
    """torch's AdamW with the state of torch's, over parameters of one dtype on one device, whole or cut."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            changed = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in changed]
            update(group, changed, [parameter.grad for parameter in changed], states)


def update(group: dict[str, Any], parameters: list[Any], gradients: list[Any], states: list[dict[str, Tensor]]) -> None:
    """Write `parameters` and the moments in their `states` with the settings of `group`; counts the update in each "step"."""
    if not parameters:
        return
    first, second = ([local(state[name]) for state in states] for name in ("exp_avg", "exp_avg_sq"))
    beta1, beta2 = group["betas"]
    fused_adamw(
        [local(one) for one in parameters], [local(one) for one in gradients], first, second,
        [state["step"] for state in states], lr=group["lr"], beta1=beta1, beta2=beta2,
        weight_decay=group["weight_decay"], eps=group["eps"],
    )  # fmt: skip
