"""Slots of delayed fp8 scaling's amax history: three for every GEMM of a block.

    slot       amax of                               scale that follows from its history
    input      the GEMM's input                      for e4m3
    weight     its weight                            for e4m3
    gradient   the gradient of its result            for e5m2

Experts' GEMMs have three for every expert. GEMMs that read one input together use the first one's input slot. The order (input,
weight, gradient, GEMM after GEMM as `description.architecture.weights` lists them) is that of checkpoints and messages.
"""

from __future__ import annotations

from math import prod
from typing import NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, weights
from ultrascale.description.layout import NARROW, Layout

KINDS = 3
"""Number of slot kinds: input, weight, gradient."""
SLOT_BYTES = 4
"""Bytes of a slot (fp32)."""
_NARROW = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Low-rank projections of latent attention, which stay in bf16."""


class Slots(NamedTuple):
    """Slots of one GEMM among its block's."""

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
    """Slots of every fp8 GEMM of block `layer`, by its module's name in the block."""
    slots: dict[str, Slots] = {}
    first = 0
    for weight in layer_weights(model, layer):
        if weight.part not in ("attention", "mlp") or weight.name.endswith(".bias"):  # an expert bias has a row per expert
            continue
        if len(weight.shape) > 1 and not weight.name.endswith(_NARROW):
            count = weight.shape[0] if weight.is_expert else 1
            slots[weight.name.removeprefix(f"layers.{layer}.").removesuffix(".weight")] = Slots(first, count)
            first += KINDS * count
    return slots


def num_block_slots(model: Model, layer: int) -> int:
    """Number of slots of block `layer`."""
    return sum(KINDS * slots.count for slots in block_slots(model, layer).values())


def fp8_layers(model: Model, layout: Layout) -> range:
    """Blocks whose GEMMs are in fp8, if the layout's precision is."""
    return range(layout.fp8_keep_blocks, model.num_hidden_layers - layout.fp8_keep_blocks)


def products_line(model: Model, layout: Layout) -> str:
    """One-line summary: which GEMMs of an fp8 run are in fp8, and which stay in bf16, by module name."""
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
    """True if fp8 scaling is delayed, so that there is a history."""
    return layout.precision == "fp8" and layout.fp8_scaling == "delayed"


def gathers_fp8(layout: Layout) -> bool:
    """True if the weights of fp8 GEMMs are all-gathered in fp8."""
    return layout.precision in NARROW and layout.fp8_all_gather and layout.group("shard")[0] > 1


def weights_gathered_in_fp8(model: Model, layout: Layout) -> dict[str, bool]:
    """Weights that are gathered in fp8, by name; the value is True if ranks of tp (of experts: `expert_tp`) hold other parts of
    a tensor with one scale."""
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
    """Number of scales of a weight of this shape, [F, D] or of experts [X, F, D]: one per row, or one per matrix."""
    return prod(shape[:-1]) if layout.fp8_scaling == "row" else prod(shape[:-2])


def num_slots(model: Model, layout: Layout) -> int:
    """Number of slots of the whole model, which ranks all-reduce once a step. 0 without delayed scaling."""
    return sum(num_block_slots(model, layer) for layer in fp8_layers(model, layout)) if is_delayed(layout) else 0
