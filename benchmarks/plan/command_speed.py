"""CPU seconds and memory of `ultrascale plan` as a user starts it: fresh processes, imports and printing included.

    python benchmarks/plan/command_speed.py [--rounds 5] [--only one] [--against OTHER_CHECKOUT/src] [--json FILE]

User and system time of all threads of the process, least and median of the rounds, in which the commands, and with `--against`
two versions of the package, take turns. The first round, which may compile the package, is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src"
README = "--model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M --brief"


@dataclass(frozen=True)
class Command:
    """Words after `ultrascale plan`, and the CPU seconds that it should take at most."""

    words: str
    limit_seconds: float


COMMANDS = {
    "one": Command(f"{README} --dp 64 --zero-stage 3", 0.5),
    "readme": Command(README, 0.8),
    "its ten rows": Command(README.removesuffix(" --brief"), 1.2),  # a bar of our own
    "gpt-3 175B on 512 A100": Command("--model gpt3-175b --gpus 512xa100 --seq-len 2048 --sequences-per-batch 1536", 2.0),
    "llama 405B on 16,384 H100": Command(
        "--model llama-3.1-405b --gpus 16384xh100 --seq-len 8192 --sequences-per-batch 2048", 2.0
    ),
    "deepseek-v3 on 2,048 H800": Command(
        "--model deepseek-v3 --gpus 2048xh800 --seq-len 4096 --sequences-per-batch 15360", 6.0
    ),
}


def main() -> int:
    """Time all, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=[*COMMANDS], nargs="+", default=[*COMMANDS])
    parser.add_argument("--against", type=Path)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    sources = {"this": SOURCE} | ({"other": options.against} if options.against else {})
    seconds, memory = defaultdict[tuple[str, str], list[float]](list), defaultdict[tuple[str, str], list[int]](list)
    for number in range(options.rounds + 1):
        for name in options.only:
            for version, source in sources.items():
                took, most = measured(COMMANDS[name].words, source)
                seconds[name, version] += [took] if number else []
                memory[name, version].append(most)
    rows = [
        {
            "command": name, "version": version, "least": min(some), "median": statistics.median(some),
            "limit": COMMANDS[name].limit_seconds, "peak_mib": max(memory[name, version]) / 1024,
        }
        for (name, version), some in seconds.items()
    ]  # fmt: skip
    for row in rows:
        verdict = "within" if row["least"] <= row["limit"] else "OVER"
        print(
            f"{row['command']:<28} {row['version']:<6} {row['least']:6.2f} s least {row['median']:6.2f} s median  "
            f"{verdict} {row['limit']:g} s  {row['peak_mib']:5.0f} MiB"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + "\n")
    return int(any(row["least"] > row["limit"] for row in rows if row["version"] == "this"))


def measured(words: str, source: Path) -> tuple[float, int]:
    """CPU seconds, and KiB resident at most, of one fresh process."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, "-m", "ultrascale", "plan", *words.split()]
    process = subprocess.Popen(command, env=environment | {"PYTHONPATH": str(source)}, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode in (0, 1), words
    return used.ru_utime + used.ru_stime, used.ru_maxrss


if __name__ == "__main__":
    sys.exit(main())
