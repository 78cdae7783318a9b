"""What a run needs of its devices: said before it starts, and compared after it has run out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset
from ultrascale.spec.problems import SpecError
from ultrascale.spec.run import Batch, Data, Run
from ultrascale.train.fit import _stage_plans, expect_fits, stage_peaks
from ultrascale.train.out_of_memory import Measured, out_of_memory

GIB = 2**30
RUN = Run(
    preset("llama-3-8b"), layout=Layout(dp=4, tp=2, pp=2, zero_stage=1, recompute="full", precision="bf16"),
    batch=Batch(8192, 16), data=Data(document_mask=False),
)  # fmt: skip


def test_each_stage_is_told_in_one_line() -> None:
    first, last = stage_peaks(RUN)
    line = expect_fits(RUN, 80 * GIB)
    assert line is not None and "\n" not in line
    assert f"the 2 pipeline stages need {first / GIB:.1f} GiB, {last / GIB:.1f} GiB of tensors; a device has 80 GiB" in line


def test_what_cannot_fit_is_refused_unless_memory_is_to_be_ignored() -> None:
    with pytest.raises(SpecError, match="does not fit") as refused:
        expect_fits(RUN, 24 * GIB)
    assert "--explain-oom" in refused.value.problems[0].remedy
    assert expect_fits(RUN, 24 * GIB, anyway=True) is not None


def test_of_compiled_blocks_what_no_compiler_makes_smaller_is_refused() -> None:
    compiled = replace(RUN, compile=True)
    states = max(plan.before_update.total for plan in _stage_plans(RUN))
    assert 7 * GIB < states < 8 * GIB and min(stage_peaks(RUN)) > 12 * GIB
    with pytest.raises(SpecError, match="does not fit"):
        expect_fits(RUN, 12 * GIB)
    assert expect_fits(compiled, 12 * GIB) == expect_fits(RUN, 12 * GIB, anyway=True)
    with pytest.raises(SpecError, match=r"weights, gradients and optimizer states alone take 7\.\d+ GiB"):
        expect_fits(compiled, 8 * GIB)


@pytest.mark.catalogue(15)
def test_an_out_of_memory_compares_what_was_measured_planned_and_traced(tmp_path: Path) -> None:
    run = Run(preset("tiny-llama"), layout=Layout(dp=2, precision="bf16"), batch=Batch(128, 4), data=Data(document_mask=False))
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nand more")
    told = str(out_of_memory(run, 1, Measured(3 * GIB, 4 * GIB), tmp_path / "run.toml", error)).splitlines()
    assert told[0] == "rank 1 ran out of memory (CUDA out of memory. Tried to allocate 2 GiB.)"
    assert told[1].split() == ["measured", "3", "GiB", "allocated,", "4", "GiB", "reserved,", "until", "it", "failed"]
    planned, traced = (float(line.split()[1]) for line in told[2:4])
    assert traced == pytest.approx(planned, rel=0.03)
    assert "reserved; most: " in told[3] and told[4].endswith("says what fills it and what to change.")
