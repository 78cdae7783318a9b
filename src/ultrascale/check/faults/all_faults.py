"""Planted faults: classic bugs, each of which the proof must detect. A proof that cannot fail proves nothing.

They are in `faults_step` (batch, loss, norm, update), `faults_dropout`, `faults_data`, `faults_tensor`, `faults_context`,
`faults_pipeline` and `faults_experts`; each names the project that had it, if one is known. All are planted into a finished
trainer, in memory.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from contextlib import nullcontext

from ultrascale.check.faults import (
    faults_context,
    faults_data,
    faults_dropout,
    faults_experts,
    faults_pipeline,
    faults_step,
    faults_tensor,
)
from ultrascale.check.faults.table import FAULTS, Plant
from ultrascale.train.trainer import Trainer

_MODULES = (faults_step, faults_dropout, faults_data, faults_tensor, faults_context, faults_pipeline, faults_experts)
_CODE = ChainMap(*(vars(module) for module in _MODULES))
PLANTS: dict[str, Callable[[Trainer], Plant]] = {name: _CODE[f"_{name}".replace("-", "_")] for name in FAULTS}
"""Functions that plant the faults, each named as its fault."""
CLASSIC = ("missing-reduce", "mean-of-means", "counted-twice", "shifted-batch")
"""Names of faults that fit any run of several data-parallel ranks."""


def planted(fault: str | None, trainer: Trainer) -> Plant:
    """Context in which `trainer` has the fault. None plants nothing. Raises KeyError for an unknown fault."""
    return nullcontext() if fault is None else PLANTS[fault](trainer)
