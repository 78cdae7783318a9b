"""Check that a state is finite before it is saved: one NaN in a weight makes every later step NaN, and each save would displace
a good checkpoint. One pass over memory, two numbers per tensor.
"""

from __future__ import annotations

import torch

from ultrascale.checkpoint.disk.files import Piece
from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.description.units import first_few

MAX_SHOWN = 5


def expect_finite(pieces: list[Piece]) -> None:
    """Raises CheckpointError, naming tensors, if a number in them is NaN or infinite."""
    extremes = [(piece.name, torch.stack(torch.aminmax(piece.tensor))) for piece in pieces if _can_be_otherwise(piece.tensor)]
    bad = dict.fromkeys(name for name, extreme in extremes if not extreme.isfinite().all())
    if bad:
        names = first_few(list(bad), MAX_SHOWN)
        remedy = "Nothing was saved, and what was before is as it was. Go on from there with a lower learning rate."
        raise CheckpointError(f"{names}: NaN or infinite. {remedy}")


def _can_be_otherwise(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dtype.itemsize > 1 and tensor.numel() > 0
