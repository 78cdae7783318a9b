"""Computation beside communication: what shows of the communication, and how much slower the computation gets.

    compute   ======================~~~~            while a collective runs, compute loses `slowdown` of its rate
    comm      ################                      the collective keeps its own
    total     compute + slowdown x comm             if compute is the longer; else comm

NCCL's kernels take SMs (a channel is one) and bandwidth of the memory. Published losses: 0.15 beside NVLink traffic and 0.02
beside traffic of the cards (Calculon, SC'23); 1.126 measured and 1.3 assumed as the factor on both (Galvatron, VLDB'23), which
is 0.11 to 0.23 here. The alternative, the maximum of the two, calls overlap free.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

NVLINK_SLOWDOWN = 0.15
NETWORK_SLOWDOWN = 0.02
"""Calculon (Isaev et al., SC'23), its H100 and A100 systems."""

Floats = NDArray[np.float64]


def overlapped(
    compute_seconds: ArrayLike, comm_seconds: ArrayLike, *, slowdown: ArrayLike = NVLINK_SLOWDOWN
) -> tuple[Floats, Floats]:
    """Seconds of communication that show, and of computation as slowed, when both start at once; they sum to the total.

    `slowdown`: share of its rate that computation loses while communication runs, in [0, 1). Arguments broadcast.
    """
    compute, comm, lost = (np.asarray(value, dtype=np.float64) for value in (compute_seconds, comm_seconds, slowdown))
    alone = compute / (1.0 - lost)  # if communication never ends
    slowed = np.minimum(compute + lost * comm, alone)
    return np.maximum(comm - slowed, 0.0), slowed
