"""Work of a pipeline stage on one rank: its operations, its weights, and their FSDP2 buckets."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import chain
from typing import NamedTuple

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, layer_weights, weights_outside_layers
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.sharding import Bucket
from ultrascale.work.fp8_slots import weights_gathered_in_fp8
from ultrascale.work.op_builders import without_fp8
from ultrascale.work.sharding.places import Coordinates, WeightShard, shard_of
from ultrascale.work.work import (
    Op,
    Shape,
    block_work,
    embedding_work,
    head_work,
    next_token_work,
    prediction_block_work,
    prediction_head_work,
)

EXPERTS = "mlp.experts."
PREDICTION_NORM = "shared_head.norm"


class StagePart(NamedTuple):
    """Part of the model that a stage holds."""

    layers: range
    is_first: bool = True
    is_last: bool = True
    predictions: range = range(0)
    """Blocks of multi-token prediction, which follow the others on the last stage."""

    @property
    def blocks(self) -> list[int]:
        """All blocks, those of multi-token prediction last."""
        return [*self.layers, *self.predictions]


class StageWork:
    """Operations, weights and buckets of a stage; `plan.memory.stage_replay` replays it."""

    def __init__(self, model: Model, layout: Layout, shape: Shape, part: StagePart, coordinates: Coordinates):
        self.model, self.layout, self.shape, self.part = model, layout, shape, part
        self.per_bucket = layout.layers_per_bucket if layout.dp * layout.cp > 1 else 1
        blocks = part.blocks
        self._first_block, self._last_block = (blocks[0], blocks[-1]) if blocks else (None, None)
        self.hidden_bytes = shape.outer_tokens * model.hidden_size * shape.itemsize
        """Bytes of the residual stream of one micro-batch."""
        self._local = {w.name: w for w in self._weights(coordinates)}
        self.buckets = self._buckets()
        self.by_name = {weight.name: (bucket, weight) for bucket in self.buckets for weight in bucket.weights}
        self._blocks: dict[int, tuple[Op, ...]] = {}
        self._names: dict[tuple[tuple[str, ...], int | None], list[str]] = {}
        self.uses = Counter(name for ops in self.outside() for op in ops for name in op.weights)

    def _weights(self, coordinates: Coordinates) -> list[Weight]:
        """Weights of this stage, with the shapes that the rank at `coordinates` holds."""
        named = {name for ops in self.outside() for op in ops for name in op.weights}
        outside = [w for w in weights_outside_layers(self.model) if w.name in named]
        layout = self.layout
        cut, in_stage = (
            Layout(tp=layout.tp, ep=layout.ep, expert_tp=layout.expert_tp),
            coordinates._replace(pp=0, dp=0, expert_dp=0),
        )
        blocks = (_block_weights(self.model, layer, cut, in_stage) for layer in self.part.blocks)
        return [*(_part(w, shard_of(w, cut, in_stage)) for w in outside), *chain.from_iterable(blocks)]

    def _buckets(self) -> list[Bucket]:
        """Buckets in the order in which their forward passes end, the one outside the blocks first. Experts sharded over other
        ranks than the rest have a separate bucket, before that of their block."""
        layout, of_layer = self.layout, defaultdict[int | None, list[Weight]](list)
        for weight in self._local.values():
            of_layer[weight.layer].append(weight)
        root = Bucket(of_layer[None], "outside the blocks")
        buckets = [root]
        apart = self.model.num_experts > 0 and layout.tp * layout.ep * layout.expert_tp > 1
        layers = self.part.blocks
        for first in range(0, len(layers), self.per_bucket):
            members = layers[first : first + self.per_bucket]
            for layer in members if apart else ():
                if experts := [w for w in of_layer[layer] if w.is_expert]:
                    buckets.append(Bucket(experts, "experts", ranks=layout.expert_shard_size))
            of_members = [w for layer in members for w in of_layer[layer]]
            norms = [w for w in of_members if PREDICTION_NORM in w.name]
            rest = [w for w in of_members if not (apart and w.is_expert) and w not in norms]
            buckets += [Bucket(rest, "blocks"), *(Bucket([norm], "norms of predictions") for norm in norms)]
        in_fp8 = weights_gathered_in_fp8(self.model, layout)
        for bucket in buckets:
            bucket.in_fp8 = in_fp8
        return buckets

    def before(self) -> tuple[Op, ...]:
        return embedding_work(self.model, self.shape) if self.part.is_first else ()

    def after(self) -> tuple[Op, ...]:
        return head_work(self.model, self.shape) if self.part.is_last else ()

    def outside(self) -> list[tuple[Op, ...]]:
        """Operations outside the blocks in a forward pass."""
        predicting = [next_token_work(self.model, self.shape), prediction_head_work(self.model, self.shape)]
        return [self.before(), self.after(), *predicting * len(self.part.predictions)]

    def block(self, layer: int) -> tuple[Op, ...]:
        """Operations of a block; equal blocks return the same object, across stages too."""
        if layer not in self._blocks:
            self._blocks[layer] = self._block(layer)
        return self._blocks[layer]

    def _block(self, layer: int) -> tuple[Op, ...]:
        if layer in self.part.predictions:
            return prediction_block_work(self.model, layer, self.shape)
        kept = self.layout.fp8_keep_blocks
        is_kept = not kept <= layer < self.model.num_hidden_layers - kept
        return block_work(self.model, layer, without_fp8(self.shape) if is_kept else self.shape)

    def bucket(self, layer: int) -> Bucket:
        return self.by_name[f"layers.{layer}.self_attn.o_proj.weight"][0]

    def norm_bucket(self, layer: int) -> Bucket:
        return self.by_name[f"layers.{layer}.{PREDICTION_NORM}.weight"][0]

    def experts(self, layer: int | None, ops: Sequence[Op]) -> tuple[Bucket | None, int, int]:
        """Separate bucket of a block's experts (or None), and the indices of the first and last operation that read it."""
        if layer is None or not self.model.num_experts:
            return None, 0, 0
        indices = [index for index, op in enumerate(ops) if op.name.startswith(EXPERTS)]
        named = [name for index in indices for name in ops[index].weights]
        bucket = self.by_name[f"layers.{layer}.{named[0]}"][0] if named else None
        if bucket is None or bucket is self.bucket(layer):
            return None, 0, 0
        return bucket, indices[0], indices[-1]

    def is_first(self, layer: int) -> bool:
        return (layer - self.part.layers.start) % self.per_bucket == 0

    def is_last(self, layer: int) -> bool:
        return (layer + 1 - self.part.layers.start) % self.per_bucket == 0 or layer == self._last_block

    def cuts_input(self, layer: int) -> bool:
        """True if a tp rank keeps only its positions of a checkpointed block's input
        (`parallel.activations.partitioned_checkpoints`)."""
        held_anyway = layer == self._first_block and not self.part.is_first
        return self.layout.partition_checkpoints and not held_anyway

    def names(self, weights: tuple[str, ...], layer: int | None) -> list[str]:
        """Names of weights in the whole model; a prediction block shares the model's head."""
        cached = self._names.get((weights, layer))
        if cached is None:
            full_names = [name if layer is None or name in self.by_name else f"layers.{layer}.{name}" for name in weights]
            cached = self._names[weights, layer] = full_names
        return cached


@lru_cache(maxsize=4096)
def _block_weights(model: Model, layer: int, cut: Layout, coordinates: Coordinates) -> tuple[Weight, ...]:
    """Weights of a block as tp, ep and expert_tp shard them; cached for all layouts of a search."""
    return tuple(_part(weight, shard_of(weight, cut, coordinates)) for weight in layer_weights(model, layer))


def _part(weight: Weight, shard: WeightShard) -> Weight:
    """`weight` with the shape that a rank holds."""
    if (weight.shape, weight.first_column) == (shard.shape, shard.offsets[-1]):
        return weight
    return replace(weight, shape=shard.shape, first_column=shard.offsets[-1])
