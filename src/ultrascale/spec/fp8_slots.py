"""What delayed scaling of fp8 keeps a history of: three largest magnitudes of every product of a block.

    slot       of                                    scale that follows from its history
    input      what the product reads                of e4m3
    weight     its weight                            of e4m3
    gradient   the gradient of its result            of e5m2

Products of experts have three for every expert. Of products that read one input together the first one's slot is used. The
order, input, weight, gradient of product after product as `spec.weights` lists them, is that of checkpoints and messages.
"""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.spec.layout import Layout
from ultrascale.spec.model import Model
from ultrascale.spec.weights import layer_weights

KINDS = 3
"""Input, weight, gradient."""
SLOT_BYTES = 4
"""fp32."""
_NARROW = ("q_a_proj.weight", "kv_a_proj_with_mqa.weight")
"""Latent attention's, which stay in bf16."""


class Slots(NamedTuple):
    """Where a product's are among its block's."""

    first: int
    count: int
    """Of each kind: 1, or the number of experts."""

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
    """Of every product of block `layer` that is in fp8, by the name of its module in the block."""
    found: dict[str, Slots] = {}
    first = 0
    for weight in layer_weights(model, layer):
        if weight.part in ("attention", "mlp") and len(weight.shape) > 1 and not weight.name.endswith(_NARROW):
            count = weight.shape[0] if weight.is_expert else 1
            found[weight.name.removeprefix(f"layers.{layer}.").removesuffix(".weight")] = Slots(first, count)
            first += KINDS * count
    return found


def num_block_slots(model: Model, layer: int) -> int:
    """Slots of block `layer`."""
    return sum(KINDS * slots.count for slots in block_slots(model, layer).values())


def fp8_layers(model: Model, layout: Layout) -> range:
    """The blocks whose products are in fp8, if the layout's precision is."""
    return range(layout.fp8_keep_blocks, model.num_hidden_layers - layout.fp8_keep_blocks)


def is_delayed(layout: Layout) -> bool:
    """Whether there is a history."""
    return layout.precision == "fp8" and layout.fp8_scaling == "delayed"


def num_slots(model: Model, layout: Layout) -> int:
    """Of the whole model: the numbers that ranks agree on once a step. 0 without delayed scaling."""
    return sum(num_block_slots(model, layer) for layer in fp8_layers(model, layout)) if is_delayed(layout) else 0
