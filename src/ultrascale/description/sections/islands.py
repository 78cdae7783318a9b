"""Islands: groups of ranks that train independently and synchronize every H steps (DiLoCo, Douillard et al. 2023).

    inner    every island does ordinary steps on its own share of each batch, with its own optimizer
    outer    every H steps the islands average how far each has moved from the last common weights, the anchor, and an outer
             optimizer takes the mean as its gradient:

        delta = anchor - weights;  anchor <- outer optimizer(anchor, mean of deltas);  weights <- anchor

Streaming DiLoCo (Douillard et al. 2025) sends one fragment of the layers at a time, in fewer bits, and lets the islands train
on for some steps while it is in transfer; the anchor is then applied late, and the training since then is kept on top of it.

The mean is computed by a reduce-scatter and an all-gather: of n elements a rank sends 2 (N - 1) pieces of n / N, in any
encoding. The arithmetic is here; the trainer sends by it and the planner counts by it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ultrascale.description.problems import Problem

if TYPE_CHECKING:
    from ultrascale.description.architecture.model import Model
    from ultrascale.description.architecture.weights import Weight
    from ultrascale.description.layout import Layout

Wire = Literal["fp32", "bf16", "int8", "int4"]
SCALED_TOGETHER = 128
"""Elements that share a scale in int8 and int4."""
SCALE_BYTES = 4
MOST_ISLANDS = 1024
HIGHEST_RATE = 10.0
"""Highest learning rate of the outer optimizer; published values are 0.4 to 1."""


@dataclass(frozen=True)
class Outer:
    """Outer optimizer: computes the next common weights from the mean of the islands' deltas."""

    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """SGD with Nesterov momentum, or with plain momentum."""
    lr: float = 0.7
    """Learning rate, constant; 1 without momentum averages weights. DiLoCo: 0.7."""
    momentum: float = 0.9
    """Momentum over the mean of deltas. DiLoCo: 0.9."""


@dataclass(frozen=True)
class Islands:
    """Groups of ranks that train independently and synchronize every `every_steps` steps (DiLoCo). `[layout]` is that of one
    island."""

    count: int = 1
    """Number of islands, each with the ranks of `[layout]`, numbered one island after another; each takes a share of every
    batch. 1: no islands."""
    every_steps: int = 100
    """H: steps between two outer steps."""
    outer: Outer = field(default_factory=Outer)
    fragments: int = 1
    """Fragments into which layers are divided, each with its own outer steps, spread over the H steps: layer l is in fragment l
    mod fragments."""
    overlap_steps: int = 0
    """Steps that islands train on while a fragment is in transfer; its anchor is applied after them. 0: they wait."""
    dtype: Wire = "fp32"
    """Dtype of the deltas sent: fp32 (fp64 with layout.precision = "fp64") is exact; with the others the rounding error is
    added to the next outer step (error feedback)."""
    dp: tuple[int, ...] = ()
    """Data-parallel degree of each island, if they differ. Shares of a batch, and weights in the outer mean, are proportional
    to it; `layout.dp` is that of the island that is planned. Empty: all have `layout.dp`, and equal shares."""
    quorum: int = 0
    """Fewest islands that do an outer step: an island that has failed is left out, and takes the state of another when it
    returns. Each island is then a command of its own, which `ultrascale train` starts here. 0: all take part, or the run
    ends."""
    silent_seconds: float = 10.0
    """Time without a sign of life after which a quorum leaves an island out."""
    meet: str = ""
    """Store through which a quorum agrees on its members: `file:///FOLDER` that all islands can access, or `tcp://HOST:PORT` of
    `python -m ultrascale.islands.store HOST PORT`. Empty: in the run's folder."""

    def problems(self) -> Iterator[Problem]:
        """Every broken rule among the fields."""
        if self.dp and (len(self.dp) != self.count or min(self.dp) < 1):
            rule = f"must be a degree of 1 or more for each of islands.count = {self.count}, is {[*self.dp]}"
            yield Problem("islands.dp", rule, "Give as many, or leave it out where all have layout.dp.")
        if self.overlap_steps >= self.every_steps and self.count > 1:
            rule = f"must be below islands.every_steps = {self.every_steps}, is {self.overlap_steps}"
            yield Problem("islands.overlap_steps", rule, "A fragment must be back before it is sent again.")
        if self.quorum > self.count:
            rule = f"must be at most islands.count = {self.count}, is {self.quorum}"
            yield Problem("islands.quorum", rule, "1 goes on until the last island has died.")
        between = max(1, self.every_steps // self.fragments)
        if self.quorum and self.overlap_steps >= between:
            rule = f"must be below the {between} steps between two outer steps where there is a quorum, is {self.overlap_steps}"
            yield Problem("islands.overlap_steps", rule, "An outer step that is done again must be over before the next one.")
        if self.meet and not re.fullmatch(r"file:///.+|tcp://[^/:]+:[0-9]+", self.meet):
            rule = f"must be file:///FOLDER or tcp://HOST:PORT, is {self.meet!r}"
            yield Problem("islands.meet", rule, "Leave it out for islands of one machine.")
        if not 0 < self.outer.lr <= HIGHEST_RATE:
            rule = f"must be above 0 and at most {HIGHEST_RATE:g}, is {self.outer.lr:g}"
            yield Problem("islands.outer.lr", rule, "0.7 is DiLoCo's, 1 averages weights.")

    @property
    def uneven_dp(self) -> bool:
        """True if islands differ in dp, and so in which rank holds which shard."""
        return len(set(self.dp)) > 1

    def degrees(self, dp: int) -> tuple[int, ...]:
        """Data-parallel degree of each island. `dp`: of the layout."""
        return self.dp or (dp,) * self.count

    def num_senders(self, layout: Layout, *, experts: bool = False) -> int:
        """Ranks that communicate with other islands where islands differ, among those that hold the same part of a weight apart
        from data parallelism: as many as the smallest island has."""
        ranks = min(self.dp) * layout.cp
        return ranks * layout.tp // (layout.ep * layout.expert_tp) if experts else ranks

    def divisor(self, islands: Iterable[int]) -> int:
        """Divisor of the sum of these islands' deltas in their mean: if islands differ, deltas are weighted by dp."""
        return sum(self.dp[island] if self.uneven_dp else 1 for island in islands)

    @property
    def kept_tensors(self) -> int:
        """Tensors of each weight's size in host memory: anchor, momentum, residual, and two for a fragment in transfer."""
        return 1 + (self.outer.momentum > 0) + (self.dtype != "fp32") + 2 * (self.overlap_steps > 0)

    def due(self, steps_done: int, steps: int) -> list[int]:
        """Fragments whose outer step follows the step that makes `steps_done`; after the last of `steps`, all fragments."""
        every, parts = self.every_steps, range(self.fragments)
        return [part for part in parts if steps_done == steps or (steps_done + part * every // self.fragments) % every == 0]

    def next_outer_step(self, steps_done: int, steps: int) -> int:
        """The first step after `steps_done` with an outer step; `steps`, the last, is one."""
        waits = (self.every_steps - (steps_done + p * self.every_steps // self.fragments) % self.every_steps
                 for p in range(self.fragments))  # fmt: skip
        return min(steps_done + min(waits), max(steps, steps_done))

    def fragment(self, weight: Weight) -> int:
        """Fragment of a weight: blocks in turn by layer, embeddings in the first, final norm and head in the last."""
        if weight.layer is not None:
            return weight.layer % self.fragments
        return 0 if weight.name.startswith("embed") else self.fragments - 1

    def piece(self, num_elements: int, replicas: int) -> int:
        """Elements of a piece if `replicas` ranks of each island split this many elements among them and the islands."""
        return piece_of(num_elements, replicas * self.count, self.dtype)

    def encoded_bytes(self, piece: int, master_bytes: int) -> int:
        """Bytes of a piece on the wire. `master_bytes`: of an element between steps."""
        scales = piece // SCALED_TOGETHER * SCALE_BYTES
        return {
            "fp32": piece * master_bytes, "bf16": piece * 2, "int8": piece + scales, "int4": piece // 2 + scales,
        }[self.dtype]  # fmt: skip

    def sent_bytes(self, num_elements: int, replicas: int, master_bytes: int) -> int:
        """Bytes that a rank sends to other islands in one outer step, of `num_elements` that `replicas` ranks of its island
        replicate: once for the reduction, once for the result."""
        return 2 * (self.count - 1) * self.encoded_bytes(self.piece(num_elements, replicas), master_bytes)


def piece_of(num_elements: int, pieces: int, wire: Wire) -> int:
    """Elements of one of `pieces` equal pieces of this many elements, rounded up to whole blocks of a scale."""
    piece, together = -(-num_elements // pieces), SCALED_TOGETHER if wire in ("int8", "int4") else 1
    return -(-piece // together) * together


def replicas_of(weight: Weight, model: Model, layout: Layout) -> tuple[bool, int]:
    """Pair: true if a weight is an expert's and is held by other ranks than the weights around it; and its replicas, the ranks
    of an island that hold the same part of it."""
    if weight.is_expert and layout.tp * layout.ep * layout.expert_tp > 1 and model.num_experts:
        return True, layout.expert_dp // layout.expert_shard_size
    return False, layout.group("replicate")[0]
