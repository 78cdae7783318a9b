"""The comparison of plan and run, the machine's ceiling, and the pictures."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

from rich.console import Console

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.layout import Layout
from ultrascale.measure.compare import compare_memory, comparison_table
from ultrascale.measure.machine.ceilings import measure_matmul_ceiling
from ultrascale.measure.plots import plot_run_folder, read_metrics
from ultrascale.plan.memory.replay import plan_memory

PLAN = plan_memory(preset("tiny-llama"), Layout(), sequence_length=128, sequences_per_batch=1, device="cpu")
PNG = b"\x89PNG"


def test_differences_are_percent_of_the_measured_peak() -> None:
    measured = dict(PLAN.by_category)
    measured["activations"] -= PLAN.peak.total // 10
    rows = {row.name: row for row in compare_memory(PLAN, measured)}
    total = sum(measured.values())
    assert rows["parameters"].percent == 0
    assert rows["activations"].percent == rows["peak"].percent == 100 * (PLAN.peak.total // 10) / total


def test_where_only_the_sum_is_measured_only_the_sum_is_compared() -> None:
    rows = compare_memory(PLAN, {}, measured_total=PLAN.peak.total * 2)
    assert [row.name for row in rows if row.percent is not None] == ["peak"]
    assert rows[-1].percent == -50


def test_the_table_names_every_category_that_holds_something() -> None:
    console = Console(width=100, record=True, file=StringIO())
    console.print(comparison_table(compare_memory(PLAN, PLAN.by_category)))
    text = console.export_text()
    assert all(name in text for name, num_bytes in PLAN.by_category.items() if num_bytes)
    assert " 0.0%" in text and "-0.0" not in text


def test_the_matmul_ceiling_is_a_rate_a_cpu_can_have() -> None:
    ceiling = measure_matmul_ceiling("fp32", budget_seconds=0.02)
    assert 1e9 < ceiling.flops_per_second < 1e14
    assert ceiling.device


def test_a_run_folder_becomes_three_pictures(tmp_path: Path) -> None:
    rows = [{"step": i, "train/loss": 3 - i / 10, "perf/tokens_per_s": 100.0 + i, "val/loss/text": 3.0} for i in range(8)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(json.dumps(row) for row in rows) + '\n{"step": 8, "tr')
    timeline = [{"step": i // 4, "phase": "forward", "bytes": {"parameters": 10, "activations": i}} for i in range(16)]
    (tmp_path / "memory.json").write_text(json.dumps({"measured_timeline": timeline, "planned_peak_bytes": 30}))
    pictures = plot_run_folder(tmp_path, read_metrics(tmp_path / "metrics.jsonl"), reference_loss=("unigram entropy", 2.5))
    assert [picture.name for picture in pictures] == ["loss.png", "tokens_per_second.png", "memory_by_category.png"]
    assert all(picture.read_bytes()[:4] == PNG for picture in pictures)


def test_a_metrics_line_cut_short_by_a_kill_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"schema": "ultrascale/metrics/1", "step": 1}\n{"st')
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"schema": "ultrascale/metrics/1", "step": 1}]


def test_a_metrics_file_without_its_last_line_end_has_all_its_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}')
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]  # of an earlier release
