"""Initial values independent of the layout: each is a pure function of (seed, name of its weight, position in it).

A weight (of experts: each expert's matrix) is drawn in tiles, in fp32, each from its own generator:

    columns     0 .. 1023   1024 .. 2047
    rows 0-63   tile 0/0    tile 0/1          a rank draws the tiles that overlap its shard, one at a time, and keeps the
    64-127      tile 1/0    tile 1/1          overlap: rows under tp, ep or ZeRO, or columns under tp

Ranks that share a weight draw the same numbers, so nothing is sent, and no rank holds more than its shard and one tile. A shard
of whole tiles draws no extra numbers; a narrow one draws at most a tile's width more on each side. The alternatives: one random
stream for all weights ties the values to order and sharding; drawing whole weights costs every rank the work of all.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, weights
from ultrascale.work.sharding.places import WeightShard, row_boxes

TILE, TILE_COLUMNS = 1 << 16, 1024
"""Elements of a tile, and its most columns: a quarter MB, large enough that seeding costs little, and small beside a rank's
shard."""


@torch.no_grad()
def initialise(
    decoder: nn.Module,
    model: Model,
    seed: int,
    *,
    places: Mapping[str, WeightShard] | None = None,
    draw_on_device: bool = False,
) -> None:
    """Fill every parameter and buffer of `decoder` (plain or DTensor, on any device) as the table of weights specifies.

    `places`: the shard that the decoder holds of each weight, by name; None: it holds all weights whole. Numbers are drawn on
    the CPU, so that all devices start from the same bits; `draw_on_device` draws on the parameter's device, which is faster and
    gives that device's own numbers. Raises ValueError if the names or shapes differ from the table.
    """
    parameters = dict(decoder.named_parameters())
    table = {weight.name: weight for weight in weights(model) if places is None or weight.name in places}
    if parameters.keys() != table.keys():
        odd = sorted(parameters.keys() ^ table.keys())
        raise ValueError(f"the decoder's parameters are not those of its description; these differ: {odd}")
    for name, parameter in parameters.items():
        part = _all_of(table[name]) if places is None else places[name]
        device = parameter.device if draw_on_device else torch.device("cpu")
        try:
            parts = shard_boxes(parameter, part)
        except ValueError as error:
            raise ValueError(f"{name} has shape {tuple(parameter.shape)}, its description says {part.shape}") from error
        for offsets, box in parts:
            _fill(box, table[name], offsets, seed, device)
    for bias in decoder.buffers():  # load-balancing biases of routers
        bias.zero_()


def build_embedding(rows: int, width: int) -> nn.Embedding:
    """Embedding as torch builds it. On the meta device values are not drawn: torch would load its compiler for that, a second,
    and they would have no effect."""
    weight = torch.empty(rows, width)
    return nn.Embedding(rows, width, _weight=weight if weight.is_meta else nn.init.normal_(weight))


def weight_seed(seed: int, name: str) -> int:
    """A distinct 63-bit seed for every (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _all_of(weight: Weight) -> WeightShard:
    return WeightShard((0,) * len(weight.shape), weight.shape)


def shard_boxes(parameter: Tensor, part: WeightShard, values: Tensor | None = None) -> list[tuple[tuple[int, ...], Tensor]]:
    """Boxes of `part` of a weight that this rank holds under data parallelism, each with its offsets in the whole weight.

    `parameter`: of the shape of `part`, or of the shape in which ZeRO shards it (`work.sharding.places.zero_shape`). `values`:
    a tensor of the same size as this rank's shard, such as a moment; None: the parameter's own values. Boxes are views of them.
    Raises ValueError for a parameter of another shape.
    """
    local_rows, first = _local_rows(parameter)
    values = local_rows if values is None else values
    return [
        (tuple(a + b for a, b in zip(part.offsets, box.offsets, strict=True)), values[rows].view(box.shape))
        for rows, box in row_boxes(part.shape, tuple(parameter.shape), first, len(local_rows))
    ]


def _local_rows(parameter: Tensor) -> tuple[Tensor, int]:
    """This rank's shard of a parameter that data parallelism shards along dim 0 or not at all, and its first row."""
    if not isinstance(parameter, DTensor):
        return parameter, 0
    first, count = 0, len(parameter)
    for axis, placement in enumerate(parameter.placements):
        if placement.is_shard(0):  # as torch.chunk: the last parts may be short, or empty
            per_rank = -(-count // parameter.device_mesh.size(axis))
            skipped = min(parameter.device_mesh.get_local_rank(axis) * per_rank, count)
            first, count = first + skipped, min(per_rank, count - skipped)
    local = parameter.to_local()
    assert len(local) == count and local.shape[1:] == parameter.shape[1:], "data parallelism cuts rows"
    return local, first


def _fill(out: Tensor, weight: Weight, offsets: Sequence[int], seed: int, device: torch.device) -> None:
    """Fill `out`, the part of `weight` that begins at `offsets`, with values drawn on `device`."""
    if weight.init_std is None:
        out.fill_(weight.init_fill)
    elif weight.is_expert:
        for place, matrix in enumerate(out):
            drawing = _Drawing(f"{weight.name}/{offsets[0] + place}", weight.shape[1:], weight.init_std, seed)
            _draw(matrix, drawing, offsets[1:], device)
    else:
        _draw(out, _Drawing(weight.name, weight.shape, weight.init_std, seed), offsets, device)


class _Drawing(NamedTuple):
    """A matrix of normally distributed values."""

    name: str
    shape: tuple[int, ...]
    std: float
    seed: int


def _draw(out: Tensor, drawing: _Drawing, offsets: Sequence[int], device: torch.device) -> None:
    """Draw the part of a matrix that begins at `offsets` into `out`, tile by tile. A vector is a matrix of one row."""
    if out.ndim == 1:
        return _draw(out[None], drawing._replace(shape=(1, *drawing.shape)), (0, *offsets), device)
    buffer = torch.empty(TILE, dtype=torch.float32, device=device)
    generator, width = torch.Generator(device), min(drawing.shape[1], TILE_COLUMNS)
    for rows in _tiles(drawing.shape[0], TILE // width, offsets[0], out.shape[0]):
        for columns in _tiles(drawing.shape[1], width, offsets[1], out.shape[1]):
            tile = buffer[: rows.length * columns.length].view(rows.length, columns.length)
            generator.manual_seed(weight_seed(drawing.seed, f"{drawing.name}/{rows.number}/{columns.number}"))
            tile.normal_(0.0, drawing.std, generator=generator)
            out[rows.in_part, columns.in_part] = tile[rows.in_tile, columns.in_tile]


class _Tile(NamedTuple):
    """A tile along one dimension, and its overlap with a part."""

    number: int
    length: int
    in_tile: slice
    """Overlapping rows or columns, counted in the tile."""
    in_part: slice
    """Overlapping rows or columns, counted in the part."""


def _tiles(whole: int, size: int, first: int, count: int) -> Iterator[_Tile]:
    """Tiles of `whole` that overlap the `count` entries from `first` on; the last tile may be shorter."""
    for start in range(first // size * size, first + count, size):
        stop = min(start + size, whole)
        begin, end = max(start, first), min(stop, first + count)
        yield _Tile(start // size, stop - start, slice(begin - start, end - start), slice(begin - first, end - first))
