"""The few numbers of the time model that no datasheet gives and no single kernel shows: how a step differs from its parts.

Each has its meaning, its range in the literature and where it comes from. Fitted ones are fitted on published runs, all sources
together, by `benchmarks/plan/cross_validate.py`; what that leaves is told by `docs/validation.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

DEVICE_DERATES = {"b200": 1.26}  # NVIDIA's recipes run 1.15 slower, SimuMax's products 1.32
"""Time of products and attention in training over what the law of `plan.laws.compute` gives for a device."""


@dataclass(frozen=True)
class Constants:
    """Constants of the time model: factors by which a step differs from the sum of its parts."""

    compute_derate: float = 1.145
    """Time of a product or of attention in training over its time alone in a hot loop: cold caches, clocks lowered by power."""
    device_derates: Mapping[str, float] = field(default_factory=lambda: DEVICE_DERATES)
    """Further factor on their time by name of accelerator; 1 for those not named."""
    power_exponent: float = 0.75
    """Exponent with which their time grows as a chip has less power, of what its law was measured with, for its peak. 1 where
    voltage is as low as it goes and clocks follow power, a third where voltage falls with the clock."""
    compiled_host_fraction: float = 0.5
    """Share of Python's time to launch a block's operations that is left when the block is compiled."""
    tensor_parallel_hidden: float = 0.17
    """Share of tensor-parallel traffic hidden where the stack overlaps it (Megatron's user buffers), beyond what travels beside
    the two products of a column-parallel layer's backward pass (`plan.time.blocks.PartSeconds.tp_beside`)."""
    data_parallel_window: float = 0.9
    """Share of the compute of a pass that traffic can run beside: the rest has no traffic ready, or none left."""
    overlap_slowdown: float = 0.15
    """Compute beside a collective loses this share of the time of the collective: it shares SMs and memory. 0.15 beside NVLink
    in Calculon (SC'23); 0.11 to 0.23 follows from what Galvatron measured and assumed (VLDB'23)."""
    straggler_per_doubling: float = 0.007
    """A step waits for the slowest of its nodes: this share more per doubling of nodes."""
    step_seconds: float = 5e-3
    """Per optimizer step: batch to device, loss to host, learning rate, logging."""
    optimizer_passes: float = 1.3
    """Bytes the optimizer really moves over what its arithmetic needs: foreach temporaries, norms, zeroing."""


CONSTANTS = Constants()
