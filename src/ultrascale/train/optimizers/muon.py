"""Muon: hidden matrices are updated by an orthogonal matrix, all else by AdamW (Jordan et al. 2024; Liu et al. 2025).

    B = momentum B + G                       the momentum, fp32, sharded like the matrix
    O = orthogonalise(G + momentum B)        of the *unsharded* matrix, gathered by `parallel.data.gathered_matrices`
    W = (1 - rate decay) W - rate 0.2 sqrt(max(m, n)) O

The factor makes an update as large as AdamW's usually is (Liu et al. 2025, section 2.2), so that both share one learning rate
and one weight decay. Hidden matrices are those of attention, of MLPs and of each expert; embedding, head, router, norms and
biases use AdamW. With this factor it equals `torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`, which supports neither sharded
matrices nor experts; a test compares the two.

`orthogonalise` approximates the nearest orthogonal matrix, by Newton-Schulz iterations (Jordan et al. 2024). For G = U S V^T
five steps of X <- a X + (b A + c A A) X with A = X X^T take every singular value of X = G / |G| to between 0.7 and 1.2, with
matrix products alone. The constants are Jordan's: they raise small singular values as fast as possible, and do not quite
converge to 1, which does not matter to training. Runs in bf16, as there; for fp64 in fp64, where it can be proven.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import sqrt
from typing import Any

import torch
from torch import Tensor

from ultrascale.description.architecture.weights import is_hidden_matrix
from ultrascale.description.run import Optimizer
from ultrascale.parallel.data.gathered_matrices import GatheredMatrices
from ultrascale.parallel.share import Share, local
from ultrascale.train.optimizers.host_optimizer import adamw_groups, create_moments, update_changed
from ultrascale.work.sharding.owners import NEWTON_SCHULZ_STEPS

RMS_OF_ADAMW = 0.2
"""Root mean square of an AdamW update over its learning rate, as observed in training (Liu et al. 2025)."""


class Muon(torch.optim.Optimizer):
    """Muon over the parameters of a share. Groups: matrices, then the others with and without weight decay."""

    def __init__(self, share: Share, settings: Optimizer):
        self.matrices = [shard for shard in share.local_parameters if is_hidden_matrix(shard.weight)]
        others = [shard for shard in share.local_parameters if not is_hidden_matrix(shard.weight)]
        matrices = {"params": [shard.parameter for shard in self.matrices], "weight_decay": settings.weight_decay}
        super().__init__([matrices, *adamw_groups(others, settings)], {"lr": settings.learning_rate})
        self.settings, self.whole = settings, GatheredMatrices(share, self.matrices)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update every parameter that has a gradient. A matrix without one counts as zero, because its owner waits for it."""
        assert closure is None
        matrices, *others = self.param_groups
        if self.matrices:
            self._update_matrices(matrices)
        for group in others:
            update_changed(group, self.state)

    def _update_matrices(self, group: dict[str, Any]) -> None:
        parts = []
        for parameter in group["params"]:
            momentum = local(self.state[parameter]["momentum_buffer"])
            momentum.mul_(self.settings.momentum)
            part = momentum * self.settings.momentum
            if parameter.grad is not None:
                gradient = local(parameter.grad)
                momentum.add_(gradient)
                part = torch.add(gradient, momentum, alpha=self.settings.momentum)
            parts.append(part.to(iteration_dtype(part.dtype)))
        for shard, update in zip(self.matrices, self.whole.apply(parts, orthogonalise), strict=True):
            parameter = local(shard.parameter)
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
            parameter.add_(update.to(parameter.dtype), alpha=-group["lr"] * update_size(shard.weight.shape))

    def create_state(self) -> None:
        """Give every parameter zero moments."""
        matrices, *others = self.param_groups
        for parameter in matrices["params"]:
            self.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
        for group in others:
            create_moments(group, self.state)


def update_size(shape: Sequence[int]) -> float:
    """Factor on an orthogonal matrix [m, n] (experts: on each of [X, m, n]) in the update, besides the learning rate."""
    return RMS_OF_ADAMW * sqrt(max(shape[-2:]))


COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def iteration_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which matrices of `dtype` are iterated and communicated."""
    return torch.float64 if dtype == torch.float64 else torch.bfloat16


def orthogonalise(matrices: Tensor) -> Tensor:
    """U S' V^T with S' near 1, of [m, n] or of each of [X, m, n], in the dtype of `iteration_dtype`."""
    x = matrices.to(iteration_dtype(matrices.dtype))
    is_tall = x.shape[-2] > x.shape[-1]
    x = x.mT if is_tall else x
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp_min(SMALLEST_NORM)
    a, b, c = COEFFICIENTS
    add_product = torch.addmm if x.dim() == 2 else torch.baddbmm
    for _ in range(NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = add_product(x, add_product(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
