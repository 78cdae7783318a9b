"""`ultrascale report` as a function: summary and plots of a run's folder."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ultrascale.api.displays import TableRow, frame, html
from ultrascale.api.extras import naming_extras
from ultrascale.api.keywords import read_keywords
from ultrascale.api.stamp import stamped
from ultrascale.description.units import format_bytes, format_count
from ultrascale.page.documents import run_document
from ultrascale.page.html_file import expect_writable, write_document

if TYPE_CHECKING:
    from ultrascale.measure.summary import Summary


@dataclass(frozen=True)
class ReportOptions:
    """Plot a run's loss, speed, memory and noise scale to FOLDER/plots, and print a summary.

    For example:

        ultrascale report out/first
    """

    folder: Path
    """Folder of a run."""
    html: Path | None = None
    """Write the report with its charts to one self-contained HTML file."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, repr=False)
class Report:
    """Metrics and plots of a run."""

    folder: Path
    summary: Summary
    pictures: tuple[Path, ...]
    not_drawn: str = ""
    """Reason why there are no pictures: FOLDER/plots cannot be written, as of somebody else's run."""

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale report --json`."""
        numbers = asdict(self.summary) | {"memory_percent": self.summary.memory_percent}
        return stamped("report", numbers | {"pictures": list(map(str, self.pictures))})

    def metrics(self) -> list[TableRow]:
        """Rows of metrics.jsonl, one per logged step."""
        from ultrascale.measure.plots import read_metrics

        return read_metrics(self.folder / "metrics.jsonl")

    def to_frame(self) -> Any:
        """`metrics` as a pandas DataFrame. Raises NotInstalledError without pandas."""
        return frame(self.metrics(), "metrics()")

    def plot(self) -> Any:
        """A matplotlib figure: loss by step, as in `plots/loss.png`. Raises NotInstalledError without matplotlib."""
        from ultrascale.api.displays import figure
        from ultrascale.measure.plots import draw_loss
        from ultrascale.measure.run_marks import marks_of

        drawing = figure(repr(self))
        axes = drawing.add_subplot()
        draw_loss(axes, self.metrics(), marks_of(self.folder))
        axes.set_xlabel("step")
        axes.set_ylabel("loss, nats per token")
        return drawing

    def lines(self) -> list[tuple[str, str]]:
        """Names and values, as text, of all known quantities."""
        return list(_lines(self.summary))

    def __repr__(self) -> str:
        return f"Report({self.folder}: {'; '.join(f'{name} {text}' for name, text in self.lines()[:3])})"

    def _repr_html_(self) -> str:
        drawn = "".join(
            f"<img style='max-width:48%' src='data:image/png;base64,{b64encode(picture.read_bytes()).decode()}'>"
            for picture in self.pictures
            if picture.is_file()
        )
        return html(str(self.folder), [{"": name, "value": text} for name, text in self.lines()]) + drawn


def report(folder: str | PathLike[str], **settings: Any) -> Report:
    """Summarize a run's folder, and draw its plots into FOLDER/plots: `report("out/first")`.

    Needs matplotlib. Raises SpecError if the folder is not a run's. Where it cannot be written, the report has no pictures.
    """
    request = read_keywords(ReportOptions, "report", {"folder": folder, **settings}, positional=("folder",), run_settings=False)
    with naming_extras("report"):
        return answer(request.options)


def answer(options: ReportOptions) -> Report:
    """Make the requested report."""
    from ultrascale.measure.plots import plot_run_folder
    from ultrascale.measure.run_marks import marks_of
    from ultrascale.measure.summary import logged_rows, summarise

    expect_writable(options.html)
    rows = logged_rows(options.folder)
    summary = summarise(options.folder, rows)
    try:
        report = Report(options.folder, summary, tuple(plot_run_folder(options.folder, rows)))
    except OSError as error:
        report = Report(options.folder, summary, (), f"{error.filename}: {(error.strerror or str(error)).lower()}")
    if options.html is not None:
        document = run_document(report.lines(), rows, str(options.folder), marks_of(options.folder))
        write_document(options.html, document, ["report", str(options.folder)])
    return report


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Names and values of all known quantities."""
    tokens = "" if summary.tokens is None else f", {format_count(summary.tokens)} tokens"
    yield "steps", f"{summary.steps:,}{tokens}"
    if summary.first_loss is not None:
        yield "loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last"
    for name, loss in summary.validation_loss.items():
        yield "val/loss", f"{loss:.4f} {name.removeprefix('val/loss').strip('/')}".rstrip()
    since = f" since the start at step {summary.timed_since:,}" if summary.timed_since else ""
    if summary.tokens_per_second is not None:
        island = " on one island" if summary.of_one_island else ""
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s{island} (median{since})"
    if summary.mfu is not None and summary.hfu is not None:
        yield "MFU, HFU", f"{summary.mfu:.1%}, {summary.hfu:.1%} (medians{since})"
    if summary.memory_percent is not None:
        planned, measured = format_bytes(summary.planned_peak_bytes or 0), format_bytes(summary.measured_peak_bytes or 0)
        percent = round(summary.memory_percent, 1) + 0.0
        when = f" in the first steps, before the start at step {summary.timed_since:,}" if summary.timed_since else ""
        yield "memory", f"{planned} planned, {measured} measured at the peak of rank 0{when}: {percent:.1f}% off"
    if summary.noise_scale_tokens is not None and summary.tokens_per_batch:
        ratio = summary.noise_scale_tokens / summary.tokens_per_batch
        advice = "a larger batch would save steps" if ratio > 1 else "more batch would buy little"
        scale, batch = format_count(summary.noise_scale_tokens), format_count(summary.tokens_per_batch)
        yield "batch", f"{batch} tokens, noise scale {scale}: {ratio:.3g} batches, {advice}"
