"""Ring attention as one custom torch operation, for compiled blocks: the compiler sees one node with shapes, and does not trace
inside.

    block's graph    ... RoPE --> ultrascale::ring_attention(query, key, value, sinks, number, scale) --> product ...
    outside it       number -> mask of this micro-batch, ring, kernel        (`_SETTINGS`)

An operation cannot take masks, process groups or message plans as arguments. They are kept in `_SETTINGS` under a number, a
tensor that the graph passes on and saves for its backward pass like any other; another micro-batch brings another number and
the same graph runs again. An entry is removed when nothing holds its number any more. The number is on the CPU, so that the
host need not wait for a GPU.

The alternative, torch's functional collectives in the graph: each hop's messages would be separate nodes, and the compiler
could fuse between hops; but the hops and their key counts depend on the documents of a micro-batch, and each order would be
compiled anew.
"""

from __future__ import annotations

import weakref
from itertools import count
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.parallel.context.context_attention import Setting, attention_backward, attention_forward

_NUMBERS = count()
_SETTINGS: dict[int, Setting] = {}
"""The only global state here: an operation has no argument that could carry these settings."""


def note(setting: Setting) -> Tensor:
    """Register `setting`; returns the number under which `operation` finds it: 0-d int64 on the CPU."""
    number = next(_NUMBERS)
    noted = torch.tensor(number, device="cpu")
    _SETTINGS[number] = setting
    weakref.finalize(noted, _SETTINGS.pop, number)
    return noted


def operation(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, noted: Tensor, scale: float) -> Tensor:
    """`context_attention.ring_attention` with the setting registered as `noted`: the same shapes and the same numbers."""
    return _Operation.apply(query, key, value, sinks, noted, scale)  # pyright: ignore[reportReturnType]


@custom_op("ultrascale::ring_attention", mutates_args=())
def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, noted: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """out [B, S/n, H, E'], and log-sum-exp [B, H, S/n] in fp32 or wider."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out, lse = attention_forward(query, key, value, sinks, _setting(noted, scale))
    return out.transpose(1, 2).contiguous(), lse.contiguous()


@custom_op("ultrascale::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, out: Tensor, lse: Tensor, noted: Tensor,
    scale: float,
) -> list[Tensor]:  # fmt: skip
    """Gradients of queries, keys and values, and of sinks if there are any."""
    grad, query, key, value, out = (tensor.transpose(1, 2) for tensor in (grad, query, key, value, out))
    *heads_first, of_sinks = attention_backward(grad, query, key, value, sinks, out, lse, _setting(noted, scale))
    grads = [gradient.transpose(1, 2).contiguous() for gradient in heads_first if gradient is not None]
    return grads if of_sinks is None else [*grads, of_sinks]


@ring_attention.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = query.shape
    lse = query.new_empty(batch, heads, length, dtype=wide_dtype(query))
    return query.new_empty(batch, length, heads, value.shape[-1]), lse


@ring_attention_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, *rest: Any) -> list[Tensor]:
    return [tensor.new_empty(tensor.shape) for tensor in (query, key, value, *(() if sinks is None else (sinks,)))]


KEPT_OPS = (torch.ops.ultrascale.ring_attention.default,)
"""Operations whose results selective recomputation saves: attention, with the communication inside."""


class _Operation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, noted: Tensor, scale: float
    ) -> Tensor:  # fmt: skip
        out, lse = ring_attention(query, key, value, sinks, noted, scale)
        ctx.save_for_backward(query, key, value, sinks, out, lse, noted)
        ctx.scale = scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sinks, out, lse, noted = ctx.saved_tensors
        of_query, of_key, of_value, *of_sinks = ring_attention_backward(
            grads[0], query, key, value, sinks, out, lse, noted, ctx.scale
        )
        return of_query, of_key, of_value, of_sinks[0] if of_sinks else None, None, None


def _setting(noted: Tensor, scale: float) -> Setting:
    return _SETTINGS[int(noted)]._replace(scale=scale)
