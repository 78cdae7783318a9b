"""Time limits: how long a rank waits for another one before it gives up, which depends on what the other may be doing.

    start          START_SECONDS, or more if a step may take more: loading, planning, compiling, the first step
    a slow part    SLOW_SECONDS: going back to a checkpoint, the first evaluation of a compiled model
    a step         the run's collective_timeout_seconds: less than a stopped run has to leave in, because Python runs no handler
                   of a signal inside a collective

Saves have a group and a limit of their own (`checkpoint.coordination`). torch takes a group's limit for its collectives; single
messages of gloo keep the limit that their connection was made with, so that they are waited for with the group's own.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from ultrascale.torch_private import set_group_timeout

START_SECONDS = 600.0
"""Seconds that torchrun's rendezvous waits for nodes."""
SLOW_SECONDS = 3600.0
"""Seconds that `checkpoint.coordination` waits for the slowest disk."""


def limit_waits(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """Limits every later wait in each of `groups`. Every rank of a group must give the same seconds, at the same place."""
    for group in groups:
        set_group_timeout(timedelta(seconds=seconds), group)


def wait_for(work: dist.Work | None, group: dist.ProcessGroup | None) -> None:
    """Waits until a single message of `group` (None: all ranks) has arrived or left. Raises RuntimeError if it takes too long.

    NCCL's own are not given a limit here: the host would then wait for the device. Their watchdog knows the group's.
    """
    if work is None:
        return
    limit = _gloo_limit(dist.group.WORLD if group is None else group)
    if limit is None:
        work.wait()
    else:
        work.wait(limit)


def _gloo_limit(group: dist.ProcessGroup | None) -> timedelta | None:
    """Timeout of gloo; None for messages of another backend, or where a test has put something in a group's place."""
    if not isinstance(group, dist.ProcessGroup) or torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None
