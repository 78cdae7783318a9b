"""What autograd remembers of a block, and how it travels to the host and back: `parallel.offload` replayed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ultrascale.plan.memory.ledger import Held, Ledger
from ultrascale.spec.kept import Region
from ultrascale.spec.layout import OFFLOAD_FROM_BYTES, OFFLOAD_LEFT, Layout
from ultrascale.spec.ops import Op


@dataclass
class Waiting:
    """A region that is to be made again (`spec.kept`): what it keeps for that, by name."""

    region: Region
    reads: dict[str, Held] = field(default_factory=dict)


@dataclass
class Tape:
    """What autograd remembers of operations of one pass: each with the bytes it saved."""

    entries: list[tuple[Op, list[Held]]] = field(default_factory=list)
    remade: dict[str, Waiting] = field(default_factory=dict)
    """By name, what is saved and not there."""
    trip: list[Held] = field(default_factory=list)
    """What goes to the host (`parallel.offload`)."""


@dataclass
class Checkpoint:
    """A block that is computed again: what it reads, and what selective recomputation keeps."""

    reads: dict[str, Held]
    shared: list[Held]
    """What it reads that all blocks do."""
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
        """What a block saved begins to leave; what the block before it saved has left. `shared` stays: all blocks read it."""
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
        """What a block saved is there, and what the block before it saved is on its way."""
        for tape in tapes:
            for held in tape.trip:
                self.ledger.bring_back(held)
            self.leaving = [trip for trip in self.leaving if trip is not tape.trip]
