"""Attention over several ranks and on one, as plain products of float64: how far apart results and gradients are."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.description.layout import Layout
from ultrascale.parallel.context import context_parallel as context
from ultrascale.parallel.context.context_parallel import ContextParallel

BATCH, HEADS, WIDTH = 2, 4, 6


@dataclass(frozen=True)
class Case:
    method: Any = "ring"
    cp_heads: int = 1
    length: int = 29
    groups: int = 2
    """Key/value heads."""
    window: int | None = None
    documents: bool = False
    sinks: bool = False
    value_width: int = WIDTH
    dtype: torch.dtype = torch.float64
    fault: Callable[[], None] | None = None
    """Breaks this rank before it computes."""


def masks_and_heads(method: str, cp_heads: int = 1) -> dict[str, Case]:
    """Causal, window, documents and both, each with grouped and single heads of keys and values, over odd and even lengths."""
    return {
        f"{method}-{'documents' if documents else 'one'}-{window}-{groups}-{length}": Case(
            method, cp_heads, length, groups, window, documents
        )
        for documents in (False, True)
        for window in (None, 5)
        for groups in (2, HEADS)
        for length in (29, 48)
    }


def errors_of(rank: int, cases: dict[str, Case]) -> dict[str, dict[str, float]]:
    """Largest error of each result on this rank, relative to the largest element of the whole, or to 1."""
    return {name: errors(rank, case) for name, case in cases.items()}


def errors(rank: int, case: Case) -> dict[str, float]:
    torch.manual_seed(3)
    document_ids = made_documents(case) if case.documents else None
    whole = made_tensors(case)
    expected = results(whole, lambda q, k, v, s: plain_attention(q, k, v, s, document_ids, case.window))
    if case.fault is not None:
        case.fault()
    layout = Layout(cp=dist.get_world_size(), cp_method=case.method, cp_heads=case.cp_heads)
    assert layout.problems() == []
    assert dist.group.WORLD is not None
    cp = ContextParallel(layout, dist.group.WORLD)
    slots = slots_of(case, document_ids, layout, rank)
    ids = torch.zeros(BATCH, case.length, dtype=torch.long) if document_ids is None else document_ids
    mask = cp.make_mask(
        slots.shape[1], slots.shape[1], document_ids=ids, window=case.window, dtype=case.dtype, device=torch.device("cpu")
    )
    own = {name: taken(x, slots) if x.dim() == 4 else x for name, x in whole.items()}
    own = {name: x.to(case.dtype).contiguous() for name, x in own.items()}
    found = results(own, lambda q, k, v, s: cp.core(q, k, v, mask, sinks=s))
    if "sinks" in found:
        dist.all_reduce(found["sinks"])
    return {
        name: float((found[name] - (taken(x, slots) if x.dim() == 4 else x)).abs().max() / x.abs().max().clamp(min=1))
        for name, x in expected.items()
    }


def made_documents(case: Case) -> Tensor:
    """[B, S]: breaks every few tokens, elsewhere in each sequence."""
    breaks = torch.rand(BATCH, case.length) < 0.12
    breaks[:, 0] = False
    return breaks.long().cumsum(1)


def made_tensors(case: Case) -> dict[str, Tensor]:
    """Queries, keys, values and the gradient of the result, [B, S, heads, width] float64, and sinks [H] if asked for."""
    shapes = {
        "query": (HEADS, WIDTH), "key": (case.groups, WIDTH), "value": (case.groups, case.value_width),
        "grad": (HEADS, case.value_width),
    }  # fmt: skip
    made = {name: torch.randn(BATCH, case.length, *shape, dtype=torch.float64) for name, shape in shapes.items()}
    return made | ({"sinks": torch.randn(HEADS, dtype=torch.float64)} if case.sinks else {})


def slots_of(case: Case, document_ids: Tensor | None, layout: Layout, rank: int) -> Tensor:
    """Where in its sequence each token of `rank` is, [B, S/cp]: what `shard_batch` makes of the numbers of the positions."""
    numbers = np.broadcast_to(np.arange(case.length), (BATCH, case.length))
    ids = None if document_ids is None else document_ids.numpy()
    return torch.from_numpy(context.shard_batch(numbers, numbers, numbers, ids, layout=layout, cp_rank=rank).tokens)


def taken(x: Tensor, slots: Tensor) -> Tensor:
    return x.gather(1, slots[:, :, None, None].expand(-1, -1, *x.shape[2:]))


def results(tensors: dict[str, Tensor], attend: Callable[..., Tensor]) -> dict[str, Tensor]:
    """Of an attention function: the result, and the gradients of all it was given."""
    leaves = {name: x.clone().requires_grad_() for name, x in tensors.items() if name != "grad"}
    out = attend(leaves["query"], leaves["key"], leaves["value"], leaves.get("sinks"))
    out.backward(tensors["grad"])
    grads = {name: x.grad for name, x in leaves.items() if x.grad is not None}
    return {"out": out.detach(), **grads}


def plain_attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, document_ids: Tensor | None, window: int | None
) -> Tensor:
    """Softmax of all scores, written out."""
    batch, length, heads, width = query.shape
    key, value = (x.repeat_interleave(heads // key.shape[2], 2) for x in (key, value))
    scores = torch.einsum("bshe,bthe->bhst", query, key) / math.sqrt(width)
    at = torch.arange(length)
    visible = (at <= at[:, None]) & (at > at[:, None] - (window or length))
    visible = visible.expand(batch, -1, -1)
    if document_ids is not None:
        visible = visible & (document_ids[:, :, None] == document_ids[:, None, :])
    scores = scores.masked_fill(~visible[:, None], -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[None, :, None, None].expand(batch, -1, length, 1)), dim=-1)
    return torch.einsum("bhst,bthe->bshe", scores.softmax(-1)[..., :length], value)
