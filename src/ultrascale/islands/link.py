"""A rank and its like on the other islands: rank r of each is in one group, and they send one another what rank r holds.

    arrive    who is here for an outer step; an island that was told to stop says that it has left, so that nobody waits for it
    mean      two rounds of pieces. Of the buffer, cut in N, island k has piece k sent by all the others, adds them up in their
              order, and sends the mean to all: 2 (N - 1) / N of the buffer leaves each rank, and all have the same bits

Every piece is encoded twice, as a move and as a mean. Of the first the error is the sender's; of the second it is N times what
island k must add to its own next move to make it good, and so both are in one buffer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from ultrascale import heartbeat
from ultrascale.contact import why
from ultrascale.description.sections.islands import Wire, piece_of
from ultrascale.islands.encoding import decode, encode
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.mesh import Ranks
from ultrascale.torch_private import PrefixStore, Store

HERE, LEFT = "here", "left"


class LostIslandError(LostRankError):
    """Another island does not answer."""


class Mean(NamedTuple):
    """Mean of one buffer over all islands."""

    values: Tensor
    """[n], the same bits on every island."""
    lost: Tensor
    """[n], what was rounded off and this island has to add to the next buffer."""
    sent_bytes: int
    """Bytes sent to the other islands."""


class Group:
    """A rank and its like on `islands`, of which it is number `index`. All build theirs at the same time."""

    def __init__(self, store: Store, islands: Sequence[int], index: int, timeout: timedelta):
        self.islands, self.index, self.count, self.timeout = [*islands], index, len(islands), timeout
        self.island = self.islands[index]
        with self._waiting("to meet"):
            self._group: Any = dist.ProcessGroupGloo(store, index, self.count, timeout)

    def mean(self, own: Tensor, wire: Wire) -> Mean:
        """Mean over the islands of `own`, [n]. Sends messages, and waits for the others'."""
        n, piece = len(own), piece_of(len(own), self.count, wire)
        whole = own if n == piece * self.count else pad(own, (0, piece * self.count - n))
        pieces = whole.view(self.count, -1)
        message = encode(pieces, wire)  # [N, bytes of a piece]
        lost = pieces - decode(message, wire, own.dtype)
        came = decode(self._swap(message), wire, own.dtype)
        total = came[0].clone()
        for other in came[1:]:  # in the order of islands, on whichever of them
            total += other
        mean = (total / self.count)[None]
        result = encode(mean, wire)
        lost[self.index] += (mean - decode(result, wire, own.dtype))[0] * self.count
        sent_bytes = (self.count - 1) * (message.shape[1] + result.nbytes)
        return Mean(decode(self._gather(result), wire, own.dtype).flatten()[:n], lost.flatten()[:n], sent_bytes)

    def from_all(self, own: Tensor) -> Tensor:
        """Every island's `own`, [N, ...]."""
        return self._gather(own[None])

    def from_one(self, tensor: Tensor, index: int) -> None:
        """Fill `tensor` with what number `index` of the islands has in its own."""
        host = tensor.cpu().contiguous()
        options = dist.BroadcastOptions()
        options.rootRank = index
        if host.numel():
            with self._waiting(f"for the state of island {self.islands[index]}"):
                self._group.broadcast([host.view(-1).view(torch.uint8)], options).wait()
        if index != self.index:
            tensor.copy_(host)

    def _swap(self, message: Tensor) -> Tensor:
        """Row k of `message` [N, n] to island k, for what each island has for this one."""
        came = torch.empty_like(message)
        with self._waiting("for their moves"):
            self._group.alltoall_base(came, message, [], []).wait()
        return came

    def _gather(self, row: Tensor) -> Tensor:
        """The `row` [1, ...] of each island, one below the other."""
        came = row.new_empty((self.count, *row.shape[1:]))
        with self._waiting("for the mean of moves"):
            self._group._allgather_base(came, row.contiguous()).wait()
        return came

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Let what is awaited inside fail in words. Raises LostIslandError."""
        beside = threading.current_thread() is not threading.main_thread()  # of training, which goes on
        try:
            with nullcontext() if beside else heartbeat.waits(f"waiting for other islands {what}"):
                yield
        except RuntimeError as error:
            limit = f"{self.timeout.total_seconds():g} s (collective_timeout_seconds)"
            told = f"island {self.island} waited {what} for at most {limit}, and another island did not answer"
            raise LostIslandError(
                f"{told}: {why(error)}. Start all islands again: each goes on from its checkpoint."
            ) from error


class Link(Group):
    """This rank's end of the link of all islands that were started together."""

    def __init__(self, ranks: Ranks, count: int, *, timeout_seconds: float, name: str = "", sends: bool = True):
        """`name`: of this rank's like on all islands, its rank if that is the same. `sends`: False of a rank that has no like,
        which only learns who is here."""
        assert ranks.store is not None
        self._store = PrefixStore(f"between islands, rank {name or ranks.rank}", ranks.store)
        self.sends, timeout = sends, timedelta(seconds=timeout_seconds)
        if sends:
            super().__init__(PrefixStore("messages", self._store), range(count), ranks.island, timeout)
        else:
            self.islands, self.island, self.count, self.timeout = [*range(count)], ranks.island, count, timeout

    def mean(self, own: Tensor, wire: Wire) -> Mean:
        """Mean over the islands of `own`, [n]; from a rank that sends nothing, what it has."""
        return super().mean(own, wire) if self.sends else Mean(own, own, 0)

    def arrive(self, step: int) -> bool:
        """True if all islands have reached the outer step after `step` steps; False if one has left, or will stop before it."""
        self._store.set(_at(step, self.island), HERE)
        others = [_at(step, island) for island in range(self.count) if island != self.island]
        with self._waiting(f"at the outer step after step {step}"):
            try:
                self._store.wait(others, self.timeout)
                return all(self._store.get(key).decode() == HERE for key in others)
            except dist.DistNetworkError:  # whoever held the store has left, and nobody can be met any more
                return False

    def leave(self, step: int) -> None:
        """Let nobody wait for this island at the outer step after `step` steps."""
        with suppress(RuntimeError):  # whoever held the store has left before
            self._store.set(_at(step, self.island), LEFT)


def _at(step: int, island: int) -> str:
    return f"after step {step}, island {island}"
