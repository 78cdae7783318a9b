"""Errors for lost ranks: they say which rank waited for which, and for what; gloo itself names only a port. Profiler ranges
carry the same words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from ultrascale import heartbeat
from ultrascale.contact import meaning_of, names
from ultrascale.torch_private import profiler_is_active

AWAITED = "ultrascale: wait: "
"""Prefix of profiler ranges in which a rank starts messages or waits for them; the name of the message follows."""


class LostRankError(RuntimeError):
    """A message did not arrive or could not be sent: a rank has died or is too late."""

    lost_another = True
    """The cause is in another rank (`launch.forked` looks there first)."""


@contextmanager
def waiting(
    what: str,
    group: dist.ProcessGroup | None = None,
    peers: Sequence[int] | None = None,
    *,
    tensor: torch.Tensor | None = None,
) -> Iterator[None]:
    """Context in which a failing wait raises an error with the ranks' numbers in the run and the name of the message, `what`.
    Meanwhile this rank's heartbeat says that it waits.

    `peers`: the ranks of `group` (None: of the run) that the message comes from; None: all others, in a collective that every
    rank must call in the same order and with the same shape of `tensor`. Raises LostRankError.
    """
    try:
        with heartbeat.waits(what, collective=_named(what, group, tensor) if peers is None else None), profiler_range(what):
            yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        ranks = dist.get_process_group_ranks(group)
        whom = [rank for rank in ranks if rank != dist.get_rank()] if peers is None else [ranks[peer] for peer in peers]
        raise LostRankError(f"rank {dist.get_rank()} waited for {names(whom)} in {what}: {meaning_of(error)}") from error


def _named(what: str, group: dist.ProcessGroup | None, tensor: torch.Tensor | None) -> tuple[str, str]:
    """Names of the group and the collective, the same on every rank of the group."""
    if not dist.is_initialized():
        return "", what
    ranks = dist.get_process_group_ranks(group)
    shape = "" if tensor is None else f" of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return f"ranks {ranks[0]} to {ranks[-1]} ({len(ranks)})", f"{what}{shape}"


def profiler_range(what: str) -> AbstractContextManager[object]:
    """Profiler range of this name, if a profiler is active."""
    return torch.profiler.record_function(AWAITED + what) if profiler_is_active() else nullcontext()
