"""What the device holds beyond the bytes that tensors need: the allocator's rounding and cache, and what lies outside torch.

reserved    segments that torch's caching allocator took from CUDA. Blocks above 1 MiB are cut out of 20 MiB segments, those
            above 10 MiB are rounded to 2 MiB (c10/core/AllocatorConfig.h), and freed segments are kept for the next block
            that fits them: a step whose tensors have few sizes wastes little. Each stream has segments of its own
            (`plan.rank_moments.aside_bytes`), and unless segments can grow none is ever joined with another: FSDP's largest
            buffers have no room in what activations have left (`plan.rank_moments.late_bytes`). `trace.allocator` replays
            all of it; `tests/agree/test_reserved_agrees.py` holds this to that
outside     CUDA's context and modules, NCCL's buffers of each communicator, cuBLAS's and attention's workspaces
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ultrascale.plan.layouts import LayoutTable

Floats = NDArray[np.float64]
CACHED_FRACTION = 0.03
"""Of the peak: reserved and not allocated. 0.01 to 0.03 in nanotron's logs (2024), 0.03 to 0.06 in SimuMax's on B200 (2026)."""
CACHED_BYTES = 0.5 * 2**30
LEFT_BYTES = 0.1 * 2**30
"""In its place, where the buffers for which segments have no room are counted one by one: what is below 20 MiB."""
CONTEXT_BYTES = 0.6 * 2**30
"""CUDA's context and modules: 0.47 to 0.92 GiB on A100 and H100 (ml-engineering)."""
WORLD_BYTES = 0.4 * 2**30
"""NCCL's buffers of the communicator of all ranks: 0.33 GiB on 2 GPUs, 0.38 on 4 to 8 (aiconfigurator)."""
COMMUNICATOR_BYTES = 0.35 * 2**30
"""Of each further communicator: 1.0 GiB for three, measured on H100 (pith-train)."""


def reserved_bytes(allocated: Floats, *, joins_segments: bool) -> Floats:
    """What torch's caching allocator takes for a peak of `allocated`; `joins_segments` as in `Stack`."""
    return allocated * (1 + CACHED_FRACTION) + (CACHED_BYTES if joins_segments else LEFT_BYTES)


def outside_bytes(table: LayoutTable) -> Floats:
    """What lies outside torch's allocator, [layouts]."""
    world = table.tp * table.cp * table.dp * table.pp
    of_data = (table.dp * table.cp > 1) & (table.tp * table.pp > 1)
    communicators = 1 * (table.tp > 1) + (table.pp > 1) + (table.cp > 1) + of_data + (table.ep > 1)
    return CONTEXT_BYTES + np.where(world > 1, WORLD_BYTES, 0.0) + COMMUNICATOR_BYTES * communicators
