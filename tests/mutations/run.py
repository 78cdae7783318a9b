"""Plants bugs in a copy of the source, each alone, and lets `check` and tests look for it.

Processes are forked from one that has loaded torch and pytest and nothing of ours, so that each starts in a tenth of a second
and reads the changed source; two at a time, each of them a session of its own that ends with all it started.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent))

from mutations.table import (
    PAGE,
    ROOT,
    SOURCE,
    TESTS,
    Mutation,
    controls,
    page,
    problems,
    read_mutations,
    read_results,
    write_results,
)

LIMIT_SECONDS = {"check": 120, "tests": 240}
"""Of one process. What hangs is ended earlier: by collectives that give up, and by the time limit of tests."""
PATIENCE_SECONDS, TEST_SECONDS = 20, 90
LONGEST_WORD, LONGEST_CASE = 100, 40
"""Of what ranks and parameters of tests are told by, in the table."""
_PLACE = re.compile(r"(?:/[\w.-]+)+/|\[\S*?\]:\d+|\b[\d.]+:\d+\b|\b[0-9a-f]{8,}\b")
"""Paths, ports and names of this machine, in what a process says before it ends."""


@dataclass
class Job:
    """A bug and who looks for it, and the process that does."""

    mutation: Mutation
    who: str
    folder: Path
    pid: int = 0
    started: float = field(default_factory=time.monotonic)

    @property
    def told(self) -> Path:
        return self.folder / "told.json"


def run(
    mutations: Iterable[Mutation], *, note: Callable[[dict[str, dict[str, Any]]], None], workers: int = 2
) -> dict[str, dict[str, Any]]:
    """Of each the row that `write_results` takes: what `check` said, the tests that failed; empty where unseen. `note`
    is told again and again of all that is known."""
    _warm()
    found: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="mutations-") as home:
        whole = Path(home) / "whole"
        shutil.copytree(SOURCE, whole / "ultrascale")  # with what Python has compiled: times of files are kept
        todo = deque(
            Job(one, who, Path(home) / f"{number}-{who}")
            for number, one in enumerate(mutations)
            for who in ("check", "tests")
            if getattr(one, who)
        )
        under_way: list[Job] = []
        while todo or under_way:
            while todo and len(under_way) < workers:
                under_way.append(_start(todo.popleft(), whole))
            time.sleep(0.05)
            for job in [job for job in under_way if _has_ended(job)]:
                under_way.remove(job)
                row = found.setdefault(job.mutation.name, _row(job.mutation))
                row[job.who], row["seconds"] = _said(job), round(row["seconds"] + time.monotonic() - job.started, 1)
                print(
                    f"{len(todo) + len(under_way):4} left  {job.mutation.name} {job.who}: {row[job.who] or 'nothing seen'}",
                    flush=True,
                )
                note(found)
                shutil.rmtree(job.folder, ignore_errors=True)
    return found


def _row(one: Mutation) -> dict[str, Any]:
    return {"digest": one.digest, "check": "", "tests": "", "seconds": 0.0, "on": time.strftime("%Y-%m-%d")}


def _warm() -> None:
    """Load what takes long, once. Nothing of ours: its source is what changes."""
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    sys.dont_write_bytecode = True
    import hypothesis  # noqa: F401
    import safetensors.torch  # noqa: F401
    import tokenizers  # noqa: F401
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp

    torch.set_num_threads(1)


def _start(job: Job, whole: Path) -> Job:
    tree = job.folder / "src"
    shutil.copytree(whole, tree, copy_function=os.link)
    changed = tree / "ultrascale" / job.mutation.file
    text = job.mutation.planted(changed.read_text())
    changed.unlink()
    changed.write_text(text)
    os.utime(changed, (1, 1))  # older than whatever Python has compiled of it
    job.started = time.monotonic()
    job.pid = os.fork()
    if job.pid == 0:
        _child(job, tree)
    return job


def _child(job: Job, tree: Path) -> None:
    """Look for the bug, write down what was seen, and end."""
    status = 1
    try:
        os.setsid()
        out = os.open(job.folder / "out.txt", os.O_WRONLY | os.O_CREAT)
        for number in (1, 2):
            os.dup2(out, number)
        os.environ["PYTHONPATH"], os.environ["TMPDIR"] = str(tree), str(job.folder)
        tempfile.tempdir = str(job.folder)
        os.environ.pop("ULTRASCALE_NIGHTLY", None)
        sys.path.insert(0, str(tree))
        seen = _by_check(job.mutation) if job.who == "check" else _by_tests(job.mutation, tree)
        job.told.write_text(json.dumps(seen))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _by_check(mutation: Mutation) -> str:
    """What is beyond the tolerance first, or what a rank raised; as `ultrascale check RUN.TOML --own-layout`."""
    from ultrascale.check import prove as pool
    from ultrascale.check.cases import cases
    from ultrascale.check.prove import prove_all
    from ultrascale.config.resolve import resolve
    from ultrascale.launch.forked import RankFailed

    pool.TIMEOUT_SECONDS = PATIENCE_SECONDS
    preset, *settings = mutation.check.split()
    described: dict[str, Any] = {"model.preset": preset, "batch.sequence_length": 512, "batch.sequences_per_batch": 48}
    for key, _, value in (setting.partition("=") for setting in settings):
        with suppress(ValueError):
            value = json.loads(value)
        described[key if "." in key or key == "seed" else f"layout.{key}"] = value
    try:
        verdicts = prove_all(list(cases(resolve(None, described).run, own_layout=True)))
    except RankFailed as error:
        last = str(error).strip().splitlines()[-1]
        return f"raised {last}"
    beyond = [difference for verdict in verdicts for difference in verdict.beyond]
    return next((str(one) for quantity in ("messages", "") for one in beyond if quantity in ("", one.quantity)), "")


def _by_tests(mutation: Mutation, tree: Path) -> str:
    """Of each test the first case that fails, a line each; empty if one of them passes."""
    os.chdir(ROOT)
    failed = [_first_failure(mutation.name, test, tree) for test in mutation.tests]
    return "\n".join(failed) if all(failed) else ""


def _first_failure(name: str, test: str, tree: Path) -> str:
    failed: list[str] = []

    class Seen:
        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed:
                failed.append(report.nodeid.removeprefix("tests/"))

    options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_SECONDS}", "-o", f"pythonpath={tree} tests"]
    code = pytest.main([*options, str(TESTS / test)], plugins=[Seen()])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise RuntimeError(f"{name}: pytest ended with {code!r}")
    return re.sub(rf"\[.{{{LONGEST_CASE},}}\]$", "", failed[0]) if failed else ""


def _has_ended(job: Job) -> bool:
    """Whether its process has, or has had its time and is ended."""
    pid, _ = os.waitpid(job.pid, os.WNOHANG)
    if pid == 0 and time.monotonic() - job.started < LIMIT_SECONDS[job.who]:
        return False
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)
    if pid == 0:
        os.waitpid(job.pid, 0)
    return True


def _said(job: Job) -> str:
    """What the process has written down: nothing, and why on the console, if it could not look."""
    if job.told.exists():
        told = json.loads(job.told.read_text())
        return _PLACE.sub("", told)[:LONGEST_WORD] if job.who == "check" else told
    print(f"{job.mutation.name} by {job.who}:\n{(job.folder / 'out.txt').read_text()[-3000:]}")
    return ""


def main() -> int:
    """0 if all is seen that should be. Results and page are written, or, with `--into FILE`, the results into that alone."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="of faults.toml; default: all")
    parser.add_argument("--control", action="store_true", help="plant nothing; writes nothing but --into")
    parser.add_argument("--into", type=Path, metavar="FILE", help="write the results here, and nothing else")
    asked = parser.parse_args()
    todo = [one for one in read_mutations() if not asked.names or one.name in asked.names]
    todo = controls(todo) if asked.control else todo
    began, records = time.monotonic(), asked.into is None and not asked.control
    found = run(todo, note=write_results if records else lambda rows: None)
    if records:
        PAGE.write_text(page(read_mutations(), read_results()))
    elif asked.into is not None:
        asked.into.write_text(json.dumps(found))
    wrong = problems(todo, found)
    print(f"{len(todo)} in {time.monotonic() - began:.0f} s", *wrong, sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
