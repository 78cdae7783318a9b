"""What the launcher starts: one rank of a run, described by one resolved file. Imports nothing a bare GPU machine may lack."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Run
from ultrascale.train.loop import Outcome, train
from ultrascale.train.run_folder import RunFolder

FAILURE = "failure.json"
"""Written into the run's folder when a rank fails in a way that would repeat itself."""


def main() -> int:
    """Train the run in the file named first; `--allow-changes` may follow. Returns the process's exit code."""
    run = resolve(Path(sys.argv[1])).run
    return 0 if train_or_explain(run, allow_changes="--allow-changes" in sys.argv[2:]) is not None else 1


def train_or_explain(run: Run, *, allow_changes: bool) -> Outcome | None:
    """Train; an error meant for people is printed with its rank and kept in the run's folder, and None is returned."""
    try:
        return train(run, allow_changes=allow_changes)
    except Exception as error:
        if type(error).__module__.split(".")[0] != "ultrascale" or os.environ.get("ULTRASCALE_TRACEBACK") == "1":
            raise
        rank = int(os.environ.get("RANK", "0"))
        # Ranks mostly fail together and with the same words: one of them says it.
        if rank == 0 or f"rank {rank}" in str(error):
            print(f"ultrascale: error on rank {rank}: {error}", file=sys.stderr, flush=True)
        RunFolder.of(run).write_json(FAILURE, {"rank": rank, "error": type(error).__name__, "message": str(error)})
        return None


if __name__ == "__main__":
    sys.exit(main())
