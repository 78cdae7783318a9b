"""Blank cells of measured runs that a program's own defaults, or its source's text, fill."""

from __future__ import annotations

import pytest
from plan.test_validate import asked

from ultrascale.plan.measured_setups import setup_of
from ultrascale.plan.measured_stacks import stack_of

PIPELINE = {"pp": "8", "tp": "8", "dp": "8", "n_gpus": "512", "layers": "126", "micro_batch": "", "grad_accum": "", "vpp": ""}
README = "NVIDIA Megatron-LM README, images/model_table.png"


@pytest.mark.parametrize(("year", "size"), [("2024", 4), ("2025", 1), ("", 1)])
def test_torchtitan_cuts_a_batch_in_as_many_micro_batches_as_stages_and_later_in_single_sequences(year: str, size: int):
    setup = setup_of(asked(**PIPELINE, global_batch="256", pp_schedule="1f1b", year=year))
    assert [layout.micro_batch_size for layout in setup.layouts] == [size] and "micro_batch" not in setup.open_cells
    assert f"micro_batch = {size}, torchtitan's default in a pipeline" in setup.assumed


def test_a_batch_that_torchtitan_could_not_cut_so_stays_open():
    setup = setup_of(asked(**PIPELINE, global_batch="96", pp_schedule="1f1b", year="2024"))  # 12 sequences in 8
    assert "micro_batch" in setup.open_cells


def test_torchtitan_s_interleaved_pipelines_have_two_stages_a_rank():
    setup = setup_of(asked(**PIPELINE, global_batch="256", pp_schedule="interleaved_1f1b"))
    assert {(layout.schedule, layout.virtual_stages) for layout in setup.layouts} == {("interleaved", 2)}


def test_embedding_and_head_may_count_as_layers_where_megatron_cuts_chunks():
    cells = PIPELINE | {"framework": "Megatron-LM", "micro_batch": "1", "zero_stage": "1"}
    setup = setup_of(asked(**cells, global_batch="256"))
    assert sorted({layout.virtual_stages for layout in setup.layouts}) == [2, 4, 8, 16]  # of 128


@pytest.mark.parametrize(("source", "chunks"), [(README, {3, 4, 6, 12, 2}), ("a paper", {1})])
def test_megatron_s_own_table_overlaps_sends_and_so_interleaves(source: str, chunks: set[int]):
    cells = PIPELINE | {"framework": "Megatron-LM", "micro_batch": "1", "zero_stage": "1", "layers": "96"}
    setup = setup_of(asked(**cells, global_batch="256", pp_schedule="1f1b", source=source))
    assert {layout.virtual_stages for layout in setup.layouts} == chunks


@pytest.mark.parametrize(("framework", "overlaps"), [("Megatron-LM (commit 285068c8)", False), ("MegaScale", True)])
def test_megascale_s_baseline_has_nothing_beside_its_passes(framework: str, overlaps: bool):
    stack, _ = stack_of(asked(framework=framework, source="MegaScale (NSDI'24, arXiv 2402.15627) Table 2", year="2024"))
    assert stack.overlaps_data_parallel is overlaps


@pytest.mark.parametrize(("framework", "num_bytes"), [("fms-fsdp (PyTorch FSDP1)", 2), ("PyTorch FSDP", 4)])
def test_fms_fsdp_reduces_in_bf16(framework: str, num_bytes: int):
    assert stack_of(asked(framework=framework))[0].reduce_bytes == num_bytes
