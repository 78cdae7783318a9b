"""`ultrascale checkpoint list|verify FOLDER`: lists checkpoints, and verifies that every byte is as saved."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json, waiting
from ultrascale.cli.terminal.stores import store_of
from ultrascale.config.failures import problem_lines, problems_in
from ultrascale.config.rules.early import expect_checkpoints
from ultrascale.console import plain_table
from ultrascale.description.units import count_of, format_bytes

if TYPE_CHECKING:
    from ultrascale.checkpoint.listing import CheckpointSummary

ABOUT = "List the checkpoints of a run, or verify that every byte is as saved."


@dataclass
class List:
    """List checkpoints: step, size, and whether manifest and file sizes are right (`verify` also reads the bytes).

    Exit code 1 if there are none, or any is damaged.

    Example: ultrascale checkpoint list out/run
    """

    folder: tyro.conf.Positional[Path]
    """Folder of a run, its `checkpoints`, or one `step-...` in it; or the URL of a stored run, as in
    s3://BUCKET/PREFIX/NAME."""
    json: bool = False
    """Print one JSON object."""


@dataclass
class Verify:
    """Read every byte of the checkpoints and compare with the checksums computed when they were saved.

    Exit code 1 if there are none, or any is damaged.

    Example: ultrascale checkpoint verify out/run/checkpoints/step-00000100
    """

    folder: tyro.conf.Positional[Path]
    """Folder of a run, its `checkpoints`, or one `step-...` in it; or the URL of a stored run, as in
    s3://BUCKET/PREFIX/NAME."""
    json: bool = False
    """Print one JSON object."""


def command(arguments: list[str]) -> int:
    """Parse, check, print. Returns 1 if any checkpoint is damaged."""
    options = parse(List | Verify, "checkpoint", arguments, about=ABOUT)
    if store_of(options.folder) is None:
        expect_checkpoints(options.folder)
    summaries = collect(options.folder, read_all=isinstance(options, Verify))
    damaged = [summary for summary in summaries if summary.problem is not None]
    if options.json:
        store = store_of(options.folder)
        places = [
            str(summary.folder) if store is None else store.where(f"checkpoints/{summary.folder}") for summary in summaries
        ]
        checkpoints = [asdict(summary) | {"folder": place} for summary, place in zip(summaries, places, strict=True)]
        document = {"whole": not damaged, "read_all": isinstance(options, Verify), "checkpoints": checkpoints}
        print_json(document, "checkpoints", indent=2)
    else:
        print_table(summaries, verified=isinstance(options, Verify))
    return 1 if damaged else 0


def collect(folder: Path, *, read_all: bool) -> list[CheckpointSummary]:
    """All summaries; on a terminal, stderr shows the folder that is being read."""
    summaries: list[CheckpointSummary] = []
    with waiting("reading checkpoints") as report_progress:
        from ultrascale.checkpoint.listing import find_checkpoints, summarize
        from ultrascale.checkpoint.stored.fetch import stored_checkpoints, summarize_stored

        store = store_of(folder)
        total = len(find_checkpoints(folder) if store is None else stored_checkpoints(store))
        for summary in summarize(folder, read_all=read_all) if store is None else summarize_stored(store, read_all=read_all):
            summaries.append(summary)
            report_progress(f"reading {count_of(total, 'checkpoint')}, {len(summaries)} done")
    return summaries


def print_table(summaries: list[CheckpointSummary], *, verified: bool) -> None:
    """Print one line per checkpoint, then all damage in full."""
    from rich.markup import escape

    good = "[green]verified[/green]" if verified else "[green]complete[/green]"
    columns = ("checkpoint", "size", "shards", "tensors", "saved", "state")
    named = ("checkpoint", "saved", "state")
    table = plain_table(*columns, left=named, whole=named, padding=(0, 3, 0, 0))
    for summary in summaries:
        state = good if summary.problem is None else "[bold red]damaged[/bold red]"
        if summary.bytes is None or summary.saved_at is None:
            cells = ["?", "?", "?", "?"]
        else:
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(summary.saved_at))
            cells = [format_bytes(summary.bytes), str(summary.shards), str(summary.tensors), saved]
        table.add_row(escape(summary.folder.name), *cells, state)
    console = console_for_people()
    console.print(table)
    for summary in summaries:
        if summary.problem is not None:
            for problem in problems_in(summary.problem, str(summary.folder)):
                console.print(f"\n[red]{escape(problem_lines(problem))}[/red]", soft_wrap=True)
