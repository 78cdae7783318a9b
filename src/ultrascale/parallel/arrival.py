"""Start-up barrier: all ranks meet before anything is timed. Machines of a job start minutes apart, and no collective should
have to wait for that.

Each rank adds itself to a counter in the rendezvous store, and the last one releases all. So a late rank is waited for longer
than any step may take, a rank that never comes is named in the error, and collectives can keep a time-out sized for a step.

torchrun reuses its store for every restart attempt, and the keys of earlier attempts are still in it: new ranks would read the
addresses of dead ones. (torch 2.13: `dynamic_rendezvous.next_rendezvous` makes the server once, `rendezvous._create_c10d_store`
puts no prefix before its keys; pytorch#135712.) The restart count does not identify an attempt: each agent counts its own, and
only where one of its ranks failed. So rank 0 draws a random name for the attempt. Each rank acknowledges the name under a
random word of its own, and rank 0 repeats that word: a rank that read the name of an earlier attempt does not find its word
there, and reads again.
"""

from __future__ import annotations

import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta

from torch.distributed.rendezvous import rendezvous as rendezvous_at

from ultrascale.contact import names
from ultrascale.parallel.lost import LostRankError
from ultrascale.torch_private import PrefixStore, Store

ARRIVAL_SECONDS = 600.0
"""Ten minutes, torchrun's own rendezvous time-out for nodes; longer where collectives may take longer."""
LENT = "TORCHELASTIC_USE_AGENT_STORE"
"""Environment variable by which torchrun says that its agent's store is reused for every attempt."""
LOOK_SECONDS = 0.05
RANKS_A_LOOK = 64
"""Ranks above which each polls less often, as all of them poll one store."""
_ALL = "arrived, all"
_NAME = "the attempt"
_LAST = "no attempt after this one"
_GONE = "lost the store of the rendezvous before all ranks had met: whoever holds it has ended. Start the ranks again."


_lent: Store | None = None


class GivenUpError(RuntimeError):
    """An earlier attempt asked that no further attempt be made."""


def meet(rendezvous: str, rank: int, world: int, timeout: timedelta) -> tuple[PrefixStore, int, int]:
    """Store shared by all ranks, this rank's number and the world size, once all ranks have arrived. `timeout`: of later store
    operations. `rendezvous`: a URL that torch understands.

    Raises LostRankError that names the missing ranks, or says that the store went away, and GivenUpError.
    """
    patience = max(timedelta(seconds=ARRIVAL_SECONDS), timeout)
    store, rank, world = next(iter(rendezvous_at(rendezvous, rank, world, timeout=patience)))
    is_lent = os.environ.get(LENT) == "True" and rendezvous == "env://"
    if is_lent:
        _expect_wanted(store)
    name = agree_on_attempt(store, rank, world, patience) if is_lent else "alone"
    store = PrefixStore(f"attempt {name}", store)
    wait_for_all(store, rank, world, patience)
    store.set_timeout(timeout)
    return store, rank, world


def give_up(why: str) -> None:
    """Make ranks that torchrun restarts exit with this message as soon as they meet."""
    if _lent is not None:
        with suppress(RuntimeError):  # the store's process is gone, so nothing restarts ranks either
            _lent.set(_LAST, why)


def _expect_wanted(store: Store) -> None:
    global _lent
    _lent = store
    if store.check([_LAST]):
        raise GivenUpError(f"this run: not started again: {store.get(_LAST).decode()}")


def agree_on_attempt(store: Store, rank: int, world: int, timeout: timedelta) -> str:
    """Name of this attempt, the same on all `world` ranks; the store may hold keys of earlier attempts.

    Raises LostRankError for ranks that did not arrive, or if the store went away.
    """
    deadline = time.monotonic() + timeout.total_seconds()
    try:
        agreed = _lead(store, world, deadline) if rank == 0 else _follow(store, rank, world, deadline)
    except RuntimeError as error:
        raise LostRankError(f"rank {rank} {_GONE}") from error
    if isinstance(agreed, str):
        return agreed
    raise LostRankError(f"rank {rank} {_missing_text(agreed, world, timeout)}")


def _lead(store: Store, world: int, deadline: float) -> str | list[int]:
    """Rank 0: draw a name and wait until all ranks have read it. Returns the name, or the ranks that have not read it."""
    name, words = uuid.uuid4().hex, []
    store.set(_NAME, name)
    for rank in range(1, world):
        while (word := _word(store, rank, name)) is None:
            if time.monotonic() > deadline:
                return [late for late in range(rank, world) if _word(store, late, name) is None]
            time.sleep(LOOK_SECONDS)
        words.append(word)
    store.set(f"{_ALL}, {name}", " ".join(words))
    return name


def _word(store: Store, rank: int, name: str) -> str | None:
    """The word that a rank wrote on reading `name`."""
    key = f"{_NAME}, rank {rank}"
    read, _, word = store.get(key).decode().partition(" ") if store.check([key]) else ("", "", "")
    return word if read == name else None


def _follow(store: Store, rank: int, world: int, deadline: float) -> str | list[int]:
    """Other ranks: return the name once rank 0 has repeated this rank's word, or the ranks not known to have arrived."""
    word, name = uuid.uuid4().hex, ""
    while time.monotonic() < deadline:
        if store.check([_NAME]) and (newest := store.get(_NAME).decode()) != name:
            name = newest
            store.set(f"{_NAME}, rank {rank}", f"{name} {word}")
        if name and store.check([f"{_ALL}, {name}"]) and word in store.get(f"{_ALL}, {name}").decode():
            return name
        time.sleep(LOOK_SECONDS * (1 + world / RANKS_A_LOOK))
    return [0]


def wait_for_all(store: PrefixStore, rank: int, world: int, timeout: timedelta) -> None:
    """Return once all `world` ranks have called this with a fresh store (one never used for this before). Raises
    LostRankError."""
    try:
        store.set(_arrival_key(rank), "")
        if store.add("arrived, number", 1) == world:
            store.set(_ALL, "")
        store.wait([_ALL], timeout)
    except RuntimeError as error:
        raise LostRankError(f"rank {rank} {_why_missing(store, world, timeout)}") from error


def _arrival_key(rank: int) -> str:
    return f"arrived, rank {rank}"


def _why_missing(store: PrefixStore, world: int, timeout: timedelta) -> str:
    try:
        missing = [rank for rank in range(world) if not store.check([_arrival_key(rank)])]
    except RuntimeError:
        return _GONE
    return _missing_text(missing, world, timeout)


def _missing_text(missing: list[int], world: int, timeout: timedelta) -> str:
    waited = f"waited {timeout.total_seconds():g} s for {names(missing)} of {world}"
    return f"{waited}, which did not start. Look at their machines, and at what started them."
