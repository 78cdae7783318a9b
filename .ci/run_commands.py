"""Runs the commands of Markdown files as a reader would: every block fenced as ```bash, in order, from the repository's root.

    python .ci/run_commands.py [--skip "make test"] README.md docs/getting-started.md [--beside docs/*.md]

A block that cannot run on any machine (a cluster, a GPU) is fenced as ```text or ```console instead. Lines that match a --skip
(a shell's pattern) are left out. The blocks of one file share a shell's directory but not its variables; the first that fails
ends the run. Files after --beside may need what those before them made, but nothing of each other: two run at a time.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path

AT_ONCE = 2
"""Most commands compute in one thread, and much of each is waiting for imports."""
ACTIVATE = "source .venv/bin/activate"
BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def bash_blocks(text: str) -> list[tuple[int, str]]:
    """The line number and the commands of every ```bash block."""
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in BLOCK.finditer(text)]


def run_block(commands: str, environment: dict[str, str], where: str) -> str:
    """Run one block; what it printed. Raises Failed if a command of it fails."""
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, errors="replace",
    )  # fmt: skip
    told = f"::: {where}\n{commands.rstrip()}\n{done.stdout}::: {where} took {time.monotonic() - started:.1f} s"
    if done.returncode != 0:
        raise Failed(f"{told}\n{where}: the command failed with exit code {done.returncode}")
    return told


class Failed(Exception):
    """A block that did not run to its end; the text is all that it printed."""


def run_file(file: Path, skip: list[str], environment: dict[str, str]) -> int:
    """Run the blocks of a file in order and print what each printed; how many there were."""
    count = 0
    for line, block in bash_blocks(file.read_text()):
        rows = block.splitlines(keepends=True)
        commands = "".join(row for row in rows if not any(fnmatch(row.strip(), pattern) for pattern in skip))
        if commands.replace(ACTIVATE, "").strip():
            print(run_block(commands, environment, f"{file}:{line}"), flush=True)
            count += 1
    return count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", action="append", default=[], help="command lines to leave out, as a shell's pattern")
    parser.add_argument("--beside", nargs="+", type=Path, default=[], help="files to run two at a time, after the others")
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    binaries = Path(".venv/bin").resolve()
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    files = list(dict.fromkeys(options.files))
    beside = [file for file in dict.fromkeys(options.beside) if file not in files]
    try:
        count = sum(run_file(file, options.skip, environment) for file in files)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            running = [pool.submit(run_file, file, options.skip, environment) for file in beside]
            try:
                count += sum(one.result() for one in running)
            finally:
                pool.shutdown(cancel_futures=True)
    except Failed as error:
        sys.exit(str(error))
    if not count:
        sys.exit("no bash block found: nothing was checked")


if __name__ == "__main__":
    main()
