"""Time that storage adds to a step: checkpoints that all ranks wait for, and batches that are not read in time.

    checkpoint   masters, moments and compute copies of all parameters, over what the storage takes, once an interval
    data         4 bytes a token, read ahead while the step before runs: only what takes longer than the step shows

A trainer that copies the state to the host and writes it beside the next steps stops for the copy alone, seconds where this
says minutes: then leave the interval out.
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
    """Storage that takes checkpoints and supplies batches."""

    bytes_per_second: float
    """Bytes per second that all nodes together write or read."""
    checkpoint_seconds: float | None = None
    """Seconds of training between two checkpoints; None: training waits for none."""


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
    """Seconds that reading a batch takes, beside the step before."""
    return 0.0 if workload.storage is None else workload.tokens_per_step * TOKEN_BYTES / workload.storage.bytes_per_second
