"""Launcher like that of `ultrascale train`, for ranks with injected faults and with unlimited restarts."""

from __future__ import annotations

import sys
from pathlib import Path

from ultrascale.config.resolve import resolve, to_toml
from ultrascale.launch.local import launch_local
from ultrascale.run_rows import event_line
from ultrascale.train.folder.run_folder import RunFolder

WITHOUT_END = 1_000_000


def main() -> int:
    """Train the run in the file named first, to its end or until it is stopped; returns the exit code."""
    run = resolve(Path(sys.argv[1])).run
    folder = RunFolder.of(run)
    folder.path.mkdir(parents=True, exist_ok=True)
    ending = launch_local(
        to_toml(run),
        run.layout.world_size,
        max_restarts=WITHOUT_END,
        progress=folder.progress,
        record=lambda event: folder.append("events.jsonl", event_line(event)),
        keep=folder.path,
        worker="ultrascale.soak.worker",
    )
    print(f"launcher: {ending.reason or 'complete'}", flush=True)
    return 0 if not ending.reason or ending.saved else ending.exit_code


if __name__ == "__main__":
    sys.exit(main())
