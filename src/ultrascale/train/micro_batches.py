"""The sequences of a step, as the forward passes of one rank see them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ultrascale.data.loader import Sequences
from ultrascale.spec.layout import Layout
from ultrascale.spec.places import Coordinates
from ultrascale.spec.progress import StepSpan


class ReadsSequences(Protocol):
    """What a trainer needs of a loader (`data.loader.Loader`)."""

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers."""
        ...

    def fingerprint(self) -> str:
        """What decides the sequences."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """What one forward pass sees, on the device; shapes [B, S], int64."""

    tokens: torch.Tensor
    targets: torch.Tensor
    positions: torch.Tensor | None
    document_ids: torch.Tensor | None
    num_targets: int
    """Targets that count."""


def sequence_numbers(span: StepSpan, layout: Layout, at: Coordinates) -> list[range]:
    """Global numbers of the sequences in each micro-batch of a rank: micro-batch j of data-parallel rank r takes the
    (j dp + r)-th run of micro_batch_size numbers."""
    size, end = layout.micro_batch_size, span.first_sequence + span.num_sequences
    starts = range(span.first_sequence + at.dp * size, end, layout.dp * size)
    return [range(start, start + size) for start in starts]


def micro_batch(sequences: Sequences, *, packed: bool, device: torch.device) -> MicroBatch:
    """`sequences` as tensors on `device`; without positions and documents when they are one stream (not `packed`)."""

    def moved(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    return MicroBatch(
        tokens=moved(sequences.tokens),
        targets=moved(sequences.targets),
        positions=moved(sequences.positions) if packed else None,
        document_ids=moved(sequences.document_ids) if packed else None,
        num_targets=int((sequences.targets >= 0).sum()),
    )
