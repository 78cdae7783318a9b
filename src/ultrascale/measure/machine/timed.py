"""One timed message of `network`; the JSON Schema of its verb is read off it without torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Timed:
    """One kind of message, group of ranks and size, timed."""

    kind: str
    size: int
    stride: int
    num_bytes: int
    seconds: float
    """The median round, of the slowest rank."""
    spread: float
    """(slowest - fastest) / median of the rounds."""
    bus_bytes_per_second: float
    """Bus bandwidth as nccl-tests defines it: comparable between kinds and sizes of groups, and with a link's rate."""
    planned_seconds: float | None
    """Planned seconds; None if this machine is not in the catalogue, or not as it is there."""
