"""Published measurements of NCCL across nodes. Sizes in bytes of the whole buffer, times in microseconds, out of place."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ultrascale.catalogue.cluster import Cluster, Link, Node, Sourced, parse_cluster

MIB, GIB = 2**20, 2**30


class Published(NamedTuple):
    """One measured sweep of a collective over all ranks of a cluster."""

    cluster: Cluster
    kind: str
    microseconds: dict[int, float]
    source: str
    calibrated: bool = False
    """Whether a constant was taken from it: a hop, a share of the wire, what a rack or two nodes keep. The others judge."""

    @property
    def size(self) -> int:
        return self.cluster.num_accelerators


def with_network(name: str, nodes: int, link: str, giga_bytes: float, cards: int = 8) -> Cluster:
    """`nodes` nodes called `name` with another network: all cards of a node together reach `giga_bytes` GB/s."""
    node: Node = parse_cluster(f"1x{name}").node
    node = replace(node, inter_link=Link(link, Sourced(giga_bytes * 1e9, "source", "")), num_network_cards=cards)
    return Cluster(f"{nodes}x{name}", node, nodes * node.num_accelerators)


def from_bus(kind: str, size: int, points: dict[int, float]) -> dict[int, float]:
    """Microseconds from bus bandwidth in GB/s."""
    passes = 2 if kind == "all_reduce" else 1
    return {w: passes * (size - 1) / size * w / (bus * 1e3) for w, bus in points.items()}


_AWS = "github.com/aws-samples/awsome-distributed-training, micro-benchmarks/nccl-tests/README.md"
_COREWEAVE = "github.com/coreweave/nccl-tests README.md"
_BEKMAN = "github.com/stas00/ml-engineering, network/README.md"

SWEEPS = (
    Published(
        parse_cluster("2xaws-p5"), "all_reduce",
        {1024: 69.24, MIB: 123.2, 8 * MIB: 204.8, 16 * MIB: 298.1, 64 * MIB: 601.5, 128 * MIB: 870.3, 256 * MIB: 1468.2,
         512 * MIB: 2559.2, GIB: 4607.6, 4 * GIB: 17286, 16 * GIB: 66132}, _AWS, True,
    ),
    Published(
        parse_cluster("2xaws-p4de"), "all_reduce",
        {1024: 165, MIB: 309.4, 8 * MIB: 762.8, 16 * MIB: 1191.8, 64 * MIB: 2644.6, 128 * MIB: 3912.9, 256 * MIB: 7201.7,
         512 * MIB: 13552, GIB: 26217, 2 * GIB: 51406}, _AWS, True,
    ),
    Published(
        parse_cluster("8xdgx-h100"), "all_reduce",
        {512 * MIB: 2984.6, GIB: 5808, 2 * GIB: 11163, 4 * GIB: 22181, 8 * GIB: 43980}, _COREWEAVE,
    ),
    Published(
        parse_cluster("2xdgx-h200"), "all_reduce", {512 * MIB: 2387.7, GIB: 4416.5},
        "docs.skypilot.co, examples/performance/coreweave_infiniband",
    ),
    Published(
        parse_cluster("2xdgx-h100"), "all_reduce", {512 * MIB: 2407.5, GIB: 4524.3},
        "docs.skypilot.co, examples/performance/together_infiniband",
    ),
    Published(
        with_network("dgx-b200", 4, "EFA v4", 400), "all_reduce",
        from_bus("all_reduce", 32, {16 * MIB: 64, 64 * MIB: 157, 256 * MIB: 229, GIB: 362, 16 * GIB: 382}), _BEKMAN, True,
    ),
    Published(
        parse_cluster("1xgb200-nvl72"), "all_reduce",
        {512 * MIB: 1806.7, GIB: 3108.8, 2 * GIB: 5589.1, 4 * GIB: 10094, 8 * GIB: 20299}, _COREWEAVE, True,
    ),
    Published(
        parse_cluster("2xgb200-nvl72"), "all_reduce",
        {512 * MIB: 2156.8, GIB: 3574.4, 2 * GIB: 6264, 4 * GIB: 11469, 8 * GIB: 21493, 16 * GIB: 42067}, _COREWEAVE,
    ),
    Published(
        parse_cluster("20xgb200-nvl72"), "all_reduce",
        {512 * MIB: 7108.4, GIB: 9805.7, 2 * GIB: 14980, 4 * GIB: 24782, 8 * GIB: 45004, 16 * GIB: 84625}, _COREWEAVE, True,
    ),
    Published(
        parse_cluster("4xdgx-a100"), "all_reduce", from_bus("all_reduce", 32, {8 * GIB: 192}),
        "github.com/NVIDIA/nccl issue 812, NVIDIA's own DGX A100", True,
    ),
    Published(
        with_network("dgx-a100", 3, "4 x InfiniBand HDR 200", 100, 4), "all_reduce",
        from_bus("all_reduce", 24, {4 * GIB: 96}), "github.com/NVIDIA/nccl-tests issue 119",
    ),
    Published(
        parse_cluster("32xdgx-h100"), "all_reduce", from_bus("all_reduce", 256, {2 * GIB: 340}),
        "github.com/NVIDIA/nccl issue 1218",
    ),
    Published(
        with_network("dgx-h200", 248, "8 x InfiniBand NDR 400", 400), "all_reduce",
        from_bus("all_reduce", 1984, {512 * MIB: 350}), "github.com/NVIDIA/nccl-tests issue 283: about 350, below 300 at times",
    ),
    Published(
        with_network("dgx-h100", 6, "8 x RoCE 400", 400), "all_to_all", from_bus("all_to_all", 48, {4 * GIB: 48 * 6 / 5}),
        "github.com/NVIDIA/nccl-tests issues 130, 267: one card a GPU, 48 to 49 GB/s, times nodes/(nodes - 1)",
    ),
)  # fmt: skip

# Of the bandwidth at 17 GB, what an all-gather reaches, by bytes and nodes of eight: SimAI, inputs/ratio/nic_ratio.csv (2024).
SIZE_RATIOS = {
    16 * MIB: {2: 0.32, 4: 0.24, 8: 0.13, 16: 0.05, 32: 0.044, 64: 0.021, 128: 0.009},
    128 * MIB: {2: 0.67, 4: 0.67, 8: 0.54, 16: 0.38, 32: 0.21, 64: 0.11, 128: 0.05},
    GIB: {2: 0.92, 4: 0.93, 8: 0.90, 16: 0.76, 32: 0.74, 64: 0.56, 128: 0.31},
}

# Bus bandwidth in GB/s by nodes, median and 5th to 95th percentile over many runs on one shared cloud cluster of p5-like nodes:
# nanotron's Ultra-Scale Playbook, src/fragments/pp_comm_bandwidth.html (2025). Sizes are not given; a busy cluster gives this.
PLAYBOOK_ALL_REDUCE = {
    1: (436.0, 422.3, 461.5), 2: (361.7, 302.3, 436.1), 4: (160.1, 44.5, 219.1), 8: (99.6, 41.6, 192.7),
    16: (84.7, 31.3, 188.4), 32: (64.9, 25.0, 194.2), 64: (32.9, 12.5, 177.4),
}  # fmt: skip
PLAYBOOK_ALL_GATHER_95 = {1: 264.9, 2: 226.3, 4: 229.4, 8: 178.5, 16: 126.7, 32: 77.0, 64: 44.4}
PLAYBOOK_MEDIANS = {
    "all_gather": {2: 184.6, 4: 119.0, 8: 69.0, 16: 55.0, 32: 28.0},
    "reduce_scatter": {2: 181.6, 4: 115.8, 8: 68.6, 16: 54.5, 32: 27.9},
}
"""The same figure's, over all ranks, 256 MB. On 64 nodes 11.0 and 11.1, which is less than a hop explains."""
