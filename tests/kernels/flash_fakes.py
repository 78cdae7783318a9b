"""Stand-ins for the flash-attn packages on the CPU, in fp64: their signatures and layouts, computed by softmax written out.

Packed sequences, windows, groups of heads and log-sum-exp are the packages' own conventions: cu_seqlens [n + 1] int32, a window
of `left` tokens before and `right` after (-1: none; of FlashAttention 4 None), lse [B, H, S] or [H, T]. Gradients follow from
the `out` and `lse` that are handed in, as in their kernels.
"""

from __future__ import annotations

import sys
from itertools import pairwise
from types import ModuleType

import torch
from torch import Tensor

CALLS: list[dict] = []
"""What the packages were told, newest last."""


def _seen(length: int, keys: int, causal: bool, left: int, right: int) -> Tensor:
    distance = torch.arange(length)[:, None] - torch.arange(keys)
    seen = distance >= 0 if causal else torch.ones(length, keys, dtype=torch.bool)
    seen = seen if left < 0 else seen & (distance <= left)
    return seen if right < 0 else seen & (-distance <= right)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool, left: int, right: int) -> Tensor:
    scores = torch.einsum("she,the->hst", q, k.repeat_interleave(q.shape[1] // k.shape[1], 1)) * scale
    return scores.masked_fill(~_seen(len(q), len(k), causal, left, right), float("-inf"))


def _one(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, left: int, right: int) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, scale, causal, left, right)
    out = torch.einsum("hst,the->she", scores.softmax(-1), v.repeat_interleave(q.shape[1] // v.shape[1], 1))
    return out, scores.logsumexp(-1)


def _one_backward(do, q, k, v, out, lse, scale, causal, left, right):  # type: ignore[no-untyped-def]
    groups = q.shape[1] // k.shape[1]
    probabilities = (_scores(q, k, scale, causal, left, right) - lse[..., None]).exp()
    wide_k, wide_v = (x.repeat_interleave(groups, 1) for x in (k, v))
    dv = torch.einsum("hst,she->the", probabilities, do)
    change = torch.einsum("she,the->hst", do, wide_v) - (do * out).sum(-1).t()[..., None]
    ds = probabilities * change * scale
    dq, dk = torch.einsum("hst,the->she", ds, wide_k), torch.einsum("hst,she->the", ds, q)
    return dq, *(x.unflatten(1, (k.shape[1], groups)).sum(2) for x in (dk, dv))


def parts(q: Tensor, ends: Tensor | None) -> list[slice | int]:
    """Sequences of a batch, or documents of a packed one."""
    if ends is None:
        return list(range(len(q)))
    assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(q)
    return [slice(a, b) for a, b in pairwise(ends.tolist()) if b > a]


def forward(q, k, v, ends, longest, scale, causal, left, right):  # type: ignore[no-untyped-def]
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous() and q.dim() == (4 if ends is None else 3)
    out = torch.empty_like(q)
    lse = q.new_empty((q.shape[-2], len(q)) if ends is not None else (len(q), q.shape[-2], q.shape[1]))
    for part in parts(q, ends):
        found, found_lse = _one(q[part], k[part], v[part], scale, causal, left, right)
        out[part] = found
        lse[(slice(None), part) if ends is not None else part] = found_lse
        assert ends is None or longest >= len(found)
    return out, lse


def backward(do, q, k, v, out, lse, ends, longest, scale, causal, left, right, dq, dk, dv):  # type: ignore[no-untyped-def]
    assert all(x.is_contiguous() for x in (do, q, k, v, out, lse))
    for part in parts(q, ends):
        own = lse[(slice(None), part) if ends is not None else part]
        found = _one_backward(do[part], q[part], k[part], v[part], out[part], own, scale, causal, left, right)
        for into, grad in zip((dq, dk, dv), found, strict=True):
            into[part] = grad
    return dq, dk, dv


def flash_2() -> ModuleType:
    """flash_attn.flash_attn_interface of 2.7 and 2.8."""
    module = ModuleType("flash_attn.flash_attn_interface")

    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
    ):  # type: ignore[no-untyped-def]
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None and not return_softmax
        found = forward(q, k, v, None, 0, softmax_scale, causal, window_size_left, window_size_right)
        return *found, torch.empty(0), torch.empty(2)

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None,
        leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k
        found = forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size_left, window_size_right)
        return *found, torch.empty(0), torch.empty(2)

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None
        CALLS.append({"deterministic": deterministic})
        sides = window_size_left, window_size_right
        return backward(dout, q, k, v, out, softmax_lse, None, 0, softmax_scale, causal, *sides, dq, dk, dv)[0]

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p,
        softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
        zero_tensors=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert dropout_p == 0 and softcap == 0 and alibi_slopes is None and torch.equal(cu_seqlens_q, cu_seqlens_k)
        CALLS.append({"deterministic": deterministic})
        rest = cu_seqlens_q, max_seqlen_q, softmax_scale, causal, window_size_left, window_size_right
        return backward(dout, q, k, v, out, softmax_lse, *rest, dq, dk, dv)[0]

    for function in (_flash_attn_forward, _flash_attn_varlen_forward, _flash_attn_backward, _flash_attn_varlen_backward):
        setattr(module, function.__name__, function)
    return module


FWD = (
    "fwd(Tensor q, Tensor k, Tensor v, Tensor(k_new!)? k_new=None, Tensor(v_new!)? v_new=None, Tensor? q_v=None, "
    "Tensor(out!)? out=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, Tensor? cu_seqlens_k_new=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, Tensor? page_table=None, "
    "Tensor? kv_batch_idx=None, Tensor? leftpad_k=None, Tensor? rotary_cos=None, Tensor? rotary_sin=None, "
    "Tensor? seqlens_rotary=None, Tensor? q_descale=None, Tensor? k_descale=None, Tensor? v_descale=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, "
    "int attention_chunk=0, float softcap=0., bool is_rotary_interleaved=False, Tensor? scheduler_metadata=None, "
    "int num_splits=0, bool? pack_gqa=None, int sm_margin=0) -> (Tensor(out!), Tensor, Tensor, Tensor)"
)
BWD = (
    "bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor softmax_lse, Tensor(dq!)? dq=None, "
    "Tensor(dk!)? dk=None, Tensor(dv!)? dv=None, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "
    "Tensor? seqused_q=None, Tensor? seqused_k=None, int? max_seqlen_q=None, int? max_seqlen_k=None, "
    "float? softmax_scale=None, bool is_causal=False, int window_size_left=-1, int window_size_right=-1, float softcap=0., "
    "bool deterministic=False, int sm_margin=0) "
    "-> (Tensor(dq!), Tensor(dk!), Tensor(dv!), Tensor, Tensor, Tensor, Tensor, Tensor)"
)
"""The schemas that the package's own tests keep compatible."""


def flash_3() -> tuple[ModuleType, torch.library.Library]:
    """flash_attn_interface, whose import makes torch.ops.flash_attn_3."""
    library = torch.library.Library("flash_attn_3", "FRAGMENT")
    library.define(FWD)
    library.define(BWD)

    def fwd(
        q, k, v, k_new=None, v_new=None, q_v=None, out=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None,
        seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None,
        leftpad_k=None, rotary_cos=None, rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None,
        softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1, *rest,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        sides = window_size_left, window_size_right
        found = forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, is_causal, *sides)
        return *found, torch.empty(0), torch.empty(0)

    def bwd(
        dout, q, k, v, out, softmax_lse, dq=None, dk=None, dv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None,
        seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, is_causal=False, window_size_left=-1,
        window_size_right=-1, softcap=0.0, deterministic=False, sm_margin=0,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        CALLS.append({"deterministic": deterministic})
        where = cu_seqlens_q, max_seqlen_q, softmax_scale, is_causal, window_size_left, window_size_right
        found = backward(dout, q, k, v, out, softmax_lse, *where, dq, dk, dv)
        return *found, *(torch.empty(0) for _ in range(5))

    library.impl("fwd", fwd, "CPU", allow_override=True)
    library.impl("bwd", bwd, "CPU", allow_override=True)
    return ModuleType("flash_attn_interface"), library


def flash_4() -> ModuleType:
    """flash_attn.cute.interface."""
    module = ModuleType("flash_attn.cute.interface")

    def sides(left, right):  # type: ignore[no-untyped-def]
        assert left != -1 and right != -1, "None, not -1, is no window"
        return -1 if left is None else left, -1 if right is None else right

    def _flash_attn_fwd(
        q, k, v, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None, max_seqlen_k=None,
        page_table=None, softmax_scale=None, causal=False, softcap=None, window_size_left=None, window_size_right=None,
        learnable_sink=None, return_lse=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        assert return_lse
        own = sides(window_size_left, window_size_right)
        return forward(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, causal, *own)

    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None, window_size_right=None,
        cu_seqlens_q=None, cu_seqlens_k=None, deterministic=False,
    ):  # type: ignore[no-untyped-def]  # fmt: skip
        CALLS.append({"deterministic": deterministic})
        own = sides(window_size_left, window_size_right)
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        return backward(dout, q, k, v, out, lse, cu_seqlens_q, 10**9, softmax_scale, causal, *own, *grads)

    module._flash_attn_fwd, module._flash_attn_bwd = _flash_attn_fwd, _flash_attn_bwd  # type: ignore[attr-defined]
    return module


def install(monkeypatch, core: str) -> object:  # type: ignore[no-untyped-def]
    """Have `core` importable from here on; what is returned must stay alive."""
    made = {"flash-2": flash_2, "flash-3": flash_3, "flash-4": flash_4}[core]()
    module = made[0] if isinstance(made, tuple) else made
    names = module.__name__.split(".")
    for depth in range(1, len(names)):
        monkeypatch.setitem(sys.modules, ".".join(names[:depth]), ModuleType(".".join(names[:depth])))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return made
