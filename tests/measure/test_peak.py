"""The rate that MFU is a share of: steady over a run's starts, and of this device."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ultrascale.config.resolve import resolve
from ultrascale.measure.machine import ceilings as machine
from ultrascale.measure.machine.ceilings import (
    MatmulCeiling,
    is_here,
    measure_matmul_ceiling,
    peak_flops,
    stored_or_measured_peak,
)
from ultrascale.plan.flops import hardware_flops_per_token, model_flops_per_token
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.observers.metrics import Metrics
from ultrascale.train.observers.performance import Performance
from ultrascale.work.ops import Shape

CPU = torch.device("cpu")
NOW = MatmulCeiling(5e10, 0.1, "a processor", "fp32", 1024, 1)


@pytest.fixture
def measured(monkeypatch) -> Callable[[float], None]:
    """Has this machine measured at so many operations in a second."""
    return lambda rate: monkeypatch.setattr(machine, "measure_matmul_ceiling", lambda *_: replace(NOW, flops_per_second=rate))


@pytest.fixture
def measured_now(measured) -> None:
    measured(NOW.flops_per_second)


@pytest.fixture
def products_take(monkeypatch) -> Callable[[Iterator[float]], None]:
    """Has products take so many seconds, one after the other."""
    return lambda seconds: monkeypatch.setattr(machine, "_time_product", lambda left, right: next(seconds))


@pytest.fixture
def on_an_h100(monkeypatch) -> None:
    monkeypatch.setattr(machine, "this_gpu", lambda device: machine.ACCELERATORS["h100-sxm"])


def test_the_ceiling_is_the_best_of_ten_products_also_where_each_takes_long(products_take) -> None:
    took = iter([9.0, *[0.02] * 5, 0.01, *[0.02] * 10])
    products_take(took)
    assert measure_matmul_ceiling("fp32").flops_per_second == 2 * 512**3 / 0.01
    assert len(list(took)) == 17 - 1 - 10


def test_ten_very_slow_products_are_not_waited_for(products_take) -> None:
    took = iter([3.0] * 12)
    products_take(took)
    measure_matmul_ceiling("fp32")
    assert len(list(took)) == 10


@pytest.mark.parametrize(("stored", "expected"), [(8e10, 8e10), (2e10, 5e10)])
def test_a_resumed_run_keeps_the_best_peak_of_its_starts(tmp_path: Path, measured_now, stored, expected) -> None:
    file = tmp_path / "peak.json"
    file.write_text(json.dumps(asdict(replace(NOW, flops_per_second=stored))))
    peak = stored_or_measured_peak(file, "auto", "fp32", CPU)
    assert peak.flops_per_second == expected
    assert peak.ceiling == replace(NOW, flops_per_second=expected)
    assert ("best of this run's starts" in peak.origin) == (stored == expected)


@pytest.mark.parametrize("other", [{"device": "another"}, {"dtype": "bf16"}, {"threads": 2}])
def test_a_peak_of_other_conditions_does_not_count(tmp_path: Path, measured_now, other) -> None:
    file = tmp_path / "peak.json"
    file.write_text(json.dumps(asdict(replace(NOW, flops_per_second=8e10, **other))))
    assert stored_or_measured_peak(file, "auto", "fp32", CPU).flops_per_second == 5e10


@pytest.mark.parametrize("text", [None, "", '{"flops_per', "[]", "3", '{"flops_per_second": 1}'])
def test_a_peak_that_cannot_be_read_is_measured(tmp_path: Path, measured_now, text: str | None) -> None:
    if text is not None:
        (tmp_path / "peak.json").write_text(text)
    assert stored_or_measured_peak(tmp_path / "peak.json", "auto", "fp32", CPU).flops_per_second == 5e10


def test_mfu_on_a_cpu_is_never_a_share_of_the_gpu_that_is_planned_for(measured_now) -> None:
    peak = peak_flops("8xh100", "fp32", CPU)
    assert peak.flops_per_second == 5e10
    assert peak.origin == "a large fp32 matrix product here, 1 thread (cluster = 8xh100 is another machine)"


@pytest.mark.parametrize("cluster", ["auto", "8xh100", "8xa100-80", "2xcpu"])
def test_on_a_catalogued_gpu_the_peak_is_its_own(on_an_h100, cluster: str) -> None:
    found = peak_flops(cluster, "bf16", torch.device("cuda"))
    assert found.flops_per_second == pytest.approx(989.4e12, rel=0.01)
    assert ("another machine" in found.origin) == (cluster in ("8xa100-80", "2xcpu"))


def test_a_started_run_keeps_its_best_peak_and_counts_masked_documents(tmp_path: Path, measured) -> None:
    words = ["--model.preset", "tiny-llama", "--batch.sequence-length", "64", "--folder", str(tmp_path), "--name", "run"]
    run = resolve(None, words).run
    ranks: Any = SimpleNamespace(device=CPU, world=1, rank=0)
    folder = RunFolder.of(run)
    for rate in (7e10, 5e10):
        measured(rate)
        metrics = Metrics(run, folder, first_step=0, writes=True)
        performance = Performance(run, ranks, metrics)
        metrics.close()
        assert performance.peak.flops_per_second == 7e10
    assert json.loads((folder.path / machine.PEAK_FILE).read_text())["flops_per_second"] == 7e10
    assert performance.hardware_flops == hardware_flops_per_token(run.model, run.layout, Shape(1, 64, documents=True))
    assert performance.model_flops == model_flops_per_token(run.model, 64)


def test_what_is_timed_here_is_planned_for_this_machine_and_for_no_other(on_an_h100) -> None:
    here = {name: is_here(name, torch.device("cuda")) for name in ("auto", "64xh100", "8xa100", "8xcpu")}
    assert here == {"auto": True, "64xh100": True, "8xa100": False, "8xcpu": False}
    assert not is_here("8xh100", torch.device("cpu"))
