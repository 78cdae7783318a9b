"""Tensors that autograd saves for a block, and their offload to the host and back, as `parallel.activations.offload` does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ultrascale.description.layout import OFFLOAD_FROM_BYTES, OFFLOAD_RESIDENT, Layout
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.work.ops import Op
from ultrascale.work.recompute import Region


@dataclass
class PendingRegion:
    """A region to recompute (`work.recompute`), with the inputs kept for that, by name."""

    region: Region
    reads: dict[str, Allocation] = field(default_factory=dict)


@dataclass
class Tape:
    """Autograd's record of one forward pass: each operation with the tensors it saved."""

    entries: list[tuple[Op, list[Allocation]]] = field(default_factory=list)
    remade: dict[str, PendingRegion] = field(default_factory=dict)
    """Saved tensors that have to be recomputed first, by name."""
    offloaded: list[Allocation] = field(default_factory=list)
    """Tensors offloaded to the host (`parallel.activations.offload`)."""


@dataclass
class CheckpointedBlock:
    """A recomputed block: its inputs, and the results that selective recomputation keeps."""

    reads: dict[str, Allocation]
    shared: list[Allocation]
    """Inputs that all blocks read."""
    kept: dict[str, Allocation]
    offloaded: list[Allocation] = field(default_factory=list)


@dataclass
class OffloadReplay:
    """Activation offload of one stage's blocks."""

    ledger: Ledger
    layout: Layout
    layers: Sequence[int]
    is_first: bool
    leaving: list[list[Allocation]] = field(default_factory=list)

    def offload(
        self, layer: int, tape: Tape | CheckpointedBlock, block_input: Allocation, shared: Iterable[Allocation]
    ) -> None:
        """Start to offload a block's saved tensors, and free the earlier block's on the device. `shared` (read by all blocks)
        stays on the device."""
        if not self.layout.offload_activations or (self.layout.pp == 1 and layer == self.layers[-1]):
            return
        is_checkpoint = isinstance(tape, CheckpointedBlock)
        saved = list(tape.reads.values()) if is_checkpoint else [allocation for _, some in tape.entries for allocation in some]
        stays = {id(tensor) for tensor in shared}
        stays |= {id(block_input)} if layer == self.layers[0] and not self.is_first else set()
        moving = {id(tensor): tensor for tensor in saved if id(tensor) not in stays and tensor.num_bytes >= OFFLOAD_FROM_BYTES}
        tape.offloaded = list(moving.values())
        for allocation in tape.offloaded:
            self.ledger.copy_to_host(allocation)
        self.leaving.append(tape.offloaded)
        while len(self.leaving) >= OFFLOAD_RESIDENT:
            for allocation in self.leaving.pop(0):
                self.ledger.leave_device(allocation)

    def prefetch(self, *tapes: Tape | CheckpointedBlock) -> None:
        """Bring the blocks' saved tensors back to the device, and cancel offloads still in progress."""
        for tape in tapes:
            for allocation in tape.offloaded:
                self.ledger.bring_back(allocation)
            self.leaving = [offloaded for offloaded in self.leaving if offloaded is not tape.offloaded]
