"""`ultrascale report`: the pictures of a run's folder, and a summary."""

from __future__ import annotations

import json as jsonlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from ultrascale.cli.parse import parse
from ultrascale.spec.units import format_bytes, format_count

if TYPE_CHECKING:
    from ultrascale.measure.summary import Summary


def report(folder: Annotated[Path, tyro.conf.Positional], /, json: bool = False) -> tuple[Path, bool]:
    """Draw a run's loss, speed, memory and noise scale into FOLDER/plots, and sum it up.

    For example:

        ultrascale report out/first

    Args:
        folder: A run's folder.
        json: Print one JSON object.
    """
    return folder, json


def command(arguments: list[str]) -> int:
    """Run the verb."""
    folder, as_json = parse(report, "report", arguments)
    from ultrascale.measure.plots import plot_run_folder
    from ultrascale.measure.summary import summarise

    summary = summarise(folder)
    pictures = [str(picture) for picture in plot_run_folder(folder)]
    if as_json:
        print(jsonlib.dumps(asdict(summary) | {"memory_percent": summary.memory_percent, "pictures": pictures}, indent=2))
        return 0
    for name, text in (*_lines(summary), *(("picture", picture) for picture in pictures)):
        print(f"{name:<10}{text}")
    return 0


def _lines(summary: Summary) -> Iterator[tuple[str, str]]:
    """Names and values, of what is known."""
    tokens = "" if summary.tokens is None else f", {format_count(summary.tokens)} tokens"
    yield "steps", f"{summary.steps:,}{tokens}"
    if summary.first_loss is not None:
        yield "loss", f"{summary.first_loss:.4f} at first, {summary.last_loss:.4f} at last"
    for name, loss in summary.validation_loss.items():
        yield "held out", f"{loss:.4f} {name.removeprefix('val/loss').strip('/')}".rstrip()
    since = f" since the start at step {summary.timed_since:,}" if summary.timed_since else ""
    if summary.tokens_per_second is not None:
        yield "speed", f"{summary.tokens_per_second:,.0f} tokens/s (median{since})"
    if summary.mfu is not None and summary.hfu is not None:
        yield "MFU, HFU", f"{summary.mfu:.1%}, {summary.hfu:.1%} (medians{since})"
    if summary.memory_percent is not None:
        planned, measured = format_bytes(summary.planned_peak_bytes or 0), format_bytes(summary.measured_peak_bytes or 0)
        percent = round(summary.memory_percent, 1) + 0.0
        when = f" in the first steps, before the start at step {summary.timed_since:,}" if summary.timed_since else ""
        yield "memory", f"{planned} planned, {measured} measured at the peak of rank 0{when}: {percent:.1f} % off"
    if summary.noise_scale_tokens is not None and summary.tokens_per_batch:
        ratio = summary.noise_scale_tokens / summary.tokens_per_batch
        advice = "a larger batch would save steps" if ratio > 1 else "more batch would buy little"
        scale, batch = format_count(summary.noise_scale_tokens), format_count(summary.tokens_per_batch)
        yield "batch", f"{batch} tokens, noise scale {scale}: {ratio:.3g} batches, {advice}"
