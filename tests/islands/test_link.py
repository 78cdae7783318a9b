"""Messages between islands: what is rounded off is kept, means are the same bits everywhere, and who is gone is named."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch._C._distributed_c10d import FileStore

from ultrascale.description.sections.islands import Islands, Wire
from ultrascale.islands.encoding import decode, encode
from ultrascale.islands.link import IslandLink, LostIslandError
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import Ranks

COUNT = 3
WIRES: tuple[Wire, ...] = ("fp32", "bf16", "int8", "int4")
ELEMENTS = 3 * 256


def link_at(rendezvous: str) -> IslandLink:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store = FileStore(rendezvous.removeprefix("file://"), world)
    ranks = Ranks(0, 1, torch.device("cpu"), island=rank, store=store)
    return IslandLink(ranks, world, timeout_seconds=60.0, likes={"all": True})


def moves_of(island: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(island), dtype=torch.float64)


def means(rendezvous: str) -> dict[str, Any]:
    """Of every wire: the mean, what was lost, and the bytes."""
    link, found = link_at(rendezvous), {}
    for wire in WIRES:
        one = link.groups["all"].mean(moves_of(link.island), wire)
        found[wire] = (one.values.tolist(), one.lost.tolist(), one.sent_bytes)
    return found


def test_the_mean_and_what_was_rounded_off_are_the_moves() -> None:
    islands = run_forked(COUNT, means)
    total = torch.stack([moves_of(island) for island in range(COUNT)]).sum(0)
    for wire in WIRES:
        values, lost, sent = zip(*(one[wire] for one in islands), strict=True)
        assert values[0] == values[1] == values[2]
        kept = COUNT * torch.tensor(values[0], dtype=torch.float64) + torch.tensor(lost, dtype=torch.float64).sum(0)
        assert (kept - total).abs().max() < 1e-12
        assert sent[0] == Islands(COUNT, dtype=wire).sent_bytes(ELEMENTS, 1, 8)
        assert any(map(any, lost)) == (wire != "fp32")


@pytest.mark.parametrize(("wire", "share"), [("bf16", 2**-8), ("int8", 0.5 / 127), ("int4", 0.5 / 7)])
def test_a_number_is_rounded_to_half_a_step_at_most(wire: Any, share: float) -> None:
    values = torch.randn(2, 256, generator=torch.Generator().manual_seed(1))
    values[1] = 0
    found = decode(encode(values, wire), wire, values.dtype)
    largest = values.view(2, -1, 128).abs().amax(-1, keepdim=True).expand(2, -1, 128).reshape(2, 256)
    assert ((found - values).abs() <= share * largest * (1 + 1e-6)).all()
    assert not found[1].any()


def _left(rendezvous: str) -> list[bool]:
    link = link_at(rendezvous)
    here = [link.arrive(1)]
    if link.island == 2:
        link.leave(2)
        return here
    return [*here, link.arrive(2)]


def test_an_island_that_has_left_is_not_waited_for() -> None:
    assert run_forked(COUNT, _left) == [[True, False], [True, False], [True]]


def _lost(rendezvous: str) -> str:
    link = link_at(rendezvous)
    link.arrive(0)  # both are connected before one ends: gloo would tell of a peer that closes the connection otherwise
    link._timeout = timedelta(seconds=2)  # from here on: until both were there, a busy machine has more time
    if link.island == 1:
        return ""
    try:
        link.arrive(1)
    except LostIslandError as error:
        return str(error)
    return "arrived"


def test_an_island_that_does_not_come_is_told_of() -> None:
    told, _ = run_forked(2, _lost)
    assert told.startswith("island 0 waited at the outer step after step 1 for at most 2 s (collective_timeout_seconds), and")
    assert told.endswith("Start all islands again: each goes on from its checkpoint.")
