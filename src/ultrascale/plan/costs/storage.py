"""Time that storage adds to a step: checkpoints that all ranks wait for, and batches that are not read in time.

    checkpoint   masters, moments and compute copies of all parameters, over the storage's bandwidth, once per interval
    data         4 bytes per token, read ahead during the previous step: only the excess over the step is exposed

A trainer that copies the state to the host and writes it during the next steps stops only for the copy, for seconds where this
predicts minutes: then omit the interval.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ultrascale.description.architecture.weights import num_parameters

if TYPE_CHECKING:
    from ultrascale.plan.workload import Workload

TOKEN_BYTES = 4
"""Bytes of a token on disk: uint32, which vocabularies above 65,536 need."""


@dataclass(frozen=True)
class Storage:
    """Storage for checkpoints and batches."""

    bytes_per_second: float
    """Bytes per second that all nodes together write or read."""
    checkpoint_seconds: float | None = None
    """Seconds of training between two checkpoints; None: training never waits for one."""


def checkpoint_bytes(workload: Workload) -> float:
    """Bytes of a whole checkpoint: masters, moments and compute copies of all parameters."""
    stack = workload.stack
    return num_parameters(workload.model) * (stack.master_bytes + stack.moment_bytes + stack.weight_bytes)


def checkpoint_share(workload: Workload) -> float:
    """Seconds spent waiting for checkpoints over seconds of training."""
    storage = workload.storage
    if storage is None or storage.checkpoint_seconds is None:
        return 0.0
    return checkpoint_bytes(workload) / storage.bytes_per_second / storage.checkpoint_seconds


def read_seconds(workload: Workload) -> float:
    """Seconds of reading a batch, during the previous step."""
    return 0.0 if workload.storage is None else workload.tokens_per_step * TOKEN_BYTES / workload.storage.bytes_per_second
