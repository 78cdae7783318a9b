"""Planted faults: classic bugs, each of which the proof must detect. A proof that cannot fail proves nothing.

They are in `faults_step` (batch, loss, norm, update), `faults_dropout`, `faults_data`, `faults_tensor`, `faults_context`,
`faults_pipeline` and `faults_experts`; each names the project that had it, if one is known. All are planted into a finished
trainer, in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ultrascale.check.faults import (
    faults_context,
    faults_data,
    faults_dropout,
    faults_experts,
    faults_pipeline,
    faults_step,
    faults_tensor,
)
from ultrascale.check.faults.plants import PLANTS
from ultrascale.train.trainer import Trainer

MODULES = (faults_step, faults_dropout, faults_data, faults_tensor, faults_context, faults_pipeline, faults_experts)
CLASSIC = ("missing-reduce", "mean-of-means", "counted-twice", "shifted-batch")
"""Names of faults that fit any run of several data-parallel ranks."""


@contextmanager
def planted(fault: str | None, trainer: Trainer) -> Iterator[None]:
    """Context in which `trainer` has the fault. None plants nothing. Raises KeyError for an unknown fault."""
    if fault is None:
        yield
        return
    with PLANTS[fault](trainer):
        yield
