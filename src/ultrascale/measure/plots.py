"""Pictures of a run as PNGs: loss, tokens per second, memory by category over the first steps, gradient noise scale."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate
from math import isfinite, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from ultrascale.description.parsing import parse_json
from ultrascale.description.problems import mistake
from ultrascale.launch.events import event_of, read_rows
from ultrascale.measure.run_marks import RunMark, marks_of
from ultrascale.output_file import write_output
from ultrascale.run_rows import is_validation_loss, memory_document, metric_row

INK, GRID = "#22272e", "#e3e6ea"
LINE, SECOND = "#3b6fb6", "#d1603d"
COLORS = {
    "parameters": "#3b6fb6", "gathered": "#7fb2d9", "optimizer": "#8b5fa8", "gradients": "#e0a83c", "activations": "#4f9d69",
    "temporary": "#a5d0a8", "communication": "#d1603d", "other": "#a9b0b8",
}  # fmt: skip
GIB, MIB = 2**30, 2**20
MARK_LETTERS = 50
"""Most characters in a line of a mark's text, which is vertical."""


def plot_run_folder(
    folder: Path,
    metrics: Sequence[Mapping[str, Any]],
    *,
    into: Path | None = None,
    reference_loss: tuple[str, float] | None = None,
) -> list[Path]:
    """Write `loss`, `tokens_per_second`, `noise_scale` and `memory_by_category.png` of the run in `folder`, those with data,
    into its folder `plots`, or `into`.

    `metrics`: rows of its metrics.jsonl. `reference_loss`: name and value of a line. Raises ModuleNotFoundError without
    matplotlib (extra `plot`).
    """
    memory, marks = read_memory(folder), marks_of(folder)
    into = into or folder / "plots"
    into.mkdir(parents=True, exist_ok=True)
    written: list[Path] = []
    if any("train/loss" in row for row in metrics):
        written.append(plot_loss(metrics, into / "loss.png", reference=reference_loss, marks=marks))
    if any(row.get("perf/tokens_per_s") for row in metrics):
        since = last_timed_start(folder, metrics)
        written.append(plot_tokens_per_second(metrics, into / "tokens_per_second.png", since=since, marks=marks))
    if any(row.get("train/noise_scale_tokens") for row in metrics):
        written.append(plot_noise_scale(metrics, into / "noise_scale.png"))
    if timeline := memory.get("measured_timeline"):
        planned = memory.get("planned_peak_bytes")
        written.append(plot_memory(timeline, into / "memory_by_category.png", planned_peak_bytes=planned))
    return written


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Rows of a metrics.jsonl; an incomplete last line (the run was killed) is ignored.

    Raises SpecError, which names file and line, if another line is not a row (a full disk truncated it, or it is damaged).
    """
    rows: list[dict[str, Any]] = []
    lines = path.read_bytes().splitlines()
    for number, line in enumerate(lines, start=1):
        row = _row_of(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            remedy = "Remove this line; the others are read by themselves. (A run that is resumed removes it, too.)"
            raise mistake(f"{path}:{number}", "is no row of a step: cut by a full disk, or damaged", remedy)
    return rows


def read_memory(folder: Path) -> dict[str, Any]:
    """Contents of memory.json in the folder of a run; nothing if it is not there. Raises SpecError if it cannot be read."""
    path = folder / "memory.json"
    try:
        memory = parse_json(path.read_bytes()) if path.exists() else {}
        if isinstance(memory, dict):
            return memory_document(memory)
    except (ValueError, TypeError, KeyError):
        pass
    raise mistake(str(path), "is not what a run wrote there", "Remove it: the report then has no memory.")


def last_timed_start(folder: Path, rows: Sequence[Mapping[str, Any]]) -> int:
    """Number of steps done at the last start (from the folder's events) with timed steps in `rows`; 0 if unknown."""
    events_read = map(event_of, read_rows(folder / "events.jsonl"))
    starts = [event.step for event in events_read if event is not None and event.kind == "start" and event.step is not None]
    last = max((row["step"] for row in rows if row.get("perf/tokens_per_s") is not None), default=0)
    return next((step for step in reversed(starts) if step < last), 0)


def _row_of(line: bytes) -> dict[str, Any] | None:
    try:
        return metric_row(parse_json(line))
    except ValueError:
        return None


def plot_loss(
    rows: Sequence[Mapping[str, Any]], path: Path, *, reference: tuple[str, float] | None = None, marks: Sequence[RunMark]
) -> Path:
    """Plot the training loss by step, raw and smoothed; validation losses as points, `reference` as a dashed line."""
    figure, axes = new_figure("Loss", "step", "nats per token")
    draw_loss(axes, rows, marks, reference=reference)
    return save_figure(figure, path)


def draw_loss(
    axes: Any, rows: Sequence[Mapping[str, Any]], marks: Sequence[RunMark], *, reference: tuple[str, float] | None = None
) -> None:
    """Draw on `axes` what `plot_loss` does."""
    steps = _draw_smoothed(axes, rows, "train/loss", "training, smoothed")
    for key in sorted({key for row in rows for key in row if is_validation_loss(key)}):
        axes.plot(*_series(rows, key), color=SECOND, marker="o", markersize=4, linewidth=1.2, label=_validation_name(key))
    if reference is not None:
        axes.axhline(reference[1], color=INK, linewidth=1, linestyle=(0, (4, 3)), label=f"{reference[0]}, {reference[1]:.2f}")
    _draw_marks(axes, marks, max(steps, default=0))
    axes.legend(frameon=False, loc="upper right")  # "best" takes seconds, and warns, for a run of weeks


def _draw_smoothed(axes: Any, rows: Sequence[Mapping[str, Any]], key: str, label: str) -> list[int]:
    """Draw values by step, raw and smoothed. Returns the steps."""
    steps, values = _series(rows, key)
    axes.plot(steps, values, color=LINE, linewidth=0.8, alpha=0.35)
    axes.plot(steps, smoothed(values), color=LINE, linewidth=1.8, label=label)
    return steps


def smoothed(values: Sequence[float]) -> list[float]:
    """Moving average of finite values: each with 2% of all values on either side (at least one neighbour). NaN where there
    are none. The time is linear in `values`, of which a run of weeks has a million.

    Values are cut into blocks of a window's width: a window is the end of one block and the beginning of the next, whose sums
    hold no value from outside it. A difference of two sums would lose every value smaller than the rounding of a large one.
    """
    reach, count = max(1, round(0.02 * len(values))), len(values)
    width = 2 * reach + 1
    scale = 0.5 ** width.bit_length()  # no sum of a window overflows
    finite = [value * scale if isfinite(value) else 0.0 for value in values]
    counts = [0, *accumulate(map(isfinite, values))]
    beginnings: list[float] = []  # of each value's block, the sum up to it
    ends: list[float] = []  # of each value's block, the sum from it on
    for start in range(0, count, width):
        block = finite[start : start + width]
        beginnings += accumulate(block)
        ends += reversed([*accumulate(reversed(block))])

    def window_sum(first: int, last: int) -> float:
        if first // width < last // width:
            return ends[first] + beginnings[last]
        return beginnings[last] if first % width == 0 else ends[first]

    windows = ((max(0, index - reach), min(count, index + reach + 1)) for index in range(count))
    return [window_sum(begin, end - 1) / (counts[end] - counts[begin] or nan) / scale for begin, end in windows]


def _draw_marks(axes: Any, marks: Sequence[RunMark], last: int) -> None:
    """Draw a dotted line and a text for each event of the run."""
    for mark in marks:
        if 0 < mark.step < last:
            axes.axvline(mark.step, color=INK, linewidth=0.9, linestyle=":")
            annotation = axes.annotate(
                fill(mark.text, MARK_LETTERS), (mark.step, 1.0), xycoords=("data", "axes fraction"), xytext=(3, -4),
                textcoords="offset points", rotation=90, va="top", fontsize=7, color=INK,
            )  # fmt: skip
            annotation.set_in_layout(False)  # else a long one takes the room of the axes


def plot_tokens_per_second(rows: Sequence[Mapping[str, Any]], path: Path, *, since: int = 0, marks: Sequence[RunMark]) -> Path:
    """Plot tokens per second by step, raw and smoothed, and their median after step `since` (earlier steps may have had another
    layout)."""
    from statistics import median

    figure, axes = new_figure("Throughput", "step", "tokens per second")
    steps, rates = _series(rows, "perf/tokens_per_s")
    middle = median(rate for step, rate in zip(steps, rates, strict=True) if step > since)
    _draw_smoothed(axes, rows, "perf/tokens_per_s", "smoothed")
    label = f"median {middle:,.0f}" + (f" after step {since:,}" if since else "")
    axes.plot([max(since + 1, steps[0]), steps[-1]], [middle, middle], color=SECOND, linewidth=1.2, label=label)
    axes.set_ylim(0, max(rates) * 1.15)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    _draw_marks(axes, marks, steps[-1])
    axes.legend(frameon=False, loc="lower right")
    return save_figure(figure, path)


def plot_noise_scale(rows: Sequence[Mapping[str, Any]], path: Path) -> Path:
    """Plot the critical batch size by step, as smoothed by the trainer, and the actual batch size; tokens, on a log axis."""
    figure, axes = new_figure("Gradient noise scale: the batch beyond which more buys little", "step", "tokens")
    steps, batches = _series(rows, "progress/tokens_per_batch")
    axes.plot(*_series(rows, "train/noise_scale_tokens"), color=LINE, linewidth=1.6, label="noise scale")
    axes.plot(steps, batches, color=SECOND, linewidth=1.2, drawstyle="steps-post", label="batch of a step")
    axes.set_yscale("log")
    axes.legend(frameon=False, loc="upper left")
    return save_figure(figure, path)


def plot_memory(
    timeline: Sequence[Mapping[str, Any]],
    path: Path,
    *,
    planned_peak_bytes: int | None = None,
    planned_timeline: Sequence[Mapping[str, Any]] = (),
    title: str = "Memory of rank 0 by category",
) -> Path:
    """Plot live bytes by category, stacked, over operations; a line marks the start of each step.

    A `planned_timeline` is drawn on the left, on the same scale.
    """
    panels = {"planned": planned_timeline, "measured": timeline} if planned_timeline else {"": timeline}
    peak = max(sum(row["bytes"].values()) for rows in panels.values() for row in rows)
    unit, word = (GIB, "GiB") if peak >= GIB else (MIB, "MiB")
    figure, first = new_figure(title, "operations, in order", word, width=8 if len(panels) == 1 else 13)
    shown = [category for category in COLORS if any(row["bytes"].get(category) for rows in panels.values() for row in rows)]
    top = max(peak, planned_peak_bytes or 0) / unit * 1.12
    axes = first
    for number, (name, rows) in enumerate(panels.items()):
        if len(panels) > 1:
            if number == 0:
                first.remove()
            axes = figure.add_subplot(1, len(panels), number + 1)
            _dress(axes, name, "operations, in order", word if number == 0 else "")
        _draw_memory(axes, rows, shown, unit, top)
        if planned_peak_bytes is not None:
            label = f"planned peak {planned_peak_bytes / unit:.1f}"
            axes.axhline(planned_peak_bytes / unit, color=INK, linewidth=1.1, linestyle=(0, (4, 3)), label=label)
    if len(panels) > 1:
        figure.suptitle(title, fontsize=12, fontweight="bold", color=INK)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
    return save_figure(figure, path)


def _draw_memory(axes: Any, rows: Sequence[Mapping[str, Any]], shown: Sequence[str], unit: int, top: float) -> None:
    layers = [[row["bytes"].get(category, 0) / unit for row in rows] for category in shown]
    axes.stackplot(range(len(rows)), layers, labels=shown, colors=[COLORS[c] for c in shown], linewidth=0, step="post")
    for index, row in enumerate(rows):
        if index == 0 or row["step"] != rows[index - 1]["step"]:
            axes.axvline(index, color=INK, linewidth=0.6, alpha=0.5)
            axes.text(index + len(rows) * 0.006, top * 0.985, f"step {row['step']}", fontsize=8, color=INK, va="top")
    axes.set_xlim(0, len(rows) - 1)
    axes.set_ylim(0, top)
    axes.set_xticks([])


def _validation_name(key: str) -> str:
    """`val/loss` or `val/loss/NAME` in words."""
    source = key.removeprefix("val/loss").strip("/")
    return f"validation, {source}" if source else "validation"


def _series(rows: Sequence[Mapping[str, Any]], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of the rows that have `key`; the later one if a step was written twice."""
    values = {int(row["step"]): float(row[key]) for row in rows if row.get(key) is not None}
    return sorted(values), [values[step] for step in sorted(values)]


def new_figure(title: str, across: str, up: str, *, width: float = 8) -> tuple[Any, Any]:
    """A figure and its axes, in the style of all pictures here; labels of the axes `across` and `up`. `width` in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)  # no pyplot: it keeps figures alive and may look for a screen
    axes = figure.add_subplot()
    _dress(axes, title, across, up)
    return figure, axes


def _dress(axes: Any, title: str, across: str, up: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK)
    axes.set_xlabel(across, color=INK)
    axes.set_ylabel(up, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#9aa2ab")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    if across == "step":
        axes.xaxis.get_major_locator().set_params(integer=True)


def save_figure(figure: Any, path: Path) -> Path:
    """Write the figure to `path` in the format of its suffix, and return it. Raises OSError that names `path`."""
    picture = BytesIO()
    figure.savefig(picture, facecolor="white", format=path.suffix.removeprefix("."))
    write_output(path, picture.getvalue())
    return path
