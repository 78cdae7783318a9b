"""Initial weights, one at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from ultrascale.description.architecture.weights import Weight
from ultrascale.models.initialise import _all_of, _fill
from ultrascale.work.sharding.places import WeightShard


def initial_value(weight: Weight, seed: int, *, part: WeightShard | None = None) -> Tensor:
    """Initial value of `weight`, or of a shard of it, fp32 on the CPU."""
    part = part or _all_of(weight)
    value = torch.empty(part.shape, dtype=torch.float32)
    _fill(value, weight, part.offsets, seed, value.device)
    return value
