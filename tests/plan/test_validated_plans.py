"""A measured run and the same settings given to `plan` are one number: what is validated is what users get."""

from __future__ import annotations

import itertools

import pytest
from plan.test_validate import config

from ultrascale.catalogue.stacks.stack_files import changed_settings, changed_stack, stack_names
from ultrascale.description.run import Batch, Data, Run
from ultrascale.plan.report import plan_run
from ultrascale.validation.predict import predict_rows
from ultrascale.validation.rows import RunConfig
from ultrascale.validation.setups import setup_of

MOE = {"experts": "64", "topk": "6", "expert_ffn": "1408", "ep": "8"}
PIPED = {
    "dp": "4", "pp": "8", "tp": "2", "vpp": "2", "pp_schedule": "interleaved_1f1b", "zero_stage": "1", "global_batch": "64",
    "micro_batch": "1", "grad_accum": "",
}  # fmt: skip
BRIDGE = {
    "source_key": "megatron-bridge", "framework": "Megatron-Bridge", "source": "26.08 NeMo container", "attn_kind": "mla0",
    "kv_heads": "32", "gpu": "GB200", "n_gpus": "64", "precision": "mxfp8", "zero_stage": "1", "recompute": "none",
}  # fmt: skip
ROWS = [
    config(stack=stack, recompute="none", **cells)
    for stack, cells in itertools.product(
        (name for name in stack_names() if name != "ultrascale"), ({"global_batch": "128", "grad_accum": "2"}, MOE, PIPED)
    )
] + [
    config(source_key="megascale", framework="Megatron-LM (commit 285068c8)", zero_stage="1", recompute="full"),
    config(**BRIDGE, **MOE),
    config(source_key="hf-bench-cluster", framework="nanotron", zero_stage="1", recompute="none", gpu="H100-80GB"),
]  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.stack or row.source_key}-{row.experts or row.pp}")
def test_a_row_and_its_settings_given_to_plan_are_one_number(row: RunConfig) -> None:
    """The run that the row means, on its machines, with its stack rebuilt from a name and the settings a user would type."""
    setup, (predicted,) = setup_of(row), predict_rows([row])
    assert predicted.step_seconds is not None, predicted.reason
    found = {}
    for workload, layout in itertools.product(setup.workloads, setup.layouts):
        run = Run(
            workload.model, layout=layout, batch=Batch(workload.sequence_length, workload.sequences_per_batch),
            data=Data(document_mask=False),
        )  # fmt: skip
        typed = {key: str(value) for key, value in changed_settings(workload.stack).items()}
        typed |= {"optimizer": workload.stack.optimizer}
        stack = changed_stack(workload.stack.name, typed)
        assert stack == workload.stack
        plan = plan_run(run, workload.cluster, stack)
        assert plan.prediction is not None
        found[plan.prediction.step_seconds] = plan.prediction.memory
    memory = found.get(predicted.step_seconds)
    assert memory is not None, (predicted, found)
    assert float(memory.allocated) == predicted.allocated_bytes and bool(memory.fits) is predicted.fits
