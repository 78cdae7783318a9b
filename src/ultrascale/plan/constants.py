"""Constants of the time model that neither datasheets nor single kernels give: how a step differs from the sum of its parts.

Each has its meaning, its range in the literature and its source. `benchmarks/plan/cross_validate.py` fits constants on
published runs, all sources together; values are between what the tuned ones of vendors and what all ask for, and
`docs/validation.md` reports the remaining errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEVICE_DERATES = {"b200": 1.15, "gh200": 1.09}  # means of published runs by source; `plan.time.blocks.PRODUCT_DERATES`
"""Seconds of GEMMs and attention in training over those by `plan.laws.compute`, by accelerator. A GH200 shares its power with
its CPU: beyond `power_slowdown` of what is left."""


@dataclass(frozen=True)
class Constants:
    """Constants of the time model: factors by which a step differs from the sum of its parts."""

    compute_derate: float = 1.165
    """Time of a GEMM or attention in training over that in a hot loop of its own: cold caches, clocks lowered by power."""
    device_derates: Mapping[str, float] = field(default_factory=lambda: DEVICE_DERATES)
    """Further factor on their time by name of accelerator; 1 for those not named."""
    compiled_host_fraction: float = 0.5
    """Fraction of Python's launch time of a block that remains when the block is compiled."""
    tensor_parallel_hidden: float = 0.19
    """Fraction of tp traffic hidden if the stack overlaps it (Megatron's user buffers), beyond the overlap with the two GEMMs
    of a column-parallel layer's backward pass (`plan.time.blocks.PartSeconds.tp_beside`)."""
    data_parallel_window: float = 0.9
    """Fraction of a pass's compute with which dp traffic can overlap: during the rest none is ready, or none is left."""
    overlap_slowdown: float = 0.16
    """Compute that overlaps with a collective is slowed by this fraction of the collective's time, since they share SMs and
    memory. 0.15 for NVLink in Calculon (SC'23); 0.11 to 0.23 follows from measurements and assumptions of Galvatron
    (VLDB'23)."""
    straggler_per_doubling: float = 0.007
    """Fraction by which a step is longer per doubling of nodes, since it waits for the slowest node."""
    step_seconds: float = 5e-3
    """Fixed seconds per optimizer step: batch to device, loss to host, learning rate, logging."""
    optimizer_passes: float = 1.25
    """Bytes that the optimizer moves over the minimum for its arithmetic: foreach temporaries, norms, zeroing."""


CONSTANTS = Constants()
