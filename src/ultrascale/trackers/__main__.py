"""`python -m ultrascale.trackers RUN_FOLDER`: send trackers the rows of a run that they lack.

Rank 0 starts it with `--beside`, and it ends with rank 0. Started by hand, it sends the remaining rows: from a machine with a
network, for a run on machines without one.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ultrascale.description.problems import SpecError
from ultrascale.description.sections.trackers import SINKS
from ultrascale.trackers.follow import follow

CLOSE_SECONDS, BY_HAND_SECONDS = 30.0, 600.0
LOCK = ".trackers.lock"


def main() -> int:
    """Follow the run, or send the remaining rows; 0 if every tracker has every row."""
    parser = argparse.ArgumentParser(prog="python -m ultrascale.trackers", description="Give trackers what they lack of a run.")
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    help_text = f"of {', '.join(SINKS)}; else those of the run"
    parser.add_argument("--to", nargs="*", default=[], choices=SINKS, metavar="TRACKER", help=help_text)
    parser.add_argument("--beside", type=int, metavar="PID", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not (arguments.folder / "run.toml").is_file():
        print(f"ultrascale: {arguments.folder} has no run.toml: name the folder of a run", file=sys.stderr)
        return 2
    lines = _launcher_stream() if arguments.beside else sys.stdout

    def say(text: str) -> None:
        for file in dict.fromkeys((lines, sys.stderr)):
            with suppress(OSError):  # the reader has exited, or the disk is full
                print(text, file=file, flush=True)

    def over() -> bool:
        return arguments.beside is None or os.getppid() != arguments.beside or _at_end(sys.stdin.fileno())

    try:
        with _only_follower(arguments.folder):
            seconds = BY_HAND_SECONDS if arguments.beside is None else CLOSE_SECONDS
            has_all = follow(arguments.folder, say, over, close_seconds=seconds, sinks=arguments.to)
    except (SpecError, OSError) as error:
        say(f"warning: no tracker follows this run: {error}")
        has_all = False
    sys.stderr.flush()
    os._exit(0 if has_all else 1)  # exit handlers of libraries may wait for a server that does not respond


def _launcher_stream():
    """Standard output for this package's lines alone; output of the libraries is redirected to stderr."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return lines


def _at_end(file: int) -> bool:
    """True if the other end of this pipe has been closed."""
    readable, _, _ = select.select([file], [], [], 0)
    return bool(readable) and os.read(file, 1) == b""


@contextmanager
def _only_follower(folder: Path) -> Iterator[None]:
    """Context manager in which no other process feeds this run's trackers: waits for the one of the previous attempt."""
    with open(folder / LOCK, "w") as file:
        for _ in range(int((CLOSE_SECONDS + 5) * 10)):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(0.1)
        yield


if __name__ == "__main__":
    sys.exit(main())
