"""Pictures of a sweep: the best speed by two of its settings, and planned against measured."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ultrascale.measure.plots import GIB, GRID, INK, LINE, MIB, SECOND, new_figure, save_figure
from ultrascale.sweep.accuracy import MeasuredCell
from ultrascale.sweep.cells import CellPlace
from ultrascale.sweep.grid import Axis, SweepCell

SHADES = ("#eef3fa", "#3b6fb6")
FEWEST_POINTS = 2
LONGEST_VALUE, LONGEST_LEVEL = 24, 9
"""Most characters of a value that are drawn, and that are drawn horizontally below a column of 0.8 inches."""
MARKS = {"refused": "refused", "out of memory": "OOM", "too slow": "slow", "killed": "killed", "failed": "failed"}


def draw(
    folder: Path,
    axes: Sequence[Axis],
    cells: Sequence[SweepCell],
    places: Sequence[CellPlace],
    measured: Sequence[MeasuredCell],
) -> list[Path]:
    """Write the pictures for which there is data into `folder`. Raises ModuleNotFoundError without matplotlib (extra
    `plot`)."""
    written = []
    wide = [axis for axis in axes if len(axis.values) > 1]
    if len(wide) >= 2 and measured:
        written.append(_draw_grid(folder / "speed.png", wide[0], wide[1], wide[2:], cells, places, measured))
    memory = [
        (measurement.planned_peak_bytes, measurement.measured_peak_bytes)
        for measurement in measured
        if measurement.measured_peak_bytes
    ]
    if len(memory) >= FEWEST_POINTS:
        unit, word = (GIB, "GiB") if max(map(max, memory)) >= GIB else (MIB, "MiB")
        points = [(planned / unit, actual / unit) for planned, actual in memory]
        written.append(_draw_points(folder / "memory.png", "Peak memory", word, points))
    times = [
        (measurement.planned_step_seconds, measurement.step_seconds)
        for measurement in measured
        if measurement.planned_step_seconds
    ]
    if len(times) >= FEWEST_POINTS:
        points = [(planned * 1e3, actual * 1e3) for planned, actual in times]
        written.append(_draw_points(folder / "time.png", "Step time", "ms", points))
    return written


def best_by(
    rows: Axis, columns: Axis, cells: Sequence[SweepCell], places: Sequence[CellPlace], measured: Sequence[MeasuredCell]
) -> list[list[float | str]]:
    """Best tokens per second per rank for each value of `rows` and `columns`, or one word for why there is none."""
    rates = {id(measurement.place.cell): measurement.tokens_per_second_per_rank for measurement in measured}
    failures = {id(place.cell): place.failure for place in places}

    def best_of_cell(row: str, column: str) -> float | str:
        matching = [cell for cell in cells if cell.values[rows.key] == row and cell.values[columns.key] == column]
        if speeds := [rates[id(cell)] for cell in matching if id(cell) in rates]:
            return max(speeds)
        failed = [failure.outcome for cell in matching if (failure := failures.get(id(cell))) is not None]
        return MARKS[failed[0]] if failed else MARKS["refused"] if any(cell.run is None for cell in matching) else ""

    return [[best_of_cell(row, column) for column in columns.values] for row in rows.values]


def _draw_grid(
    path: Path, rows: Axis, columns: Axis, other_axes: Sequence[Axis],
    cells: Sequence[SweepCell], places: Sequence[CellPlace], measured: Sequence[MeasuredCell],
) -> Path:  # fmt: skip
    """Draw the best speed of each pair of values, darker where faster."""
    from matplotlib.colors import LinearSegmentedColormap

    table = best_by(rows, columns, cells, places, measured)
    best = max(entry for line in table for entry in line if isinstance(entry, float))
    title = "Tokens per second and rank" + (f", best of {', '.join(axis.short for axis in other_axes)}" if other_axes else "")
    figure, axes = new_figure(title, columns.short, rows.short, width=max(6.0, 0.8 * len(columns.values) + 2))
    figure.set_figheight(max(figure.get_figheight(), 0.3 * len(rows.values) + 1.5))
    shades = LinearSegmentedColormap.from_list("speed", SHADES)
    shares = [[entry / best if isinstance(entry, float) else float("nan") for entry in line] for line in table]
    axes.imshow(shares, cmap=shades, vmin=0, vmax=1, aspect="auto")
    for i, line in enumerate(table):
        for j, entry in enumerate(line):
            text = f"{entry:,.0f}" if isinstance(entry, float) else entry
            dark = isinstance(entry, float) and entry / best > 0.6
            weight = "bold" if entry == best else "normal"
            axes.text(j, i, text, ha="center", va="center", fontsize=10, color="white" if dark else INK, fontweight=weight)
    names = [_shortened(value) for value in columns.values]
    are_long = max(map(len, names)) > LONGEST_LEVEL
    axes.set_xticks(range(len(names)), names, rotation=30 if are_long else 0, ha="right" if are_long else "center")
    axes.set_yticks(range(len(rows.values)), [_shortened(value) for value in rows.values])
    axes.grid(visible=False)
    return save_figure(figure, path)


def _shortened(value: str) -> str:
    """End of a long value, the most telling part: the file of a path, the size of a model."""
    return value if len(value) <= LONGEST_VALUE else f"…{value[1 - LONGEST_VALUE :]}"


def _draw_points(path: Path, title: str, unit: str, points: Sequence[tuple[float, float]]) -> Path:
    figure, axes = new_figure(f"{title}, planned and measured", f"planned, {unit}", f"measured, {unit}", width=6)
    top = 1.08 * max(map(max, points))
    axes.plot([0, top], [0, top], color=INK, linewidth=1, linestyle=(0, (4, 3)), label="equal")
    axes.fill_between([0, top], [0, 0.9 * top], [0, 1.1 * top], color=GRID, linewidth=0, label="within 10 %")
    axes.scatter(*_columns(points), color=SECOND, edgecolor=LINE, linewidth=0.4, s=28, zorder=3, label=f"{len(points)} cells")
    axes.set_xlim(0, top)
    axes.set_ylim(0, top)
    axes.legend(frameon=False, loc="upper left")
    return save_figure(figure, path)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[Any, Any]:
    return [x for x, _ in points], [y for _, y in points]
