"""A sweep's pictures can be read, however many values a setting has and however long they are."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ultrascale.sweep import pictures
from ultrascale.sweep.grid import Axis, SweepCell

pytest.importorskip("matplotlib")


@pytest.mark.parametrize(
    ("rows", "columns"),
    [
        ([str(n) for n in range(30)], [str(n) for n in range(24)]),
        (["a-model-of-a-very-long-name-70b", "x"], [f"64x/some/long/path/to/machines/our-cluster-{n}.toml" for n in range(5)]),
    ],
)
def test_no_name_of_a_value_covers_another(rows, columns, tmp_path, figures):
    axes = [Axis("layout.tp", tuple(rows)), Axis("cluster", tuple(columns))]
    cells = [SweepCell({"layout.tp": row, "cluster": column}, None) for row in rows for column in columns]
    here = SimpleNamespace(cell=cells[0])
    only: Any = SimpleNamespace(
        place=here,
        tokens_per_second_per_rank=1.0,
        measured_peak_bytes=None,
        planned_step_seconds=None,
    )
    assert pictures.draw(Path(tmp_path), axes, cells, [], [only]) == [tmp_path / "speed.png"]
    (figure,) = figures
    figure.canvas.draw()
    (plot,) = figure.axes
    down = [label.get_window_extent() for label in plot.get_yticklabels()]
    assert all(lower.y1 < upper.y0 for upper, lower in pairwise(down))
    level = [label for label in plot.get_xticklabels() if label.get_rotation() == 0]
    across = [label.get_window_extent() for label in level]
    assert all(left.x1 < right.x0 for left, right in pairwise(across))
    assert len(level) == (0 if len(columns[0]) > 9 else len(columns))
    assert all(label.get_text().endswith(value[-8:]) for label, value in zip(plot.get_xticklabels(), columns, strict=True))
