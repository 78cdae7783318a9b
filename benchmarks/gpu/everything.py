"""All that waits for a GPU, one after the other: figures, the primer, and the tests marked `gpu`.

    python benchmarks/gpu/everything.py --name h200 [--only steps kernels] [--within 570] [--toy]

Each is a process of its own with a limit of time under ten minutes, for machines that are lent by the call, and what fails or
hangs costs the others nothing. What it prints goes to `results/NAME/*.txt`, what it records to `results/NAME/*.json`; a line
each says what came of it, and where one failed this exits with 1. Nothing need be installed of this project; what is missing of
others' packages is said first, with what it costs, and may lie in `benchmarks/gpu/packages` (`pip install --target`). Machine,
versions and commit are in `results/NAME/place.json`; `--commit` tells it where the tree is a copy that git does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RECORD = "RECORD"
"""Among the words of a part: the JSON that it writes."""
LINES_SHOWN = 45
"""The table of steps, and what is claimed."""


@dataclass(frozen=True)
class Part:
    """One process: words of Python's command line, and its limit. `toy`: words more on a CPU."""

    words: tuple[str, ...]
    limit_seconds: float
    toy: tuple[str, ...]
    needs: tuple[str, ...] = ("torch", "numpy")
    """Packages without which it does not run at all."""


TESTS = ("-m", "pytest", "-v", "-rs", "--tb=short", "-m", "gpu")
"""Each is told as soon as it has run: what is stopped at its limit has said what it found."""
WORKERS = ("-n", "8")
"""For tests, where pytest-xdist is there: they wait for compilers more than for the device."""
KERNEL_TESTS = "tests/gpu/test_kernels_cuda.py"
TESTS_NEED = ("torch", "numpy", "safetensors", "rich", "pytest", "hypothesis")

PARTS = {
    "steps": Part((f"{HERE}/step_speed.py", "--output", RECORD), 570, ("--toy", "--shapes", "1b", "--steps", "2")),
    "primitives": Part((f"{HERE}/primitives.py", "--output", RECORD), 240, ("--toy",)),
    "gathers": Part((f"{HERE}/gather_speed.py", "--output", RECORD), 570, ("--toy", "--steps", "2")),
    "kernels": Part((f"{HERE}/kernel_speed.py", "--output", RECORD), 300, ()),
    "primer": Part(("-m", "ultrascale.primer"), 180, ("access",), ("torch", "numpy", "triton")),
    "tests": Part((*TESTS, "tests/gpu", f"--ignore={KERNEL_TESTS}"), 570, (), TESTS_NEED),
    "kernel-tests": Part((*TESTS, KERNEL_TESTS, "tests/kernels"), 570, (), TESTS_NEED),
}
"""Figures first, then what they rest on."""
NO_TESTS = 5
"""pytest's exit code where it runs none, as without a GPU."""
PACKAGES = HERE / "packages"
OPTIONAL = {
    "triton": "no kernels of ours, nothing compiled", "transformers": "no Hugging Face beside us",
    "liger_kernel": "no Liger beside us",
}  # fmt: skip
"""What goes on without, and what is lost."""


def search_path() -> list[str]:
    """Where the parts find packages before their own places."""
    return [str(ROOT / "src"), *([str(PACKAGES)] if PACKAGES.is_dir() else []), *filter(None, [os.environ.get("PYTHONPATH")])]


def is_there(package: str) -> bool:
    """Whether a part can import it; it is not imported here."""
    places = [place for one in search_path() for place in one.split(os.pathsep)]
    return PathFinder.find_spec(package, [*places, *sys.path]) is not None


def say_what_is_missing(names: list[str]) -> None:
    """One line for each package that is not there."""
    needed = {package: [one for one in names if package in PARTS[one].needs] for one in names for package in PARTS[one].needs}
    lost = {package: f"{', '.join(parts)} cannot run" for package, parts in needed.items()}
    for package, cost in (OPTIONAL | lost).items():
        if not is_there(package):
            where = PACKAGES.relative_to(ROOT)
            print(f"{package} is not installed: {cost}. `pip install --target {where} {package.replace('_', '-')}`", flush=True)


def said_by(*words: str) -> str:
    """What a command prints; nothing where it fails or is not there."""
    with suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, timeout=30).stdout.strip()
    return ""


def place(commit: str) -> dict[str, object]:
    """Where and with what everything runs."""
    versions = {}
    for package in ("torch", "triton", "numpy", *OPTIONAL, "flash_attn"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    return {
        "commit": commit or said_by("git", "describe", "--always", "--dirty"), "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(), "packages": versions,
        "gpus": said_by("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader").splitlines(),
    }  # fmt: skip


def run(name: str, folder: Path, left_seconds: float, *, toy: bool) -> str:
    """Run a part, for as long as it may or is left; in words what went wrong, empty if nothing did."""
    part = PARTS[name]
    limit = min(part.limit_seconds, left_seconds)
    more = part.toy if toy else WORKERS if "pytest" in part.words and is_there("xdist") else ()
    words = [str(folder / f"{name}.json") if word == RECORD else word for word in (*part.words, *more)]
    with (folder / f"{name}.txt").open("w") as told:
        child = subprocess.Popen(
            [sys.executable, *words], cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join(search_path())}, stdout=told,
            stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        try:
            code = child.wait(limit)
        except subprocess.TimeoutExpired:
            return f"was stopped after {limit:.0f} s"
        finally:
            end(child)
    return "" if code == 0 or (toy and "pytest" in part.words and code == NO_TESTS) else f"ended with {code}"


def end(child: subprocess.Popen[bytes]) -> None:
    """End whatever is left of it and of those it started."""
    with suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def main(words: list[str] | None = None) -> int:
    """Run what is asked for: 0 if all went well."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="gpu", help="folder under results")
    parser.add_argument("--results", type=Path, default=HERE / "results")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--within", type=float, default=float("inf"), help="seconds for all parts together")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--commit", default="", help="of this tree, where git does not know it")
    asked, started = parser.parse_args(words), time.monotonic()
    folder = asked.results / asked.name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "place.json").write_text(json.dumps(place(asked.commit), indent=1) + "\n")
    wrong = 0
    say_what_is_missing(asked.only)
    for name in asked.only:
        begun = time.monotonic()
        left = asked.within - (begun - started)
        problem = run(name, folder, left, toy=asked.toy) if left > 0 else "no time was left"
        wrong += bool(problem)
        print(f"{name}: {problem or 'done'}, {time.monotonic() - begun:.0f} s", flush=True)
        if left > 0:
            print(*(folder / f"{name}.txt").read_text().splitlines()[-LINES_SHOWN:], sep="\n", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
