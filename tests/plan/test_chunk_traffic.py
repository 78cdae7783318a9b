"""What data parallelism sends beside the computing of other chunks of a pipeline, and in how many pieces."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.time.data_traffic import _exposed, _num_buckets
from ultrascale.plan.time.price import predict
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload


@pytest.mark.parametrize(
    ("window", "chunks", "shown"),
    [
        (1.0, 1, 9.0),  # beside one pass
        (1.0, 2, 7.5),  # the second chunk's has four micro-batches of half a pass before it, and its own
        (4.0, 2, 3.0),  # all of that; the first chunk's half has half a pass
        (40.0, 2, 0.5),  # what never is beside anything
    ],
)
def test_a_chunk_s_traffic_is_beside_the_micro_batches_of_the_one_before(window: float, chunks: int, shown: float) -> None:
    told = (np.array([number]) for number in (10.0, window, 0.5, float(chunks), 4.0))
    assert _exposed(*told)[0] == pytest.approx(shown)


def _workload(stack: str) -> Workload:
    return Workload(preset("gpt3-175b"), parse_cluster("1024xh100"), 2048, 512, STACKS[stack])


def _shown(stack: str, chunks: int) -> float:
    schedule = "1f1b" if chunks == 1 else "interleaved"
    layout = Layout(dp=32, tp=4, pp=8, zero_stage=1, precision="bf16", virtual_stages=chunks, schedule=schedule)
    return predict(_workload(stack), layout).waterfall["data_parallel"]


def test_more_chunks_hide_more_of_what_stays_whole() -> None:
    """Megatron's buffers of a chunk travel beside other chunks; FSDP gathers a block when its own pass begins."""
    whole = [_shown("megatron", chunks) for chunks in (1, 3, 12)]
    assert whole[1] < 0.8 * whole[0] and whole[2] < 0.5 * whole[1]
    assert _shown("torchtitan", 12) == pytest.approx(_shown("torchtitan", 1), rel=0.01)


@pytest.mark.parametrize(("dp", "overlaps", "buckets"), [(8, True, 188), (40, True, 188), (1024, True, 8), (8, False, 1)])
def test_buckets_grow_with_the_ranks_that_reduce(dp: int, overlaps: bool, buckets: int) -> None:
    """Megatron-Core: max(40 million, a million for each rank) parameters, and one where nothing runs beside passes."""
    workload = _workload("megatron")
    workload = replace(workload, stack=replace(workload.stack, overlaps_data_parallel=overlaps))
    table = LayoutTable.of([Layout(dp=dp, zero_stage=1, precision="bf16")])
    parameters, reduce_bytes = np.full((3, 1), 7.5e9), np.array([4])
    assert (_num_buckets(workload, table, parameters, reduce_bytes, partition_stages(workload, table)) == buckets).all()
