"""The sequences of a step, as the forward passes of one rank see them."""

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
    """Interface of a loader for the trainer (`data.loader.Loader`)."""

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers."""
        ...

    def fingerprint(self) -> str:
        """Text of everything that the sequences depend on."""
        ...


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of one rank's forward passes, on the device, int64; S is this rank's share of the sequence under cp."""

    tokens: torch.Tensor
    """[B, S]"""
    targets: torch.Tensor
    """[B, S]"""
    positions: torch.Tensor | None
    """[S] or [B, S]; None: 0, 1, 2, ..."""
    document_ids: torch.Tensor | PackedIds | Documents | None
    """[B, length of whole sequences]; on CUDA with where documents end; with cp on the CPU, and the order that they are cut in.
    None: one stream."""
    num_targets: int
    """Targets that count."""
    dropout_keys: torch.Tensor | None = None
    """[B, S] (`kernels.dropout.token_keys`), read in training only; None: the model drops nothing."""


def sequence_numbers(span: StepSpan, layout: Layout, coordinates: Coordinates) -> list[range]:
    """Global numbers of the sequences in each micro-batch of a rank: micro-batch j of data-parallel rank r takes the
    (j dp + r)-th run of micro_batch_size numbers."""
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
    """Micro-batch of `sequences` of the rank at `coordinates`, on `device`; no documents if they are one stream (not `packed`).

    `dropout_seed`: with it and a token's place in the data it is decided what is dropped; None: nothing is.
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
            ids = np.zeros_like(sequences.tokens)  # one document: only ids tell how long sequences are of uneven parts
    elif packed:
        tokens, positions = sequences.tokens, moved(sequences.positions)
    else:
        tokens, positions = sequences.tokens, None
    if positions is None and layout.world_size > layout.dp:  # activations may be shorter than what they stand for
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
    """[B, S, D] of what one pipeline stage of the rank at `coordinates` hands to the next; `width`: D."""
    rows, length = batch.tokens.shape
    if layout.tp > 1 and layout.sequence_parallel:
        length = even_part(length, layout.tp, coordinates.tp)[1]
    return rows, length, width
