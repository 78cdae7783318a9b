"""The optimizer of a run over a rank's parameters; the weights table says which weights decay."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from ultrascale.description.architecture.weights import Weight, is_hidden_matrix
from ultrascale.description.run import Optimizer
from ultrascale.kernels.optimizers.narrow_moments import FIRST, SECOND, Kind
from ultrascale.parallel.share import LocalParameter, Share, local
from ultrascale.torch_private import leave_compiler_out
from ultrascale.train.optimizers.compact_adamw import CompactAdamW
from ultrascale.train.optimizers.host_optimizer import HostAdamW, LocalAdamW, adamw_groups
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
    """The optimizer that `settings` name. Its state exists from the start, so that it can be saved, loaded and planned at any
    step. `seed`: for stochastic rounding."""
    leave_compiler_out()
    optimizer: Muon | CompactAdamW | HostAdamW | LocalAdamW
    if settings.name == "muon":
        optimizer = Muon(share, settings)
    elif settings.name in KINDS:
        optimizer = CompactAdamW(share, settings, KINDS[settings.name], seed=seed)
    elif share.layout.offload_optimizer:
        optimizer = HostAdamW(adamw_groups(share.local_parameters, settings), share.local_parameters, fused=True)
    else:
        optimizer = LocalAdamW(adamw_groups(share.local_parameters, settings), fused=True)
    optimizer.create_state()
    # The fused update does not tell autograd that it wrote; `parallel.precision.mixed_precision` must be notified.
    optimizer.register_step_post_hook(lambda *unused: increment_version(share.parameters()))
    return optimizer


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
