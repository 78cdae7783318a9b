"""Attention whose keys and values are spread over several ranks, as one autograd function.

    forward     for each hop: attend over the blocks this rank's queries see, and join the parts by log-sum-exp
    backward    for each hop: gradients of the blocks, from the joined out and log-sum-exp; query gradients add up here,
                gradients of keys and values are sent back to their ranks

Saved for the backward pass: this rank's queries, keys, values, out, and one number per row and head, as on one process.
Attention sinks (GPT-OSS) are one score per head that takes weight from all keys and has no value. They are joined once at the
end: they lower out and raise the log-sum-exp, and the backward pass follows from these. In 16 bits, out and gradients are
summed over hops in fp32.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ultrascale.kernels.attention.attention_with_lse import attend, attend_backward, join
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.parallel.context.context_gather import GatheredKeys, ScatteredGradients
from ultrascale.parallel.context.context_masks import ContextMask, KernelCall, Slots
from ultrascale.parallel.context.context_ring import KeyValueBlock, Ring, RingGradients, RingKeys, pack, unpack


class Setting(NamedTuple):
    """Settings shared by all attention calls with one mask."""

    mask: ContextMask
    ring: Ring
    gathers: bool
    """True if keys and values are all-gathered first; otherwise they travel around the ring."""
    scale: float
    core: str = ""
    """Flash attention package for blocks without a mask; empty: torch's own."""


def ring_attention(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, setting: Setting) -> Tensor:
    """Ring attention of this rank's queries over all ranks' keys and values: [B, S/n, H, E'].

    query [B, S/n, H, E], key [B, S/n, K, E], value [B, S/n, K, E'] of this rank's slots; sinks [H] or None. All ranks of the
    ring call it, and its backward pass, in the same order.
    """
    return _ContextAttention.apply(query, key, value, sinks, setting)  # pyright: ignore[reportReturnType]


class _ContextAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, setting: Setting) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))  # [B, H, S/n, E], [B, K, S/n, E] twice
        out, lse = attention_forward(query, key, value, sinks, setting)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.setting = setting
        return out.transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, lse, sinks = ctx.saved_tensors
        *input_grads, grad_sinks = attention_backward(grads[0].transpose(1, 2), query, key, value, sinks, out, lse, ctx.setting)
        return *(grad.transpose(1, 2) for grad in input_grads if grad is not None), grad_sinks, None


def attention_forward(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, setting: Setting
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """out [B, H, S/n, E'] in the dtype of the queries, and log-sum-exp [B, H, S/n] in fp32 or wider, with sinks joined."""
    out, lse = _forward(query, key, value, setting)
    if sinks is not None:
        out, lse = _join_sinks(out, lse, sinks)
    return out.to(query.dtype), lse


def attention_backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor,
    setting: Setting,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of queries, keys, values and sinks, from the results of `attention_forward`; the heads dimension precedes
    positions."""
    grads = _backward(grad_out, query, key, value, out, lse, setting)
    return *grads, None if sinks is None else _sinks_gradient(grad_out, out, lse, sinks)


def _forward(query: Tensor, key: Tensor, value: Tensor, setting: Setting) -> tuple[Tensor, Tensor]:
    """out [B, H, S/n, E'] and lse [B, H, S/n], in the dtype of sums."""
    hops = zip(_keys(key, value, setting).hops(), setting.mask.hops, strict=True)
    joined: tuple[Tensor, Tensor] | None = None
    for keys_values, blocks in hops:
        for block in blocks:
            out, lse = attend(
                *_block(query, keys_values, block),
                mask=block.mask,
                is_causal=block.is_causal,
                scale=setting.scale,
                core=setting.core,
            )
            if setting.ring.size == 1 and len(blocks) == 1:
                return out, lse
            if joined is None:
                joined = _begin(query, value, out, lse, block)
            else:
                place = (block.sequences, slice(None), block.queries)
                join(joined[0][place], joined[1][place], out, lse)
    assert joined is not None
    return joined


def _begin(query: Tensor, value: Tensor, out: Tensor, lse: Tensor, block: KernelCall) -> tuple[Tensor, Tensor]:
    """Copy of the first part, since selective recomputation may hold the kernel's own result. In memory, positions precede
    heads, as in kernel results (padded heads too): the projection that follows reads this order without another copy."""
    (batch, heads, length, _), dtype = query.shape, wide_dtype(query)
    shape = (batch, length, heads, value.shape[-1])
    if block.queries == slice(0, length) and len(out) == len(query):
        return query.new_empty(shape, dtype=dtype).transpose(1, 2).copy_(out), lse.clone()
    whole = query.new_zeros(shape, dtype=dtype).transpose(1, 2)
    whole_lse = torch.full(query.shape[:3], -torch.inf, dtype=dtype, device=query.device)
    place = (block.sequences, slice(None), block.queries)
    whole[place], whole_lse[place] = out, lse
    return whole, whole_lse


def _backward(
    grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, setting: Setting
) -> tuple[Tensor, Tensor, Tensor]:
    mask, ring, wide = setting.mask, setting.ring, wide_dtype(query)
    going_home = (ScatteredGradients if setting.gathers else RingGradients)(key, value, mask, ring, wide)
    total_query, total_key, total_value = (_Total(like, wide) for like in (query, key, value))
    for distance, (keys_values, blocks) in enumerate(zip(_keys(key, value, setting).hops(), mask.hops, strict=True)):
        parts = []
        for block in blocks:
            place = (block.sequences, slice(None), block.queries)
            block_grads = attend_backward(
                grad_out[place], *_block(query, keys_values, block), out[place], lse[place],
                mask=block.mask, is_causal=block.is_causal, scale=setting.scale, core=setting.core,
            )  # fmt: skip
            total_query.add(block.queries, block_grads[0], block.sequences)
            if distance == 0:
                total_key.add(block.keys, block_grads[1], block.sequences)
                total_value.add(block.keys, block_grads[2], block.sequences)
            else:
                parts.append((block, pack(*block_grads[1:], dtype=wide)))
        if distance > 0:
            going_home.add(distance, _packed_over(mask.needs[ring.source(distance)][distance], parts, len(key)))
    for slots, packed in going_home.received():
        grad_key, grad_value = unpack(packed, key.shape[-1])
        total_key.add(slice(*slots), grad_key)
        total_value.add(slice(*slots), grad_value)
    return total_query.done(), total_key.done(), total_value.done()


class _Total:
    """Gradient [B, H, S, E], accumulated from parts that cover some of the slots."""

    def __init__(self, like: Tensor, wide: torch.dtype):
        self.like, self.wide = like, wide
        self.total: Tensor | None = None

    def add(self, slots: slice, part: Tensor, sequences: slice = slice(None)) -> None:
        if self.total is None and slots == slice(0, self.like.shape[2]) and len(part) == len(self.like):
            self.total = part.to(self.wide)
            return
        if self.total is None:
            self.total = torch.zeros_like(self.like, dtype=self.wide)
        self.total[sequences, :, slots] += part

    def done(self) -> Tensor:
        assert self.total is not None, "every token sees itself"
        return self.total.to(self.like.dtype)


def _keys(key: Tensor, value: Tensor, setting: Setting) -> GatheredKeys | RingKeys:
    return (GatheredKeys if setting.gathers else RingKeys)(key, value, setting.mask, setting.ring)


def _block(query: Tensor, keys_values: KeyValueBlock | None, block: KernelCall) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of a block."""
    assert keys_values is not None, "a block without keys"
    keys = slice(block.keys.start - keys_values.first, block.keys.stop - keys_values.first)
    sequences = block.sequences
    return query[sequences, :, block.queries], keys_values.key[sequences, :, keys], keys_values.value[sequences, :, keys]


def _packed_over(slots: Slots, parts: list[tuple[KernelCall, Tensor]], batch: int) -> Tensor | None:
    """Packed gradients of all `slots` of all sequences, summed from the blocks' gradients."""
    if not parts:
        return None
    block, packed = parts[0]
    if len(parts) == 1 and block.keys == slice(*slots) and packed.shape[1] == batch:
        return packed
    whole = packed.new_zeros(slots[1] - slots[0], batch, *packed.shape[2:])
    for block, packed in parts:
        whole[block.keys.start - slots[0] : block.keys.stop - slots[0], block.sequences] += packed
    return whole


def _join_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    total = torch.logaddexp(lse, sinks.to(lse.dtype).unsqueeze(-1))
    return out * (lse - total).exp().unsqueeze(-1).to(out.dtype), total


def _sinks_gradient(grad_out: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[H]: minus the sink's attention weight times (grad_out . out), summed over rows."""
    share = (sinks.to(lse.dtype).unsqueeze(-1) - lse).exp()
    return -(share * (grad_out.to(lse.dtype) * out).sum(-1)).sum((0, 2)).to(sinks.dtype)
