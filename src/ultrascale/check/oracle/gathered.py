"""Whole tensors out of the parts that ranks hold, and whether parts that several ranks hold are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ultrascale.description.run import Optimizer as Settings
from ultrascale.models.experts import moe_layers
from ultrascale.models.initialise import own_boxes
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import Held, Share, local
from ultrascale.train.optimizers.optimizer import moment_of, moments_of


class Part(NamedTuple):
    """A box of a whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor


class Gathered(NamedTuple):
    """By global name; empty but on rank 0."""

    whole: dict[str, Tensor]
    differing: list[str]
    """Names of tensors of which two ranks hold the same box with different bits."""


Box = tuple[str, tuple[int, ...], Part]
"""The global name and shape of a tensor, and the part of it that a rank holds."""


def parts(share: Share, value_of: Callable[[nn.Parameter], Tensor]) -> list[Box]:
    """Boxes of `value_of(parameter)` for each parameter of this rank; the value has the parameter's shape and sharding."""
    return [box for one in share.held for box in _boxes(one, local(value_of(one.parameter)))]


def moment_parts(share: Share, optimizer: Optimizer, settings: Settings, moment: str) -> list[Box]:
    """A moment of every weight that has it, float64."""
    return [
        box
        for one in share.held
        if moment in moments_of(one.weight, settings)
        for box in _boxes(one, moment_of(optimizer, one, moment).double())
    ]


def bias_parts(share: Share) -> list[Box]:
    """The biases that even out the load of experts, by block, float64."""
    return [
        (f"bias.{number}", tuple(bias.shape), Part((0,), bias.double()))
        for stage in share.stages.values()
        for number, layer in moe_layers(stage)
        if (bias := layer.router.e_score_correction_bias) is not None
    ]


def gather(share: Share, kinds: dict[str, list[Box]]) -> dict[str, Gathered]:
    """Unsharded tensors of each kind, assembled on rank 0 from the boxes of all ranks.

    Collective, once for all kinds. Raises ValueError if the ranks together do not hold all of a tensor.
    """
    if share.layout.world_size == 1:
        return {kind: _joined([boxes]) for kind, boxes in kinds.items()}
    packed = [(kind, name, shape, part.offsets, *_packed(part.values)) for kind in kinds for name, shape, part in kinds[kind]]
    found: list[Any] | None = [None] * share.layout.world_size if dist.get_rank() == 0 else None
    with waiting("the proof's gather of what all ranks hold"):
        dist.gather_object(packed, found)
    everything: dict[str, list[list[Box]]] = {kind: [] for kind in kinds}
    for rank in found or []:
        for boxes in everything.values():
            boxes.append([])
        for kind, name, shape, offsets, *values in rank:
            everything[kind][-1].append((name, shape, Part(offsets, _unpacked(*values))))
    return {kind: _joined(ranks) for kind, ranks in everything.items()}


def _packed(values: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """For pickle, which takes tensors twenty times as long as bytes."""
    return values.dtype, tuple(values.shape), values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


def _joined(everything: list[list[Box]]) -> Gathered:
    shapes = {name: shape for rank in everything for name, shape, _ in rank}
    held: dict[str, list[Part]] = {name: [] for name in shapes}
    for rank in everything:
        for name, _, part in rank:
            held[name].append(part)
    whole = {name: _assembled(name, shapes[name], held[name]) for name in held}
    return Gathered(whole, [name for name in held if _differ(held[name])])


def _boxes(one: Held, own: Tensor) -> list[Box]:
    """Boxes of this rank's shard of a tensor that is sharded as its parameter is."""
    return [(one.name, one.weight.shape, Part(*box)) for box in own_boxes(one.parameter, one.place, own.detach())]


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
