"""What delayed scales of fp8 save and cost, as the planner prices them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.price import price_time
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.work.fp8_slots import SLOT_BYTES, num_slots


def test_delayed_scales_save_every_message_for_scales_but_one() -> None:
    cluster, model = parse_cluster("8xh100"), PRESETS["llama-3.1-8b"]
    workload = Workload(model, cluster, 4096, 16, stack=STACKS["ultrascale"])
    layout = Layout(tp=8, precision="fp8", fp8_scaling="tensor")
    table = LayoutTable.of([layout, replace(layout, fp8_scaling="delayed")])
    _, parts = price_time(workload, table, partition_stages(workload, table))
    current, delayed = parts["tensor_parallel"]
    assert delayed < current
    message = SLOT_BYTES * num_slots(model, table.layout(1))
    assert message == 4 * 3 * 7 * 32
    seconds = collective_seconds(cluster, "all_reduce", np.float64(message), size=8, stride=1)
    assert np.diff(parts["rest"])[0] == pytest.approx(float(seconds), rel=0.2)  # and what slow nodes make of the sum
