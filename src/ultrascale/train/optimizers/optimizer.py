"""The optimizer of a run over a rank's parameters; the weights table says which weights decay."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import AdamW

from ultrascale.description.architecture.weights import Weight, is_hidden_matrix
from ultrascale.description.run import Optimizer
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND, Kind
from ultrascale.parallel.activations.host_memory import host_tensor
from ultrascale.parallel.share import LocalParameter, Share, local
from ultrascale.torch_private import leave_compiler_out
from ultrascale.train.optimizers.compact_adamw import CompactAdamW
from ultrascale.train.optimizers.host_optimizer import HostAdamW, LocalAdamW
from ultrascale.train.optimizers.muon import Muon

MOMENTS = (FIRST, SECOND, "momentum_buffer")
KINDS: dict[str, Kind] = {"adamw-bf16": "bf16", "adamw-8bit": "8bit"}
"""Format of narrow moments, by the optimizer's name."""


def moments_of(weight: Weight, settings: Optimizer) -> tuple[str, ...]:
    """Names of the moments that the optimizer keeps for a weight."""
    return MOMENTS[2:] if settings.name == "muon" and is_hidden_matrix(weight) else MOMENTS[:2]


def saved_dtype(weight: Weight, settings: Optimizer, master: torch.dtype) -> torch.dtype:
    """Dtype of a weight's moments in a checkpoint."""
    kind = None if len(weight.shape) == 1 else KINDS.get(settings.name)
    return {"bf16": torch.bfloat16, "8bit": torch.float32}.get(kind or "", master)


def build_optimizer(share: Share, settings: Optimizer, *, seed: int = 0) -> torch.optim.Optimizer:
    """The optimizer that `settings` name. Its state exists from the start (`create_state`), so that it can be saved, loaded and
    planned at any step. `seed`: for stochastic rounding."""
    leave_compiler_out()
    optimizer: torch.optim.Optimizer
    if settings.name == "muon":
        optimizer = Muon(share, settings)
    elif settings.name in KINDS:
        optimizer = CompactAdamW(share, settings, KINDS[settings.name], seed=seed)
    else:
        optimizer = _adamw(share, settings)
    # The fused update does not tell autograd that it wrote; `parallel.precision.mixed_precision` must be notified.
    optimizer.register_step_post_hook(lambda *unused: increment_version(share.parameters()))
    return optimizer


def _adamw(share: Share, settings: Optimizer) -> AdamW:
    """Fused AdamW in two groups, with and without weight decay."""
    groups = [
        {
            "params": [shard.parameter for shard in share.local_parameters if shard.weight.decay],
            "weight_decay": settings.weight_decay,
        },
        {"params": [shard.parameter for shard in share.local_parameters if not shard.weight.decay], "weight_decay": 0.0},
    ]
    used = [group for group in groups if group["params"]]
    options: dict[str, Any] = {
        "lr": settings.learning_rate, "betas": (settings.beta1, settings.beta2), "eps": settings.eps, "fused": True,
    }  # fmt: skip
    return HostAdamW(used, share.local_parameters, **options) if share.layout.offload_optimizer else LocalAdamW(used, **options)


def create_state(optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Give every parameter zero moments and a count of updates, as the optimizer's first step would."""
    if isinstance(optimizer, (Muon, CompactAdamW)):
        optimizer.create_state(steps_done)
        return
    offloads = isinstance(optimizer, HostAdamW)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = torch.empty((), dtype=torch.float32, device=parameter.device)
            optimizer.state[parameter] = {
                "step": (host_tensor(count) if offloads else count).fill_(float(steps_done)),
                **(optimizer.create_host_state(parameter, MOMENTS[:2]) if offloads else _zeros(parameter)),
            }
    if offloads:
        optimizer.read_parameters()


def _zeros(parameter: torch.Tensor) -> dict[str, torch.Tensor]:
    return {moment: torch.zeros_like(parameter) for moment in MOMENTS[:2]}


def set_steps_done(optimizer: torch.optim.Optimizer, steps_done: int) -> None:
    """Set the count of updates for loaded parameters: AdamW's bias correction and the rounding of narrow moments depend on
    it."""
    if isinstance(optimizer, CompactAdamW):
        optimizer.updates_done = steps_done
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(float(steps_done))
    if isinstance(optimizer, HostAdamW):
        optimizer.read_parameters()


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` for the next update."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def moment_of(optimizer: torch.optim.Optimizer, shard: LocalParameter, moment: str) -> Tensor:
    """This rank's shard of a moment; for narrow moments a dequantized copy on the CPU."""
    if isinstance(optimizer, CompactAdamW):
        return optimizer.store(shard).whole(moment)
    return local(optimizer.state[shard.parameter][moment])
