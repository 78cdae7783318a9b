"""Types of networks between nodes: achieved fraction of the nominal bandwidth, and latency per hop.

The cards of a node are one tier (`Node.inter_link`, shared by every group of ranks that crosses it), the spine above the leaf
switches (`Cluster.spine`) the next. Data centres far apart are a separate case: `plan.view.far_apart`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.catalogue.cluster import Link


@dataclass(frozen=True)
class NetworkKind:
    """Behaviour of a type of network under NCCL."""

    name: str
    words: tuple[str, ...]
    """A link with one of these words in its name is of this type; the first type that matches wins."""
    achieved: float
    """Fraction of the nominal bandwidth that large messages reach."""
    hop_seconds: float
    """Seconds added to NCCL's own latency of a hop between nodes (measured on InfiniBand)."""
    source: str


KINDS = (
    NetworkKind(
        "EFA v2 under load", ("under load",), 0.955, 2.4e-4,
        "the Ultra-Scale Playbook's figure of bandwidth by nodes: medians of its runs' all-reduces, all-gathers and "
        "reduce-scatters of 256 MiB over all ranks of 2 to 64 nodes; the hop that fits them best; 2025",
    ),
    NetworkKind(
        "EFA v2", ("efa v2", "efa v3", "efa v4", "efa 3200"), 0.955, 22e-6,
        "awsome-distributed-training, 2 x p5: 69 us for 8 bytes; ml-engineering, 4 x B200 with EFA v4: 382 of 400 GB/s; 2025",
    ),
    NetworkKind(
        "EFA", ("efa",), 0.84, 70e-6,
        "awsome-distributed-training, 2 x p4de: 164 us for 8 bytes, 41.8 of 50 GB/s across the cards at 2 GB; 2023",
    ),
    NetworkKind(
        "InfiniBand", ("infiniband", "hdr", "ndr", "xdr"), 0.97, 0.0,
        "SimAI calbusbw.h: 48.5 of 50 GB/s; NVIDIA/nccl-tests issue 290: 46 to 48 of 50; 192 of 200 on DGX A100; 2025",
    ),
    NetworkKind(
        "RoCE", ("roce", "ethernet"), 0.93, 2e-6,
        "assumed: some per cent below InfiniBand; NVIDIA/nccl issue 2409 shows half where it is mistuned; 2026",
    ),
    NetworkKind(
        "Slingshot", ("slingshot",), 0.97, 8e-6, "NVIDIA/nccl issue 1272: 24.2 of 25 GB/s; the hop is assumed; 2024",
    ),
)  # fmt: skip
OTHER = NetworkKind("network", (), 0.90, 10e-6, "assumed: between the best InfiniBand and EFA; nobody publishes it")


def network_kind(link: Link) -> NetworkKind:
    """Type of a link between nodes, derived from its name; `OTHER` if unknown."""
    name = link.name.lower()
    for kind in KINDS:
        if any(word in name for word in kind.words):
            return kind
    return OTHER
