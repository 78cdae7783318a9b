"""FlashAttention 2, 3 and 4 from the flash-attn packages, where importable, as one pair of custom torch operations.

    core      package                     what is called                                              log-sum-exp
    flash-2   flash_attn, 2.7 and later   flash_attn_interface._flash_attn_[varlen_]forward, backward   [B, H, S] or [H, T]
    flash-3   flash_attn_interface        torch.ops.flash_attn_3.fwd, bwd: kept compatible by its tests   the same
    flash-4   flash_attn.cute             interface._flash_attn_fwd, _flash_attn_bwd                      the same

Forward and backward are called directly, not through the packages' autograd. So sinks and context parallelism can pass a merged
result and log-sum-exp to the backward pass, selective recomputation sees one operation whose result it saves, and the compiler
one that it leaves alone. (torch's `activate_flash_attention_impl` replaces its own kernel by 3 or 4 for the whole process, and
is a prototype in 2.11 to 2.13.)

With `ends`, tensors are packed [T, H, E] and a token sees only its own document; otherwise they are [B, S, H, E]. A window of w
tokens is w - 1 to the left. Heads are zero-padded to one width, a multiple of 8.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

MODULES = {
    "flash-2": "flash_attn.flash_attn_interface",
    "flash-3": "flash_attn_interface",
    "flash-4": "flash_attn.cute.interface",
}
_ARGUMENTS = "Tensor query, Tensor key, Tensor value"
_SETTING = "Tensor? ends, int length, bool causal, int window, float scale, str core"


def not_importable(core: str) -> str:
    """Reason why a core's package cannot be used here; empty if it can, or none is needed."""
    if core not in MODULES:
        return ""
    try:
        module = import_module(MODULES[core])
    except Exception as error:  # a missing CUDA library may raise any exception
        missing = isinstance(error, ModuleNotFoundError)
        return f"{MODULES[core]} is not installed" if missing else f"{MODULES[core]} cannot be imported: {str(error)[:120]}"
    wanted = {"flash-2": "_flash_attn_varlen_forward", "flash-4": "_flash_attn_fwd"}.get(core)
    has_it = hasattr(torch.ops.flash_attn_3, "fwd") if wanted is None else hasattr(module, wanted)
    return "" if has_it else f"{MODULES[core]} is of a version that is not known here"


@custom_op("ultrascale::flash_forward", mutates_args=(), schema=f"({_ARGUMENTS}, {_SETTING}) -> (Tensor, Tensor)")
def flash_forward(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, length: int, causal: bool, window: int, scale: float,
    core: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out, lse) as described above. `ends` [documents + 1] int32, with no document longer than `length`; `window`: 0 for none;
    `core`: a key of `MODULES`. The three tensors are contiguous and have one head width.
    """
    out, lse = _FORWARD[core](query, key, value, ends, length, causal, window, scale)
    return out, lse.contiguous()


@flash_forward.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, length: int, causal: bool, window: int, scale: float,
    core: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    rows = query.shape[:1] if ends is not None else query.shape[:2]
    lse = query.new_empty((query.shape[-2], *rows), dtype=torch.float32)
    return torch.empty_like(query), lse if ends is not None else lse.transpose(0, 1).contiguous()


@custom_op(
    "ultrascale::flash_backward", mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}, Tensor out, Tensor lse, {_SETTING}) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor | None, length: int,
    causal: bool, window: int, scale: float, core: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of queries, keys and values; the same bits every time under torch's deterministic mode."""
    steady = torch.are_deterministic_algorithms_enabled()
    return _BACKWARD[core](grad, query, key, value, out, lse, ends, length, causal, window, scale, steady)


@flash_backward.register_fake
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


FORWARD = torch.ops.ultrascale.flash_forward.default


def _sides(window: int) -> tuple[int, int]:
    return (window - 1, 0) if window else (-1, -1)


def _forward_2(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, length: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    module, (left, right) = import_module(MODULES["flash-2"]), _sides(window)
    options: dict[str, Any] = {
        "window_size_left": left, "window_size_right": right, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    if ends is None:
        outputs = module._flash_attn_forward(query, key, value, 0.0, scale, causal, **options)
    else:
        outputs = module._flash_attn_varlen_forward(
            query, key, value, ends, ends, length, length, 0.0, scale, causal, **options
        )
    return outputs[0], outputs[1]


def _backward_2(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor | None, length: int,
    causal: bool, window: int, scale: float, steady: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    module, (left, right) = import_module(MODULES["flash-2"]), _sides(window)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    tensors = (grad, query, key, value, out, lse, *grads)
    options = (0.0, scale, causal, left, right, 0.0, None, steady)  # no dropout; no soft cap; no slopes
    if ends is None:
        module._flash_attn_backward(*tensors, *options)
    else:
        module._flash_attn_varlen_backward(*tensors, ends, ends, length, length, *options)
    return grads


def _forward_3(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, length: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    left, right = _sides(window)
    # num_splits = 1: the heuristic would sum parts in an order that depends on the shape.
    out, lse, *_ = torch.ops.flash_attn_3.fwd(
        query, key, value, **_ends_3(ends, length), softmax_scale=scale, is_causal=causal, window_size_left=left,
        window_size_right=right, num_splits=1,
    )  # fmt: skip
    return out, lse


def _backward_3(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor | None, length: int,
    causal: bool, window: int, scale: float, steady: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    left, right = _sides(window)
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    torch.ops.flash_attn_3.bwd(
        grad, query, key, value, out, lse, *grads, **_ends_3(ends, length), softmax_scale=scale, is_causal=causal,
        window_size_left=left, window_size_right=right, deterministic=steady,
    )  # fmt: skip
    return grads


def _ends_3(ends: Tensor | None, length: int) -> dict[str, Any]:
    if ends is None:
        return {}
    return {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}


def _forward_4(
    query: Tensor, key: Tensor, value: Tensor, ends: Tensor | None, length: int, causal: bool, window: int, scale: float
) -> tuple[Tensor, Tensor]:
    forward = import_module(MODULES["flash-4"])._flash_attn_fwd
    outputs = forward(
        query, key, value, **_setting_4(forward, ends, length, window), softmax_scale=scale, causal=causal, return_lse=True
    )
    return outputs[0], outputs[1]


def _backward_4(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, ends: Tensor | None, length: int,
    causal: bool, window: int, scale: float, steady: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    backward = import_module(MODULES["flash-4"])._flash_attn_bwd
    grads = backward(
        query, key, value, out, grad, lse, **_setting_4(backward, ends, length, window), softmax_scale=scale, causal=causal,
        deterministic=steady,
    )  # fmt: skip
    return grads[0], grads[1], grads[2]


def _setting_4(function: Callable[..., Any], ends: Tensor | None, length: int, window: int) -> dict[str, Any]:
    """Keyword arguments of FlashAttention 4: None for no window; the longest document only for versions that take it."""
    setting: dict[str, Any] = {"window_size_left": window - 1, "window_size_right": 0} if window else {}
    if ends is not None:
        parameters = signature(function).parameters
        setting |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        setting |= {name: length for name in ("max_seqlen_q", "max_seqlen_k") if name in parameters}
    return setting


_FORWARD = {"flash-2": _forward_2, "flash-3": _forward_3, "flash-4": _forward_4}
_BACKWARD = {"flash-2": _backward_2, "flash-3": _backward_3, "flash-4": _backward_4}
