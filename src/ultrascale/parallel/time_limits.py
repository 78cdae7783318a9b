"""Time limits: how long a rank waits for another before it gives up, depending on what the other may be doing.

    start          START_SECONDS, or more if a step may take more: loading, planning, compiling, the first step
    a slow part    SLOW_SECONDS: returning to a checkpoint, the first evaluation of a compiled model
    a step         the run's collective_timeout_seconds: less than the grace period of a stopped run, because Python runs no
                   signal handler inside a collective

Saves have their own group and limit (`checkpoint.coordination`). torch applies a group's limit to its collectives; single gloo
messages keep the limit set when their connection was made, so the code passes the group's limit explicitly.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta

import torch
import torch.distributed as dist

from ultrascale.torch_private import set_group_timeout

START_SECONDS = 600.0
"""Seconds that torchrun's rendezvous waits for nodes, used for the start."""
SLOW_SECONDS = 3600.0
"""Seconds that `checkpoint.coordination` waits for the slowest disk."""


def limit_waits(groups: Iterable[dist.ProcessGroup], seconds: float) -> None:
    """Limit every later wait in each of `groups`. Every rank of a group must pass the same seconds, at the same point."""
    for group in groups:
        set_group_timeout(timedelta(seconds=seconds), group)


def wait_for(work: dist.Work | None, group: dist.ProcessGroup | None) -> None:
    """Wait until a single message of `group` (None: all ranks) has arrived or left. Raises RuntimeError on time-out.

    NCCL messages get no limit here, as the host would then wait for the device. Their watchdog applies the group's limit.
    """
    if work is None:
        return
    limit = _gloo_limit(dist.group.WORLD if group is None else group)
    if limit is None:
        work.wait()
    else:
        work.wait(limit)


def _gloo_limit(group: dist.ProcessGroup | None) -> timedelta | None:
    """gloo timeout of the group; None for another backend, or where a test has replaced the group."""
    if not isinstance(group, dist.ProcessGroup) or torch.device("cpu") not in group._device_types:
        return None
    backend = group._get_backend(torch.device("cpu"))
    return backend.options._timeout if isinstance(backend, dist.ProcessGroupGloo) else None
