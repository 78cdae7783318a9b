"""Slices: the part of a tensor that one of several ranks holds.

    tensor [12, 8]                tensor parallelism: columns 4 to 8       FSDP2 cuts that slice: rows 6 to 12
    Slice.shape (12, 8)           Slice.offsets (0, 4)                     Slice.tensor: a DTensor of shape [12, 4]
                                                                           Piece: offsets (6, 4), local tensor [6, 4]

A DTensor knows its place in the slice, a Slice its place in the whole. Files hold pieces, in the coordinates of the whole: who
cut what, and in which order, is gone there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.tensor import DTensor

from ultrascale.checkpoint.disk.dtypes import DTYPE_NAMES
from ultrascale.checkpoint.disk.files import Piece
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.manifest import check_name


@dataclass(frozen=True)
class Slice:
    """A part of a tensor: the box of the shape of `tensor` that begins at `offsets`."""

    tensor: torch.Tensor
    """Plain, or a DTensor over the ranks that cut the slice once more."""
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    offsets: tuple[int, ...]
    """Offsets of the slice's first element in the whole tensor."""


TensorOrSlice = torch.Tensor | Slice
Tensors = Mapping[str, TensorOrSlice | Sequence[TensorOrSlice]]
"""The tensors that a rank holds, by global name: a whole tensor (a DTensor: as its ranks hold it together), a slice, or several
slices, as where both ends of a pipeline are on one rank."""


def slices_of(tensors: Tensors) -> list[tuple[str, Slice]]:
    """Everything in `tensors` by name, as slices. Raises CheckpointError, naming what no file can hold."""
    return [(name, part) for name, held in tensors.items() for part in _slices(check_name(name, "tensors"), held)]


def pieces_of(slices: list[tuple[str, Slice]]) -> list[Piece]:
    """The boxes of this rank, in the coordinates of the whole; tensors share memory with the slices.

    Ranks left with nothing of an unevenly cut tensor have no box of it; a tensor without elements keeps an empty one.
    """
    with torch.no_grad():
        pieces = [
            Piece(name, part.shape, tuple(a + b for a, b in zip(part.offsets, inner, strict=True)), local.detach())
            for name, part in slices
            for inner, local in _local(part.tensor)
        ]
    return [piece for piece in pieces if piece.tensor.numel() > 0 or prod(piece.shape) == 0]


def _slices(name: str, held: TensorOrSlice | Sequence[TensorOrSlice]) -> Iterator[Slice]:
    for part in held if isinstance(held, (list, tuple)) else (held,):
        if isinstance(part, torch.Tensor):
            part = Slice(part, tuple(part.shape), (0,) * part.dim())
        if not isinstance(part, Slice):
            raise CheckpointError(f"{name}: is {type(part).__name__}, expected a tensor. Put plain values into the metadata.")
        _check_tensor(name, part.tensor)
        _check_place(name, part)
        yield part


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError unless the tensor has numbers that a file can hold and that are final."""
    if tensor.dtype not in DTYPE_NAMES:
        raise CheckpointError(f"{name}: dtype {tensor.dtype} has no name on disk; expected one of {list(DTYPE_NAMES)}.")
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        raise CheckpointError(f"{name}: on {tensor.device} with layout {tensor.layout}, expected dense numbers in memory.")
    if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
        raise CheckpointError(f"{name}: a sum still spread over ranks ({tensor.placements}). Reduce it before.")


def _check_place(name: str, part: Slice) -> None:
    dims = {len(part.shape), len(part.offsets), part.tensor.dim()}
    inside = len(dims) == 1 and all(
        0 <= offset <= extent - size for offset, size, extent in zip(part.offsets, part.tensor.shape, part.shape, strict=True)
    )
    if not inside:
        box = f"shape {list(part.tensor.shape)} at {list(part.offsets)}"
        raise CheckpointError(f"{name}: a slice of {box} is no part of {list(part.shape)}. Give it its place in the whole.")


def _local(tensor: torch.Tensor) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(offsets, local tensor) of what this rank holds of `tensor`; by the protocol that DCP asks DTensors by."""
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor
        return
    for chunk in tensor.__create_chunk_list__():
        local = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        assert tuple(local.shape) == tuple(chunk.sizes)
        yield tuple(chunk.offsets), local
