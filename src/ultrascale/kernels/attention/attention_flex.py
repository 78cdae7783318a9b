"""Attention within documents and a sliding window by FlexAttention (Dong et al. 2024), which torch compiles for the mask.

Blocks of 128 queries and 128 keys are skipped, computed in full, or computed and masked elementwise. The choice follows from
the first and the last document of each block: S^2/128^2 numbers, without an S x S mask. (torch's own `create_block_mask` builds
one unless it is compiled.) This requires document ids that increase along a sequence, as packed documents' do.

Supports fp32 on CUDA, unlike flash attention, and any sliding window. Uncompiled, as on the CPU, it computes all scores and has
no backward pass: there it only tests the block logic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from ultrascale.kernels.choice.device_kind import is_cuda

BLOCK = 128


class FlexMask(NamedTuple):
    """Block mask: which tokens see which, block by block."""

    blocks: BlockMask


def flex_mask(length: int, *, document_ids: Tensor | None, window: int | None, device: torch.device) -> FlexMask:
    """Causal block mask, within documents (`document_ids` [B, S], increasing) and a sliding window of so many tokens."""
    ids = torch.zeros(1, length, dtype=torch.int32, device=device) if document_ids is None else document_ids

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        row = batch if document_ids is not None else batch * 0
        visible = (key <= query) & (ids[row, query] == ids[row, key])
        return visible if window is None else visible & (query - key < window)

    seen, whole = seen_blocks(ids, window)
    partly = _listed(seen & ~whole), _listed(whole)
    (counts, indices), (full_counts, full_indices) = partly
    return FlexMask(
        BlockMask.from_kv_blocks(
            counts, indices, full_counts, full_indices, BLOCK_SIZE=BLOCK, mask_mod=mask_mod, seq_lengths=(length, length)
        )
    )


def seen_blocks(ids: Tensor, window: int | None, block: int = BLOCK) -> tuple[Tensor, Tensor]:
    """Block masks from ids [B, S]: key blocks that a query block sees in part or in full, and those that it sees in full, [B,
    S/128, S/128]."""
    length = ids.shape[1]
    count = -(-length // block)
    places = torch.arange(count, device=ids.device)
    starts, ends = places * block, (places * block + block - 1).clamp(max=length - 1)
    first, last = ids[:, starts], ids[:, ends]  # [B, blocks]
    farthest = ends[:, None] - starts  # tokens from a query back to a key, at most, [blocks, blocks]
    nearest = starts[:, None] - ends
    seen = (places[:, None] >= places) & (last[:, None, :] >= first[:, :, None])
    whole = (places[:, None] > places) & (first[:, None, :] == last[:, :, None])
    if window is not None:
        seen, whole = seen & (nearest < window), whole & (farthest < window)
    return seen, whole & seen


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """Number of key blocks of each query block, [B, 1, rows], and their indices, listed first, [B, 1, rows, columns]."""
    counts = blocks.sum(-1, dtype=torch.int32)
    indices = torch.argsort(blocks.to(torch.int8), dim=-1, descending=True, stable=True).int()
    return counts.unsqueeze(1), indices.unsqueeze(1)


def attend_flex(query: Tensor, key: Tensor, value: Tensor, mask: FlexMask, *, sinks: Tensor | None, scale: float) -> Tensor:
    """FlexAttention with the signature of `kernels.attention.attention_core.attention`: [B, S, H, E'] from [B, S, H, E], [B, S,
    K, E] and [B, S, K, E']."""
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    compiles = is_cuda(query) and not torch.compiler.is_compiling()
    run: Callable[..., Any] = _compiled() if compiles else flex_attention
    grouped = query.shape[1] != key.shape[1]
    if sinks is None:
        out = run(query, key, value, block_mask=mask.blocks, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2)
    out, aux = run(query, key, value, block_mask=mask.blocks, scale=scale, enable_gqa=grouped, return_aux=AuxRequest(lse=True))
    return (out * torch.sigmoid(aux.lse - sinks[:, None].to(aux.lse.dtype)).to(out.dtype).unsqueeze(-1)).transpose(1, 2)


@cache
def _compiled() -> Callable[..., Any]:
    return torch.compile(flex_attention)
