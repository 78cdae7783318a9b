"""Dispatchers of experts that send a token once to each place it goes to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload


@pytest.mark.parametrize(
    ("nodes", "share"),
    [
        (1, (1 - (7 / 8) ** 8)),  # of eight draws 5.25 are distinct ranks: 0.66 of what is sent to each expert
        (2, (1 - (1 / 2) ** 8) / 4),  # one copy to the other node, where four were sent
    ],
)
def test_a_token_goes_once_to_each_rank_of_a_node_or_to_each_node(nodes: int, share: float) -> None:
    def seconds(once: bool) -> float:
        stack = replace(STACKS["megatron"], dispatcher="deepep" if once else "alltoall")
        workload = Workload(preset("qwen3-30b-a3b"), parse_cluster(f"{nodes}xdgx-h100"), 4096, 512, stack)
        layout = Layout(dp=8 * nodes, ep=8 * nodes, zero_stage=1, precision="bf16", micro_batch_size=4)
        return predict(workload, layout).waterfall["expert_parallel"]

    assert seconds(True) / seconds(False) == pytest.approx(share, rel=0.1)
