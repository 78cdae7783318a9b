"""Number of places of a machine that a job uses: all of a server of eight, any number of a rack of 72.

72, 144, 216   whole racks
128, 256, 512  64 of each: NVIDIA's recipes leave two trays of 18 out, so that powers of two divide everything
96, 160        48 and 40 of each: as many in every rack, the fewest racks
"""

from __future__ import annotations

import itertools
from dataclasses import replace

from ultrascale.catalogue.cluster import Cluster, Node
from ultrascale.description.problems import mistake


def places_used(count: int, node: Node) -> int | None:
    """Accelerators used of each rack for `count` in total, the same number in every rack; None if more than half would stay
    empty.

    All places, if that divides; else a power of two, else whole trays, else any number: the largest, which needs fewest racks.
    """
    most, tray = node.num_accelerators, node.tray or 1
    if count <= most:
        return most
    shares = [used for used in range(most // 2, most + 1) if count % used == 0]
    return max(shares, key=lambda n: (n == most, n & (n - 1) == 0, n % tray == 0, n), default=None)


def usual_places(node: Node) -> int:
    """Default number of places used of each rack: the largest power of two, 64 of 72."""
    return 1 << (node.num_accelerators.bit_length() - 1)


def node_for(count: int, name: str, node: Node) -> Node:
    """Node that `count` accelerators called `name` fill. Raises SpecError with the nearest counts if they do not."""
    per_node = node.num_accelerators
    if node.tray is None:
        if count <= per_node or count % per_node == 0:
            return node
        below = count - count % per_node
        rule = f"{count} is not a whole number of nodes of {per_node} {name}"
        raise mistake("cluster", rule, f"Choose {below}x{name} or {below + per_node}x{name}.")
    used = places_used(count, node)
    if used is not None:
        return using(node, used)
    near = [next(n for n in itertools.count(count + step, step) if places_used(n, node)) for step in (-1, 1)]
    rule = f"{count} {name} are not as many in each rack of {per_node}"
    remedy = (
        f"Choose {near[0]}x{name} or {near[1]}x{name}, or say how many of each are used: {count}x{name}/{usual_places(node)}."
    )
    raise mistake("cluster", rule, remedy)


def using(node: Node, used: int) -> Node:
    """`node` with only `used` of its accelerators, and their share of network, cards and power."""
    whole = node.num_accelerators
    if used == whole:
        return node
    share, link, cards, watts = used / whole, node.inter_link, node.num_network_cards, node.watts
    if link is not None:
        rate, reached = link.bytes_per_second, link.achieved_bytes_per_second
        link = replace(
            link,
            bytes_per_second=replace(rate, value=rate.value * share),
            achieved_bytes_per_second=reached and replace(reached, value=reached.value * share),
        )
    return replace(
        node,
        num_accelerators=used,
        inter_link=link,
        num_network_cards=cards and max(1, round(cards * share)),
        watts=watts and replace(watts, value=watts.value * share),
        places=node.places or (whole if used < whole else None),
    )


def resized(cluster: Cluster, count: int) -> Cluster:
    """The cluster with another number of accelerators in the same nodes; racks that were used whole are filled anew. Raises
    SpecError as above."""
    node, name = cluster.node, cluster.accelerator.name
    if node.tray is not None and node.places is None:
        node = node_for(count, name, node)
    return replace(cluster, node=node, num_accelerators=count, name=f"{count}x{name}")
