"""Messages between ranks while they save and load: JSON over gloo. A failure on one rank becomes a failure on all.

Values travel as JSON in byte tensors, not as pickled objects. `agree` is the core: it runs a piece of work on every rank, and
if it failed anywhere, every rank raises the same `CheckpointError`. A crashed rank shows as a broken collective, which becomes
a `LostContactError`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ultrascale.checkpoint.errors import CheckpointError, LostContactError, UnknownVersionError
from ultrascale.contact import meaning_of, names
from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.storage.store import StorageError

T = TypeVar("T")
MAX_SHOWN = 8
SLOW_DISK_TIMEOUT = timedelta(minutes=60)
"""Ranks wait for the slowest writer here, not in a training collective, whose shorter time-out suits a step."""


class Coordinator:
    """A rank's connection to the other ranks. Without a group it is the only rank."""

    def __init__(self, group: dist.ProcessGroup | None):
        self.group = group
        self.rank = 0 if group is None else group.rank()
        self.world = 1 if group is None else group.size()

    def agree(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on this rank and return its result, once it has succeeded on every rank.

        Raises CheckpointError on every rank if it raised on any; the message begins with `doing`.
        """
        result, failure = None, None
        try:
            result = work()
        except Exception as error:
            failure = error
        failures = self.failures(None if failure is None else _describe(failure))
        if failures:
            is_unknown = any(UnknownVersionError.WORDS in text for text in failures.values())
            kind = UnknownVersionError if is_unknown else CheckpointError
            raise kind(_failure_text(doing, failures, self.world)) from failure
        return result  # type: ignore[return-value]

    def failures(self, failure: str | None) -> dict[int, str]:
        """All failures by rank, the same on every rank; empty if there are none, which costs one small reduction."""
        if self.group is None:
            return {} if failure is None else {0: failure}
        bad = torch.tensor([failure is not None], dtype=torch.int64)
        with self._contact():
            dist.all_reduce(bad, group=self.group)
        if not bad.item():
            return {}
        gathered = self.gather(failure)
        texts = self.broadcast({str(rank): text for rank, text in enumerate(gathered or []) if text is not None})
        return {int(rank): text for rank, text in texts.items()}

    def gather(self, value: Any) -> list[Any] | None:
        """JSON-able values of all ranks, in order of rank, on rank 0; None elsewhere."""
        if self.group is None:
            return [value]
        data = _to_bytes(value)
        with self._contact():
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(lengths, torch.tensor([len(data)]), group=self.group)
            padded = torch.zeros(max(int(length) for length in lengths), dtype=torch.uint8)
            padded[: len(data)] = data
            received = [torch.empty_like(padded) for _ in range(self.world)] if self.rank == 0 else None
            dist.gather(padded, received, group=self.group, group_dst=0)
        if received is None:
            return None
        return [_from_bytes(part[: int(length)]) for part, length in zip(received, lengths, strict=True)]

    def broadcast(self, value: Any = None) -> Any:
        """Rank 0's JSON-able value, on every rank."""
        if self.group is None:
            return value
        data = _to_bytes(value) if self.rank == 0 else torch.empty(0, dtype=torch.uint8)
        length = torch.tensor([len(data)])
        with self._contact():
            dist.broadcast(length, group=self.group, group_src=0)
            data = data if self.rank == 0 else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(data, group=self.group, group_src=0)
        return _from_bytes(data)

    @contextmanager
    def _contact(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:
            ranks = [rank for rank in dist.get_process_group_ranks(self.group) if rank != dist.get_rank()]
            lost = f"rank {dist.get_rank()} lost contact with {names(ranks)} while saving or loading a checkpoint"
            raise LostContactError(
                f"{lost}: {meaning_of(error)}. Look for the rank that ended first; what was published before is intact."
            ) from error

    def on_rank_0(self, doing: str, work: Callable[[], T]) -> T:
        """Run `work` on rank 0 and broadcast its JSON-able result. Raises CheckpointError on every rank if it fails."""
        result = self.agree(doing, lambda: work() if self.rank == 0 else None)
        return self.broadcast(result)


@contextmanager
def coordinating(process_group: dist.ProcessGroup | None, *, always_new_group: bool = False) -> Iterator[Coordinator]:
    """A coordinator over `process_group`, or over all ranks, or over this process alone if torch.distributed is not
    initialized.

    If the group cannot reduce CPU tensors (NCCL), a temporary gloo group is made beside it; `always_new_group` always makes
    one, for use from another thread. Collective over the group's ranks.
    """
    if not dist.is_initialized():
        yield Coordinator(None)
        return
    group = process_group if process_group is not None else dist.group.WORLD
    if group is None or group.rank() < 0:
        raise CheckpointError("process_group: this rank is not in it. Save and load on the ranks of the group only.")
    if not always_new_group and "cpu:gloo" in str(dist.get_backend_config(group)):
        yield Coordinator(group)
        return
    ranks = dist.get_process_group_ranks(group)
    with gloo_threads_as_batch():
        gloo_group = dist.new_group(ranks, backend="gloo", timeout=SLOW_DISK_TIMEOUT, use_local_synchronization=True)
    assert isinstance(gloo_group, dist.ProcessGroup)  # This rank is one of `ranks`.
    try:
        yield Coordinator(gloo_group)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group(gloo_group)


def _describe(error: Exception) -> str:
    if isinstance(error, CheckpointError | StorageError):
        return str(error)
    remedy = " Free space or choose another folder." if isinstance(error, OSError) and error.errno in (27, 28, 122) else ""
    return f"{type(error).__name__}: {error}.{remedy}"


def _failure_text(doing: str, failures: dict[int, str], world: int) -> str:
    if world == 1:
        return f"{doing}: {failures[0]}"
    same = len(set(failures.values())) == 1
    ranks = sorted(failures)
    shown = ranks[:1] if same else ranks[:MAX_SHOWN]
    whose = f"ranks {ranks}" if same and len(ranks) > 1 else None
    lines = [f"{whose or f'rank {rank}'} of {world}: {failures[rank]}" for rank in shown]
    more = len(ranks) - len(shown)
    return f"{doing}: " + "\n".join(lines) + (f"\nand {more} more ranks" if more and not same else "")


def _to_bytes(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)


def _from_bytes(data: torch.Tensor) -> Any:
    return json.loads(bytes(data.numpy()))
