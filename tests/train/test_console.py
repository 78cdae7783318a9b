"""A console that goes before the run does: a full disk, a pipe that nobody reads, a stream that was closed."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from train.small_runs import STEPS, make_corpus, rows, small_run, state

from ultrascale.config.resolve import to_toml
from ultrascale.description.layout import Layout
from ultrascale.description.run import Checkpoint, Faults

REDIRECTIONS = {
    "full": ">/dev/full",
    "closed": ">&-",
    "all closed": "<&- >&- 2>&-",
}
"""What follows the command in a shell."""
MANY_STEPS = 250
"""Their lines are more than `head` reads at once and a page: however late it leaves, somebody still writes to its pipe then."""
NIGHTLY = pytest.mark.nightly
CASES = [
    ("full", 1), ("head", 1), ("head", 2), ("closed", 1),
    *(pytest.param(name, count, marks=NIGHTLY) for name, count in (("full", 2), ("closed", 2), ("all closed", 2))),
    *(pytest.param("head of both", count, marks=NIGHTLY) for count in (1, 2)),
]  # fmt: skip


def in_shell(redirection: str, *words: str) -> tuple[int, str]:
    """Exit code of `python -m ultrascale words` in front of a redirection, and what it said on stderr."""
    if redirection.startswith("head"):
        return before_head(redirection, *words)
    script = f'set -o pipefail; "$@" {REDIRECTIONS[redirection]} || exit $?'
    command = ["bash", "-c", script, "bash", sys.executable, "-m", "ultrascale", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=os.environ | {"OMP_NUM_THREADS": "1"})
    return done.returncode, done.stderr


def before_head(redirection: str, *words: str) -> tuple[int, str]:
    """The same in front of `| head -1`, or of `2>&1 | head -1`; the pipe holds one page."""
    reading, writing = os.pipe()
    fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    both = redirection == "head of both"
    with subprocess.Popen(["head", "-1"], stdin=reading, stdout=subprocess.DEVNULL):
        os.close(reading)
        command = [sys.executable, "-m", "ultrascale", *words]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                command, stdout=writing, stderr=writing if both else subprocess.PIPE, text=True, timeout=280, env=environment
            )
        finally:
            os.close(writing)
    return done.returncode, done.stderr or ""


def described(home: Path, processes: int, steps: int) -> tuple[list[str], Path]:
    """The words that train a small run, and its folder."""
    make_corpus(home / "tokens")
    layout = Layout(dp=processes, micro_batch_size=2)
    checkpoint, faults = Checkpoint(every_steps=steps // 2, export=False), Faults(straggler_steps=None)  # any is one at times
    run = small_run(home, layout=layout, steps=steps, checkpoint=checkpoint, faults=faults)
    (home / "run.toml").write_text(to_toml(run))
    many = ["--processes", str(processes)] if processes > 1 else []
    return ["train", str(home / "run.toml"), *many], home / "small"


@pytest.mark.catalogue(26)
@pytest.mark.parametrize(("redirection", "processes"), CASES)
def test_training_goes_on_without_its_console_and_says_so_once(tmp_path, redirection, processes):
    steps = MANY_STEPS if redirection.startswith("head") else STEPS
    words, folder = described(tmp_path, processes, steps)
    code, told = in_shell(redirection, *words)
    assert (code, "Traceback" in told) == (0, False), told
    run = small_run(tmp_path)
    assert rows(run, "step") == [(step + 1,) for step in range(steps)]
    assert len(state(run)) > 0
    events = [json.loads(line)["event"] for line in (folder / "events.jsonl").read_text().splitlines()]
    assert sorted(events) == ["console gone", "end", "start", "stepped"]
    log = (folder / "log.txt").read_text()
    assert [f"step {step}/{steps} " in log for step in range(1, steps + 1)] == [True] * steps
    assert steps == STEPS or len(log) > 2**14
    assert log.count("the console is gone") == 1
    if redirection in ("full", "head", "closed"):
        assert told.count("warning: the console is gone") == 1 and "Exception ignored" not in told


@pytest.mark.parametrize(
    ("redirection", "code", "message"),
    [("full", 1, "could not be written: No space left on device"), ("closed", 0, "")],
)
def test_a_verb_that_prints_ends_in_order_when_it_cannot(redirection, code, message):
    found, told = in_shell(redirection, "show", "models")
    assert found == code, told
    assert message in told and "Traceback" not in told and "Exception ignored" not in told
