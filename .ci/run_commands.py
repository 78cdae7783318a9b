"""Runs the commands of Markdown files as a reader would: every block fenced as ```bash, in order, from the repository's root.

    python .ci/run_commands.py [--skip "make test"] README.md docs/*.md

A block that cannot run on any machine (a cluster, a GPU) is fenced as ```text or ```console instead. Lines equal to a --skip
are left out. The blocks of one file share a shell's directory but not its variables; the first that fails ends the run.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from pathlib import Path

BLOCK = re.compile(r"^```bash\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def bash_blocks(text: str) -> list[tuple[int, str]]:
    """The line number and the commands of every ```bash block."""
    return [(text.count("\n", 0, found.start(1)) + 1, found.group(1)) for found in BLOCK.finditer(text)]


def run_block(commands: str, environment: dict[str, str], where: str) -> None:
    """Run one block; raises SystemExit naming file and line if a command of it fails."""
    started = time.monotonic()
    print(f"::: {where}\n{commands.rstrip()}", flush=True)
    code = subprocess.run(["bash", "-euo", "pipefail", "-c", commands], env=environment, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        sys.exit(f"{where}: the command failed with exit code {code}")
    print(f"::: {where} took {time.monotonic() - started:.1f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--skip", action="append", default=[], help="a command line to leave out")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    binaries = Path(".venv/bin").resolve()
    environment = {**os.environ, "PATH": f"{binaries}{os.pathsep}{os.environ['PATH']}"}
    count = 0
    for file in dict.fromkeys(options.files):
        for line, block in bash_blocks(file.read_text()):
            commands = "".join(row for row in block.splitlines(keepends=True) if row.strip() not in options.skip)
            if commands.strip():
                run_block(commands, environment, f"{file}:{line}")
                count += 1
    if not count:
        sys.exit("no bash block found: nothing was checked")


if __name__ == "__main__":
    main()
