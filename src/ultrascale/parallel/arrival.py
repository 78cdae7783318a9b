"""All ranks are here before anything is timed: machines of a job start minutes apart, and no collective should wait for that.

Each rank counts itself in at the store of the rendezvous; the last one opens the door. So a late rank is waited for longer than
any step may take, one that never comes is named, and collectives can keep a time-out that is meant for a step.
"""

from __future__ import annotations

import os
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous as rendezvous_at

from ultrascale.contact import names
from ultrascale.parallel.lost import LostRankError
from ultrascale.parallel.torch_private import PrefixStore

ARRIVAL_SECONDS = 600.0
"""Ten minutes, as torchrun's rendezvous waits for nodes; more where collectives may take more."""
RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_ALL = "arrived, all"


def meet(rendezvous: str, rank: int, world: int, timeout: timedelta) -> tuple[PrefixStore, int, int]:
    """The store of all ranks, this one's number and theirs, once all of them are here. `timeout`: of what is asked of the store
    from then on. `rendezvous`: a URL that torch understands.

    Raises LostRankError that names the ranks that did not come, or says that the store went away.
    """
    patience = max(timedelta(seconds=ARRIVAL_SECONDS), timeout)
    store, rank, world = next(iter(rendezvous_at(rendezvous, rank, world, timeout=patience)))
    # torchrun keeps its store over restarts, and a new worker then meets the addresses of dead ones: each attempt writes
    # under its own prefix, unless the launcher already gives each a store of its own (pytorch#135712).
    restarts = "0" if os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE") == "1" else os.environ.get(RESTARTS, "0")
    store = PrefixStore(f"attempt-{restarts}", store)
    wait_for_all(store, rank, world, patience)
    store.set_timeout(timeout)
    return store, rank, world


def wait_for_all(store: PrefixStore, rank: int, world: int, timeout: timedelta) -> None:
    """Return once all `world` ranks have called this with a store that none has called it with before. Raises LostRankError."""
    try:
        store.set(_here(rank), "")
        if store.add("arrived, number", 1) == world:
            store.set(_ALL, "")
        store.wait([_ALL], timeout)
    except RuntimeError as error:
        raise LostRankError(f"rank {rank} {_missed(store, world, timeout)}") from error


def _here(rank: int) -> str:
    return f"arrived, rank {rank}"


def _missed(store: PrefixStore, world: int, timeout: timedelta) -> str:
    try:
        missing = [rank for rank in range(world) if not store.check([_here(rank)])]
    except RuntimeError:
        return "lost the store of the rendezvous before all ranks had met: whoever holds it has ended. Start the ranks again."
    waited = f"waited {timeout.total_seconds():g} s for {names(missing)} of {world}"
    return f"{waited}, which did not start. Look at their machines, and at what started them."
