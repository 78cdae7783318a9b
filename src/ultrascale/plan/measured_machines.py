"""The cluster of a measured run: from the name of its GPU and what the row says of its network.

A blank network is that of the GPU's usual node (`spec.machines`). A rack with one fast network inside (GB200 NVL72) counts as
one node even where the row counts its trays of four: what matters is who shares the fast links.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ultrascale.plan.measured_models import UnrepresentableError
from ultrascale.plan.measured_rows import Asked
from ultrascale.spec.cluster import Cluster, Link, Node, Sourced
from ultrascale.spec.machines import ACCELERATORS, NODES, USUAL_NODE
from ultrascale.spec.racks import places_used, using, usual_places

# The first pattern found in the name decides: the catalogue's name, and what stands in where it is not in the catalogue.
_GPUS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"A100.*40", ("a100-40",)), (r"A100.*PCI", ("a100-pcie", "a100-80")), (r"A100", ("a100-80",)),
    (r"A800", ("a800", "a100-80")), (r"H100.*96", ("h100-96", "h100-sxm")), (r"H100.*PCI", ("h100-pcie",)),
    (r"H100.*NVL", ("h100-nvl", "h100-pcie")), (r"GH200", ("gh200", "h200")), (r"H100", ("h100-sxm",)),
    (r"H800", ("h800", "h100-sxm")), (r"H200", ("h200",)), (r"H20\b", ("h20",)), (r"GB300", ("gb300", "gb200")),
    (r"GB200", ("gb200",)), (r"B300", ("b300", "b200")), (r"B200", ("b200",)), (r"MI300X", ("mi300x",)),
    (r"MI325X", ("mi325x", "mi300x")), (r"MI250X", ("mi250x",)),
    (r"L40S", ("l40s",)), (r"\bL4\b", ("l4",)), (r"A10G", ("a10g",)), (r"6000.?Ada", ("rtx-6000-ada",)), (r"A6000", ("a6000",)),
    (r"3090", ("rtx-3090",)), (r"4090", ("rtx-4090",)), (r"5090", ("rtx-5090",)),
    (r"MI355X", ("mi355x",)), (r"V100.*16", ("v100-16", "v100-32")), (r"V100", ("v100-32",)),
)  # fmt: skip
_RATE = re.compile(
    r"(?:(\d+)\s*[x\u00d7]\s*(?:(?:[EFHNX]DR|InfiniBand|IB|RoCE|EFA|Omni-?Path|OPA|Slingshot|ConnectX|CX|Ethernet|RDMA)[-\w]*\s+){0,3})?"
    r"(\d+(?:\.\d+)?)\s*(Gb/s|Gbps|Gbit/s|GB/s)(?:\s*[x\u00d7]\s*(\d+))?",
    re.IGNORECASE,
)
"""A rate with how many links have it in front ("4x Omni-Path 100 Gb/s"), or behind ("100 Gbps x 4")."""
_INSIDE = re.compile(r"intra-?node|in-?side|in node|within|nvlink|nvswitch|pcie", re.IGNORECASE)
LAST_YEAR_OF_A100 = 2022
HUGGING_FACE_NODE, HUGGING_FACE_NETWORK = "aws-p5", "EFA v2 under load"
"""Of Hugging Face's H100s, on which the playbook's scan ran and those before it: AWS p5 with EFA (the Smol Training Playbook of
2025, on its infrastructure), and what the playbook shows of its bandwidth (`spec.network`)."""


def cluster_of(asked: Asked, num_gpus: int) -> tuple[Cluster, tuple[str, ...]]:
    """The row's machines and what had to be assumed. Raises UnrepresentableError for a GPU nobody described."""
    name, assumed = _accelerator(asked)
    usual = _hugging_face_node() if _is_hugging_faces(asked, name) else NODES[USUAL_NODE[name]]
    node, network = _with_network(asked, using(usual, _per_node(asked, usual, num_gpus)))
    return Cluster(f"{num_gpus}x{name}", node, num_gpus), (*assumed, *network)


def _accelerator(asked: Asked) -> tuple[str, tuple[str, ...]]:
    text = f"{asked.gpu} {asked.gpu_family}".strip()
    if not text:
        name = "h100-sxm" if (asked.year or 9999) > LAST_YEAR_OF_A100 else "a100-80"
        return name, (f"{name}, as most in {asked.year or 'recent years'}",)
    for pattern, names in _GPUS:
        if re.search(pattern, asked.gpu or asked.gpu_family, re.IGNORECASE):
            known = [name for name in names if name in ACCELERATORS]
            if known:
                return known[0], () if known[0] == names[0] else (f"{known[0]} stands for {asked.gpu}",)
    raise UnrepresentableError(f"gpu {text!r} is not in the catalogue (`ultrascale show clusters`)")


def _per_node(asked: Asked, node: Node, num_gpus: int) -> int:
    if node.tray is not None:
        return places_used(num_gpus, node) or usual_places(node)
    return asked.gpus_per_node or node.num_accelerators


def _is_hugging_faces(asked: Asked, accelerator: str) -> bool:
    ran_there = asked.is_playbook or re.search(r"huggingface/bench_cluster", asked.source, re.IGNORECASE)
    return bool(ran_there) and NODES[HUGGING_FACE_NODE].accelerator.name == accelerator


def _hugging_face_node() -> Node:
    node = NODES[HUGGING_FACE_NODE]
    assert node.inter_link is not None
    return replace(node, inter_link=replace(node.inter_link, name=HUGGING_FACE_NETWORK))


def _with_network(asked: Asked, node: Node) -> tuple[Node, tuple[str, ...]]:
    """The node with the links the row names; its own where it names none."""
    inside, between = _rates(asked.interconnect, node.num_accelerators)
    source, year = f"the row's interconnect: {asked.interconnect}", str(asked.year or "")
    if inside is not None:
        node = replace(node, intra_link=Link("links inside a node", Sourced(inside, source, year)))
    if between is not None:
        return replace(
            node, inter_link=Link("network between nodes", Sourced(between, source, year)), num_network_cards=None
        ), ()
    return node, (f"network: {node.inter_link.name if node.inter_link else 'none'}",)


def _rates(text: str, per_node: int) -> tuple[float | None, float | None]:
    """Bytes per second inside a node (of a GPU) and between nodes (of a node) as a text tells them; None where it does not."""
    inside = between = None
    for clause in re.split(r"[;,]", re.sub(r"\([^)]*\)", "", text)):
        match = _RATE.search(clause)
        if match is None:
            continue
        rate = (
            float(match[2])
            * int(match[1] or match[4] or 1)
            * 1e9
            / (1 if match[3].lower() == "gb/s" and match[3][1] == "B" else 8)
        )
        if _INSIDE.search(clause):
            inside = rate
        else:
            between = rate * per_node if re.search(r"per (?:gpu|accelerator)", clause, re.IGNORECASE) else rate
    return inside, between
