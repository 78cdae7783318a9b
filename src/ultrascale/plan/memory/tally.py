"""Counts of a rank's replayed step: messages by kind and group, and FLOPs.

The memory replay reports each operation and its backward pass (`plan.memory.stage_replay`), each gather and reduction of a
bucket (`plan.memory.sharding`) and each message of a pipeline (`plan.memory.stage_player`). Traffic and memory come from the
same events: a gather that the replay makes too often shows in both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from ultrascale.description.layout import Layout
from ultrascale.work.ops import Collective, Op, Shape, When
from ultrascale.work.sharding.context_order import gathered_traffic, pairs_worked_on, ring_traffic, rows_made


class TrafficKey(NamedTuple):
    """Messages that are counted together."""

    kind: str
    size: int
    stride: int


class Traffic(NamedTuple):
    """Number of messages, and their bytes."""

    count: int
    num_bytes: int


class OpMessages(NamedTuple):
    """Messages of one operation under one key, and their bytes."""

    key: TrafficKey
    count: int
    num_bytes: int


class Pass(NamedTuple):
    """Counts of one pass of an operation."""

    op: Op
    """Kept alive so that its `id` is not reused."""
    products: int
    attention: int
    messages: list[OpMessages]


class Counts(NamedTuple):
    """FLOPs, and messages by key."""

    products: int
    attention: int
    counts: Counter[TrafficKey]
    sizes: Counter[TrafficKey]


@dataclass
class Tally:
    """Counts of one rank."""

    layout: Layout
    shape: Shape
    cp_rank: int
    products: int = 0
    """FLOPs of GEMMs, recomputed ones included, attention excluded."""
    attention: int = 0
    """FLOPs of attention, over every pair of a query and a key that a kernel gets."""
    counts: Counter[TrafficKey] = field(default_factory=Counter)
    sizes: Counter[TrafficKey] = field(default_factory=Counter)
    _known: dict[When, dict[int, Pass]] = field(default_factory=lambda: {"forward": {}, "backward": {}})
    """Counts of operations by `id`: the same ones return with every block and micro-batch."""

    @property
    def traffic(self) -> dict[TrafficKey, Traffic]:
        """Messages and bytes, by key."""
        return {key: Traffic(count, self.sizes[key]) for key, count in self.counts.items()}

    def clear(self) -> None:
        """Reset all counts to zero."""
        self.products = self.attention = 0
        self.counts.clear()
        self.sizes.clear()

    def counted(self) -> Counts:
        """All counts so far."""
        return Counts(self.products, self.attention, self.counts.copy(), self.sizes.copy())

    def since(self, before: Counts) -> Counts:
        """Counts since `before`."""
        return Counts(
            self.products - before.products, self.attention - before.attention, self.counts - before.counts,
            self.sizes - before.sizes,
        )  # fmt: skip

    def add(self, more: Counts) -> None:
        """Add the counts `more` of a pass."""
        self.products += more.products
        self.attention += more.attention
        self.counts.update(more.counts)
        self.sizes.update(more.sizes)

    @contextmanager
    def unrecorded(self) -> Iterator[None]:
        """Context in which nothing is counted."""
        before = self.counted()
        try:
            yield
        finally:
            self.products, self.attention, self.counts, self.sizes = before

    def send(self, kind: str, group: tuple[int, int], num_bytes: int, count: int = 1) -> None:
        """Count `count` messages of `num_bytes` in total within `group` (size, stride); none in a group of one rank."""
        if group[0] > 1 and num_bytes:
            key = TrafficKey(kind, *group)
            self.counts[key] += count
            self.sizes[key] += num_bytes

    def forward(self, op: Op) -> None:
        """Count one forward pass of `op`."""
        self._count(self._pass(op, "forward"))

    def backward(self, op: Op) -> None:
        """Count the backward pass of `op`. GEMMs deferred to W are counted here too, their messages are not."""
        self._count(self._pass(op, "backward"))

    def recompute(self, op: Op) -> None:
        """Count the FLOPs of a forward pass of `op`, without its messages."""
        self._count(self._pass(op, "forward")._replace(messages=[]))

    def resend(self, op: Op) -> None:
        """Count the messages of a forward pass of `op`, without its FLOPs."""
        self._count(self._pass(op, "forward")._replace(products=0, attention=0))

    def _count(self, known: Pass) -> None:
        self.products += known.products
        self.attention += known.attention
        if known.messages:
            self.send_all(known)

    def send_all(self, known: Pass) -> None:
        """Count the messages of a pass."""
        for key, count, num_bytes in known.messages:
            self.counts[key] += count
            self.sizes[key] += num_bytes

    def _pass(self, op: Op, when: When) -> Pass:
        if known := self._known[when].get(id(op)):
            return known
        flops = op.flops if when == "forward" else op.backward_flops
        is_attention = op.kind == "attention"
        messages = [self._message(op, item) for item in op.collectives if item.when == when]
        known = self._known[when][id(op)] = Pass(
            op, 0 if is_attention else flops, self._attention_flops(op, flops) if is_attention else 0,
            [message for message in messages if message.key.size > 1 and message.num_bytes],
        )  # fmt: skip
        return known

    def _attention_flops(self, op: Op, flops: int) -> int:
        """FLOPs of attention; over cp the share of the score matrix that this ring position computes. There, and where kernels
        get the document ends, query-key and value heads are padded to one width."""
        scores, (places, heads) = op.scores, self.layout.cp_grid
        knows_document_ends = self.shape.documents and self.shape.masks_in_kernel and self.shape.kernels.spans
        if scores is None or (self.layout.cp == 1 and not knows_document_ends):
            return flops
        e, v = scores.head_dim, scores.value_head_dim
        width = scores.kernel_width(self.shape.device)
        flops = flops // (e + v) * 2 * width if flops == op.flops else flops // (3 * e + 2 * v) * 5 * width
        if places == 1 or self.shape.documents:
            return flops
        length, window = self.shape.sequence_length, op.collectives[0].window
        pairs = pairs_worked_on(length, places, self.cp_rank // heads, window)
        return flops * pairs // (scores.queries * scores.keys)

    def partial_result_bytes(self, op: Op) -> int:
        """Bytes of the results of single ring hops of an attention, as wide as kernels make them, beyond the merged result;
        0 with one hop."""
        if not op.collectives or self.layout.cp_grid[0] == 1 or self.shape.documents:
            return 0
        (places, heads), shape = self.layout.cp_grid, self.shape
        num_rows = rows_made(shape.sequence_length, places, self.cp_rank // heads, op.collectives[0].window)
        merged, (attended, *other_results), scores = shape.swapped_length, op.makes, op.scores
        assert scores is not None
        wide = attended.num_bytes * scores.kernel_width(self.shape.device) // scores.value_head_dim
        other_bytes = sum(result.num_bytes for result in other_results)
        return wide * num_rows // merged - attended.num_bytes + other_bytes * (num_rows - merged) // merged

    def _message(self, op: Op, item: Collective) -> OpMessages:
        if item.axis == "cp" and op.kind != "router":
            return self._message_in_context(item)
        # The reduce-scatter of experts' rows is an all-to-all, then local additions.
        kind = "all_to_all" if (item.axis, item.kind) == ("expert_tp", "reduce_scatter") else item.kind
        return OpMessages(TrafficKey(kind, *self.layout.group(item.axis)), 1, item.num_bytes)

    def _message_in_context(self, item: Collective) -> OpMessages:
        """Messages over cp and the bytes that leave the rank: point-to-point, except where NCCL all-gathers."""
        group, (places, heads) = self.layout.group("cp"), self.layout.cp_grid
        if item.kind == "all_to_all":
            leaving = item.num_bytes * (heads - 1) // heads if item.leaving_bytes is None else item.leaving_bytes
            return OpMessages(TrafficKey("send", *group), item.num_messages * (heads - 1), leaving)
        uneven = not self.shape.rings and self.shape.coordinates is not None and self.shape.sequence_length % places
        if (
            not self.shape.rings and not uneven
        ) or self.shape.documents:  # a plan does not know which rank needs the keys of which documents
            kind, count = (item.kind, 1) if self.shape.device == "cuda" and not self.shape.rings else ("send", places - 1)
            return OpMessages(TrafficKey(kind, *group), count, round(item.num_bytes * (places - 1) / places * item.sent_share))
        traffic = ring_traffic if self.shape.rings else gathered_traffic
        sent = traffic(self.shape.sequence_length, places, self.cp_rank // heads, item.window)
        count, slots = sent.keys if item.kind == "all_gather" else sent.gradients
        return OpMessages(TrafficKey("send", *group), count, item.num_bytes * slots // self.shape.sequence_length)


def per_step(few: Tally, fewer: Tally, more: int) -> Tally:
    """Tally of `few` extrapolated: `more` times the difference of `few` and `fewer` is added."""
    total = Tally(few.layout, few.shape, few.cp_rank)
    total.products = few.products + more * (few.products - fewer.products)
    total.attention = few.attention + more * (few.attention - fewer.attention)
    for key in few.counts:
        total.counts[key] = few.counts[key] + more * (few.counts[key] - fewer.counts[key])
        total.sizes[key] = few.sizes[key] + more * (few.sizes[key] - fewer.sizes[key])
    return total
