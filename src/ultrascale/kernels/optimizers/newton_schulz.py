"""The nearest orthogonal matrix to a matrix, nearly: Newton-Schulz iterations of Muon (Jordan et al. 2024).

For G = U S V^T five steps of X <- a X + (b A + c A A) X with A = X X^T take every singular value of X = G / |G| to between 0.7
and 1.2, with products alone. The constants are Jordan's: they raise small singular values as fast as can be, and do not quite
arrive at 1, which does not matter to training. In bf16, as there; of fp64 in fp64, where it can be proven.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ultrascale.work.sharding.owners import NEWTON_SCHULZ_STEPS

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
SMALLEST_NORM = 1e-7


def iteration_dtype(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which matrices of `dtype` are iterated, and sent."""
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
