"""What starting a training costs: fresh processes, from the command to its end after two steps of a model of a few kilobytes.

    python benchmarks/cpu/start_speed.py [--rounds 5] [--only NAME ...] [--against OTHER_CHECKOUT/src] [--json FILE]

CPU seconds of all processes of a command (user and system; Linux, where orphans come to this process) and of the clock.
Commands, and with `--against` two versions of the package, take turns; the first round, which may compile the package, is not
counted. Floors: a process that imports torch, and `torchrun` with ranks that import torch, meet over gloo and leave.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
RUN = """
name = "small"
steps = 2
[model]
preset = "tiny-llama-4m"
vocab_size = 512
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
[batch]
sequence_length = 32
sequences_per_batch = 2
[data]
sources = ["{tokens}"]
"""
PR_SET_CHILD_SUBREAPER = 36
"""Linux's number: processes whose parent has ended become children of this one, which counts what they used."""
MEET = "import torch.distributed as d; d.init_process_group('gloo'); d.barrier(); d.destroy_process_group()"
"""What a rank of torchrun does."""

ULTRASCALE = [sys.executable, "-m", "ultrascale"]

Words = Callable[[Path], list[str]]
"""The words of a command that works in a folder."""


def train(ranks: int) -> Words:
    """`ultrascale train` of a new run with this many ranks."""
    return lambda folder: [*ULTRASCALE, "train", str(folder / "run.toml"), f"--folder={folder}", f"--layout.dp={ranks}"]


def torchrun(ranks: int) -> Words:
    """torchrun with ranks that meet and leave."""
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return lambda folder: [*run, str(folder / "meet.py")]


COMMANDS: dict[str, Words] = {
    "import torch": lambda folder: [sys.executable, "-c", "import torch"],
    "ultrascale --version": lambda folder: [*ULTRASCALE, "--version"],
    "train, 1 rank": train(1),
    "train, 2 ranks": train(2),
    "torchrun, 1 rank": torchrun(1),
    "torchrun, 2 ranks": torchrun(2),
}
OURS = ("ultrascale", "train")
"""How the names begin of commands of this package."""


def main() -> int:
    """Time all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*COMMANDS], nargs="+", default=[*COMMANDS])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    sources = {"this": SOURCE} | ({"other": options.against} if options.against else {})
    with tempfile.TemporaryDirectory() as place:
        rows = timed(options.only, options.rounds, sources, prepared(Path(place)))
    for row in rows:
        print(
            f"{row['command']:<22} {row['version']:<6} CPU {row['processor_median']:5.2f} s "
            f"({row['processor_least']:.2f} to {row['processor_most']:.2f})  clock {row['clock_median']:5.2f} s"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return 0


def timed(names: list[str], rounds: int, sources: dict[str, Path], tokens: Path) -> list[dict[str, str | float]]:
    """A row for each command and, if it is of this package, each version."""
    processor, clock = defaultdict[tuple[str, str], list[float]](list), defaultdict[tuple[str, str], list[float]](list)
    for number in range(rounds + 1):
        for name in names:
            for version, source in (sources if name.startswith(OURS) else {"": SOURCE}).items():
                used, passed = measured(COMMANDS[name], source, tokens)
                processor[name, version] += [used] if number else []
                clock[name, version] += [passed] if number else []
    return [
        {
            "command": name, "version": version, "processor_median": statistics.median(used), "processor_least": min(used),
            "processor_most": max(used), "clock_median": statistics.median(clock[name, version]),
            "clock_least": min(clock[name, version]),
        }
        for (name, version), used in processor.items()
    ]  # fmt: skip


def prepared(folder: Path) -> Path:
    """Tokens of some text, in `folder`."""
    (folder / "text").mkdir()
    (folder / "text" / "some.txt").write_text(
        "".join(f"{number} times {number} is {number * number}\n" for number in range(9999))
    )
    command = [
        *ULTRASCALE,
        "data",
        "prepare",
        str(folder / "text"),
        "--train-tokenizer",
        "512",
        "--output",
        str(folder / "tokens"),
    ]
    ended = subprocess.run(command, env=os.environ | {"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return folder / "tokens"


def measured(words: Words, source: Path, tokens: Path) -> tuple[float, float]:
    """Seconds of processors and of the clock of one command, in a folder of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment |= {"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as printed:
        folder = Path(place)
        (folder / "run.toml").write_text(RUN.format(tokens=tokens))
        (folder / "meet.py").write_text(MEET)
        started = time.perf_counter()
        process = subprocess.Popen(words(folder), env=environment, cwd=folder, stdout=printed, stderr=printed)
        _, status, used = os.wait4(process.pid, 0)
        passed, processor = time.perf_counter() - started, used.ru_utime + used.ru_stime
        process.returncode = os.waitstatus_to_exitcode(status)
        with suppress(ChildProcessError):  # none is left
            while True:
                used = os.wait4(-1, 0)[2]
                processor += used.ru_utime + used.ru_stime
        printed.seek(0)
        assert process.returncode == 0, f"{process.args} ended with {process.returncode}:\n{printed.read().decode()}"
    return processor, passed


if __name__ == "__main__":
    sys.exit(main())
