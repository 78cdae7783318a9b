"""The cluster of a measured run: from the name of its GPU and the network cells of the row.

The machine is given by the row's `machine`, else by the first name of one in `interconnect` (p4d.24xlarge), else it is the
usual one of its GPU (`catalogue.machines`); `network` names the type of network (`catalogue.network`), `interconnect` its
links, such as `8x HDR 200 Gb/s per node; NVLink in node`; if blank, they are the machine's. A rack with one fast network inside
(GB200 NVL72) counts as one node even if the row counts its trays of four: what matters is which ranks share the fast links.

A clause of `interconnect` between commas, semicolons, "+", "&", "and" or "with" gives one rate, inside a node (per GPU) or
between nodes, of which the first counts; storage, front-end and management networks are left out. A clause that only names a
network (`HDR InfiniBand, 200 Gb/s`) or links (`NVLink, 900 GB/s`) belongs to the neighbour that states a rate and no other
network; a name without such a neighbour has its own speed:

    per node, server, in total          of all cards together
    8x HDR 200 Gb/s, 200 Gb/s x 4       number of cards, and the rate of each
    per GPU, card, NIC; NDR 400 Gb/s    of one of the node's cards: InfiniBand and RoCE speeds are per card
    InfiniBand HDR; Slingshot-11        of one of the node's cards: the speed that the name stands for (HDR x4: of four)
    EFA 3200 Gb/s; 800 Gb/s             of all together: clouds state the rate of a machine
    busbw 340 GB/s, measured            achieved by large collectives
    NVLink 900 GB/s                     both directions, if it is twice the link's rate in one
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from ultrascale.catalogue.cluster import Cluster, Link, Node, Sourced
from ultrascale.catalogue.machines import ACCELERATORS, ALIASES, NODES, USUAL_NODE, accelerator_in
from ultrascale.catalogue.network import KINDS, network_kind
from ultrascale.catalogue.racks import places_used, using, usual_places
from ultrascale.validation.cells.models import UnrepresentableError
from ultrascale.validation.rows import RunConfig

_WORDS = (
    r"(?:(?:[EFHNX]DR|InfiniBand|IB|RoCE|EFA|Omni-?Path|OPA|(?:Slingshot|ConnectX|CX)(?: \d\d?\b)?|Ethernet|RDMA)"
    r"[-\w]*\s+){0,3}"
)
_RATE = re.compile(
    rf"(?:(?P<front>\d+)\s*[x\u00d7]\s*{_WORDS})?(?P<rate>\d+(?:\.\d+)?)\s*-?"
    r"(?P<unit>[GT](?:b/s|bps|bit/s|bit|B/s|Bps|bE|(?-i:b))?\b)(?:\s*[x\u00d7]\s*(?P<behind>\d+))?",
    re.IGNORECASE,
)
_COUNTED = re.compile(rf"\b(?P<front>\d+)\s*[x\u00d7]\s*{_WORDS}(?P<rate>25|40|50|56|100|200|400|800)\b", re.IGNORECASE)
"""Number of cards with a rate without a unit, such as 4x400: gigabits, as cards are sold."""
_NAMED = re.compile(
    r"(?<![-\w])(?<!ConnectX )(?<!CX )(?:(?P<front>\d\d?)\s*[x\u00d7]?\s*)?(?P<name>[EFHNX]DR|Slingshot)"
    r"(?:[- ]?(?P<rate>10|11|40|50|56|100|200|400|800)G?b?)?(?:\s*[x\u00d7]\s*(?P<behind>\d\d?)\b|(?!\w))",
    re.IGNORECASE,
)
"""Name of a generation of cards, with its number: InfiniBand's is a speed (HDR100), Slingshot's a version."""
_SPEEDS = {"fdr": 56, "edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "slingshot10": 100, "slingshot11": 200, "slingshot": 200}
"""Gb/s of one port by name (InfiniBand Trade Association's roadmap; HPE Slingshot's datasheet)."""
SLOWEST = 10
"""Gigabits per second below which a number without a unit of time is no rate: `a3-ultragpu-8g` has eight GPUs."""
_TYPED = re.compile(r"(?:[A-Z]|(?<!RoCE)(?<!CX\d)(?<!InfiniBand)-|\d00 )$", re.IGNORECASE)
"""Text before a number that is no rate without a unit of time: `a2-megagpu-16g`, `A100 80G`."""
_THOUSANDS = re.compile(r"(?<![-\w.])(?<!slingshot )\d\d?,\d{3}(?=\s*-?[GT])", re.IGNORECASE)
_INSIDE = re.compile(r"intra-?node|in-?side|in node|within|nvlink|nvswitch|pcie", re.IGNORECASE)
_MEASURED = re.compile(r"measured|achiev|bus-?\s?bw|bus (?:bandwidth|rate)|nccl-?tests", re.IGNORECASE)
_OF_NODE = re.compile(r"per (?:node|server|machine|host|box)|/node|in total|aggregate|altogether", re.IGNORECASE)
_OF_CARD = re.compile(r"per (?:gpu|accelerator|card|nic|hca|port|rail)|/(?:gpu|nic|card)", re.IGNORECASE)
_CARD_SPEEDS = re.compile(r"\b(?:[EFHNX]DR|InfiniBand|IB|RoCE|ConnectX|CX-?\d|Slingshot)", re.IGNORECASE)
_NETWORK = re.compile(r"\b(?:[EFHNX]DR|InfiniBand|RoCE|EFA|Omni-?Path|OPA|Slingshot|Ethernet)|\d\s*GbE\b", re.IGNORECASE)
_OTHER_USE = re.compile(r"storage|front-?\s?end|management|mgmt", re.IGNORECASE)
"""Networks of a machine that no collective uses."""
_JOINT = re.compile(
    rf"\bwith\b(?=.*(?:{_NETWORK.pattern}|{_CARD_SPEEDS.pattern}|RDMA|{_INSIDE.pattern}|{_OTHER_USE.pattern}))"
    rf"|(?:(?<=NVLink)|(?<=NVSwitch)|(?<=PCIe))\s*/(?=\s*(?:\d+\s*x\s*)?(?:{_NETWORK.pattern}))",
    re.IGNORECASE,
)
"""A joint of two networks (`NVLink/InfiniBand`), not of a network and its rate (`InfiniBand with 200 Gb/s`)."""
FASTEST_CARD = 100e9
"""Bytes per second, 800 Gb/s: a higher rate is a machine's."""


def with_links(node: Node, text: str) -> tuple[Node, bool]:
    """`node` with the links that `text` names, and true if it names the network between nodes."""
    between: Link | None = None
    reached: Link | None = None
    cards: int | None = None
    for clause in _clauses(text):
        counted = _rate(clause)
        if counted is None:
            continue
        value, count = counted
        rate = Sourced(value, f"the row's interconnect: {text}", "the row's")
        if _INSIDE.search(clause):
            node = replace(node, intra_link=_inside(node, clause, rate))
        elif _MEASURED.search(clause):
            reached = Link(clause.strip(), rate, rate)
        elif between is None:
            times = count or (_cards(node, clause) if _is_of_a_card(clause, rate.value) else 1)
            cards, between = count or None, Link(clause.strip(), replace(rate, value=rate.value * times))
    if between is None and reached is None:
        return node, False
    link = between or node.inter_link
    if reached and link:
        nominal = max(link.bytes_per_second, reached.bytes_per_second, key=lambda rate: rate.value)
        link = Link(link.name, nominal, reached.achieved_bytes_per_second)
    return replace(node, inter_link=link or reached, num_network_cards=cards), True


def _clauses(text: str) -> list[str]:
    """Clauses of a text without what is in brackets, each network's name joined to the rate that stands beside it."""
    clauses: list[str] = []
    name, plain = "", None  # a name that waits for a rate; the index of a rate that waits for a name
    for clause in _split(text):
        if _INSIDE.search(clause) or _MEASURED.search(clause):
            clauses.append(clause)
        elif _CARD_SPEEDS.search(clause) or _NETWORK.search(clause):
            if not _states_rate(clause):
                if plain is None:
                    name = f"{name} {clause}".strip()
                else:
                    clauses[plain], plain = f"{clause} {clauses[plain]}", None
                continue
            clauses += [f"{name} {clause}".strip()] if _is_same(name, clause) else [name, clause]
            name, plain = "", None
        elif clauses and _is_inside_rate(clauses[-1], clause):
            clauses[-1] = f"{clauses[-1]} {clause}"
        elif _states_rate(clause):
            plain = None if name else len(clauses)
            clauses.append(f"{name} {clause}".strip())
            name = ""
        else:
            clauses.append(clause)
    return [*clauses, name]


def _split(text: str) -> Iterator[str]:
    """Parts of a text that speak of one network each; a card named beside NVLink (`NVLink HDR`) is a part of its own."""
    text = re.sub(r"\bIB\b", "InfiniBand", re.sub(r"\([^)]*\)", "", text))
    text = _THOUSANDS.sub(lambda match: match[0].replace(",", ""), text)
    for clause in re.split(r"[;,+&]|\band\b", text):
        for part in _JOINT.split(clause):
            if _OTHER_USE.search(part):
                continue
            if _INSIDE.search(part) and _NETWORK.search(part) and not _states_rate(part):
                part = _INSIDE.sub("", part).strip(" /")
            yield part.strip()


def _is_same(name: str, clause: str) -> bool:
    """True if a name and a clause speak of one network: of one kind, or one of them names cards only (ConnectX)."""
    kinds = {network_kind(Link(text, Sourced(0, "", ""))) for text in (name, clause) if _NETWORK.search(text)}
    return len(kinds) < 2


def _is_inside_rate(named: str, clause: str) -> bool:
    """True if a clause states the rate of the links that the one before it names: `NVLink, 900 GB/s`."""
    if not _INSIDE.search(named) or _states_rate(named) or re.search("inter|between|across", clause, re.IGNORECASE):
        return False
    match = _figure(clause)
    if match is None or match["front"] or _OF_NODE.search(clause):
        return False
    return "B" in (match.groupdict().get("unit") or "") and _bytes_per_second(match) > FASTEST_CARD


def _states_rate(clause: str) -> bool:
    """True if a clause states a rate in figures, not by a name alone."""
    return _figure(clause) is not None


def _figure(clause: str) -> re.Match[str] | None:
    """First rate that a clause states in figures."""
    for match in (*_RATE.finditer(clause), *_COUNTED.finditer(clause)):
        unit = match.groupdict().get("unit") or "Gb/s"
        if len(unit) > len("Gb"):
            return match
        is_typed = _TYPED.search(clause[: match.start()])
        if not is_typed and (len(unit) > 1 or float(match["rate"]) >= SLOWEST):
            return match
    return None


def _rate(clause: str) -> tuple[float, int] | None:
    """Bytes per second that a clause states, and the number of cards it counts, 0 if none; None without a rate."""
    named = None if _INSIDE.search(clause) else _NAMED.search(clause)
    count = int(named["front"] or named["behind"] or 0) if named else 0
    if match := _figure(clause):
        return _bytes_per_second(match), int(match["front"] or match.groupdict().get("behind") or count)
    if named is None:
        return None
    name, number = named["name"].lower(), int(named["rate"] or 0)
    speed = _SPEEDS.get(f"{name}{number}", number) if name == "slingshot" and number else number or _SPEEDS[name]
    return speed * 1e9 / 8, count


def _bytes_per_second(match: re.Match[str]) -> float:
    unit = match.groupdict().get("unit") or "Gb"
    return float(match["rate"]) * (1e12 if unit[0] in "tT" else 1e9) / (1 if unit[1:2] == "B" else 8)


def _is_of_a_card(clause: str, rate: float) -> bool:
    if _OF_CARD.search(clause):
        return True
    return not _OF_NODE.search(clause) and bool(_CARD_SPEEDS.search(clause)) and rate <= FASTEST_CARD


def _cards(node: Node, clause: str) -> int:
    """Number of cards of a node: one per GPU if the rate is per GPU, else the usual number of such machines."""
    of_gpu = re.search(r"per (?:gpu|accelerator)|/gpu", clause, re.IGNORECASE)
    return node.num_accelerators if of_gpu else node.num_network_cards or node.num_accelerators


def _inside(node: Node, clause: str, rate: Sourced) -> Link:
    usual = node.intra_link
    if _MEASURED.search(clause):
        # Laws start from the nominal rate: the rate at which the usual link would reach the measured one.
        reached = usual.achieved_bytes_per_second if usual else None
        share = reached.value / usual.bytes_per_second.value if usual and reached else USUAL_REACH
        return Link(usual.name if usual else clause.strip(), replace(rate, value=rate.value / share), rate)
    both_ways = usual is not None and rate.value == 2 * usual.bytes_per_second.value
    return Link("links inside a node", replace(rate, value=rate.value / 2) if both_ways else rate)


USUAL_REACH = 0.8
"""Fraction of a link's nominal rate that large all-gathers reach, if not measured (NVLink 3 to 5: 0.70 to 0.85)."""


USUAL_GPU = "h100-sxm"
"""GPU of a row that names none."""
SAME_MEMORY = 0.15
"""Relative difference between the memory in a GPU's name, in GB, and what its driver reports, up to which it is the same."""


def cluster_of(config: RunConfig, num_gpus: int) -> tuple[Cluster, tuple[str, ...]]:
    """The row's machines, and the assumptions made. Raises UnrepresentableError for an unknown GPU."""
    name, assumed = _accelerator(config)
    usual = _machine(config, name)
    node, says_network = with_links(using(usual, _per_node(config, usual, num_gpus)), config.interconnect)
    if config.network and node.inter_link is not None:
        node = replace(node, inter_link=replace(node.inter_link, name=_kind(config.network)))
    network = () if says_network else (f"network: {node.inter_link.name if node.inter_link else 'none'}",)
    return Cluster(f"{num_gpus}x{name}", node, num_gpus), (*assumed, *network)


def _accelerator(config: RunConfig) -> tuple[str, tuple[str, ...]]:
    if config.machine in NODES and not config.gpu:
        return NODES[config.machine].accelerator.name, ()
    text = f"{config.gpu} {config.gpu_family}".strip()
    if not text:
        return USUAL_GPU, (f"{USUAL_GPU}, as most",)
    name = accelerator_in(config.gpu or config.gpu_family)
    if name is None:
        raise UnrepresentableError(f"gpu {text!r} is not in the catalogue (`ultrascale show clusters`)")
    stated = re.search(r"(?<!\d)\d{2,3}(?=\s*GB\b)", text, re.IGNORECASE)
    device = ACCELERATORS[name]
    # A whole node's memory, as in DGX A100 640GB, is a multiple of the device's.
    if stated and min(abs(int(stated[0]) * 1e9 / device.memory_bytes.value / many - 1) for many in (1, 4, 8)) > SAME_MEMORY:
        return name, (f"gpu {device.title}: the catalogue has none of {stated[0]} GB",)
    return name, ()


def _machine(config: RunConfig, accelerator: str) -> Node:
    """The machine that the row names, also within its interconnect; else the usual one of its accelerator."""
    if not config.machine:
        return NODES[_machine_in(config.interconnect, accelerator) or USUAL_NODE[accelerator]]
    name = ALIASES.get(config.machine, config.machine)
    if name not in NODES:
        raise UnrepresentableError(f"machine {config.machine!r} is not in the catalogue (`ultrascale show clusters`)")
    if NODES[name].accelerator.name != accelerator:
        raise UnrepresentableError(f"machine {name} has {NODES[name].accelerator.name}, gpu says {accelerator}")
    return NODES[name]


def _machine_in(text: str, accelerator: str) -> str | None:
    """First machine with this accelerator whose name is a word of a text."""
    names = (ALIASES.get(word, word) for word in re.findall(r"[a-z0-9][\w.-]*\w", text.lower()))
    return next((name for name in names if name in NODES and NODES[name].accelerator.name == accelerator), None)


def _kind(network: str) -> str:
    """Name of a type of network. Raises UnrepresentableError if it is unknown."""
    for kind in KINDS:
        if kind.name.lower() == network.lower():
            return kind.name
    raise UnrepresentableError(f"network {network!r} is none of {', '.join(kind.name for kind in KINDS)}")


def _per_node(config: RunConfig, node: Node, num_gpus: int) -> int:
    if node.tray is not None:
        return places_used(num_gpus, node) or usual_places(node)
    return config.gpus_per_node or node.num_accelerators
