"""Cost of communication: seconds of a collective of any group of ranks on a real network.

    inside a node       measured: a + w/B + c sqrt(w) by GPU, kind and ranks (`plan/laws/collectives.toml`)
    across nodes        the cheapest of the algorithms and protocols that NCCL has (`plan.laws.nccl`), each limited by NVLink
                        and by the group's share of the node's cards (`plan.laws.network`)

A group on several nodes never takes less than as many ranks inside one node would. Overlap is not considered here:
`plan.time.passes` and `plan.time.data_traffic` decide what runs beside computation. The alternative, one bandwidth per axis and
35 us per rank as in SimuMax, is 4 to 10 times too slow where latency counts (8 GPUs on each of 8 nodes and more).

Scalars take microseconds and columns of 100,000 milliseconds: everything that depends on a group's shape is computed once per
distinct (size, stride) and cached; the message is one line of arithmetic.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from ultrascale.catalogue.cluster import Cluster
from ultrascale.plan.laws.nccl import KINDS, Line, across_lines, inside_line
from ultrascale.plan.laws.network import Fabric, fabric_of, place
from ultrascale.plan.layouts import Floats, Indices

_FREE = Line("none", "none", 0.0, 0.0, 0.0)
_INFINITE = Line("", "", float("inf"), 0.0, 0.0)

FEW = 12
"""Number of groups up to which they are priced one by one."""


def collective_seconds(
    cluster: Cluster,
    kind: str,
    num_bytes: ArrayLike,
    *,
    size: ArrayLike,
    stride: ArrayLike,
) -> Floats:
    """Seconds of one collective of every group of an axis, with all groups running at once. Arguments broadcast.

    `kind`: all_reduce, all_gather, reduce_scatter, all_to_all, broadcast, or send (every rank to its neighbour in the group).
    `num_bytes`: the whole all-gathered or reduced buffer; for all_to_all the bytes that one rank sends in total, for send one
    message. `size`, `stride`: number of ranks in a group, and their distance. A group of one and an empty message take no time.
    Raises SpecError if the cluster has no link that the group needs.
    """
    assert kind in KINDS, kind
    if isinstance(size, int) and isinstance(stride, int) and isinstance(num_bytes, int | float):
        return np.asarray(_seconds_and_line(cluster, kind, num_bytes, size, stride)[0])
    widths, sizes, strides = np.asarray(num_bytes, dtype=np.float64), np.asarray(size), np.asarray(stride)
    every = np.broadcast(widths, sizes, strides)
    if every.size <= FEW:  # NumPy's fixed costs would dominate
        seconds = [_seconds_and_line(cluster, kind, float(n), int(of), int(apart))[0] for n, of, apart in every]
        return np.array(seconds, dtype=np.float64).reshape(every.shape)
    sizes, strides = np.broadcast_arrays(sizes, strides)
    pairs, row_group = _distinct(sizes.ravel(), strides.ravel())
    if all(ranks <= 1 for ranks, _ in pairs):
        return np.zeros(np.broadcast_shapes(widths.shape, sizes.shape))
    fabric = fabric_of(cluster)
    groups = [_lines(fabric, kind, ranks, apart) for ranks, apart in pairs]
    return _evaluate(groups, row_group.reshape(sizes.shape), widths)


def send_seconds(cluster: Cluster, num_bytes: ArrayLike, *, stride: ArrayLike, size: ArrayLike = 2) -> Floats:
    """Seconds of a message to the neighbour `stride` ranks away, while all other ranks of a node send theirs; arguments
    broadcast.

    `size`: length of the chain of neighbours; a single hop that leaves the node determines the time of the chain. Raises
    SpecError as `collective_seconds`.
    """
    return collective_seconds(cluster, "send", num_bytes, size=size, stride=stride)


def explain_collective(cluster: Cluster, kind: str, num_bytes: float, *, size: int, stride: int) -> dict[str, Any]:
    """Price of a collective in detail, for printing: algorithm, protocol, tier, bandwidths in bytes per second,
    alternatives."""
    seconds, line = _seconds_and_line(cluster, kind, num_bytes, size, stride)
    if size <= 1:
        return {"seconds": 0.0, "tier": "one rank", "algorithm": "none", "protocol": "none"}
    fabric = fabric_of(cluster)
    where = place(fabric, size, stride)
    lines, _ = _lines(fabric, kind, size, stride)
    return {
        "seconds": seconds,
        "tier": "inside a node" if where.num_nodes == 1 else f"{where.num_nodes} nodes over {fabric.network}",
        "algorithm": line.algorithm,
        "protocol": line.protocol,
        "ranks_per_node": where.ranks_per_node,
        "num_nodes": where.num_nodes,
        "network_bytes_per_second": where.bytes_per_second,
        "algorithm_bytes_per_second": num_bytes / seconds if seconds else 0.0,
        "bus_bytes_per_second": bus_bytes(kind, num_bytes, size) / seconds if seconds else 0.0,
        "latency_seconds": line.fixed,
        "alternatives": {f"{other.algorithm} {other.protocol}": other.seconds(num_bytes) for other in lines},
    }


def bus_bytes(kind: str, num_bytes: ArrayLike, size: ArrayLike) -> Any:
    """Bytes that a rank must send with any algorithm: over seconds, the "bus bandwidth" of nccl-tests."""
    n = np.asarray(size)
    passes = {"all_reduce": 2 * (n - 1) / n, "broadcast": 1.0, "send": 1.0}.get(kind, (n - 1) / n)
    return np.asarray(num_bytes) * passes


def _seconds_and_line(cluster: Cluster, kind: str, num_bytes: float, size: int, stride: int) -> tuple[float, Line]:
    if size <= 1 or num_bytes <= 0:
        return 0.0, _INFINITE
    lines, floor = _lines(fabric_of(cluster), kind, size, stride)
    line = min(lines, key=lambda line: line.seconds(num_bytes))
    return max(line.seconds(num_bytes), floor.seconds(num_bytes)), line


@lru_cache(maxsize=65536)
def _lines(fabric: Fabric, kind: str, size: int, stride: int) -> tuple[tuple[Line, ...], Line]:
    """Lines of the algorithms that NCCL chooses from, and the lower bound for a group of this many ranks."""
    if size <= 1:
        return (_FREE,), _FREE
    where = place(fabric, size, stride)
    floor = inside_line(fabric, kind, min(size, fabric.gpus_per_node)) if fabric.gpus_per_node > 1 else _FREE
    if where.num_nodes == 1:
        return (floor,), floor
    return across_lines(fabric, kind, where), floor


def _distinct(sizes: Indices, strides: Indices) -> tuple[list[tuple[int, int]], Indices]:
    """The distinct pairs, and the index of each row's pair. Indices instead of sorting: tables are long and pairs few."""
    some_sizes, size_codes = _codes(sizes)
    some_strides, stride_codes = _codes(strides)
    both, codes = _codes(size_codes * len(some_strides) + stride_codes)
    pairs = [(int(some_sizes[i // len(some_strides)]), int(some_strides[i % len(some_strides)])) for i in both.tolist()]
    return pairs, codes


def _codes(values: Indices) -> tuple[Indices, Indices]:
    """Distinct values in order, and the index of each row's value among them."""
    present = np.zeros(int(values.max(initial=0)) + 1, dtype=bool)
    present[values] = True
    return np.flatnonzero(present), (np.cumsum(present) - 1)[values]


def _evaluate(groups: list[tuple[tuple[Line, ...], Line]], row_group: Indices, num_bytes: Floats) -> Floats:
    """The cheapest line of each row's group, at least its lower bound."""
    roots = np.sqrt(num_bytes)

    def seconds(of_each: list[Line]) -> Floats:
        fixed, per_byte, per_root = np.array([line[2:] for line in of_each]).T
        return fixed[row_group] + per_byte[row_group] * num_bytes + per_root[row_group] * roots

    best = seconds([floor for _, floor in groups])
    choices = max(len(lines) for lines, _ in groups)
    across = [seconds([lines[i] if i < len(lines) else _INFINITE for lines, _ in groups]) for i in range(choices)]
    return np.where(num_bytes > 0, np.maximum(best, np.minimum.reduce(across)), 0.0)
