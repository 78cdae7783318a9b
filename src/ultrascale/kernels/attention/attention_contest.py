"""Benchmark that picks the attention core for a run's shapes: `kernels.choice.contest` among all that
`description.attention_cores` allows.

It times a layer's attention, from queries, keys and values to their gradients, for each kind of layer that the model has (its
sliding windows; under context parallelism a causal square of a rank's tokens). A core's time is the mean over the layers. Each
sequence is assumed to hold DOCUMENTS documents of equal length.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ultrascale.description.attention_cores import CANDIDATE_CORES, CoreRequirements, unsupported_reason
from ultrascale.description.layout import AttentionCore
from ultrascale.kernels.attention.attention_core import attention, attention_mask, causal_piece
from ultrascale.kernels.attention.attention_spans import packed_ids
from ultrascale.kernels.attention.flash_packages import MODULES, not_importable
from ultrascale.kernels.choice.contest import MOST_BYTES, Form, Outcomes, measure, weighted_sum

DOCUMENTS = 8


@dataclass(frozen=True)
class AttentionShape:
    """Shape of one rank's attention."""

    batch: int
    length: int
    heads: int
    key_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype

    def inputs(self, device: torch.device, *, most_bytes: int = MOST_BYTES) -> list[Tensor]:
        """Queries [B, S, H, E], keys [B, S, K, E] and values [B, S, K, E'], for as many sequences as fit in `most_bytes`."""
        heads = (self.heads * self.head_dim, self.key_heads * self.head_dim, self.key_heads * self.value_dim)
        batch = max(1, min(self.batch, most_bytes // (self.length * sum(heads) * self.dtype.itemsize)))
        generator = torch.Generator(device).manual_seed(0)
        widths = ((self.heads, self.head_dim), (self.key_heads, self.head_dim), (self.key_heads, self.value_dim))
        return [
            torch.randn(batch, self.length, *width, device=device, generator=generator, dtype=torch.float32).to(self.dtype)
            for width in widths
        ]


def contest(
    shape: AttentionShape, wanted: CoreRequirements, device: torch.device, *, compiled: bool, bitwise: bool = False
) -> Outcomes:
    """Mean seconds per layer, forward and backward, of each core; or the reason why it is excluded."""
    inputs = shape.inputs(device)
    layers = [(count / len(wanted.windows), window) for window, count in Counter(wanted.windows).items()]
    refused = {core: reason for core in CANDIDATE_CORES if (reason := excluded(core, wanted, compiled=compiled))}
    parts = [(share, measure(forms(inputs, wanted, window, refused), inputs, bitwise=bitwise)) for share, window in layers]
    return weighted_sum(parts)


def excluded(core: AttentionCore, wanted: CoreRequirements, *, compiled: bool) -> str:
    """Reason why `core` is excluded; empty if it takes part."""
    if reason := unsupported_reason(core, wanted):
        return reason
    if core == "sdpa" and wanted.is_masked and wanted.device == "cuda" and wanted.is_narrow and wanted.cp == 1:
        return "needs masks of S x S numbers"
    if core == "varlen" and not wanted.is_masked:
        return "is sdpa where nothing is masked"
    if core == "varlen" and wanted.device == "cpu" and compiled:
        return "cannot be compiled on the CPU"
    return not_importable(core)


def forms(
    inputs: list[Tensor], wanted: CoreRequirements, window: int | None, refused: Mapping[str, str]
) -> dict[str, Form | str]:
    """Forms that `contest.measure` compares, for layers with this window."""
    batch, length = inputs[0].shape[:2]
    ids = (torch.arange(length) * DOCUMENTS // length).expand(batch, length)
    made = partial(
        attention_mask, length, length, window=window, dtype=inputs[0].dtype, device=inputs[0].device,
        document_ids=packed_ids(ids, inputs[0].device) if wanted.documents else None,
    )  # fmt: skip
    if wanted.cp > 1:
        pieces = {core: partial(causal_piece, core=core if core in MODULES else "") for core in CANDIDATE_CORES}
        return {core: refused.get(core) or piece for core, piece in pieces.items()}
    return {core: refused.get(core) or _form(partial(made, core=core)) for core in CANDIDATE_CORES}


def _form(make_mask: partial) -> Form:
    """Attention under a mask that is built once, as once per micro-batch."""
    masks: list = []

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not masks:
            masks.append(make_mask())
        return attention(query, key, value, masks[0])

    return run
