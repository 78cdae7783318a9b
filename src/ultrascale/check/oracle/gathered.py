"""Unsharded tensors from the parts that ranks hold, and whether replicas are equal."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ultrascale.description.run import Optimizer as Settings
from ultrascale.models.experts import moe_layers
from ultrascale.models.initialise import shard_boxes
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.share import LocalParameter, Share, local
from ultrascale.train.optimizers.optimizer import moment_of, moments_of


class TensorBox(NamedTuple):
    """A box of a whole tensor."""

    offsets: tuple[int, ...]
    values: Tensor


class Gathered(NamedTuple):
    """By global name; empty but on rank 0."""

    whole: dict[str, Tensor]
    differing: list[str]
    """Names of tensors of which two ranks hold the same box with different bits."""


NamedBox = tuple[str, tuple[int, ...], TensorBox]
"""The global name and shape of a tensor, and the part of it that a rank holds."""


def parts(share: Share, value_of: Callable[[nn.Parameter], Tensor]) -> list[NamedBox]:
    """Boxes of `value_of(parameter)` for each parameter of this rank; the value has the parameter's shape and sharding."""
    return [box for shard in share.local_parameters for box in _boxes(shard, local(value_of(shard.parameter)))]


def moment_parts(share: Share, optimizer: Optimizer, settings: Settings, moment: str) -> list[NamedBox]:
    """A moment of every weight that has it, float64."""
    return [
        box
        for shard in share.local_parameters
        if moment in moments_of(shard.weight, settings)
        for box in _boxes(shard, moment_of(optimizer, shard, moment).double())
    ]


def bias_parts(share: Share) -> list[NamedBox]:
    """The biases that even out the load of experts, by block, float64."""
    return [
        (f"bias.{number}", tuple(bias.shape), TensorBox((0,), bias.double()))
        for stage in share.stages.values()
        for number, layer in moe_layers(stage)
        if (bias := layer.router.e_score_correction_bias) is not None
    ]


def gather(share: Share, kinds: dict[str, list[NamedBox]]) -> dict[str, Gathered]:
    """Unsharded tensors of each kind, assembled on rank 0 from the boxes of all ranks.

    Collective, once for all kinds. Raises ValueError if the ranks together do not hold all of a tensor.
    """
    if share.layout.world_size == 1:
        return {kind: _assemble_all([boxes]) for kind, boxes in kinds.items()}
    packed = [(kind, name, shape, part.offsets, *_packed(part.values)) for kind in kinds for name, shape, part in kinds[kind]]
    packed_by_rank: list[Any] | None = [None] * share.layout.world_size if dist.get_rank() == 0 else None
    with waiting("the proof's gather of what all ranks hold"):
        dist.gather_object(packed, packed_by_rank)
    everything: dict[str, list[list[NamedBox]]] = {kind: [] for kind in kinds}
    for rank in packed_by_rank or []:
        for boxes in everything.values():
            boxes.append([])
        for kind, name, shape, offsets, *values in rank:
            everything[kind][-1].append((name, shape, TensorBox(offsets, _unpacked(*values))))
    return {kind: _assemble_all(ranks) for kind, ranks in everything.items()}


def _packed(values: Tensor) -> tuple[torch.dtype, tuple[int, ...], bytes]:
    """For pickle, which takes tensors twenty times as long as bytes."""
    return values.dtype, tuple(values.shape), values.contiguous().flatten().view(torch.uint8).numpy().tobytes()


def _unpacked(dtype: torch.dtype, shape: tuple[int, ...], content: bytes) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape) if content else torch.empty(shape, dtype=dtype)


def _assemble_all(everything: list[list[NamedBox]]) -> Gathered:
    shapes = {name: shape for rank in everything for name, shape, _ in rank}
    boxes: dict[str, list[TensorBox]] = {name: [] for name in shapes}
    for rank in everything:
        for name, _, part in rank:
            boxes[name].append(part)
    whole = {name: _assemble(name, shapes[name], boxes[name]) for name in boxes}
    return Gathered(whole, [name for name in boxes if _differ(boxes[name])])


def _boxes(shard: LocalParameter, values: Tensor) -> list[NamedBox]:
    """Boxes of this rank's shard of a tensor that is sharded as its parameter is."""
    return [
        (shard.name, shard.weight.shape, TensorBox(*box))
        for box in shard_boxes(shard.parameter, shard.weight_shard, values.detach())
    ]


def _assemble(name: str, shape: tuple[int, ...], parts: Iterable[TensorBox]) -> Tensor:
    parts = list(parts)
    whole, is_filled = torch.zeros(shape, dtype=parts[0].values.dtype), torch.zeros(shape, dtype=torch.bool)
    for part in parts:
        box = tuple(slice(first, first + size) for first, size in zip(part.offsets, part.values.shape, strict=True))
        whole[box], is_filled[box] = part.values, True
    if not is_filled.all():
        raise ValueError(f"no rank holds {int((~is_filled).sum())} of the {is_filled.numel()} elements of {name}")
    return whole


def _differ(parts: Iterable[TensorBox]) -> bool:
    first: dict[tuple[tuple[int, ...], torch.Size], Tensor] = {}
    for part in parts:
        same = first.setdefault((part.offsets, part.values.shape), part.values)
        if not torch.equal(same, part.values) and not (same.isnan() & part.values.isnan()).any():
            return True
    return False
