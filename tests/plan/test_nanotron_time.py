"""What nanotron's code says of its time: whole gradients, parameters copied piece by piece, hops that the host waits for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan.published_collectives import MIB, PLAYBOOK_MEDIANS

from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.network import network_kind
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.laws.collectives import bus_bytes, collective_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.data_traffic import LAUNCH_SECONDS, copy_seconds
from ultrascale.plan.time.price import predict
from ultrascale.plan.time.stage_cut import layers_by_share
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.validation.predict import predict_rows
from ultrascale.validation.rows import read_rows
from ultrascale.validation.setups import setup_of

NANOTRON = STACKS["nanotron"]


def work(nodes: int, stack: Stack = NANOTRON, cluster: Cluster | None = None) -> Workload:
    return Workload(preset("llama-3.2-1b"), cluster or busy(nodes), 4096, 256, stack)


def busy(nodes: int) -> Cluster:
    """AWS p5 nodes on the network of the playbook's figure."""
    cluster = parse_cluster(f"{nodes}xaws-p5")
    link = cluster.node.inter_link
    assert link is not None
    node = replace(cluster.node, inter_link=replace(link, name="EFA v2 under load"))
    return Cluster(cluster.name, node, cluster.num_accelerators)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter"])
def test_a_hop_of_the_busy_network_meets_what_the_playbook_published(kind: str) -> None:
    errors = []
    for nodes, published in PLAYBOOK_MEDIANS[kind].items():
        size = 8 * nodes
        seconds = collective_seconds(busy(nodes), kind, 256 * MIB, size=size, stride=1)
        errors.append(abs(np.log(float(bus_bytes(kind, 256 * MIB, size) / seconds) / 1e9 / published)))
    assert np.median(errors) < 0.17 and max(errors) < 0.25


def test_with_zero_1_whole_gradients_are_all_reduced_and_nothing_is_beside_them() -> None:
    layout, one = Layout(dp=32, zero_stage=1, micro_batch_size=2, precision="bf16"), work(4)
    table = LayoutTable.of([layout])
    stages = partition_stages(one, table)
    numel = float(stages.dense_parameters[0, 0])
    sent = [
        float(collective_seconds(one.cluster, kind, numel * width, size=32, stride=1))
        for kind, width in (("all_reduce", 4.0), ("all_gather", 2.0))
    ]
    copied = float(copy_seconds(one, table, stages, np.array([2.0]))[0, 0])
    assert predict(one, layout).waterfall["data_parallel"] == pytest.approx(sum(sent) + copied, rel=1e-9)
    longer = predict(one, replace(layout, micro_batch_size=4)).waterfall["data_parallel"]
    assert longer == pytest.approx(sum(sent) + copied, rel=1e-9)


def test_without_zero_gradients_are_summed_beside_the_last_backward_pass() -> None:
    layout, one = Layout(dp=32, micro_batch_size=4, precision="bf16"), work(4)
    alone = replace(one, stack=replace(NANOTRON, overlaps_data_parallel=False))
    assert predict(one, layout).waterfall["data_parallel"] < 0.3 * predict(alone, layout).waterfall["data_parallel"]


def test_every_rank_s_piece_of_every_weight_is_copied_by_a_launch() -> None:
    """Sixteen blocks of six weights (queries, keys and values are one, gate and up are one), embedding and last norm; the tied
    head is counted once more. 256 ranks hold a piece of each."""
    layout = Layout(dp=256, zero_stage=1, precision="bf16")
    one, table = work(32), LayoutTable.of([layout])
    found = copy_seconds(one, table, partition_stages(one, table), np.array([2.0]))[0, 0]
    assert found == pytest.approx(LAUNCH_SECONDS * 256 * (16 * 6 + 3))


def test_in_a_pipeline_over_nodes_the_host_waits_for_a_hop_for_every_rank_of_tp() -> None:
    """Four collectives of a block forward and six backward (inputs are gathered again), 0.24 ms for each of eight ranks."""
    one = work(4)
    hop = network_kind(one.cluster.node.inter_link).hop_seconds  # pyright: ignore[reportArgumentType]
    assert hop == 2.4e-4
    many = Layout(dp=1, tp=8, pp=4, sequence_parallel=True, precision="bf16")
    silent = replace(one, stack=replace(NANOTRON, overheads=replace(NANOTRON.overheads, hops_per_rank=0.0)))
    waited, not_waited = (predict(each, many).step_seconds for each in (one, silent))
    rounds, blocks = 256 + 4 - 1, max(layers_by_share(one.model, 4))
    assert (waited - not_waited) / rounds / blocks == pytest.approx(10 * 8 * hop, rel=0.1)
    for other in (parse_cluster("4xdgx-h100"), busy(1)):  # InfiniBand adds nothing to a hop; one node has none
        layout = replace(many, pp=4 if other.num_accelerators == 32 else 1)
        both = [predict(replace(each, cluster=other), layout).step_seconds for each in (one, silent)]
        assert both[0] == both[1]


def test_a_measured_pipeline_is_predicted_by_playing_its_schedule(tmp_path: Path) -> None:
    file = tmp_path / "scan.csv"
    file.write_text("model,nodes,mbs,ga,gbs,dp,pp,tp,zero\n8B,2,2,32,256,4,4,1,1\n8B,2,2,32,256,4,1,4,1\n")
    rows = [row.config for row in read_rows(file)]
    for row, found in zip(rows, predict_rows(rows), strict=True):
        setup = setup_of(row)
        assert found.step_seconds == predict(setup.workload, setup.layouts[0]).step_seconds
