"""Pastes into Markdown files what the commands they show print: every block under `<!-- prints: ultrascale ... -->`.

    python .ci/paste_printed.py README.md docs/*.md            writes them anew
    python .ci/paste_printed.py --check README.md              says which are no longer true; exit code 1 if one is

A sample is still true if its words are the same and each number is within TOLERANCE of what is printed now: a constant of the
planner that is fitted again moves every step time by a little, and is no reason to stop a build.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SAMPLE = re.compile(r"(<!-- prints: ultrascale (.*?) -->\n```text\n)(.*?)(```)", re.DOTALL)
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
DRAWN = re.compile(r"[█▏░·]+| {2,}")
"""Bars and columns, whose lengths follow the numbers."""
TOLERANCE = 0.05
WIDTH = "100"


def printed(command: str) -> str:
    """What `ultrascale command` prints on a terminal of WIDTH columns, without blanks at the ends of lines."""
    environment = {**os.environ, "COLUMNS": WIDTH, "PYTHONPATH": str(ROOT / "src")}
    words = [sys.executable, "-m", "ultrascale", *command.split()]
    done = subprocess.run(words, capture_output=True, text=True, env=environment, cwd=ROOT)
    return "".join(f"{line.rstrip()}\n" for line in done.stdout.rstrip().splitlines())


def same(shown: str, now: str) -> bool:
    """Whether two texts have the same words, in as many lines, and numbers that are near."""
    old, new = ([DRAWN.sub(" ", NUMBER.sub("0", line)).strip() for line in text.splitlines()] for text in (shown, now))
    numbers = ([float(one.replace(",", "")) for one in NUMBER.findall(text)] for text in (shown, now))
    return old == new and all(abs(a - b) <= TOLERANCE * max(a, b) for a, b in zip(*numbers, strict=True))


def pasted(sample: re.Match[str]) -> str:
    """A sample with what its command prints now."""
    return sample[1] + printed(sample[2]) + sample[4]


def stale(text: str) -> list[str]:
    """Commands of the samples in `text` that print something else now."""
    return [command for _, command, shown, _ in SAMPLE.findall(text) if not same(shown, printed(command))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args()
    wrong = 0
    for file in options.files:
        text = file.read_text()
        if not options.check:
            file.write_text(SAMPLE.sub(pasted, text))
            continue
        for command in stale(text):
            print(f"{file}: `ultrascale {command}` prints something else now: python .ci/paste_printed.py {file}")
            wrong = 1
    return wrong


if __name__ == "__main__":
    sys.exit(main())
