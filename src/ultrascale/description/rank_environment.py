"""Environment variables by which torchrun gives a process its rank, the world size and the rendezvous address.

Schedulers and scripts set the same variables, sometimes only some of them. A rank outside the world, or a value that is not a
number, would end in a traceback or make all other ranks wait, so both are reported before anything starts.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping

from ultrascale.description.problems import Problem, SpecError

REMEDY = "torchrun sets it; unset WORLD_SIZE to train in one process."
LAST_PORT = 65535


def env_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Rank given by `environment`; 0 if it has none."""
    return _number(environment.get("RANK", "0")) or 0


def env_world_size(environment: Mapping[str, str] = os.environ) -> int:
    """Number of ranks given by `environment`; 1 if it has none."""
    return _number(environment.get("WORLD_SIZE", "1")) or 1


def expect_rank_environment(environment: Mapping[str, str] = os.environ, *, with_address: bool = True) -> None:
    """Raises SpecError for every variable that is missing or invalid. `with_address`: the rendezvous address is required
    too."""
    problems = [Problem(f"{name} (environment)", rule, REMEDY) for name, rule in _mistakes(environment, with_address)]
    if problems:
        raise SpecError(problems)


def _mistakes(environment: Mapping[str, str], with_address: bool) -> Iterator[tuple[str, str]]:
    text = environment.get("WORLD_SIZE", "1")
    world, rank = _number(text), environment.get("RANK")
    if not world:
        yield "WORLD_SIZE", f"must be a positive number, is {text!r}"
        return
    if world > 1:
        needed = ("RANK", "MASTER_ADDR", "MASTER_PORT") if with_address else ("RANK",)
        yield from ((name, f"is missing, but WORLD_SIZE is {world}") for name in needed if not environment.get(name))
    if rank and (_number(rank) is None or int(rank) >= world):
        size = f"WORLD_SIZE = {world}" if "WORLD_SIZE" in environment else "WORLD_SIZE, which is not set"
        yield "RANK", f"must be a number from 0 to below {size}, is {rank!r}"
    if with_address and world > 1 and (port := environment.get("MASTER_PORT")) and not 0 < (_number(port) or 0) <= LAST_PORT:
        yield "MASTER_PORT", f"must be a number from 1 to {LAST_PORT}, is {port!r}"
    if (place := environment.get("LOCAL_RANK")) is not None and _number(place) is None:
        yield "LOCAL_RANK", f"must be a number from 0 on, is {place!r}"


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdecimal() else None
