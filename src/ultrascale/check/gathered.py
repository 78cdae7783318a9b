"""Whole tensors out of the parts that ranks hold, and whether parts that several ranks hold are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.parallel.share import Share


class Part(NamedTuple):
    """A box of a whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor


class Gathered(NamedTuple):
    """By global name."""

    whole: dict[str, Tensor]
    differing: list[str]
    """Of which two ranks hold the same box with other bits."""


def gather_parts(share: Share, value_of: Callable[[nn.Parameter], Tensor]) -> Gathered:
    """What `value_of` gives for each parameter (its shape and cut are the parameter's), whole, on every rank.

    Collective. Raises ValueError if the ranks together do not hold all of a weight.
    """
    own = [(one.name, one.weight.shape, Part(one.place.offsets, _uncut(value_of(one.parameter)))) for one in share.held]
    everything: list[list[tuple[str, tuple[int, ...], Part]]] = [own]
    if share.layout.world_size > 1:
        everything = [[] for _ in range(share.layout.world_size)]
        dist.all_gather_object(everything, own)
    shapes = {name: shape for rank in everything for name, shape, _ in rank}
    parts: dict[str, list[Part]] = {name: [] for name in shapes}
    for rank in everything:
        for name, _, part in rank:
            parts[name].append(part)
    whole = {name: _assembled(name, shapes[name], parts[name]) for name in parts}
    return Gathered(whole, [name for name in parts if _differ(parts[name])])


def _uncut(tensor: Tensor) -> Tensor:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def _assembled(name: str, shape: tuple[int, ...], parts: Iterable[Part]) -> Tensor:
    parts = list(parts)
    whole, is_filled = torch.zeros(shape, dtype=parts[0].values.dtype), torch.zeros(shape, dtype=torch.bool)
    for part in parts:
        box = tuple(slice(first, first + size) for first, size in zip(part.offsets, part.values.shape, strict=True))
        whole[box], is_filled[box] = part.values, True
    if not is_filled.all():
        raise ValueError(f"no rank holds {int((~is_filled).sum())} of the {is_filled.numel()} elements of {name}")
    return whole


def _differ(parts: Iterable[Part]) -> bool:
    first: dict[tuple[tuple[int, ...], torch.Size], Tensor] = {}
    for part in parts:
        same = first.setdefault((part.offsets, part.values.shape), part.values)
        if not torch.equal(same, part.values) and not (same.isnan() & part.values.isnan()).any():
            return True
    return False
