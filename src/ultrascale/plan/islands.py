"""Bytes that islands (DiLoCo) send to each other and keep in host memory, by the same arithmetic as the trainer
(`description.sections.islands`). The effect on the loss is not predicted; `ultrascale plan far` prints seconds for a link.

    sent by a rank    2 (N - 1) pieces of each bucket; a piece is the bucket's elements / (replicas x islands), rounded up
    kept by a rank    anchor, momentum, residuals and deltas in flight, in the dtype of weights between steps
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from ultrascale.description.architecture.weights import Weight, num_parameters, weights
from ultrascale.description.layout import DTYPE_BYTES
from ultrascale.description.run import Run
from ultrascale.description.sections.islands import replicas_of
from ultrascale.plan.memory.replay import outside, stage_parts
from ultrascale.work.sharding.owners import part_shape
from ultrascale.work.sharding.places import Coordinates, shard_of

MOST_COUNTED = 256
"""Ranks of an island up to which each is counted; above, one rank of each pipeline stage stands for the others."""


@dataclass(frozen=True)
class IslandsPlan:
    """Traffic and host memory of one island."""

    count: int
    every_steps: int
    sent_bytes: int
    """Bytes that all ranks of an island send to the others in one round, every fragment once."""
    sent_at_once_bytes: int
    """Bytes of the largest fragment, sent in one outer step."""
    host_bytes: int
    """Bytes of host memory on the rank that keeps most."""
    gradient_bytes: int
    """Bytes that data parallelism over the islands would send instead in the steps of a round."""

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary."""
        return asdict(self) | {"sent_bytes_per_step": self.sent_bytes / self.every_steps}


def plan_islands(run: Run) -> IslandsPlan:
    """Traffic and host memory of one island of `run`, which has several."""
    islands, layout = run.islands, run.layout
    stage = layout.world_size // layout.pp
    counted = range(layout.world_size) if layout.world_size <= MOST_COUNTED else range(0, layout.world_size, stage)
    ranks_alike = 1 if layout.world_size <= MOST_COUNTED else stage
    sent = Counter[int]()
    for rank in counted:
        for fragment, num_bytes in sent_by_rank(run, rank).items():
            sent[fragment] += num_bytes * ranks_alike
    gradients = 2 * (islands.count - 1) * -(-num_parameters(run.model) // islands.count)
    return IslandsPlan(
        count=islands.count,
        every_steps=islands.every_steps,
        sent_bytes=sum(sent.values()),
        sent_at_once_bytes=max(sent.values()),
        host_bytes=max(host_bytes(run, rank) for rank in counted),
        gradient_bytes=islands.every_steps * gradients * DTYPE_BYTES[layout.gradient_reduce_dtype],
    )


def sent_by_rank(run: Run, rank: int) -> Counter[int]:
    """Bytes that a rank sends to other islands in the outer step of each fragment."""
    sent, master = Counter[int](), DTYPE_BYTES[run.layout.master_dtype]
    for (fragment, _, num_senders), elements in _buckets(run, rank).items():
        sent[fragment] += run.islands.sent_bytes(elements, num_senders, master)
    return sent


def host_bytes(run: Run, rank: int) -> int:
    """Peak bytes of host memory for a rank's outer-step tensors; with a quorum also the deltas in flight of all fragments (as
    after the run's last step)."""
    islands, elements = run.islands, sum(prod(part_shape(weight, run.layout, rank)) for weight in _weights_of_rank(run, rank))
    kept = elements * islands.kept_tensors
    if islands.quorum:
        kept += sum(
            islands.piece(size, num_senders) * islands.count for (_, _, num_senders), size in _buckets(run, rank).items()
        )
    return kept * DTYPE_BYTES[run.layout.master_dtype]


def _buckets(run: Run, rank: int) -> Counter[tuple[int, bool, int]]:
    """Elements whose pieces a rank sends, by fragment, whether they are experts', and the number of ranks of its island
    (replicas) that send a piece of them."""
    buckets, layout, at = Counter[tuple[int, bool, int]](), run.layout, Coordinates.of(run.layout, rank)
    for weight in _weights_of_rank(run, rank):
        is_expert, num_senders = replicas_of(weight, run.model, layout)
        shape = part_shape(weight, layout, rank)
        if run.islands.uneven_dp:
            num_senders, shape = run.islands.num_senders(layout, experts=is_expert), shard_of(weight, layout, at).shape
            if (at.expert_dp if is_expert else at.dp * layout.cp + at.cp) >= num_senders:
                continue
        buckets[run.islands.fragment(weight), is_expert, num_senders] += prod(shape)
    return buckets


def _weights_of_rank(run: Run, rank: int) -> Iterator[Weight]:
    """Weights of a rank's stages; a tied embedding once for each of the two ends."""
    at = Coordinates.of(run.layout, rank)
    for part in stage_parts(run.model, run.layout, run.batch.sequence_length, at).values():
        ends = outside(run.model, part.is_first, part.is_last)
        yield from (weight for weight in weights(run.model) if weight.layer in part.blocks or weight.name in ends)
