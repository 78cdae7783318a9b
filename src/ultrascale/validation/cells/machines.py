"""The cluster of a measured run: from the name of its GPU and what the row says of its network.

The machine is the one that the row's `machine` names, else its GPU's usual one (`catalogue.machines`); `network` names the
kind of network (`catalogue.network`), `interconnect` its links (`validation.cells.networks`); blank, they are the machine's. A
rack with one fast network inside (GB200 NVL72) counts as one node even where the row counts its trays of four: what matters is
who shares the fast links.
"""

from __future__ import annotations

from dataclasses import replace

from ultrascale.catalogue.cluster import Cluster, Node
from ultrascale.catalogue.machines import ALIASES, NODES, USUAL_NODE, accelerator_in
from ultrascale.catalogue.network import KINDS
from ultrascale.catalogue.racks import places_used, using, usual_places
from ultrascale.validation.cells.models import UnrepresentableError
from ultrascale.validation.cells.networks import with_links
from ultrascale.validation.rows import Asked

USUAL_GPU = "h100-sxm"
"""GPU of a row that names none."""


def cluster_of(asked: Asked, num_gpus: int) -> tuple[Cluster, tuple[str, ...]]:
    """The row's machines and what had to be assumed. Raises UnrepresentableError for a GPU nobody described."""
    name, assumed = _accelerator(asked)
    usual = _machine(asked, name)
    node, says_network = with_links(using(usual, _per_node(asked, usual, num_gpus)), asked.interconnect)
    if asked.network and node.inter_link is not None:
        node = replace(node, inter_link=replace(node.inter_link, name=_kind(asked.network)))
    network = () if says_network else (f"network: {node.inter_link.name if node.inter_link else 'none'}",)
    return Cluster(f"{num_gpus}x{name}", node, num_gpus), (*assumed, *network)


def _accelerator(asked: Asked) -> tuple[str, tuple[str, ...]]:
    if asked.machine in NODES and not asked.gpu:
        return NODES[asked.machine].accelerator.name, ()
    text = f"{asked.gpu} {asked.gpu_family}".strip()
    if not text:
        return USUAL_GPU, (f"{USUAL_GPU}, as most",)
    name = accelerator_in(asked.gpu or asked.gpu_family)
    if name is None:
        raise UnrepresentableError(f"gpu {text!r} is not in the catalogue (`ultrascale show clusters`)")
    return name, ()


def _machine(asked: Asked, accelerator: str) -> Node:
    """The machine the row names; the usual one of its accelerator where it names none."""
    if not asked.machine:
        return NODES[USUAL_NODE[accelerator]]
    name = ALIASES.get(asked.machine, asked.machine)
    if name not in NODES:
        raise UnrepresentableError(f"machine {asked.machine!r} is not in the catalogue (`ultrascale show clusters`)")
    if NODES[name].accelerator.name != accelerator:
        raise UnrepresentableError(f"machine {name} has {NODES[name].accelerator.name}, gpu says {accelerator}")
    return NODES[name]


def _kind(network: str) -> str:
    """The name of a kind of networks. Raises UnrepresentableError if there is none of that name."""
    for kind in KINDS:
        if kind.name.lower() == network.lower():
            return kind.name
    raise UnrepresentableError(f"network {network!r} is none of {', '.join(kind.name for kind in KINDS)}")


def _per_node(asked: Asked, node: Node, num_gpus: int) -> int:
    if node.tray is not None:
        return places_used(num_gpus, node) or usual_places(node)
    return asked.gpus_per_node or node.num_accelerators
