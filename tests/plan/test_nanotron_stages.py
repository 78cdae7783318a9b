"""How nanotron cuts a pipeline, which of its pipelines cannot run, and what its launches cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.description.architecture.model import Model
from ultrascale.plan.time.stage_cut import cannot_run, layers_by_share, ranks_by_share
from ultrascale.validation.predict import predict_rows
from ultrascale.validation.rows import RunConfig

ONE_B = Model(131072, 2048, 8192, 16, 32, 32, 64, 4096, name="1B")
"""The playbook's: its head costs four blocks."""
SCANNED = RunConfig(model="1B", nodes=4, gpus_per_node=8, framework="nanotron", gpu="H100", is_playbook=True, zero_stage="1",
                global_batch=256, precision="bf16", year=2025, tp=1)  # fmt: skip


def test_a_rank_takes_parts_until_its_share_is_used_up() -> None:
    assert layers_by_share(ONE_B, 2) == [11, 5]
    assert layers_by_share(ONE_B, 8) == [3, 3, 2, 3, 2, 3, 0, 0]
    assert ranks_by_share(ONE_B, 8)[-4:] == [6, 6, 7, 7]  # norm, head, cast, loss
    assert layers_by_share(replace(ONE_B, num_hidden_layers=80, vocab_size=1024), 4) == [21, 20, 20, 19]


@pytest.mark.parametrize(
    ("pp", "counts", "reason"),
    [
        (1, [1], ""),
        (8, [7], ""),
        (8, [6], "needs pp - 1 micro-batches at least"),
        (8, [2, 32], ""),
        (16, [64], "leaves 1 of 16 ranks without a part"),
    ],
)
def test_pipelines_that_fail_are_told_why(pp: int, counts: list[int], reason: str) -> None:
    assert reason in cannot_run(ONE_B, pp, counts) and bool(reason) == bool(cannot_run(ONE_B, pp, counts))


def test_rows_of_such_pipelines_are_predicted_not_to_run() -> None:
    runs, empty, short = predict_rows(
        [
            replace(SCANNED, dp=4, pp=8, micro_batch=2, grad_accum=32),
            replace(SCANNED, dp=2, pp=16, micro_batch=2, grad_accum=64),
            replace(SCANNED, dp=4, pp=8, micro_batch=32, grad_accum=2),
        ]
    )
    assert runs.fits and runs.step_seconds
    assert (empty.fits, short.fits) == (False, False)
    assert "without a part of the model" in empty.reason and "pp - 1 micro-batches at least" in short.reason
