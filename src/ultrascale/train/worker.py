"""One rank of a run. The launcher starts it with the path of a resolved run. Imports only packages that a bare GPU machine
has."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from inspect import signature
from pathlib import Path

from torch import distributed as dist

from ultrascale.checkpoint import LostContactError
from ultrascale.config.failures import explained, is_for_people, print_error
from ultrascale.config.resolve import resolve
from ultrascale.contact import meaning_of
from ultrascale.description.rank_environment import env_rank
from ultrascale.description.run import Run
from ultrascale.launch.orphans import end_with_starter
from ultrascale.output_file import write_output
from ultrascale.parallel.lost import LostRankError
from ultrascale.train.loop import train
from ultrascale.train.watch.signs_of_life import has_launcher, signs_folder

YIELD_SECONDS = 0.5
"""A rank that lost contact exits this many seconds later than a rank that died, so that the agent, which polls ten times a
second, reports the one that died.
"""


def main() -> int:
    """Train the run in the file given as first argument; returns the process's exit code."""
    args = build_parser().parse_args()
    if not has_launcher():
        end_with_starter()
    run = resolve(args.run).run
    code = run_or_explain(lambda: _work(run, args), args.failure)
    trains = args.profile is None and args.speed is None
    if code == 0 and trains and args.saved is not None and env_rank() == 0:
        args.saved.touch()
    return code


def build_parser() -> argparse.ArgumentParser:
    """Flags of a rank: those of the launcher, and options of `train`, under the names that it gives them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("run", type=Path)
    parser.add_argument("--rendezvous", default="env://")
    parser.add_argument("--failure", type=Path)
    parser.add_argument("--saved", type=Path)
    parser.add_argument("--launcher", type=int)
    parser.add_argument("--allow-changes", action="store_true")
    parser.add_argument("--ignore-memory", action="store_true")
    parser.add_argument("--leave-by", type=float)
    parser.add_argument("--island", type=int)
    parser.add_argument("--profile", type=Path, help="profile --profile-steps FIRST LAST into this folder, and leave")
    parser.add_argument("--profile-steps", type=int, nargs=2)
    parser.add_argument("--speed", type=Path, help="time --speed-steps WARM TIMED into this file, and leave")
    parser.add_argument("--speed-steps", type=int, nargs=2)
    return parser


def _work(run: Run, args: argparse.Namespace) -> object:
    """Train, profile or time the run."""
    if args.profile is not None:
        from ultrascale.train.observers.profile import profile_run

        first, last = args.profile_steps
        return profile_run(run, first, last, args.profile, rendezvous=args.rendezvous)
    if args.speed is not None:
        from ultrascale.train.speed import measure_speed

        warm, steps = args.speed_steps
        return measure_speed(run, steps, args.speed, warm=warm, rendezvous=args.rendezvous)
    taken = signature(train).parameters
    return train(run, **{name: value for name, value in vars(args).items() if name in taken and name != "run"})


def run_or_explain(work: Callable[[], object], failure: Path | None = None) -> int:
    """Do `work`, and return the exit code: 0 complete or stopped in order, 1 failed, 2 invalid configuration.

    An error addressed to the user is printed with its rank and written to `failure`, so that the launcher does not retry.
    """
    try:
        work()
        return 0
    except Exception as error:
        _write_cause(error)
        has_lost_contact = _has_lost_contact(error)
        if has_lost_contact and has_launcher():
            time.sleep(YIELD_SECONDS)
        if not (is_for_people(error) or has_lost_contact) or os.environ.get("ULTRASCALE_TRACEBACK") == "1":
            raise
        rank = env_rank()
        text = str(error) if is_for_people(error) else f"lost contact with another rank: {meaning_of(error)}"
        code, message = explained(error if is_for_people(error) else text, "train")
        # Ranks mostly fail together with the same message: one of them prints it.
        if rank == 0 or f"rank {rank}" in text:
            print_error(message, rank=rank)
        if failure is not None and not has_lost_contact:
            _write_failure(failure, {"rank": rank, "exit_code": code, "message": text})
        return code


def _has_lost_contact(error: Exception) -> bool:
    """True if a collective failed because another rank is gone; gloo reports that only in the message text."""
    return isinstance(error, dist.DistError | LostRankError | LostContactError) or (
        isinstance(error, RuntimeError) and "gloo" in str(error)
    )


def _write_cause(error: Exception) -> None:
    """Write the cause of this rank's failure where the launcher or the next attempt reads it."""
    folder, rank = signs_folder(), env_rank()
    if folder is not None:
        text = (str(error).strip().splitlines() or [""])[0]
        cause = {"rank": rank, "lost_contact": _has_lost_contact(error), "text": f"{type(error).__name__}: {text}"}
        _write_failure(folder / f"{rank}.cause", cause)


def _write_failure(path: Path, facts: dict[str, object]) -> None:
    with suppress(OSError):  # without the file the launcher only retries once more
        write_output(path, json.dumps(facts))


if __name__ == "__main__":
    sys.exit(main())
