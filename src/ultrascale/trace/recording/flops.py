"""FLOPs of operations, by their shapes: torch's formulas (`torch.utils.flop_counter`), and those that it lacks.

Attention counts all pairs of a query and a key, as torch does, although causal attention masks half of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from ultrascale.kernels.fp8.fp8_grouped import scaled_groups, scaled_outer_groups

_aten = torch.ops.aten
Formula = Callable[..., int]
"""A formula takes the operation's arguments and options; `out_val` is its result, as in torch's own."""


def _mm(left: Tensor, right: Tensor, *_: Any, **__: Any) -> int:
    return 2 * left.shape[0] * left.shape[1] * right.shape[-1]


def _linear(left: Tensor, *_: Any, out_val: Tensor, **__: Any) -> int:
    return 2 * out_val.numel() * left.shape[-1]


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_flop_count(query.shape, _repeated(key, query), _repeated(value, query))


def _attention_backward(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return sdpa_backward_flop_count(grad.shape, query.shape, _repeated(key, query), _repeated(value, query))


def _span_attention(*args: Any, **_: Any) -> int:
    """FLOPs over the full square of each sequence, since document boundaries do not show in shapes."""
    query, _, value, _, _, longest = args[:6]
    return 2 * query.shape[0] * query.shape[1] * longest * (query.shape[2] + value.shape[2])


def _span_attention_backward(*args: Any, **_: Any) -> int:
    _, query, _, value, _, _, _, _, longest = args[:9]
    return 2 * query.shape[0] * query.shape[1] * longest * (3 * query.shape[2] + 2 * value.shape[2])


def _repeated(key: Tensor, query: Tensor) -> tuple[int, ...]:
    """Shape of `key` repeated to the query heads: torch's formula does not support grouped queries."""
    return (key.shape[0], query.shape[1], *key.shape[2:])


FLOPS: dict[Any, Formula] = {packet: formula for packet, formula in flop_registry.items() if hasattr(packet, "overloads")} | {
    _aten.mm: _mm,
    _aten.addmm: lambda added, *args, **options: _mm(*args),
    _aten.addmm_: lambda added, *args, **options: _mm(*args),
    _aten.linear: _linear,
    _aten.matmul: _linear,
    _aten._grouped_mm: _mm,
    scaled_groups._opoverload.overloadpacket: _linear,
    scaled_outer_groups._opoverload.overloadpacket: lambda *args, **options: _mm(*args[::2]),
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._flash_attention_forward: _span_attention,
    _aten._flash_attention_backward: _span_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention_backward: _attention_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}
