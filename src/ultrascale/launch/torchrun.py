"""What a run that torchrun started on several nodes should be told."""

from __future__ import annotations

from collections.abc import Mapping

SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def torchrun_notes(environment: Mapping[str, str]) -> list[str]:
    """What would go wrong at a restart, from the variables that torchrun sets.

    Its agents lend their store to every attempt, and count restarts each for itself: after a crash nodes may count differently
    and wait for one another under different names, until the time-out (pytorch#135712).
    """
    nodes = int(environment.get("GROUP_WORLD_SIZE", "1"))
    restarts = int(environment.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if nodes == 1 or not restarts or environment.get(SHARED_STORE) == "1":
        return []
    return [f"{SHARED_STORE}=1 is not set on {nodes} nodes: ranks may not find each other again when torchrun restarts them"]
