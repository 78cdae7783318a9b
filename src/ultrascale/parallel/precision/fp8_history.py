"""The history of delayed scaling: largest magnitudes of the last steps, and the scales of this one.

    in a step     every product notes the largest magnitudes that it sees (`kernels.fp8.fp8_linear`), of every micro-batch
    at its end    all ranks agree on all of them in one message: 4 bytes a slot, 12 bytes a product of the model
    update        the step takes its place in the history, the oldest leaves, and new scales follow
    no update     a step that is passed over, and an evaluation, leave history and scales as they were

Scales hold for a whole step: all its micro-batches, the second forward pass of recomputation, and every rank, whichever axis
made it. A run begins without a history, and its first step takes scales of the numbers at hand (`fp8_scaling = "tensor"`). A
slot that was zero in its whole history has a scale of 1.

Every rank holds the whole table of its blocks, of all experts too, to the same bits: so any layout reads what any other wrote.
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
    """Largest magnitudes that the products of one block read and record: views of the rank's tables."""

    def __init__(self, layout: Layout) -> None:
        self.length, self.algorithm = layout.fp8_amax_history_len, layout.fp8_amax_compute_algo
        self.scales: Tensor | None = None
        self.largest: Tensor | None = None
        self.is_known = False
        """True once there is a history."""


class Product:
    """Slots of a projection, attached to it."""

    def __init__(self, amaxes: BlockAmaxes, slots: Slots, first_expert: int, num_experts: int):
        self.amaxes = amaxes
        self.input, self.weight, self.gradient = (first + first_expert for first in (slots.input, slots.weight, slots.gradient))
        self.count = num_experts

    @property
    def weights(self) -> slice:
        """The slots of its weight."""
        return slice(self.weight, self.weight + self.count)


def attach(block: nn.Module, model: Model, layer: int, layout: Layout, *, first_expert: int) -> None:
    """Let the projections of `block` know their slots. `first_expert`: the first of those that this rank has."""
    amaxes = BlockAmaxes(layout)
    vars(block)[_BLOCK] = amaxes
    for name, slots in block_slots(model, layer).items():
        projection = block.get_submodule(name)
        num_local = len(projection.get_parameter("weight")) if slots.count > 1 else 1
        vars(projection)[_SLOTS] = Product(amaxes, slots, first_expert if slots.count > 1 else 0, num_local)


def product_of(projection: nn.Module) -> Product | None:
    """Slots of a projection; None where scales are not delayed."""
    return vars(projection).get(_SLOTS)


def delayed_scales_of(projections: tuple[nn.Module, ...]) -> DelayedScales | None:
    """Slots that a call with `projections` reads and records; None where scales are not delayed."""
    products: list[Product] = [vars(projection)[_SLOTS] for projection in projections if _SLOTS in vars(projection)]
    if not products:
        return None
    first = products[0]
    amaxes = first.amaxes
    places = AmaxSlots(first.input, tuple([p.weight for p in products]), tuple([p.gradient for p in products]), first.count)
    return DelayedScales(
        places, amaxes.scales if amaxes.is_known else None, amaxes.largest if torch.is_grad_enabled() else None
    )


class AmaxHistory:
    """History of all blocks of a rank, on its device. A rank without blocks in fp8 only joins in the reduction over all."""

    def __init__(self, model: Model, blocks: dict[int, BlockAmaxes], layout: Layout, device: torch.device):
        self.blocks, self.updates = blocks, 0
        """Blocks by number; and the steps that went into the history."""
        first_block, layers = next(iter(blocks.values()), BlockAmaxes(layout)), fp8_layers(model, layout)
        self.length, self.algorithm = first_block.length, first_block.algorithm
        sizes = {layer: num_block_slots(model, layer) for layer in layers}
        self.rows: dict[int, slice] = {}
        self.message_rows: dict[int, slice] = {}
        """Rows of a block in the tables of this rank, and in the message of all."""
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
        """The history of every block, [slots, length], by a name that is the same on every layout."""
        for layer, rows in self.rows.items():
            yield f"layers.{layer}", self.history[rows]

    def agree(self, world_size: int) -> None:
        """Let all ranks have the largest magnitudes of all. Collective; once a step, in one message."""
        if world_size == 1:
            return
        message = self.largest
        if self.num_sent > len(self.largest):  # a pipeline: others have the other blocks
            message = self.largest.new_zeros(self.num_sent)
            for layer, rows in self.rows.items():
                message[self.message_rows[layer]] = self.largest[rows]
        with waiting("the largest magnitudes of the step, for scales of fp8", tensor=message):
            dist.all_reduce(message, dist.ReduceOp.MAX)
        if message is not self.largest:
            for layer, rows in self.rows.items():
                self.largest[rows] = message[self.message_rows[layer]]

    def accept(self) -> None:
        """The step updates: it takes its place in the history."""
        self.history[:, self.updates % self.length] = self.largest
        self.updates += 1
        self.forget()
        self._set_scales()

    def forget(self) -> None:
        """Nothing of the step is kept."""
        self.largest.zero_()

    def infinite(self) -> list[str]:
        """Names of the blocks in which this rank saw non-finite numbers in this step."""
        return [
            f"input, weight or gradient of a product of layers.{n}"
            for n, r in self.rows.items()
            if not self.largest[r].isfinite().all()
        ]

    def begin(self, updates: int) -> None:
        """Go on from a history that was read into `tables`, or from none where `updates` is 0."""
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
        """State that a checkpoint needs beside the tables."""
        return {"updates": self.updates, "length": self.length, "layers": [min(self.message_rows), max(self.message_rows)]}

    def updates_in(self, state: dict[str, int | list[int]] | None) -> int:
        """The updates in a checkpoint's history; 0 if it has none of this length of these blocks: then this run begins one."""
        current = self.state()
        if state is None or any(state[key] != current[key] for key in ("length", "layers")):
            return 0
        assert isinstance(state["updates"], int)
        return state["updates"]


def history_of(model: Model, stages: dict[int, Decoder], layout: Layout, device: torch.device) -> AmaxHistory | None:
    """The history of all blocks of `stages`, if scales are delayed, made on `device`: on every rank, since all agree."""
    blocks = {
        number: vars(block)[_BLOCK] for stage in stages.values() for number, block in stage.blocks() if _BLOCK in vars(block)
    }
    return AmaxHistory(model, blocks, layout, device) if blocks or is_delayed(layout) else None


def _limits(model: Model, layer: int) -> Tensor:
    """The largest number of the format of each slot, [slots]."""
    limits = torch.full((num_block_slots(model, layer),), torch.finfo(FORWARD).max, device="cpu")
    for slots in block_slots(model, layer).values():
        limits[slots.gradient : slots.gradient + slots.count] = torch.finfo(GRADIENT).max
    return limits
