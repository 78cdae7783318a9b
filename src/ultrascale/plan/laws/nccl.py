"""Algorithms and protocols that NCCL could choose for a collective, each as a line: t = fixed + per_byte w + per_root sqrt(w).

    inside a node       one line from measurements (`collectives.toml`): whatever NCCL chose there
    ring                every rank forwards what it received; bandwidth of the slowest link, latency of every rank
    tree                all-reduce only: up and down a double binary tree of nodes; latency of its depth. With two nodes each
                        card carries the buffer once, with more twice (a node has a parent and two children, in halves)
    NVLSTree            the same, with the node's part done by its switch (Hopper on, five ranks or more in the node)
    direct              all-to-all: every rank sends to every other; only traffic that leaves the node loads its cards

LL trades half of the bandwidth or more for latency, Simple is the opposite. LL128 is omitted across nodes: both PyTorch's model
of NCCL and the ring latencies of SimAI's measurements (4 to 5 us per rank from 2 to 128 nodes) indicate that it is not used
there. Not modelled: SHARP in InfiniBand switches, PAT (NCCL 2.23, one rank per node), copy engines, user buffers.
"""

from __future__ import annotations

from math import log2
from pathlib import Path
from typing import NamedTuple

from ultrascale.catalogue.tables import read_tables
from ultrascale.plan.laws.curves import steady
from ultrascale.plan.laws.network import Fabric, Placement

FITS: dict[str, dict[str, dict[int, tuple[float, float, float]]]] = {
    gpu: {kind: {int(ranks): tuple(fit) for ranks, fit in fits.items()} for kind, fits in kinds.items()}
    for gpu, kinds in read_tables("collectives.toml", Path(__file__).parent).items()
}
"""Measured constants of a line inside a node, by GPU, kind and ranks."""
# NCCL's src/graph/tuning.cc (2.27), in us: a launch, and a hop by protocol.
TREE_HOP = {"LL": (0.6, 5.0), "Simple": (4.0, 14.0)}
RING_HOP = {"LL": (0.6, 2.7), "Simple": (3.4, 14.0)}
NVLS_TREE_FIXED, NVLS_TREE_HOP = 25.0, 20.9
TREE_BANDWIDTH = 0.92
# Bandwidth of a tree's channels on two nodes and on four or more, over one node: 24, 23.6 and 17.8 GB/s on Ampere, 38.7, 41.4
# and 36 on Hopper, 70, 42.8 and 24 on Blackwell; a ring loses nothing.
TREE_NODES = {"a100_sxm": (0.98, 0.74), "h100_sxm": (1.0, 0.93), "h200_sxm": (1.0, 0.93), "b200_sxm": (0.61, 0.34)}
LL_SHARE = {"ring": 0.5, "tree": 1 / 3.8}
# Bytes per second that LL is capped at across two nodes, and across four or more.
LL_LIMIT = (39e9, 20.4e9)
# On two nodes p5 instances reach 0.91 of one node's in-switch rate (awsome-distributed-training, 2025); from four on NCCL's
# caps of a channel are lower, by 45.5 over 57.7 on Hopper, by 43.8 over 96 on Blackwell, as twenty GB200 racks show.
NVLS_TREE_TWO_NODES = 0.91
NVLS_TREE_MANY_NODES = {"h100_sxm": 0.72, "h200_sxm": 0.72, "b200_sxm": 0.46}
MIN_IN_SWITCH = 5
"""Ranks of a node from which its all-reduce is reduced in the switch (ml-engineering: 5 on H200, 6 on B200)."""
PIPELINE_SHARE = 1 / 3
"""Fraction of a hop's latency between nodes that filling a chunk costs while others are in flight; from 2 x p5 and SimAI's
ratios."""
# autoparallel's NCCL model: the start of an all-to-all of 16, 32, 64, 128 and 256 ranks takes 37, 42, 60, 98 and 290 us.
DIRECT_FIXED, DIRECT_PER_RANK = 27.0, 0.6
DIRECT_LOSS = 0.44
"""Fraction of the cards' bandwidth that an all-to-all loses, divided by the number of nodes (same source)."""
SEND_FIXED = 8.4
BASE = 6.6
MEASURED_RANKS = 8
GROWTH_HOP = 0.6
"""Microseconds that a rank adds inside a domain larger than the eight ranks measured."""
RING_CARDS = 8
"""Most cards that a node's rings use: twenty NVL72 racks reach 405 to 434 GB/s of bus, one rack 835 (CoreWeave, 2025)."""
MICRO = 1e-6
MEGA = 1e6
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")


class Line(NamedTuple):
    """Seconds of a message of w bytes: `fixed + per_byte * w + per_root * sqrt(w)`."""

    algorithm: str
    protocol: str
    fixed: float
    per_byte: float
    per_root: float

    def seconds(self, num_bytes: float) -> float:
        return self.fixed + self.per_byte * num_bytes + self.per_root * steady(num_bytes**0.5)


def inside_line(fabric: Fabric, kind: str, ranks: int) -> Line:
    """Line of `ranks` ranks that share a node."""
    if kind == "broadcast":
        # The root sends the whole buffer, not (n-1)/n of it, at the rate of a full node's ring.
        per_byte = 1 / _ring_rate(fabric, max(ranks, MEASURED_RANKS))
        return inside_line(fabric, "all_gather", ranks)._replace(per_byte=per_byte)
    if kind == "send":
        half = inside_line(fabric, "all_to_all", 2)  # two ranks exchange half of their data
        return half._replace(algorithm="direct", per_byte=half.per_byte * 2, per_root=half.per_root * 2**0.5)
    if kind == "all_reduce" and fabric.in_switch and ranks >= MIN_IN_SWITCH:
        measured, algorithm = FITS[fabric.fits]["all_reduce_in_switch"], "NVLS"
    else:
        measured, algorithm = FITS[fabric.fits][kind], "direct" if kind == "all_to_all" else "ring"
    fixed, per_megabyte, per_root = _at(measured, ranks)
    return Line(
        algorithm,
        "measured",
        fixed * MICRO,
        per_megabyte / fabric.scale * MICRO / MEGA,
        per_root / fabric.scale**0.5 * MICRO / MEGA**0.5,
    )


def across_lines(fabric: Fabric, kind: str, place: Placement) -> tuple[Line, ...]:
    """Lines that NCCL could choose among for a group on several nodes."""
    if kind == "send":
        return (_send(fabric, place),)
    if kind == "all_to_all":
        return (_direct(fabric, place),)
    rings = tuple(_ring(fabric, kind, place, protocol) for protocol in RING_HOP)
    if kind != "all_reduce":
        return rings
    trees = tuple(_tree(fabric, place, protocol) for protocol in TREE_HOP)
    if fabric.in_switch and place.ranks_per_node >= MIN_IN_SWITCH:
        return (*rings, *trees, _nvls_tree(fabric, place))
    return (*rings, *trees)


def _ring(fabric: Fabric, kind: str, place: Placement, protocol: str) -> Line:
    n, g, k = place.size, place.ranks_per_node, place.num_nodes
    passes = 2 if kind == "all_reduce" else 1
    inside, outside = RING_HOP[protocol]
    # The first hops inside a node are in its measured latency already.
    inside_hops = max(0, n - k - (min(n, fabric.gpus_per_node) - 1))
    # The last chunk to arrive starts just before a border between nodes if nodes have several ranks: it crosses all k of them.
    crossed = k if g > 1 else k - 1
    hops = inside_hops * inside + (k - 1) * outside + crossed * fabric.hop_seconds / MICRO
    fixed = _start(fabric, "all_gather", n) + passes * hops * MICRO
    cards = min(place.bytes_per_second, RING_CARDS * place.card_bytes_per_second) / place.crossing
    bus = min(_ring_rate(fabric, g), cards)
    share = 1.0 if kind == "broadcast" else passes * (n - 1) / n
    if protocol == "LL":
        return Line("ring", "LL", fixed, share / _limited(bus * LL_SHARE["ring"], k), 0.0)
    return Line("ring", protocol, fixed, share / bus, _root(fabric, "all_gather", share / bus))


def _tree(fabric: Fabric, place: Placement, protocol: str) -> Line:
    n, g, k = place.size, place.ranks_per_node, place.num_nodes
    inside, outside = TREE_HOP[protocol]
    packed = min(n, fabric.gpus_per_node)

    def way(ranks: int, nodes: int) -> float:
        chain = (ranks - 1) * inside if protocol == "Simple" else 0.0  # that of LL is in the measured latency
        return chain + log2(nodes) * (outside + fabric.hop_seconds / MICRO)

    # A group spread over more nodes gets no credit for the shorter chain in each.
    up = max(way(g, k), way(packed, -(-n // packed)))
    fixed = _start(fabric, "all_reduce", n) + 2 * up * MICRO
    two, many = TREE_NODES[fabric.fits]
    bus = TREE_BANDWIDTH * _ring_rate(fabric, g) * _by_nodes(two, many, k)
    cards = _tree_rate(place)
    if protocol == "LL":
        return Line("tree", "LL", fixed, 1 / min(_limited(bus * LL_SHARE["tree"], k) / 2, cards), 0.0)
    per_byte = 1 / min(bus / 2, cards)
    return Line("tree", protocol, fixed, per_byte, _root(fabric, "all_gather", per_byte))


def _nvls_tree(fabric: Fabric, place: Placement) -> Line:
    n, k = place.size, place.num_nodes
    node = inside_line(fabric, "all_reduce", min(n, fabric.gpus_per_node))
    kept = _by_nodes(NVLS_TREE_TWO_NODES, NVLS_TREE_MANY_NODES[fabric.fits], k)
    fixed = (NVLS_TREE_FIXED + 2 * log2(k) * (NVLS_TREE_HOP + fabric.hop_seconds / MICRO)) * MICRO
    per_byte = 1 / min(kept / node.per_byte, _tree_rate(place))
    return Line("NVLSTree", "Simple", max(fixed, node.fixed), per_byte, _root(fabric, "all_reduce", per_byte))


def _direct(fabric: Fabric, place: Placement) -> Line:
    n, g, k = place.size, place.ranks_per_node, place.num_nodes
    fixed = (DIRECT_FIXED + DIRECT_PER_RANK * n) * MICRO + fabric.hop_seconds
    rate = place.bytes_per_second / g * (1 - DIRECT_LOSS / k) / place.remote_crossing
    remote = (n - g) / n / rate
    local = inside_line(fabric, "all_to_all", g).per_byte * g / n if g > 1 else 0.0
    per_byte = max(remote, local)
    return Line("direct", "Simple", fixed, per_byte, _root(fabric, None, per_byte))


def _send(fabric: Fabric, place: Placement) -> Line:
    """Line of a message from one neighbour to the next, over one card."""
    fixed = (SEND_FIXED + RING_HOP["Simple"][1]) * MICRO + fabric.hop_seconds
    per_byte = place.crossing / min(place.bytes_per_second, place.card_bytes_per_second)
    return Line("direct", "Simple", fixed, per_byte, _root(fabric, None, per_byte))


def _at(measured: dict[int, tuple[float, float, float]], ranks: int) -> tuple[float, float, float]:
    """Constants for a number of ranks: interpolated logarithmically between measurements, extrapolated by the growth of a
    ring."""
    points = sorted(measured)
    last = points[-1]
    a, b, c = measured[last]
    if ranks >= last or len(points) == 1:
        share = (ranks - 1) / ranks * last / (last - 1)
        added = GROWTH_HOP * max(0, ranks - last)
        # A ring's chunks pass every rank; in a switch they do not: half the growth on 72 GPUs of a rack (CoreWeave, 2025).
        growth = 0.25 if len(points) == 1 else 0.5
        return a + added, b * share, c * steady(max(1.0, (ranks - 1) / (last - 1)) ** growth)
    above = next(point for point in points if point >= ranks)
    if above == ranks:
        return measured[above]
    below = max(point for point in points if point < ranks)
    weight = log2(ranks / below) / log2(above / below)
    low, high = measured[below], measured[above]
    a, b, c = (x + weight * (y - x) for x, y in zip(low, high, strict=True))
    return a, b, c


def _start(fabric: Fabric, kind: str, size: int) -> float:
    """Seconds of a tiny message: as measured on as many ranks inside a node; NCCL's base latency for nodes of one rank."""
    ranks = min(size, fabric.gpus_per_node)
    return inside_line(fabric, kind, ranks).fixed if ranks > 1 else BASE * MICRO


def _ring_rate(fabric: Fabric, ranks: int) -> float:
    """Bytes per second of a ring over the links inside a node; a single rank uses none."""
    if ranks == 1:
        return float("inf")
    return (ranks - 1) / ranks / inside_line(fabric, "all_gather", ranks).per_byte


def _tree_rate(place: Placement) -> float:
    """Bytes of the buffer per second that the cards of a node transfer."""
    return place.bytes_per_second / place.crossing / (1 if place.num_nodes == 2 else 2)


def _limited(rate: float, nodes: int) -> float:
    return min(rate, _by_nodes(*LL_LIMIT, nodes))


def _by_nodes(two: float, many: float, nodes: int) -> float:
    """Value by number of nodes: NCCL's tables have one for two nodes and one for four or more."""
    return two if nodes == 2 else (two + many) / 2 if nodes == 3 else many


def _root(fabric: Fabric, kind: str | None, per_byte: float) -> float:
    """Coefficient of sqrt(w) for filling the pipeline of chunks: 2 sqrt(latency of a chunk x seconds per byte).

    The latency is a fraction of a hop between nodes, plus the measured one of a whole node's `kind` if the chunks pass through
    nodes.
    """
    latency = PIPELINE_SHARE * (RING_HOP["Simple"][1] * MICRO + fabric.hop_seconds)
    if kind is not None and fabric.gpus_per_node > 1:
        node = inside_line(fabric, kind, fabric.gpus_per_node)
        latency += (node.per_root / 2) ** 2 / node.per_byte
    return 2 * steady((latency * per_byte) ** 0.5)
