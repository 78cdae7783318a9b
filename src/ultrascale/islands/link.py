"""Communication of a rank with its counterparts: rank r of each island is in one group, in which they exchange rank r's state.
Where islands differ in dp, a rank is in one group for each kind of weights (experts, others) of which it sends a piece.

    arrive    which islands are here for an outer step; a stopping island says that it has left, so that no island waits for it
    mean      a reduce-scatter and an all-gather. The buffer is cut in N; the others send piece k to island k, which adds them
              in island order, and sends the mean to all: 2 (N - 1) / N of the buffer leaves each rank, and all have the same
              bits. Messages go directly to their target: a ring, as in gloo's all-gather, would take N - 1 network latencies

Every piece is quantized twice, as a delta and as a mean. The sender keeps the error of the first. Island k compensates that of
the second by adding N times the error to its next delta. One buffer holds both.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ultrascale import heartbeat
from ultrascale.contact import meaning_of
from ultrascale.description.sections.islands import Wire, piece_of
from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.islands.encoding import decode, encode
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.mesh import Ranks
from ultrascale.torch_private import PrefixStore, Store

HERE, LEFT = "here", "left"


class LostIslandError(LostRankError):
    """Another island does not respond."""


class Mean(NamedTuple):
    """Mean of one buffer over all islands."""

    values: Tensor
    """[n], the same bits on every island."""
    lost: Tensor
    """[n], rounding error that this island must add to the next buffer."""
    sent_bytes: int
    """Bytes sent to the other islands."""


class Group:
    """A rank and its counterparts on `islands`; `index` is its position among them. All construct their groups at the same
    time.

    `divisor`: of the sum of deltas in the mean; None: the number of islands.
    """

    def __init__(self, store: Store, islands: Sequence[int], index: int, timeout: timedelta, divisor: int | None = None):
        self.islands, self.index, self.count, self.timeout = [*islands], index, len(islands), timeout
        self.divisor = divisor or self.count
        self.island = self.islands[index]
        with self._waiting("to meet"), gloo_threads_as_batch():
            self._group: Any = dist.ProcessGroupGloo(store, index, self.count, timeout)

    def mean(self, delta: Tensor, wire: Wire) -> Mean:
        """Mean over the islands of `delta`, [n]: the sum over the divisor. Sends messages and waits for the others'."""
        n, piece = len(delta), piece_of(len(delta), self.count, wire)
        whole = delta if n == piece * self.count else pad(delta, (0, piece * self.count - n))
        pieces = whole.view(self.count, -1)
        message = encode(pieces, wire)  # [N, bytes of a piece]
        lost = pieces - decode(message, wire, delta.dtype)
        received = decode(self._swap(message), wire, delta.dtype)
        total = received[0].clone()
        for other in received[1:]:  # in island order, on whichever island
            total += other
        mean = (total / self.divisor)[None]
        result = encode(mean, wire)
        lost[self.index] += (mean - decode(result, wire, delta.dtype))[0] * self.divisor
        sent_bytes = (self.count - 1) * (message.shape[1] + result.nbytes)
        return Mean(decode(self._gather(result), wire, delta.dtype).flatten()[:n], lost.flatten()[:n], sent_bytes)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Every island's `tensor`, [N, ...]."""
        return self._gather(tensor[None])

    def broadcast(self, tensor: Tensor, index: int) -> None:
        """Fill `tensor` on every island with its values on the island at `index`."""
        host = tensor.cpu().contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = index
        if host.numel():
            with self._waiting(f"for the state of island {self.islands[index]}"):
                self._group.broadcast([host.view(-1).view(torch.uint8)], options).wait()
        if index != self.index:
            tensor.copy_(host)

    def _swap(self, message: Tensor, what: str = "for their deltas") -> Tensor:
        """All-to-all: send row k of `message` [N, n] to island k, and receive each island's row for this one."""
        host = message.cpu()
        received = host.clone()
        others = [(self.index + i) % self.count for i in range(1, self.count)]
        with self._waiting(what):  # receives first: gloo's ready-notification must not queue behind outgoing data
            works = [self._group.recv([received[other]], other, 0) for other in reversed(others)]
            works += [self._group.send([host[other]], other, 0) for other in others]
            for work in works:
                work.wait()
        return received.to(message.device)

    def _gather(self, row: Tensor) -> Tensor:
        """All-gather of `row` [1, ...], stacked by island."""
        return self._swap(row.expand(self.count, *row.shape[1:]).contiguous(), "for the mean of deltas")

    def _waiting(self, what: str) -> AbstractContextManager[None]:
        return _waiting(self.island, self.timeout, what)


Groups = Mapping[str, Group]
"""Groups in which a rank sends, by the name of its set of counterparts."""


def make_groups(likes: Mapping[str, bool], make: Callable[[str], Group]) -> Groups:
    """The groups of a rank. `likes`: names of its sets of counterparts, in the same order on all ranks, and True if it sends
    there."""
    return {like: make(like) for like, sends in likes.items() if sends}


def mean_among(groups: Groups, like: str, delta: Tensor, wire: Wire) -> Mean:
    """Mean over the islands of `delta`, [n]; on a rank that sends nothing in this group, `delta` itself."""
    return groups[like].mean(delta, wire) if like in groups else Mean(delta, delta, 0)


class IslandLink:
    """This rank's connection to all islands, if they were started together."""

    def __init__(
        self, ranks: Ranks, count: int, *, timeout_seconds: float, likes: Mapping[str, bool], divisor: int | None = None
    ):
        """`likes`: as in `make_groups`; arrival is checked in the first group."""
        assert ranks.store is not None
        store, timeout = PrefixStore("between islands", ranks.store), timedelta(seconds=timeout_seconds)
        self.island, self.count, self._timeout = ranks.island, count, timeout
        self._store = PrefixStore(next(iter(likes)), store)
        self.groups = make_groups(
            likes,
            lambda like: Group(PrefixStore(f"messages, {like}", store), range(count), ranks.island, timeout, divisor),
        )

    def arrive(self, step: int) -> bool:
        """True if all islands have reached the outer step after `step` steps; False if one has left, or will stop before it."""
        self._store.set(_at(step, self.island), HERE)
        others = [_at(step, island) for island in range(self.count) if island != self.island]
        with _waiting(self.island, self._timeout, f"at the outer step after step {step}"):
            try:
                self._store.wait(others, self._timeout)
                return all(self._store.get(key).decode() == HERE for key in others)
            except dist.DistNetworkError:  # the process that hosted the store has left, so no island can be reached
                return False

    def leave(self, step: int) -> None:
        """Announce that no island needs to wait for this one at the outer step after `step` steps."""
        with suppress(RuntimeError):  # the process that hosted the store has left before
            self._store.set(_at(step, self.island), LEFT)


def _at(step: int, island: int) -> str:
    return f"after step {step}, island {island}"


@contextmanager
def _waiting(island: int, timeout: timedelta, what: str) -> Iterator[None]:
    """Context that turns a failed wait into LostIslandError."""
    beside = threading.current_thread() is not threading.main_thread()  # main: the training thread, which continues
    try:
        with nullcontext() if beside else heartbeat.waits(f"waiting for other islands {what}"):
            yield
    except RuntimeError as error:
        limit = f"{timeout.total_seconds():g} s (collective_timeout_seconds)"
        problem = f"island {island} waited {what} for at most {limit}, and another island did not answer"
        raise LostIslandError(
            f"{problem}: {meaning_of(error)}. Start all islands again: each goes on from its checkpoint."
        ) from error
