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

from collections.abc import Callable, Sequence
from importlib import import_module
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

MODULES = {
    "flash-2": "flash_attn.flash_attn_interface",
    "flash-3": "flash_attn_interface",
    "flash-4": "flash_attn.cute.interface",
}
Gradients = tuple[Tensor, Tensor, Tensor]
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


class FlashSetting(NamedTuple):
    """Settings of both operations. `ends` [documents + 1] int32, with no document longer than `length`; `window`:
    0 for none; `core`: a key of `MODULES`."""

    ends: Tensor | None
    length: int
    causal: bool
    window: int
    scale: float
    core: str

    @property
    def sides(self) -> tuple[int, int]:
        """Keys to the left and to the right that a query sees; -1 for all."""
        return (self.window - 1, 0) if self.window else (-1, -1)


@custom_op("ultrascale::flash_forward", mutates_args=(), schema=f"({_ARGUMENTS}, {_SETTING}) -> (Tensor, Tensor)")
def flash_forward(query: Tensor, key: Tensor, value: Tensor, *setting: Any) -> tuple[Tensor, Tensor]:
    """(out, lse) as described above, with the fields of a `FlashSetting`. The three tensors are contiguous and have one head
    width."""
    chosen = FlashSetting(*setting)
    out, lse = _FORWARD[chosen.core](query, key, value, chosen)
    return out, lse.contiguous()


@flash_forward.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *setting: Any) -> tuple[Tensor, Tensor]:
    packed = FlashSetting(*setting).ends is not None
    rows = query.shape[:1] if packed else query.shape[:2]
    lse = query.new_empty((query.shape[-2], *rows), dtype=torch.float32)
    return torch.empty_like(query), lse if packed else lse.transpose(0, 1).contiguous()


@custom_op(
    "ultrascale::flash_backward", mutates_args=(),
    schema=f"(Tensor grad, {_ARGUMENTS}, Tensor out, Tensor lse, {_SETTING}) -> (Tensor, Tensor, Tensor)",
)  # fmt: skip
def flash_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, *setting: Any
) -> Gradients:
    """Gradients of queries, keys and values; the same bits every time under torch's deterministic mode."""
    chosen = FlashSetting(*setting)
    steady = torch.are_deterministic_algorithms_enabled()
    return _BACKWARD[chosen.core]((grad, query, key, value, out, lse), chosen, steady)


@flash_backward.register_fake
def _(*tensors: Any) -> Gradients:
    return _room(tensors)


def _room(tensors: Sequence[Tensor]) -> Gradients:
    """Room for the gradients of queries, keys and values, which follow the first tensor."""
    return torch.empty_like(tensors[1]), torch.empty_like(tensors[2]), torch.empty_like(tensors[3])


FORWARD = torch.ops.ultrascale.flash_forward.default


def _forward_2(query: Tensor, key: Tensor, value: Tensor, setting: FlashSetting) -> tuple[Tensor, Tensor]:
    module, (left, right) = import_module(MODULES["flash-2"]), setting.sides
    options: dict[str, Any] = {
        "window_size_left": left, "window_size_right": right, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    ends, length, causal, _, scale, _ = setting
    if ends is None:
        outputs = module._flash_attn_forward(query, key, value, 0.0, scale, causal, **options)
    else:
        outputs = module._flash_attn_varlen_forward(
            query, key, value, ends, ends, length, length, 0.0, scale, causal, **options
        )
    return outputs[0], outputs[1]


def _backward_2(tensors: Sequence[Tensor], setting: FlashSetting, steady: bool) -> Gradients:
    module, (left, right), grads = import_module(MODULES["flash-2"]), setting.sides, _room(tensors)
    ends, length, causal, _, scale, _ = setting
    options = (0.0, scale, causal, left, right, 0.0, None, steady)  # no dropout; no soft cap; no slopes
    if ends is None:
        module._flash_attn_backward(*tensors, *grads, *options)
    else:
        module._flash_attn_varlen_backward(*tensors, *grads, ends, ends, length, length, *options)
    return grads


def _forward_3(query: Tensor, key: Tensor, value: Tensor, setting: FlashSetting) -> tuple[Tensor, Tensor]:
    # num_splits = 1: the heuristic would sum parts in an order that depends on the shape.
    out, lse, *_ = torch.ops.flash_attn_3.fwd(query, key, value, **_setting_3(setting), num_splits=1)
    return out, lse


def _backward_3(tensors: Sequence[Tensor], setting: FlashSetting, steady: bool) -> Gradients:
    grads = _room(tensors)
    torch.ops.flash_attn_3.bwd(*tensors, *grads, **_setting_3(setting), deterministic=steady)
    return grads


def _setting_3(setting: FlashSetting) -> dict[str, Any]:
    ends, length, causal, _, scale, _ = setting
    left, right = setting.sides
    of_documents = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": length, "max_seqlen_k": length}
    return {
        **(of_documents if ends is not None else {}),
        "softmax_scale": scale, "is_causal": causal, "window_size_left": left, "window_size_right": right,
    }  # fmt: skip


def _forward_4(query: Tensor, key: Tensor, value: Tensor, setting: FlashSetting) -> tuple[Tensor, Tensor]:
    forward = import_module(MODULES["flash-4"])._flash_attn_fwd
    outputs = forward(query, key, value, **_setting_4(forward, setting), return_lse=True)
    return outputs[0], outputs[1]


def _backward_4(tensors: Sequence[Tensor], setting: FlashSetting, steady: bool) -> Gradients:
    grad, query, key, value, out, lse = tensors
    backward = import_module(MODULES["flash-4"])._flash_attn_bwd
    made = backward(query, key, value, out, grad, lse, **_setting_4(backward, setting), deterministic=steady)
    return made[0], made[1], made[2]


def _setting_4(function: Callable[..., Any], setting: FlashSetting) -> dict[str, Any]:
    """Keyword arguments of FlashAttention 4: None for no window; the longest document only for versions that take it."""
    options: dict[str, Any] = {"softmax_scale": setting.scale, "causal": setting.causal}
    if setting.window:
        options |= {"window_size_left": setting.window - 1, "window_size_right": 0}
    if setting.ends is not None:
        parameters = signature(function).parameters
        options |= {"cu_seqlens_q": setting.ends, "cu_seqlens_k": setting.ends}
        options |= {name: setting.length for name in ("max_seqlen_q", "max_seqlen_k") if name in parameters}
    return options


_FORWARD = {"flash-2": _forward_2, "flash-3": _forward_3, "flash-4": _forward_4}
_BACKWARD = {"flash-2": _backward_2, "flash-3": _backward_3, "flash-4": _backward_4}
