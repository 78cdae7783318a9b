"""Routing without values: every expert is chosen equally often, as a plan takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ultrascale.models import experts
from ultrascale.parallel.expert import expert_dispatch
from ultrascale.parallel.expert.expert_dispatch import Dispatch, UnderWay
from ultrascale.trace.recording.pretend import replaced
from ultrascale.work.sharding.places import even_part


@contextmanager
def balanced_routing() -> Iterator[None]:
    """Inside, dispatch learns of even loads instead of asking the device; nothing is dropped."""
    now: list[tuple[Dispatch, int]] = []
    start = Dispatch.start

    def start_knowing(self: Dispatch, tokens: Tensor, routing: Any) -> UnderWay:
        now[:] = [(self, own_pairs(self, *routing[0].shape))]
        return start(self, tokens, routing)

    def to_host(sent: Tensor, from_rank: Tensor) -> tuple[list[int], list[list[int]]]:
        torch.cat([sent, from_rank.flatten()])  # what is copied to the host, for as long as that takes
        dispatch, pairs = now[0]
        to_expert = balanced(pairs, len(sent))
        own = 0 if dispatch.ep is None else dispatch.ep.rank()
        here = sum(to_expert[dispatch.bounds[own] : dispatch.bounds[own + 1]])
        return to_expert, [[here] * from_rank.shape[1] for _ in range(from_rank.shape[0])]

    def all_kept(counts: Tensor, pairs: Tensor) -> int:
        counts.sum()
        return len(pairs)

    with (
        replaced(Dispatch, "start", start_knowing),
        replaced(expert_dispatch, "_to_host", to_host),
        replaced(experts, "num_kept", all_kept),
    ):
        yield


def own_pairs(dispatch: Dispatch, num_tokens: int, choices: int) -> int:
    """(token, expert) pairs that this rank sends, of [N, k] choices."""
    if dispatch.same_tokens is not None:
        num_tokens = even_part(num_tokens, dispatch.same_tokens.size(), dispatch.same_tokens.rank())[1]
    return num_tokens * choices


def balanced(pairs: int, experts: int) -> list[int]:
    """Choices of each expert, balanced."""
    return [even_part(pairs, experts, expert)[1] for expert in range(experts)]
