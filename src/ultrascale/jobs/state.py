"""State of a run as one word, for job scripts: `python -m ultrascale.jobs.state out/first`.

    complete  0     its last step is done and saved
    stopped   75    saved and exited in order; the same command resumes it
    failed    1     anything else: started and not ended, or never started

torchrun's own exit code does not distinguish the first two, and after a signal is an error for both.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ultrascale.config.resolve import resolve
from ultrascale.description.problems import SpecError
from ultrascale.launch.events import Event, event_of, read_rows

EXIT_CODES = {"complete": 0, "stopped": 75, "failed": 1}
"""75 is EX_TEMPFAIL of sysexits: "try again"."""


def state_of(folder: Path) -> str:
    """State of the run in `folder`: one of `EXIT_CODES`."""
    events = [event for row in read_rows(folder / "events.jsonl") if (event := event_of(row)) is not None]
    starts = [number for number, event in enumerate(events) if event.kind == "start"]
    if not starts:
        return "failed"
    if _has_all(events[starts[-1]], folder):
        return "complete"
    kinds = [event.kind for event in events[starts[-1] :]]
    return {"end": "complete", "stop": "stopped"}.get(kinds[-1], "failed")


def _has_all(start: Event, folder: Path) -> bool:
    """True if all steps were done at its last start."""
    try:
        return start.step is not None and start.step >= resolve(folder).run.steps
    except SpecError:
        return False


def main(arguments: list[str]) -> int:
    """Print the state of the run in the given folder, and return its exit code; 2 without one folder."""
    if len(arguments) != 1:
        print("give the folder of one run: python -m ultrascale.jobs.state FOLDER", file=sys.stderr)
        return 2
    state = state_of(Path(arguments[0]))
    print(state)
    return EXIT_CODES[state]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
