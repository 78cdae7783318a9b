"""Slices: the part of a tensor that one of several ranks holds.

    tensor [12, 8]                tensor parallelism: columns 4 to 8       FSDP2 shards that slice: rows 6 to 12
    Slice.shape (12, 8)           Slice.offsets (0, 4)                     Slice.tensor: a DTensor of shape [12, 4]
                                                                           Piece: offsets (6, 4), local tensor [6, 4]

A DTensor knows its offsets in the slice, a Slice its offsets in the unsharded tensor. Files hold pieces, with offsets in the
unsharded tensor: the layout that wrote them leaves no trace.
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
    """A part of a tensor: the box that begins at `offsets` and has the shape of `tensor`."""

    tensor: torch.Tensor
    """Plain, or a DTensor over the ranks that shard the slice further."""
    shape: tuple[int, ...]
    """Shape of the unsharded tensor."""
    offsets: tuple[int, ...]
    """Offsets of the slice's first element in the unsharded tensor."""


TensorOrSlice = torch.Tensor | Slice
Tensors = Mapping[str, TensorOrSlice | Sequence[TensorOrSlice]]
"""The tensors that a rank holds, by global name: an unsharded tensor (or a DTensor), a slice, or several slices, such as when
one rank holds both ends of a pipeline.
"""


def slices_of(tensors: Tensors) -> list[tuple[str, Slice]]:
    """Everything in `tensors` by name, as slices. Raises CheckpointError, naming tensors that no file can hold."""
    return [(name, part) for name, parts in tensors.items() for part in _slices(check_name(name, "tensors"), parts)]


def pieces_of(slices: list[tuple[str, Slice]]) -> list[Piece]:
    """The boxes of this rank, with offsets in the unsharded tensors; tensors share memory with the slices.

    A rank that holds nothing of an unevenly sharded tensor has no box of it; a tensor without elements has an empty box.
    """
    with torch.no_grad():
        pieces = [
            Piece(name, part.shape, tuple(a + b for a, b in zip(part.offsets, inner, strict=True)), local.detach())
            for name, part in slices
            for inner, local in _local(part.tensor)
        ]
    return [piece for piece in pieces if piece.tensor.numel() > 0 or prod(piece.shape) == 0]


def _slices(name: str, parts: TensorOrSlice | Sequence[TensorOrSlice]) -> Iterator[Slice]:
    for part in parts if isinstance(parts, (list, tuple)) else (parts,):
        if isinstance(part, torch.Tensor):
            part = Slice(part, tuple(part.shape), (0,) * part.dim())
        if not isinstance(part, Slice):
            raise CheckpointError(f"{name}: is {type(part).__name__}, expected a tensor. Put plain values into the metadata.")
        _check_tensor(name, part.tensor)
        _check_place(name, part)
        yield part


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    """Raises CheckpointError unless the tensor has final values that a file can hold."""
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
    """(offsets, local tensor) of each part of `tensor` on this rank; by the protocol through which DCP queries DTensors."""
    if not isinstance(tensor, DTensor):
        yield (0,) * tensor.dim(), tensor
        return
    for chunk in tensor.__create_chunk_list__():
        local = tensor.__get_tensor_shard__(MetadataIndex("", chunk.offsets))
        assert tuple(local.shape) == tuple(chunk.sizes)
        yield tuple(chunk.offsets), local
