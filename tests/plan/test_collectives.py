"""Collectives against published measurements, and what must hold of any price of communication."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan.published_collectives import (
    GIB,
    MIB,
    PLAYBOOK_ALL_GATHER_95,
    PLAYBOOK_ALL_REDUCE,
    SIZE_RATIOS,
    SWEEPS,
    Published,
    with_network,
)

from ultrascale.catalogue.cluster import Cluster, Spine, parse_cluster
from ultrascale.catalogue.machines import NODES
from ultrascale.description.problems import SpecError
from ultrascale.plan.laws.collectives import _lines, bus_bytes, collective_seconds, explain_collective, send_seconds
from ultrascale.plan.laws.network import fabric_of, place

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send")
CLUSTERS = tuple(Cluster(f"64x{name}", node, 64 * node.num_accelerators) for name, node in NODES.items())
clusters = st.sampled_from(CLUSTERS)
kinds = st.sampled_from(KINDS)
sizes = st.integers(1, 1024)
strides = st.integers(0, 10).map(lambda power: 2**power)
messages = st.floats(1, 2**34)
few = settings(max_examples=150, deadline=None)


def seconds(cluster: Cluster, kind: str, num_bytes: float, size: int, stride: int = 1) -> float:
    return float(collective_seconds(cluster, kind, num_bytes, size=size, stride=stride))


def bus(cluster: Cluster, kind: str, num_bytes: float, size: int, stride: int = 1) -> float:
    """GB/s, as nccl-tests prints it."""
    return float(bus_bytes(kind, num_bytes, size)) / seconds(cluster, kind, num_bytes, size, stride) / 1e9


def relative_errors(sweep: Published) -> np.ndarray:
    return np.array([seconds(sweep.cluster, sweep.kind, w, sweep.size) / (t * 1e-6) - 1 for w, t in sweep.microseconds.items()])


@pytest.mark.parametrize("sweep", SWEEPS, ids=lambda sweep: f"{sweep.cluster.name}-{sweep.kind}")
def test_a_published_sweep_is_met_within_a_fifth_on_average(sweep: Published) -> None:
    assert np.abs(relative_errors(sweep)).mean() < 0.20


def test_over_all_published_points_the_median_error_is_six_percent_and_the_bias_small() -> None:
    found = np.concatenate([relative_errors(sweep) for sweep in SWEEPS])
    assert np.median(np.abs(found)) < 0.065
    assert np.abs(found).mean() < 0.10
    assert abs(found.mean()) < 0.04


def test_large_messages_reach_what_nvidias_own_machines_reach() -> None:
    for nodes in (2, 8, 64):
        assert 340 < bus(parse_cluster(f"{nodes}xdgx-h100"), "all_reduce", 8 * GIB, 8 * nodes) < 490
        assert 320 < bus(parse_cluster(f"{nodes}xdgx-h100"), "all_gather", 8 * GIB, 8 * nodes) < 372
    for nodes in (4, 16):
        assert 150 < bus(parse_cluster(f"{nodes}xdgx-a100"), "all_reduce", 8 * GIB, 8 * nodes) < 195


def test_small_messages_reach_as_little_of_the_wire_as_simai_measured() -> None:
    errors = []
    for num_bytes, row in SIZE_RATIOS.items():
        for nodes, published in row.items():
            cluster, size = parse_cluster(f"{nodes}xdgx-h100"), 8 * nodes
            ratio = bus(cluster, "all_gather", num_bytes, size) / bus(cluster, "all_gather", 16 * GIB, size)
            errors.append(ratio / published - 1)
    # 16 MB on 64 and 128 nodes was measured without LL, at a third of what it takes here.
    assert np.median(np.abs(errors)) < 0.09
    assert sorted(np.abs(errors))[-3] < 0.6


def test_the_best_runs_of_a_busy_cluster_are_met_and_its_median_is_not_promised() -> None:
    for nodes, published in PLAYBOOK_ALL_GATHER_95.items():
        assert 0.75 < published / bus(parse_cluster(f"{nodes}xaws-p5"), "all_gather", 256 * MIB, 8 * nodes) < 1.0
    for nodes, (median, _, _) in PLAYBOOK_ALL_REDUCE.items():
        assert bus(parse_cluster(f"{nodes}xaws-p5"), "all_reduce", 256 * MIB, 8 * nodes) > 0.95 * median


def test_groups_that_share_a_node_share_its_cards() -> None:
    cluster = parse_cluster("512xh100")
    whole, eighth = place(fabric_of(cluster), 512, 1), place(fabric_of(cluster), 64, 8)
    assert whole.bytes_per_second == 8 * eighth.bytes_per_second == 388e9
    assert place(fabric_of(cluster), 128, 4).bytes_per_second == 2 * eighth.bytes_per_second


def test_half_the_cards_give_half_the_bandwidth_as_galvatron_measured() -> None:
    # 44.7 GB/s for all 16 GPUs of two nodes, 20.8 GB/s for each of two groups of every second one: a ratio of 0.47.
    cluster = with_network("dgx-a100", 2, "InfiniBand", 50, 4)
    assert bus(cluster, "all_gather", GIB, 8, 2) / bus(cluster, "all_gather", GIB, 16) == pytest.approx(0.47, abs=0.05)


def test_only_what_leaves_the_node_loads_the_cards_of_an_all_to_all() -> None:
    two, eight = (explain_collective(parse_cluster(f"{n}xdgx-h100"), "all_to_all", GIB, size=8 * n, stride=1) for n in (2, 8))
    assert two["algorithm"] == eight["algorithm"] == "direct"
    remote_seconds = GIB * 56 / 64 / (48.5e9 * (1 - 0.44 / 8))
    assert eight["seconds"] == pytest.approx(remote_seconds, rel=0.06)
    assert seconds(parse_cluster("1xdgx-h100"), "all_to_all", GIB, 8) < 0.25 * two["seconds"]


def test_the_switch_reduces_from_five_ranks_on_where_there_is_one() -> None:
    h100, a100 = parse_cluster("8xh100"), parse_cluster("8xa100")
    assert explain_collective(h100, "all_reduce", GIB, size=4, stride=1)["algorithm"] == "ring"
    assert explain_collective(h100, "all_reduce", GIB, size=8, stride=1)["algorithm"] == "NVLS"
    assert explain_collective(a100, "all_reduce", GIB, size=8, stride=1)["algorithm"] == "ring"
    assert bus(h100, "all_reduce", GIB, 8) == pytest.approx(467, rel=0.03)
    assert bus(a100, "all_reduce", GIB, 8) == pytest.approx(229, rel=0.03)


def test_trees_win_where_latency_counts_and_rings_where_bandwidth_does() -> None:
    a100 = parse_cluster("512xa100")
    small = explain_collective(a100, "all_reduce", 2**16, size=512, stride=1)
    large = explain_collective(a100, "all_reduce", 8 * GIB, size=512, stride=1)
    assert (small["algorithm"], small["protocol"]) == ("tree", "LL")
    assert (large["algorithm"], large["protocol"]) == ("ring", "Simple")
    assert small["seconds"] == pytest.approx(100e-6, rel=0.3)
    assert small["alternatives"]["ring Simple"] > 40 * small["seconds"]


def test_a_rack_of_72_is_one_domain() -> None:
    rack = parse_cluster("1xgb200-nvl72")
    assert explain_collective(rack, "all_gather", GIB, size=72, stride=1)["tier"] == "inside a node"
    assert seconds(rack, "all_gather", GIB, 72) < 0.6 * seconds(parse_cluster("9xdgx-b200"), "all_gather", GIB, 72)


def test_an_oversubscribed_spine_slows_what_crosses_it_and_nothing_else() -> None:
    flat = parse_cluster("1024xh100")
    thin = replace(flat, spine=Spine(nodes_per_leaf=16, oversubscription=4))
    assert seconds(thin, "all_gather", GIB, 128) == seconds(flat, "all_gather", GIB, 128)  # one leaf
    assert seconds(thin, "all_gather", GIB, 1024) == seconds(flat, "all_gather", GIB, 1024)  # a ring leaves a leaf once
    assert seconds(thin, "all_gather", GIB, 8, 128) > 3.5 * seconds(flat, "all_gather", GIB, 8, 128)  # every hop crosses
    assert seconds(thin, "all_to_all", GIB, 1024) > 3 * seconds(flat, "all_to_all", GIB, 1024)


def test_efa_takes_longer_for_small_messages_than_infiniband() -> None:
    tiny = [seconds(parse_cluster(f"2x{name}"), "all_reduce", 1024, 16) for name in ("dgx-h100", "aws-p5", "aws-p4de")]
    assert tiny[1] == pytest.approx(69e-6, rel=0.05)
    assert tiny[2] == pytest.approx(164e-6, rel=0.05)
    assert tiny[0] < 0.5 * tiny[1]


def test_a_send_to_the_next_stage_uses_one_card_and_one_inside_the_node_uses_nvlink() -> None:
    cluster = parse_cluster("64xh100")
    assert GIB / float(send_seconds(cluster, GIB, stride=8)) == pytest.approx(48.5e9, rel=0.05)
    assert 100 * MIB / float(send_seconds(cluster, 100 * MIB, stride=1)) > 250e9
    # A chain is as slow as its slowest hop.
    assert float(send_seconds(cluster, MIB, stride=4, size=4)) == float(send_seconds(cluster, MIB, stride=8))
    assert float(send_seconds(cluster, MIB, stride=4)) < float(send_seconds(cluster, MIB, stride=8)) / 2


def test_a_group_of_one_and_an_empty_message_take_no_time_even_where_no_link_is_known() -> None:
    assert collective_seconds(parse_cluster("2xcpu"), "all_reduce", 1e9, size=1, stride=1) == 0
    assert (collective_seconds(parse_cluster("2xcpu"), "all_reduce", np.ones(3), size=np.ones(3, int), stride=1) == 0).all()
    assert collective_seconds(parse_cluster("16xh100"), "all_gather", 0, size=16, stride=1) == 0


def test_a_link_that_is_not_known_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"cluster\.cpu: has no link between its ranks"):
        collective_seconds(parse_cluster("2xcpu"), "all_reduce", 1e9, size=2, stride=1)
    alone = replace(parse_cluster("16xh100"), node=replace(NODES["dgx-h100"], inter_link=None))
    with pytest.raises(SpecError, match="16 ranks 1 apart are on 2 nodes, and no network joins them"):
        collective_seconds(alone, "all_reduce", 1e9, size=16, stride=1)


def test_columns_give_what_scalars_give() -> None:
    cluster = parse_cluster("1024xh100")
    random = np.random.default_rng(0)
    size, stride = 2 ** random.integers(0, 8, 200), 2 ** random.integers(0, 4, 200)
    num_bytes = 2.0 ** random.uniform(0, 34, (3, 200))
    for kind in KINDS:
        column = collective_seconds(cluster, kind, num_bytes, size=size, stride=stride)
        assert column.shape == (3, 200)
        one_by_one = [
            [seconds(cluster, kind, w, int(n), int(s)) for w, n, s in zip(row, size, stride, strict=True)] for row in num_bytes
        ]
        np.testing.assert_allclose(column, one_by_one, rtol=1e-12)


def test_a_hundred_thousand_groups_take_twenty_milliseconds_and_one_takes_thirty_microseconds() -> None:
    cluster = parse_cluster("16384xh100")
    random = np.random.default_rng(0)
    size, stride = 2 ** random.integers(0, 11, 100_000), 2 ** random.integers(0, 5, 100_000)
    num_bytes = random.random(100_000) * 1e9

    def best(repeats: int, count: int, run) -> float:
        run()
        taken = []
        for _ in range(repeats):
            start = time.process_time()
            for _ in range(count):
                run()
            taken.append((time.process_time() - start) / count)
        return min(taken)

    # Time of the process, twice the aim: machines are shared, and slower ones exist.
    assert best(7, 1, lambda: collective_seconds(cluster, "all_reduce", num_bytes, size=size, stride=stride)) < 40e-3
    assert best(7, 200, lambda: collective_seconds(cluster, "all_reduce", 1e6, size=16, stride=2)) < 60e-6


@few
@given(clusters, kinds, sizes, strides, messages, messages)
def test_time_never_falls_with_more_bytes(
    cluster: Cluster, kind: str, size: int, stride: int, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert seconds(cluster, kind, less, size, stride) <= seconds(cluster, kind, more, size, stride)


@few
@given(clusters, kinds, sizes, strides, messages, st.floats(0.05, 1))
def test_time_never_falls_with_a_slower_network(
    cluster: Cluster, kind: str, size: int, stride: int, num_bytes: float, factor: float
) -> None:
    link = cluster.node.inter_link
    assert link is not None
    rate = replace(link.bytes_per_second, value=link.bytes_per_second.value * factor)
    slower = replace(cluster, node=replace(cluster.node, inter_link=replace(link, bytes_per_second=rate)))
    assert seconds(cluster, kind, num_bytes, size, stride) <= seconds(slower, kind, num_bytes, size, stride) * (1 + 1e-12)


@few
@given(clusters, kinds, sizes, strides, messages)
def test_time_never_falls_with_a_larger_stride(cluster: Cluster, kind: str, size: int, stride: int, num_bytes: float) -> None:
    assert seconds(cluster, kind, num_bytes, size, stride) <= seconds(cluster, kind, num_bytes, size, 2 * stride) * (1 + 1e-9)


@few
@given(clusters, kinds, st.integers(1, 512), strides, messages)
def test_time_never_falls_with_twice_the_ranks_by_the_same_algorithm(
    cluster: Cluster, kind: str, size: int, stride: int, num_bytes: float
) -> None:
    fabric = fabric_of(cluster)

    def by_algorithm(ranks: int) -> dict[str, float]:
        lines, floor = _lines(fabric, kind, ranks, stride)
        if place(fabric, ranks, stride).num_nodes == 1:
            return {floor.algorithm: floor.seconds(num_bytes)}
        return {f"{line.algorithm} {line.protocol}": line.seconds(num_bytes) for line in lines}

    few_ranks, many = by_algorithm(size), by_algorithm(2 * size)
    for name in few_ranks.keys() & many.keys():
        assert few_ranks[name] <= many[name] * (1 + 1e-9)


@few
@given(clusters, st.integers(2, 512), strides, st.floats(2**27, 2**34))
def test_an_all_reduce_lies_between_a_reduce_scatter_and_that_with_an_all_gather(
    cluster: Cluster, size: int, stride: int, num_bytes: float
) -> None:
    # Not so for small messages on many nodes: NCCL has trees for the all-reduce only.
    both, scattered, gathered = (
        seconds(cluster, kind, num_bytes, size, stride) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    by_ring = explain_collective(cluster, "all_reduce", num_bytes, size=size, stride=stride)["alternatives"]
    assert both <= (scattered + gathered) * 1.1 + 30e-6
    if "ring Simple" in by_ring:
        assert by_ring["ring Simple"] >= scattered * (1 - 1e-9)


@few
@given(kinds, sizes, strides, messages)
def test_axes_of_equal_shape_cost_the_same(kind: str, size: int, stride: int, num_bytes: float) -> None:
    cluster = parse_cluster("64xh100")
    renamed = replace(cluster, name="another name")
    assert seconds(cluster, kind, num_bytes, size, stride) == seconds(renamed, kind, num_bytes, size, stride)


def test_a_large_all_reduce_takes_longer_than_its_reduce_scatter_everywhere() -> None:
    for cluster in CLUSTERS:
        for size, stride in ((2, 1), (4, 1), (8, 1), (64, 1), (64, 8), (16, 4)):
            assert seconds(cluster, "all_reduce", GIB, size, stride) >= seconds(cluster, "reduce_scatter", GIB, size, stride)


def test_the_fits_agree_with_what_the_catalogue_says_a_link_achieves() -> None:
    for node in NODES.values():
        link = node.intra_link
        if link is not None and link.achieved_bytes_per_second is not None:
            cluster = Cluster(node.name, node, node.num_accelerators)
            limit = bus(cluster, "all_gather", 64 * GIB, node.num_accelerators) * 1e9
            assert limit == pytest.approx(link.achieved_bytes_per_second.value, rel=0.12), node.name
