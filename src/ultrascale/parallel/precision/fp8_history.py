"""Amax history of delayed scaling: amaxes (largest magnitudes) of the last steps, and the scales of this step.

    in a step     every product records the amaxes that it sees (`kernels.fp8.fp8_linear`), over all micro-batches
    at its end    one all-reduce of all amaxes over all ranks: 4 bytes a slot, 12 bytes a product of the model
    update        the step's amaxes enter the history, the oldest leave, and new scales are computed
    no update     a skipped step, and an evaluation, leave history and scales unchanged

Scales hold for a whole step: all its micro-batches, recomputation, and every rank of every axis. A run begins without a
history, and its first step uses scales of the current tensors (`fp8_scaling = "tensor"`). A slot whose history is all zero has
a scale of 1.

Every rank holds the whole table of its blocks, of all experts too, with the same bits: a checkpoint of any layout can be read
by any other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.kernels.fp8.fp8_linear import AmaxSlots, DelayedScales
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, GRADIENT
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.lost import waiting
from ultrascale.work.fp8_slots import Slots, block_slots, fp8_layers, is_delayed, num_block_slots

_SLOTS = "fp8_slots"
_BLOCK = "fp8_amaxes"


class BlockAmaxes:
    """Amaxes that the products of one block read and record: views of the rank's tables."""

    def __init__(self, layout: Layout) -> None:
        self.length, self.algorithm = layout.fp8_amax_history_len, layout.fp8_amax_compute_algo
        self.scales: Tensor | None = None
        self.largest: Tensor | None = None
        self.is_known = False
        """True once a history exists."""


class ProjectionHistory:
    """History slots of a projection, stored on it."""

    def __init__(self, amaxes: BlockAmaxes, slots: Slots, first_expert: int, num_experts: int):
        self.amaxes = amaxes
        self.input, self.weight, self.gradient = (first + first_expert for first in (slots.input, slots.weight, slots.gradient))
        self.count = num_experts

    @property
    def weights(self) -> slice:
        """Slots of its weight."""
        return slice(self.weight, self.weight + self.count)


def attach(block: nn.Module, model: Model, layer: int, layout: Layout, *, first_expert: int) -> None:
    """Attach history slots to the projections of `block`. `first_expert`: number of this rank's first expert."""
    amaxes = BlockAmaxes(layout)
    vars(block)[_BLOCK] = amaxes
    for name, slots in block_slots(model, layer).items():
        projection = block.get_submodule(name)
        num_local = len(projection.get_parameter("weight")) if slots.count > 1 else 1
        vars(projection)[_SLOTS] = ProjectionHistory(amaxes, slots, first_expert if slots.count > 1 else 0, num_local)


def product_of(projection: nn.Module) -> ProjectionHistory | None:
    """History slots of a projection; None without delayed scaling."""
    return vars(projection).get(_SLOTS)


def delayed_scales_of(projections: tuple[nn.Module, ...]) -> DelayedScales | None:
    """History slots that a call with `projections` reads and records; None without delayed scaling."""
    products: list[ProjectionHistory] = [vars(projection)[_SLOTS] for projection in projections if _SLOTS in vars(projection)]
    if not products:
        return None
    first = products[0]
    amaxes = first.amaxes
    places = AmaxSlots(first.input, tuple([p.weight for p in products]), tuple([p.gradient for p in products]), first.count)
    return DelayedScales(
        places, amaxes.scales if amaxes.is_known else None, amaxes.largest if torch.is_grad_enabled() else None
    )


class AmaxHistory:
    """Amax history of all blocks of a rank, on its device. A rank without fp8 blocks only joins the all-reduce."""

    def __init__(self, model: Model, blocks: dict[int, BlockAmaxes], layout: Layout, device: torch.device):
        self.blocks, self.updates = blocks, 0
        """Blocks by number, and the number of steps in the history."""
        first_block, layers = next(iter(blocks.values()), BlockAmaxes(layout)), fp8_layers(model, layout)
        self.length, self.algorithm = first_block.length, first_block.algorithm
        sizes = {layer: num_block_slots(model, layer) for layer in layers}
        self.rows: dict[int, slice] = {}
        self.message_rows: dict[int, slice] = {}
        """Rows of a block in the tables of this rank, and in the all-reduced message."""
        offset = sent = 0
        for layer, size in sizes.items():
            if layer in blocks:
                self.rows[layer], offset = slice(offset, offset + size), offset + size
            self.message_rows[layer], sent = slice(sent, sent + size), sent + size
        self.num_sent = sent
        limits = [_limits(model, layer) for layer in self.rows]
        self.limits = torch.cat([torch.zeros(0, device="cpu"), *limits]).to(device)
        self.history = torch.zeros(offset, self.length, device=device)
        self.scales, self.largest = torch.ones(offset, device=device), torch.zeros(offset, device=device)
        for layer, rows in self.rows.items():
            blocks[layer].scales, blocks[layer].largest = self.scales[rows], self.largest[rows]

    def tables(self) -> Iterator[tuple[str, Tensor]]:
        """History of every block, [slots, length], under a name that is the same for every layout."""
        for layer, rows in self.rows.items():
            yield f"layers.{layer}", self.history[rows]

    def agree(self, world_size: int) -> None:
        """All-reduce (max) the amaxes over all ranks. Collective; once a step, in one message."""
        if world_size == 1:
            return
        message = self.largest
        if self.num_sent > len(self.largest):  # under a pipeline other ranks have the other blocks
            message = self.largest.new_zeros(self.num_sent)
            for layer, rows in self.rows.items():
                message[self.message_rows[layer]] = self.largest[rows]
        with waiting("the largest magnitudes of the step, for scales of fp8", tensor=message):
            dist.all_reduce(message, dist.ReduceOp.MAX)
        if message is not self.largest:
            for layer, rows in self.rows.items():
                self.largest[rows] = message[self.message_rows[layer]]

    def accept(self) -> None:
        """The step was applied: add its amaxes to the history."""
        self.history[:, self.updates % self.length] = self.largest
        self.updates += 1
        self.forget()
        self._set_scales()

    def forget(self) -> None:
        """Discard the step's amaxes."""
        self.largest.zero_()

    def infinite(self) -> list[str]:
        """Names of the blocks in which this rank saw non-finite values in this step."""
        return [
            f"input, weight or gradient of a product of layers.{n}"
            for n, r in self.rows.items()
            if not self.largest[r].isfinite().all()
        ]

    def begin(self, updates: int) -> None:
        """Continue from a history that was read into `tables`; `updates` = 0 starts without one."""
        self.updates = updates
        self.forget()
        if updates == 0:
            self.history.zero_()
        self._set_scales()

    def _set_scales(self) -> None:
        newest = (self.updates - 1) % self.length
        amax = self.history.amax(1) if self.algorithm == "max" else self.history[:, newest]
        self.scales.copy_(torch.where(amax > 0, amax / self.limits, 1.0))
        for block in self.blocks.values():
            block.is_known = self.updates > 0

    def state(self) -> dict[str, int | list[int]]:
        """State that a checkpoint saves besides the tables."""
        return {"updates": self.updates, "length": self.length, "layers": [min(self.message_rows), max(self.message_rows)]}

    def updates_in(self, state: dict[str, int | list[int]] | None) -> int:
        """Number of steps in a checkpoint's history; 0 if that has other blocks or another length, so that this run starts a
        new one."""
        current = self.state()
        if state is None or any(state[key] != current[key] for key in ("length", "layers")):
            return 0
        assert isinstance(state["updates"], int)
        return state["updates"]


def history_of(model: Model, stages: dict[int, Decoder], layout: Layout, device: torch.device) -> AmaxHistory | None:
    """Amax history of all blocks of `stages`, on `device`; None without delayed scaling. Created on every rank, since all join
    its all-reduce."""
    blocks = {
        number: vars(block)[_BLOCK] for stage in stages.values() for number, block in stage.blocks() if _BLOCK in vars(block)
    }
    return AmaxHistory(model, blocks, layout, device) if blocks or is_delayed(layout) else None


def _limits(model: Model, layer: int) -> Tensor:
    """Largest representable value of each slot's format, [slots]."""
    limits = torch.full((num_block_slots(model, layer),), torch.finfo(FORWARD).max, device="cpu")
    for slots in block_slots(model, layer).values():
        limits[slots.gradient : slots.gradient + slots.count] = torch.finfo(GRADIENT).max
    return limits
