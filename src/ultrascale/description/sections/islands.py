"""Islands: groups of ranks that train by themselves and meet every H steps (DiLoCo, Douillard et al. 2023).

    inner    every island does ordinary steps on its own share of each batch, with its own optimizer
    outer    every H steps the islands average how far each has moved from the last common weights, the anchor, and an outer
             optimizer takes the mean as its gradient:

        delta = anchor - weights;  anchor <- outer optimizer(anchor, mean of deltas);  weights <- anchor

Streaming DiLoCo (Douillard et al. 2025) sends a fragment of the layers at a time, in fewer bits, and lets the islands train on
for some steps while it is under way; the anchor is then applied late, and what was trained meanwhile is kept on top of it.

The mean goes round as a reduce-scatter and an all-gather: of n elements a rank sends 2 (N - 1) pieces of n / N, whatever they
are encoded in. Here is the arithmetic of it, which the trainer sends by and the planner counts by.
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
"""Highest learning rate of the outer optimizer; published ones are 0.4 to 1."""


@dataclass(frozen=True)
class Outer:
    """Outer optimizer: makes the next common weights from the mean of the islands' moves."""

    optimizer: Literal["nesterov", "sgd"] = "nesterov"
    """SGD with Nesterov's momentum, or with plain momentum."""
    lr: float = 0.7
    """Learning rate, constant; 1 with no momentum averages weights. DiLoCo: 0.7."""
    momentum: float = 0.9
    """Momentum over the mean of moves. DiLoCo: 0.9."""


@dataclass(frozen=True)
class Islands:
    """Groups of ranks that train apart and meet every `every_steps` steps (DiLoCo). `[layout]` is that of one island."""

    count: int = 1
    """Islands, each of `[layout]`'s ranks, one island's after the other's; each has a share of every batch. 1: none."""
    every_steps: int = 100
    """H: steps between two outer steps."""
    outer: Outer = field(default_factory=Outer)
    fragments: int = 1
    """Parts of the layers, each with outer steps of its own, spread over the H steps: layer l is in part l mod fragments."""
    overlap_steps: int = 0
    """Steps that islands train on while a fragment is under way; its anchor is applied after them. 0: they wait."""
    dtype: Wire = "fp32"
    """In which moves are sent: fp32 (fp64 with layout.precision = "fp64") is exact; what the others round off is added to the
    next outer step (error feedback)."""
    dp: tuple[int, ...] = ()
    """Degree of data parallelism of each island, where they differ. Shares of a batch, and weights in the outer mean, are in
    proportion to it; `layout.dp` is that of the island that is planned. Empty: all have `layout.dp`, and equal shares."""
    quorum: int = 0
    """Least islands that do an outer step: one that has died is left out of it, and takes the state of another when it comes
    back. Each island is then a command of its own, which `ultrascale train` starts here. 0: all take part, or all end."""
    silent_seconds: float = 10.0
    """Time without a sign of life after which a quorum leaves an island out."""
    meet: str = ""
    """Store in which a quorum agrees on who is there: `file:///FOLDER` that all islands see, or `tcp://HOST:PORT` of
    `python -m ultrascale.islands.store HOST PORT`. Empty: in the run's folder."""

    def problems(self) -> Iterator[Problem]:
        """Every rule that the fields break among themselves."""
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
        """True if islands differ in dp, and so in which rank holds what."""
        return len(set(self.dp)) > 1

    def degrees(self, dp: int) -> tuple[int, ...]:
        """Degree of data parallelism of each island. `dp`: of the layout."""
        return self.dp or (dp,) * self.count

    def num_senders(self, layout: Layout, *, experts: bool = False) -> int:
        """Ranks that talk to other islands where islands differ, of those that hold the same part of a weight, data parallelism
        left aside: as many as the smallest island has."""
        ranks = min(self.dp) * layout.cp
        return ranks * layout.tp // (layout.ep * layout.expert_tp) if experts else ranks

    def divisor(self, islands: Iterable[int]) -> int:
        """Divisor of the sum of these islands' moves in their mean: moves of islands that differ count by their dp."""
        return sum(self.dp[island] if self.uneven_dp else 1 for island in islands)

    @property
    def kept_tensors(self) -> int:
        """Tensors of each weight's size in the host's memory: anchor, momentum, residual, and two for a fragment in flight."""
        return 1 + (self.outer.momentum > 0) + (self.dtype != "fp32") + 2 * (self.overlap_steps > 0)

    def due(self, steps_done: int, steps: int) -> list[int]:
        """Fragments whose outer step follows the step that makes `steps_done`; after the last of `steps` all of them."""
        every, parts = self.every_steps, range(self.fragments)
        return [part for part in parts if steps_done == steps or (steps_done + part * every // self.fragments) % every == 0]

    def next_outer_step(self, steps_done: int, steps: int) -> int:
        """The first step after `steps_done` with an outer step; `steps` is one."""
        waits = (self.every_steps - (steps_done + p * self.every_steps // self.fragments) % self.every_steps
                 for p in range(self.fragments))  # fmt: skip
        return min(steps_done + min(waits), max(steps, steps_done))

    def fragment(self, weight: Weight) -> int:
        """The fragment of a weight: of blocks every so many layers one, embeddings in the first, final norm and head in the
        last."""
        if weight.layer is not None:
            return weight.layer % self.fragments
        return 0 if weight.name.startswith("embed") else self.fragments - 1

    def piece(self, num_elements: int, replicas: int) -> int:
        """Elements of one of the pieces into which `replicas` ranks of each island cut so many between them and the islands."""
        return piece_of(num_elements, replicas * self.count, self.dtype)

    def encoded_bytes(self, piece: int, master_bytes: int) -> int:
        """Bytes of a piece on the wire. `master_bytes`: of an element between steps."""
        scales = piece // SCALED_TOGETHER * SCALE_BYTES
        return {
            "fp32": piece * master_bytes, "bf16": piece * 2, "int8": piece + scales, "int4": piece // 2 + scales,
        }[self.dtype]  # fmt: skip

    def sent_bytes(self, num_elements: int, replicas: int, master_bytes: int) -> int:
        """Bytes that a rank sends to other islands in one outer step of `num_elements` that `replicas` ranks of its island hold
        alike: once to be added up, once as a sum."""
        return 2 * (self.count - 1) * self.encoded_bytes(self.piece(num_elements, replicas), master_bytes)


def piece_of(num_elements: int, pieces: int, wire: Wire) -> int:
    """Elements of one of `pieces` equal pieces that hold so many, whole blocks of a scale in each."""
    piece, together = -(-num_elements // pieces), SCALED_TOGETHER if wire in ("int8", "int4") else 1
    return -(-piece // together) * together


def replicas_of(weight: Weight, model: Model, layout: Layout) -> tuple[bool, int]:
    """Pair: true if a weight is an expert's and other ranks hold it than the weights around it; and its replicas, the ranks of
    an island that hold the same part of it."""
    if weight.is_expert and layout.tp * layout.ep * layout.expert_tp > 1 and model.num_experts:
        return True, layout.expert_dp // layout.expert_shard_size
    return False, layout.group("replicate")[0]
