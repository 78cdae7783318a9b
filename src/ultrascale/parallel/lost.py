"""Errors when a rank is gone: which rank waited for which, and for what. gloo itself names a port. A profiler gets the same
words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
import torch.distributed as dist

from ultrascale import heartbeat
from ultrascale.contact import meaning_of, names
from ultrascale.torch_private import profiler_is_active

AWAITED = "ultrascale: wait: "
"""Ranges in a profiler's trace in which a rank starts messages or waits for them; what they are follows."""


class LostRankError(RuntimeError):
    """A message did not arrive or could not be sent: a rank has died, or is too late."""

    lost_another = True
    """The cause lies elsewhere (`launch.forked` looks there first)."""


@contextmanager
def waiting(
    what: str,
    group: dist.ProcessGroup | None = None,
    peers: Sequence[int] | None = None,
    *,
    tensor: torch.Tensor | None = None,
) -> Iterator[None]:
    """Let what is awaited inside fail with the ranks' numbers in the run and `what` it was; meanwhile this rank's sign of life
    says that it waits.

    `peers`: the ranks of `group` (None: all of the run) that it comes from; None: all others, and then all of them must come to
    it in the same order and with the same shape of `tensor`. Raises LostRankError.
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
    """The group and the collective as every rank of the group must name it."""
    if not dist.is_initialized():
        return "", what
    ranks = dist.get_process_group_ranks(group)
    shape = "" if tensor is None else f" of {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    return f"ranks {ranks[0]} to {ranks[-1]} ({len(ranks)})", f"{what}{shape}"


def profiler_range(what: str) -> AbstractContextManager[object]:
    """A range of this name in the trace of a profiler, if one looks on."""
    return torch.profiler.record_function(AWAITED + what) if profiler_is_active() else nullcontext()
