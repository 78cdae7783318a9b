"""The command that fits constants and writes the tables of docs/validation.md, on a few rows."""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

PLAN = Path(__file__).parents[2] / "benchmarks" / "plan"
FITTED = {"zero-bubble", "a4x-gb200", "sagemaker-titan"}
UNSEEN = {"tinyllama", "nanochat"}


def test_a_fit_on_few_rows_writes_every_table_and_leaves_the_rest_of_the_file(tmp_path: Path) -> None:
    with (PLAN / "collected_runs.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    for name, sources in (("fitted.csv", FITTED), ("unseen.csv", UNSEEN)):
        kept = [row for row in rows if row["source_key"] in sources]
        with (tmp_path / name).open("w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(kept)
    page = tmp_path / "validation.md"
    page.write_text("before\n<!-- made by benchmarks/plan/cross_validate.py -->\nold\n<!-- end -->\nafter\n")
    command = [sys.executable, PLAN / "cross_validate.py", "fitted.csv", "--collected", "unseen.csv", "--markdown", page]
    printed = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert printed.returncode == 0, printed.stderr
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end -->\nafter\n") and "old" not in text
    step_times, collected = text.index("| Step time, % off |"), text.index("| Collected runs, step time, % off |")
    for source in FITTED:
        assert step_times < text.index(f"| {source} |") < collected
    for source in UNSEEN:
        assert collected < text.index(f"| {source} | 1 |")
    assert "compute_derate" in printed.stdout and "mean of sources, left out" in printed.stdout
