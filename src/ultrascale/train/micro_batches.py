"""The sequences of a step, as one rank's forward passes read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ultrascale.data.loader import Sequences
from ultrascale.description.layout import Layout
from ultrascale.description.progress import StepSpan
from ultrascale.kernels.attention.attention_spans import PackedIds, packed_ids
from ultrascale.kernels.dropout import token_keys
from ultrascale.parallel.context.context_masks import Documents
from ultrascale.parallel.context.context_parallel import shard_batch
from ultrascale.work.sharding.places import Coordinates, even_part


class ReadsSequences(Protocol):
    """Interface of a loader that the trainer needs (`data.loader.Loader`)."""

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers."""
        ...

    def fingerprint(self) -> str:
        """Text that identifies everything the sequences depend on."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one rank's forward passes, on the device, int64. Under cp, S is the rank's share of the sequence."""

    tokens: torch.Tensor
    """[B, S]"""
    targets: torch.Tensor
    """[B, S]"""
    positions: torch.Tensor | None
    """[S] or [B, S]; None: 0, 1, 2, ..."""
    document_ids: torch.Tensor | PackedIds | Documents | None
    """[B, length of the full sequences]. On CUDA with the ends of documents; under cp on the CPU, with the order in which the
    sequence is cut. None: one stream without document boundaries."""
    num_targets: int
    """Number of valid targets."""
    dropout_keys: torch.Tensor | None = None
    """[B, S] (`kernels.dropout.token_keys`), read in training only. None: no dropout."""


def sequence_numbers(span: StepSpan, layout: Layout, coordinates: Coordinates) -> list[range]:
    """Global numbers of the sequences in each micro-batch of a rank: micro-batch j of data-parallel rank r takes the (j dp +
    r)-th block of micro_batch_size numbers."""
    size, end = layout.micro_batch_size, span.first_sequence + span.num_sequences
    starts = range(span.first_sequence + coordinates.dp * size, end, layout.dp * size)
    return [range(start, start + size) for start in starts]


def micro_batch(
    sequences: Sequences,
    *,
    packed: bool,
    layout: Layout,
    coordinates: Coordinates,
    device: torch.device,
    dropout_seed: int | None = None,
) -> MicroBatch:
    """The micro-batch of the rank at `coordinates` from `sequences`, on `device`. Without document ids if not `packed`.

    `dropout_seed`: together with a token's position in the data it decides which elements are dropped. None: no dropout.
    """

    def moved(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device, non_blocking=True)

    targets, ids = sequences.targets, sequences.document_ids if packed else None
    keys = None if dropout_seed is None else token_keys(sequences.numbers, targets.shape[1], dropout_seed)
    if layout.cp > 1:
        local = shard_batch(sequences.tokens, targets, sequences.positions, ids, layout=layout, cp_rank=coordinates.cp)
        tokens, targets, positions = local.tokens, local.targets, moved(local.positions)
        keys = None if keys is None else np.take_along_axis(keys, local.slots, axis=1)
        if ids is None and sequences.tokens.shape[1] % layout.cp:
            ids = np.zeros_like(sequences.tokens)  # one document: ids carry the sequence length for uneven parts
    elif packed:
        tokens, positions = sequences.tokens, moved(sequences.positions)
    else:
        tokens, positions = sequences.tokens, None
    if positions is None and layout.world_size > layout.dp:  # activations may be shorter than the sequence they represent
        positions = torch.arange(tokens.shape[1], device=device)
    documents: torch.Tensor | PackedIds | Documents | None = None
    if ids is not None:
        documents = torch.from_numpy(ids)
        documents = Documents(documents, layout.cp_grid[0]) if layout.cp > 1 else packed_ids(documents, device)
    return MicroBatch(
        tokens=moved(tokens),
        targets=moved(targets),
        positions=positions,
        document_ids=documents,
        num_targets=int((targets >= 0).sum()),
        dropout_keys=None if keys is None else moved(keys),
    )


def activation_shape(batch: MicroBatch, width: int, layout: Layout, coordinates: Coordinates) -> tuple[int, int, int]:
    """[B, S, D] of the activations that one pipeline stage of the rank at `coordinates` sends to the next; `width`: D."""
    rows, length = batch.tokens.shape
    if layout.tp > 1 and layout.sequence_parallel:
        length = even_part(length, layout.tp, coordinates.tp)[1]
    return rows, length, width
