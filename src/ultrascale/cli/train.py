"""`ultrascale train`: train, or go on where a run stopped."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import tyro

from ultrascale.spec.resolve import resolve, to_toml
from ultrascale.spec.run import Run


def train(
    run: Annotated[str, tyro.conf.Positional],
    /,
    processes: int | None = None,
    max_restarts: int = 3,
    allow_changes: bool = False,
    json: bool = False,
) -> tuple[str, int | None, int, bool, bool]:
    """Train a run, or go on where it stopped. The same command does both.

    Any setting can follow as a dotted flag:

        ultrascale train run.toml --processes 2 --layout.zero-stage 3 --steps 200

    Under torchrun this is one rank: torchrun --nproc-per-node 8 -m ultrascale train run.toml --layout.dp 8

    Args:
        run: The run's TOML file, or the folder of a run.
        processes: Start this many processes here and share the batch between them (layout.dp).
        max_restarts: Start the processes again this often when one of them dies.
        allow_changes: Go on from a checkpoint although model, data, batch or seed have changed.
        json: At the end print one JSON object.
    """
    return run, processes, max_restarts, allow_changes, json


def command(arguments: list[str]) -> int:
    """Run the verb; 0 when the run is complete or was stopped in order, 1 when it failed."""
    parsed, rest = tyro.cli(train, prog="ultrascale train", args=arguments, return_unknown_args=True)
    path, processes, max_restarts, allow_changes, as_json = parsed
    overrides = rest if processes is None else [*rest, "--layout.dp", str(processes)]
    resolved = resolve(path, overrides, require_data=True).run
    if "WORLD_SIZE" in os.environ or resolved.layout.dp == 1:
        finished = _train_here(resolved, allow_changes)
    else:
        finished = _launch(resolved, max_restarts, allow_changes)
    if as_json and int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(_summary(resolved, finished)))
    return 0 if finished else 1


def _train_here(run: Run, allow_changes: bool) -> bool:
    from ultrascale.train.worker import train_or_explain

    return train_or_explain(run, allow_changes=allow_changes) is not None


def _launch(run: Run, max_restarts: int, allow_changes: bool) -> bool:
    from ultrascale.cli.main import say
    from ultrascale.launch.local import launch_local
    from ultrascale.train.run_folder import RunFolder
    from ultrascale.train.worker import FAILURE

    folder = RunFolder.of(run)
    failure = folder.path / FAILURE
    failure.unlink(missing_ok=True)
    folder.write_text("requested.toml", to_toml(run))

    def progress() -> str | None:
        if failure.exists():
            return None
        return max((path.name for path in folder.checkpoints.glob("step-*")), default="none")

    ending = launch_local(
        folder.path / "requested.toml",
        run.layout.dp,
        worker_arguments=("--allow-changes",) if allow_changes else (),
        max_restarts=max_restarts,
        say=say,
        progress=progress,
    )
    if ending.reason and not ending.stopped and not failure.exists():
        say(f"{ending.reason}. What is saved is in {folder.checkpoints}.")
    return not ending.reason or ending.stopped


def _summary(run: Run, finished: bool) -> dict[str, object]:
    folder = Path(run.folder) / run.name
    rows = (folder / "metrics.jsonl").read_text().splitlines() if (folder / "metrics.jsonl").exists() else []
    return {"finished": finished, "folder": str(folder), "last": json.loads(rows[-1]) if rows else None}
