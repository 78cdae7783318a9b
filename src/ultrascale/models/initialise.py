"""Initial values that do not depend on the layout: each weight's are a pure function of (seed, its name).

Every weight (of experts: every expert) is drawn whole, in fp32, from its own generator, and a rank keeps its slice. Ranks that
share a weight draw the same numbers, so nothing is sent. The cost is one whole weight in memory at a time, and world-size times
the drawing; the alternative, one stream for all weights, ties the values to the order and the cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from ultrascale.spec.model import Model
from ultrascale.spec.places import Place
from ultrascale.spec.weights import Weight, weights


@torch.no_grad()
def initialise(
    decoder: nn.Module,
    model: Model,
    seed: int,
    *,
    places: Mapping[str, Place] | None = None,
    draw_on_device: bool = False,
) -> None:
    """Fill every parameter and buffer of `decoder` (plain or DTensor, on any device) as the table of weights says.

    `places`: which part of each weight the decoder holds, by name, of those it holds; None: it holds all of all of them.
    Numbers are drawn on the CPU, so that all devices start from the same bits; `draw_on_device` draws where the parameter is,
    which is faster and gives that device's own numbers.
    Raises ValueError if the names or shapes differ from the table.
    """
    parameters = dict(decoder.named_parameters())
    table = {weight.name: weight for weight in weights(model) if places is None or weight.name in places}
    if parameters.keys() != table.keys():
        odd = sorted(parameters.keys() ^ table.keys())
        raise ValueError(f"the decoder's parameters are not those of its description; these differ: {odd}")
    for name, parameter in parameters.items():
        whole = Place((0,) * len(table[name].shape), table[name].shape)
        part = whole if places is None else places[name]
        if tuple(parameter.shape) != part.shape:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its description says {part.shape}")
        fill(parameter, initial_value(table[name], seed, part=part, device=parameter.device if draw_on_device else "cpu"))
    for bias in decoder.buffers():  # those that balance experts' load
        bias.zero_()


def initial_value(weight: Weight, seed: int, *, part: Place | None = None, device: torch.device | str = "cpu") -> Tensor:
    """The initial value of `weight`, or of a part of it, fp32 on `device`."""
    offsets, shape = ((0,) * len(weight.shape), weight.shape) if part is None else (part.offsets, part.shape)
    if weight.init_std is None:
        return torch.full(shape, weight.init_fill, dtype=torch.float32, device=device)
    cut = tuple(slice(first, first + length) for first, length in zip(offsets, shape, strict=True))
    if not weight.is_expert:
        return _drawn(weight.name, weight.shape, weight.init_std, seed, device)[cut]
    value = torch.empty(shape, dtype=torch.float32, device=device)
    for place, expert in enumerate(range(weight.shape[0])[cut[0]]):
        value[place] = _drawn(f"{weight.name}/{expert}", weight.shape[1:], weight.init_std, seed, device)[cut[1:]]
    return value


def _drawn(name: str, shape: tuple[int, ...], std: float, seed: int, device: torch.device | str) -> Tensor:
    generator = torch.Generator(device).manual_seed(weight_seed(seed, name))
    return torch.empty(shape, dtype=torch.float32, device=device).normal_(0.0, std, generator=generator)


def weight_seed(seed: int, name: str) -> int:
    """A 63-bit seed of its own for every (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def fill(parameter: Tensor, value: Tensor) -> None:
    """Copy the whole `value` into `parameter`; of a DTensor this rank's slice, with nothing sent."""
    if not isinstance(parameter, DTensor):
        parameter.copy_(value)
        return
    mesh = parameter.device_mesh
    whole = value.to(parameter.device)
    cut = distribute_tensor(whole, mesh, parameter.placements, src_data_rank=None)
    parameter.to_local().copy_(cut.to_local())
