"""When a rank is gone: who waited for whom, and for what. gloo itself names a port."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch.distributed as dist


class LostRankError(RuntimeError):
    """A message did not arrive or could not be sent: a rank has died, or is too late."""


@contextmanager
def waiting(what: str, group: dist.ProcessGroup | None = None, peers: Sequence[int] | None = None) -> Iterator[None]:
    """Let what is awaited inside fail with the ranks' numbers in the run and `what` it was.

    `peers`: the ranks of `group` (None: all of the run) that it comes from; None: all others. Raises LostRankError.
    """
    try:
        yield
    except LostRankError:
        raise
    except RuntimeError as error:
        if "gloo" not in str(error) and not isinstance(error, dist.DistError):
            raise
        ranks = dist.get_process_group_ranks(group)
        whom = [rank for rank in ranks if rank != dist.get_rank()] if peers is None else [ranks[peer] for peer in peers]
        names = f"rank{'s' * (len(whom) > 1)} {', '.join(map(str, whom))}"
        reason = str(error).strip().splitlines()[0]
        raise LostRankError(f"rank {dist.get_rank()} waited for {names} in {what}: {reason}") from error
