"""Liveness probe for the ranks on this machine: `python -m ultrascale.jobs.alive`, exit code 0 or 1.

Reads the signs of life that ranks write for their watchdog (`ultrascale.heartbeat`), which reports and kills a rank that hangs.
The probe covers a watchdog that is gone or cannot act: it fails for a rank whose next beat is overdue by another
`SLACK_SECONDS`. Without any signs nothing has started, which is not an error: earlier phases have their own time limits.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

from ultrascale.heartbeat import DONE, Heartbeat, read
from ultrascale.launch.scratch import SIGNS_PREFIX, scratch_places

SLACK_SECONDS = 120.0
"""Time for the watchdog, which writes stacks first."""


def overdue(places: Iterable[Path], slack_seconds: float) -> list[Heartbeat]:
    """The last beat of each live rank with signs in one of `places` whose next beat is overdue by more than `slack_seconds`."""
    folders = [folder for place in places for folder in place.glob(f"{SIGNS_PREFIX}*") if folder.is_dir()]
    beats = [beat for folder in folders for beat in read(folder) if beat.doing != DONE and beat.lives]
    return [beat for beat in beats if beat.overdue > slack_seconds]


def main(places: Iterable[Path] | None = None, *, slack_seconds: float = SLACK_SECONDS) -> int:
    """Print the overdue ranks, of `places`, else of this machine."""
    late = overdue(scratch_places() if places is None else places, slack_seconds)
    for beat in late:
        print(f"rank {beat.rank} has given no sign of life for {beat.overdue:.0f} s more than it may: {beat.doing}")
    return 1 if late else 0


if __name__ == "__main__":
    sys.exit(main())
