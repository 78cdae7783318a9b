"""Whole tensors out of the parts that ranks hold, and whether parts that several ranks hold are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from ultrascale.models.experts import moe_layers
from ultrascale.parallel.share import Share
from ultrascale.spec.run import Optimizer as Settings
from ultrascale.train.optimizer import moment_of, moments_of


class Part(NamedTuple):
    """A box of a whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor


class Gathered(NamedTuple):
    """By global name; empty but on rank 0."""

    whole: dict[str, Tensor]
    differing: list[str]
    """Of which two ranks hold the same box with other bits."""


def gather_parts(share: Share, value_of: Callable[[nn.Parameter], Tensor]) -> Gathered:
    """What `value_of` gives for each parameter (its shape and cut are the parameter's), whole, on rank 0.

    Collective. Raises ValueError if the ranks together do not hold all of a weight.
    """
    own = [(one.name, one.weight.shape, Part(one.place.offsets, _uncut(value_of(one.parameter)))) for one in share.held]
    return _joined(_everything(share, own))


def gather_moments(share: Share, optimizer: Optimizer, settings: Settings, moment: str) -> Gathered:
    """A moment of every weight that has it, whole, float64, on rank 0. Collective."""
    own = [
        (one.name, one.weight.shape, Part(one.place.offsets, _uncut(moment_of(optimizer, one, moment)).double()))
        for one in share.held
        if moment in moments_of(one.weight, settings)
    ]
    return _joined(_everything(share, own))


def gather_biases(share: Share) -> Gathered:
    """The biases that even out the load of experts, by block, float64, on rank 0. Collective."""
    own = [
        (f"bias.{number}", tuple(bias.shape), Part((0,), bias.double().clone()))
        for stage in share.stages.values()
        for number, layer in moe_layers(stage)
        if (bias := layer.router.e_score_correction_bias) is not None
    ]
    return _joined(_everything(share, own))


def _everything(share: Share, own: list[Any]) -> list[list[Any]]:
    if share.layout.world_size == 1:
        return [own]
    found: list[Any] | None = [None] * share.layout.world_size if dist.get_rank() == 0 else None
    dist.gather_object(own, found)
    return found or []


def _joined(everything: list[list[tuple[str, tuple[int, ...], Part]]]) -> Gathered:
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
