"""Network of a cluster as collectives use it, and the placement of a group's ranks on its nodes.

    stride 1, size 8    all eight ranks of a node: NVLink only
    stride 8, size 4    one rank on each of four nodes; eight such groups share each node's cards: an eighth of them each
    stride 2, size 16   four ranks on each of four nodes; two groups share the cards: half of them each

Ranks fill nodes in order. `min(size, max(1, gpus_per_node // stride))` ranks of a group share a node; all groups of an axis run
at once by default. Calculon's single tier per axis cannot represent the third case, which is the usual one.
"""

from __future__ import annotations

from typing import NamedTuple

from ultrascale.catalogue.cluster import Cluster, Link
from ultrascale.catalogue.network import NetworkKind, network_kind
from ultrascale.description.problems import mistake
from ultrascale.plan.laws.by_identity import cached_by_identity

GIGA = 1e9


class Domain(NamedTuple):
    """Price of a link inside a node: the measurements that it uses, and their scale."""

    word: str
    """Word in the name of the link."""
    fits: str
    """Row of `collectives.toml` that it uses."""
    nominal: float
    """Bandwidth that the row was measured on, in bytes per second and one direction."""
    factor: float
    """Achieved fraction of the nominal rate over that of the row."""
    in_switch: bool
    """True if the switch can reduce an all-reduce (NVLS, SHARP of NVLink 4 and 5)."""


DOMAINS = (
    Domain("nvlink 5", "b200_sxm", 900 * GIGA, 1.0, True),
    Domain("nvlink 4", "h100_sxm", 450 * GIGA, 1.0, True),
    Domain("nvlink 3", "a100_sxm", 300 * GIGA, 1.0, False),
    # 134.5 of 150 GB/s on eight V100 (vTrain, 2024) against 230 of 300.
    Domain("nvlink 2", "a100_sxm", 300 * GIGA, 1.17, False),
    # 35 to 45 of 64 GB/s on eight H100 PCIe (published nccl-tests, 2026) against 371 of 450; the fabric of MI300X is assumed.
    Domain("pcie", "h100_sxm", 450 * GIGA, 0.75, False),
    Domain("fabric", "h100_sxm", 450 * GIGA, 0.85, False),
)
UNKNOWN = Domain("", "h100_sxm", 450 * GIGA, 0.85, False)


class Fabric(NamedTuple):
    """Numbers of a cluster that collectives depend on: hashable, so that results for it can be cached."""

    gpus_per_node: int
    fits: str
    scale: float
    """Bandwidth inside a node over that of `fits`."""
    in_switch: bool
    node_bytes_per_second: float
    """Bytes per second that the cards of a node reach together, one direction; 0 for a node without a network."""
    num_cards: int
    hop_seconds: float
    """Latency of a hop of the network beyond InfiniBand's, in seconds."""
    network: str
    nodes_per_leaf: int
    """Nodes per leaf switch; 0: no spine."""
    oversubscription: float


class Placement(NamedTuple):
    """Placement of a group's ranks on nodes."""

    size: int
    ranks_per_node: int
    num_nodes: int
    bytes_per_second: float
    """The group's share of the cards of each of its nodes; 0 inside one node."""
    card_bytes_per_second: float
    """Bytes per second of one card, the limit of a single rank."""
    crossing: float
    """Factor by which the spine slows down a ring; 1: not at all."""
    remote_crossing: float
    """Factor by which the spine slows down traffic of every node with every other."""


@cached_by_identity
def fabric_of(cluster: Cluster) -> Fabric:
    """Network of a cluster. Raises SpecError if the links inside the node are not in the catalogue: they must be measured."""
    node = cluster.node
    if node.intra_link is None:
        rule = "has no link between its ranks in the catalogue: it is measured at run time"
        raise mistake(f"cluster.{node.name}", rule, "Plan for a catalogued machine, such as 8xh100.")
    fits, scale, in_switch = _domain(node.intra_link, cluster.accelerator.kind)
    link, spine = node.inter_link, cluster.spine
    kind = network_kind(link) if link else None
    return Fabric(
        node.num_accelerators,
        fits,
        scale,
        in_switch,
        _achieved(link, kind),
        node.num_network_cards or node.num_accelerators,
        kind.hop_seconds if kind else 0.0,
        kind.name if kind else "",
        spine.nodes_per_leaf if spine else 0,
        spine.oversubscription if spine else 1.0,
    )


def place(fabric: Fabric, size: int, stride: int) -> Placement:
    """Placement of a group of `size` ranks that are `stride` apart, while all groups of a node communicate at once.

    Raises SpecError if the group crosses nodes that no network connects.
    """
    ranks = min(size, max(1, fabric.gpus_per_node // stride))
    nodes = -(-size // ranks)
    if nodes == 1:
        return Placement(size, ranks, 1, 0.0, 0.0, 1.0, 1.0)
    if not fabric.node_bytes_per_second:
        rule = f"{size} ranks {stride} apart are on {nodes} nodes, and no network joins them"
        raise mistake("cluster", rule, "Choose a machine with a network, or keep the group inside a node.")
    groups = fabric.gpus_per_node / ranks
    card = fabric.node_bytes_per_second / fabric.num_cards
    share = min(fabric.node_bytes_per_second / max(1.0, groups), min(ranks, fabric.num_cards) * card)
    ring, remote = _crossing(fabric, nodes, stride)
    return Placement(size, ranks, nodes, share, card, ring, remote)


def _crossing(fabric: Fabric, nodes: int, stride: int) -> tuple[float, float]:
    """Factors by which the spine slows down a ring, and all-to-all traffic of the nodes.

    A ring leaves a leaf once for all the nodes that it visits there; of all-to-all traffic, only that to other leaves crosses.
    """
    if not fabric.nodes_per_leaf:
        return 1.0, 1.0
    apart = max(1, stride // fabric.gpus_per_node)
    together = min(nodes, max(1, fabric.nodes_per_leaf // apart))
    if together == nodes:
        return 1.0, 1.0
    across = (nodes - together) / (nodes - 1)
    return max(1.0, fabric.oversubscription / together), max(1.0, fabric.oversubscription * across)


def _domain(link: Link, accelerator: str) -> tuple[str, float, bool]:
    name = link.name.lower()
    matched = next((domain for domain in DOMAINS if domain.word in name), UNKNOWN)
    fits = "h200_sxm" if accelerator.startswith("h200") and matched.fits == "h100_sxm" and matched.in_switch else matched.fits
    return fits, link.bytes_per_second.value / matched.nominal * matched.factor, matched.in_switch


def _achieved(link: Link | None, kind: NetworkKind | None) -> float:
    """Bytes per second of the cards of a node: as measured if known, else the usual fraction of the nominal rate."""
    if link is None or kind is None:
        return 0.0
    if link.achieved_bytes_per_second is not None:
        return link.achieved_bytes_per_second.value
    return link.bytes_per_second.value * kind.achieved
