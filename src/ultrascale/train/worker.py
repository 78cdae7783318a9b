"""What torchrun starts: one rank of a run, described by one resolved file. Imports nothing that a bare GPU machine may lack."""

from __future__ import annotations

import sys
from pathlib import Path

from torch.distributed.elastic.multiprocessing.errors import record

from ultrascale.spec.resolve import resolve
from ultrascale.train.loop import train


@record
def main() -> None:
    """Train the run in the file named first; `--allow-changes` may follow."""
    run = resolve(Path(sys.argv[1])).run
    train(run, allow_changes="--allow-changes" in sys.argv[2:])


if __name__ == "__main__":
    main()
