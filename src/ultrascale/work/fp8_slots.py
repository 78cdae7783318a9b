"""Slots of delayed fp8 scaling, which keeps a history: three largest magnitudes of every product of a block.

    slot       of                                    scale that follows from its history
    input      what the product reads                of e4m3
    weight     its weight                            of e4m3
    gradient   the gradient of its result            of e5m2

Products of experts have three for every expert. Of products that read one input together the first one's slot is used. The
order, input, weight, gradient of product after product as `description.architecture.weights` lists them, is that of
checkpoints and messages.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights
from ultrascale.description.layout import NARROW, Layout

KINDS = 3
"""Input, weight, gradient."""
SLOT_BYTES = 4
"""fp32."""
_NARROW = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Latent attention's, which stay in bf16."""


class Slots(NamedTuple):
    """Slots of one product among its block's."""

    first: int
    count: int
    """Number of slots of each kind: 1, or the number of experts."""

    @property
    def input(self) -> int:
        return self.first

    @property
    def weight(self) -> int:
        return self.first + self.count

    @property
    def gradient(self) -> int:
        return self.first + 2 * self.count


def block_slots(model: Model, layer: int) -> dict[str, Slots]:
    """Slots of every product of block `layer` that is in fp8, by the name of its module in the block."""
    slots: dict[str, Slots] = {}
    first = 0
    for weight in layer_weights(model, layer):
        if weight.part not in ("attention", "mlp") or weight.name.endswith(".bias"):  # experts' have a row for each
            continue
        if len(weight.shape) > 1 and not weight.name.endswith(_NARROW):
            count = weight.shape[0] if weight.is_expert else 1
            slots[weight.name.removeprefix(f"layers.{layer}.").removesuffix(".weight")] = Slots(first, count)
            first += KINDS * count
    return slots


def num_block_slots(model: Model, layer: int) -> int:
    """Slots of block `layer`."""
    return sum(KINDS * slots.count for slots in block_slots(model, layer).values())


def fp8_layers(model: Model, layout: Layout) -> range:
    """The blocks whose products are in fp8, if the layout's precision is."""
    return range(layout.fp8_keep_blocks, model.num_hidden_layers - layout.fp8_keep_blocks)


def products_line(model: Model, layout: Layout) -> str:
    """Summary for people: which products of a run in fp8 are in 8 bits, and what stays in bf16, by the names of modules."""
    in_fp8: dict[int | None, set[str]] = {layer: set(block_slots(model, layer)) for layer in fp8_layers(model, layout)}
    narrow: dict[str, None] = {}
    wide: dict[str, None] = {}
    for weight in weights(model):
        name, _, kind = weight.name.removeprefix(f"layers.{weight.layer}.").rpartition(".")
        if kind == "weight":
            (narrow if name in in_fp8.get(weight.layer, ()) else wide)[name.rpartition(".")[2]] = None
    ends = f"; blocks at either end: {layout.fp8_keep_blocks}" if layout.fp8_keep_blocks else ""
    stay = ", ".join(name for name in wide if name not in narrow)
    blocks = f"{len(in_fp8)} of {model.num_hidden_layers} blocks, {layout.fp8_scaling} scaling"
    return f"{', '.join(narrow)} of {blocks}; in bf16 stay {stay}, attention, loss{ends}"


def is_delayed(layout: Layout) -> bool:
    """True if there is a history."""
    return layout.precision == "fp8" and layout.fp8_scaling == "delayed"


def gathers_fp8(layout: Layout) -> bool:
    """True if weights of products in fp8 are all-gathered in fp8."""
    return layout.precision in NARROW and layout.fp8_all_gather and layout.group("shard")[0] > 1


def weights_gathered_in_fp8(model: Model, layout: Layout) -> dict[str, bool]:
    """Names of the weights that are gathered in fp8, and whether ranks of tp (of experts: `expert_tp`) hold other parts of what
    has one scale."""
    if not gathers_fp8(layout):
        return {}
    gathered: dict[str, bool] = {}
    for layer in fp8_layers(model, layout):
        named = {weight.name: weight for weight in layer_weights(model, layer)}
        for name in block_slots(model, layer):
            weight = named[f"layers.{layer}.{name}.weight"]
            gathered[weight.name] = layout.fp8_scaling != "row" or weight.tp_dim == len(weight.shape) - 1
    return gathered


def num_weight_scales(shape: tuple[int, ...], layout: Layout) -> int:
    """Number of scales of a weight of this shape, [F, D] or of experts [X, F, D]: one a row, or one a matrix."""
    return prod(shape[:-1]) if layout.fp8_scaling == "row" else prod(shape[:-2])


def num_slots(model: Model, layout: Layout) -> int:
    """Number of slots of the whole model: the numbers that ranks agree on once a step. 0 without delayed scaling."""
    return sum(num_block_slots(model, layer) for layer in fp8_layers(model, layout)) if is_delayed(layout) else 0
