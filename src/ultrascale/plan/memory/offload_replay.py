"""Tensors that autograd saves of a block, and their way to the host and back: `parallel.activations.offload` replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ultrascale.description.layout import OFFLOAD_FROM_BYTES, OFFLOAD_LEFT, Layout
from ultrascale.plan.memory.ledger import Held, Ledger
from ultrascale.work.kept import Region
from ultrascale.work.ops import Op


@dataclass
class Waiting:
    """A region that is to be made again (`work.kept`): what it keeps for that, by name."""

    region: Region
    reads: dict[str, Held] = field(default_factory=dict)


@dataclass
class Tape:
    """Operations of one pass as autograd remembers them, each with the bytes it saved."""

    entries: list[tuple[Op, list[Held]]] = field(default_factory=list)
    remade: dict[str, Waiting] = field(default_factory=dict)
    """By name, what is saved and not there."""
    trip: list[Held] = field(default_factory=list)
    """Tensors offloaded to the host (`parallel.activations.offload`)."""


@dataclass
class Checkpoint:
    """A block that is computed again: what it reads, and what selective recomputation keeps."""

    reads: dict[str, Held]
    shared: list[Held]
    """Inputs that all blocks read."""
    kept: dict[str, Held]
    trip: list[Held] = field(default_factory=list)


@dataclass
class OffloadReplay:
    """The travels of one stage's blocks."""

    ledger: Ledger
    layout: Layout
    layers: Sequence[int]
    is_first: bool
    leaving: list[list[Held]] = field(default_factory=list)

    def send_down(self, layer: int, tape: Tape | Checkpoint, block_input: Held, shared: Iterable[Held]) -> None:
        """Start to offload what a block saved, and free what the block before it saved. `shared` stays: all blocks read it."""
        if not self.layout.offload_activations or (self.layout.pp == 1 and layer == self.layers[-1]):
            return
        is_again = isinstance(tape, Checkpoint)
        saved = list(tape.reads.values()) if is_again else [held for _, some in tape.entries for held in some]
        stays = {id(one) for one in shared}
        stays |= {id(block_input)} if layer == self.layers[0] and not self.is_first else set()
        own = {id(one): one for one in saved if id(one) not in stays and one.num_bytes >= OFFLOAD_FROM_BYTES}
        tape.trip = list(own.values())
        for held in tape.trip:
            self.ledger.copy_to_host(held)
        self.leaving.append(tape.trip)
        while len(self.leaving) >= OFFLOAD_LEFT:
            for held in self.leaving.pop(0):
                self.ledger.leave_device(held)

    def bring_up(self, *tapes: Tape | Checkpoint) -> None:
        """Bring back what blocks saved; they no longer count as leaving."""
        for tape in tapes:
            for held in tape.trip:
                self.ledger.bring_back(held)
            self.leaving = [trip for trip in self.leaving if trip is not tape.trip]
