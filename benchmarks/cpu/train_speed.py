"""Training speed on CPU beside a plain PyTorch loop, Hugging Face's Trainer and torch DDP.

    python benchmarks/cpu/train_speed.py [--only 'fp32' ...] [--rounds 5] [--steps 5] [--json FILE] [--picotron CHECKOUT]

A small Llama (hidden 256, ffn 768, 4 layers, 4 heads, sequence 256, vocabulary 8,192), 8 sequences a step, random tokens. All
contestants are alive at once, one thread a process, and take turns: a round is one untimed and `--steps` timed steps of each.
Reported are tokens/s; tokens per CPU-second, user + system over all processes of the contestant (steadier on a noisy machine);
the median of the rounds' ratios to the named peer; and the peak resident memory of all its processes. The spread is given as
lowest to highest. Four processes, and gloo's threads as they are, compete where `--only` names them ("4 eager fp32" "as it is
fp32"). With a checkout of picotron its axes compete too, and ours are compared with them.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from contestants import AS_IT_IS, AXES, CONTESTANTS, CROWDED, write_tokens
from plain_llama import SEQUENCE, SEQUENCES

HERE = Path(__file__).parent
PEER = {
    "ours eager": "plain eager", "ours compiled": "plain compiled", "HF Trainer": "plain eager", "DDP x2": "plain eager",
    "ours x2 ZeRO 0": "DDP x2", "ours x2 ZeRO 3": "DDP x2",
    **{f"ours {axis} {kind}": "plain eager" for axis in AXES for kind in ("eager", "compiled")},
    "ours pp2 torch's runtime": "ours pp2 eager", "DTensor tp2": "ours tp2 eager",
    **{f"ours {axis} eager": f"ours {axis} {AS_IT_IS}" for axis in CROWDED},
    **{f"ours {axis} {AS_IT_IS}": f"ours {axis} eager" for axis in AXES},
}  # fmt: skip
"""Whom each contestant is compared with, at the same precision."""
PICOTRON = {f"picotron {axis} fp32" for axis in AXES}
"""Contestants of `peer_picotron.py`, two processes each."""
PATIENCE_SECONDS = 300.0


@dataclass
class Runner:
    """The processes of one contestant and what they reported."""

    name: str
    processes: list[subprocess.Popen[str]]
    log: Path
    rounds: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""

    def hear(self) -> list[Any]:
        """The next report of every process; raises RuntimeError if one has died or is silent for too long."""
        reports = []
        for process in self.processes:
            assert process.stdout is not None
            ready, _, _ = select.select([process.stdout], [], [], PATIENCE_SECONDS)
            line = process.stdout.readline() if ready else ""
            if not line:
                lines = self.log.read_text(errors="replace").strip().splitlines()
                raise RuntimeError(lines[-1] if lines and ready else f"silent for {PATIENCE_SECONDS:.0f} s")
            reports.append(json.loads(line))
        return reports

    def play_round(self, tokens: int) -> None:
        """Let it run one round of `tokens` tokens and keep the figures."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        reports = self.hear()
        self.rounds.append({
            "tokens_per_second": tokens / max(report["wall_seconds"] for report in reports),
            "tokens_per_cpu_second": tokens / sum(report["cpu_seconds"] for report in reports),
            "peak_bytes": sum(report["peak_bytes"] for report in reports),
        })  # fmt: skip

    def stop(self) -> None:
        """End its processes: by closing their input, and if that is not enough by SIGKILL."""
        for process in self.processes:
            try:
                process.communicate(timeout=10)
            except (subprocess.TimeoutExpired, BrokenPipeError, ValueError):
                process.kill()
                process.wait()


def start(name: str, folder: Path, *, warmup: int, steps: int) -> Runner:
    """Start the processes of a contestant, each with one thread."""
    world, script = (2, "peer_picotron.py") if name in PICOTRON else (CONTESTANTS[name][0], "contestants.py")
    log = folder / f"{name}.log"
    command = [sys.executable, str(HERE / script), name, str(folder), str(warmup), str(steps)]
    fixed = {"OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    port = str(free_port())
    processes = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
        environment = {**os.environ, **fixed, **({**place, "MASTER_PORT": port} if world > 1 else {})}
        with log.open("a") as errors:
            processes.append(
                subprocess.Popen(
                    command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
                )
            )
    return Runner(name, processes, log)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def compete(names: list[str], *, rounds: int, warmup: int, steps: int) -> list[Runner]:
    """Start and warm up one contestant after the other, then play the rounds in turn. A failure is a row, not the end."""
    tokens = steps * SEQUENCE * SEQUENCES
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_tokens(folder)
        runners: list[Runner] = []
        try:
            for name in names:
                runners.append(start(name, folder, warmup=warmup, steps=steps))
                attempt(runners[-1], runners[-1].hear)
                print(f"{name}: {runners[-1].failure or 'warm'}", file=sys.stderr, flush=True)
            for number in range(rounds):
                for runner in runners:
                    attempt(runner, lambda runner=runner: runner.play_round(tokens))
                print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
        finally:
            for runner in runners:
                runner.stop()
    return runners


def attempt(runner: Runner, action: Any) -> None:
    if runner.failure:
        return
    try:
        action()
    except (RuntimeError, OSError) as error:
        runner.failure = str(error)


def summarise(runners: list[Runner]) -> list[dict[str, Any]]:
    """One row a contestant: median, lowest and highest of each figure, and the ratio to its peer."""
    by_name = {runner.name: runner for runner in runners}
    rows = []
    for runner in runners:
        row: dict[str, Any] = {"name": runner.name, "failure": runner.failure, "rounds": runner.rounds}
        if runner.rounds and not runner.failure:
            for key in runner.rounds[0]:
                values = [figures[key] for figures in runner.rounds]
                row[key] = {"median": median(values), "min": min(values), "max": max(values)}
            kind, precision = runner.name.rsplit(" ", 1)
            picotron = f"picotron {kind.split()[1]} {precision}" if kind.startswith("ours ") else ""
            peer = by_name.get(picotron) or by_name.get(f"{PEER.get(kind)} {precision}")
            if peer and peer.rounds and not peer.failure:
                row["peer"] = peer.name
                for key in ("tokens_per_second", "tokens_per_cpu_second"):
                    ratios = [own[key] / other[key] for own, other in zip(runner.rounds, peer.rounds, strict=True)]
                    row[f"{key}_ratio"] = {"median": median(ratios), "min": min(ratios), "max": max(ratios)}
        rows.append(row)
    return rows


def certificate(arguments: argparse.Namespace) -> dict[str, Any]:
    """Where the numbers come from: machine, commit, command, versions."""
    from ultrascale.measure.machine.doctor import cpu_facts, versions

    commit = subprocess.run(["git", "-C", str(HERE), "describe", "--always", "--dirty"], capture_output=True, text=True)
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip() or "unknown",
        "command": "python benchmarks/cpu/train_speed.py " + " ".join(sys.argv[1:]),
        "processor": cpu_facts().get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "versions": versions(),
        "rounds": arguments.rounds,
        "steps_per_round": arguments.steps,
        "warmup_steps": arguments.warmup,
    }


def print_table(rows: list[dict[str, Any]]) -> None:
    """The rows as Markdown, so that they can be pasted into the docs."""
    print(
        "| contestant | tokens/s (lowest to highest) | tokens per CPU-second | against | ratio, CPU | ratio, wall | peak MiB |"
    )
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        if row["failure"]:
            print(f"| {row['name']} | failed: {row['failure']} | | | | | |")
            continue
        wall, cpu, peak = row["tokens_per_second"], row["tokens_per_cpu_second"], row["peak_bytes"]["max"] / 2**20
        ratios = ["", "", ""]
        if "peer" in row:
            cpu_ratio, wall_ratio = row["tokens_per_cpu_second_ratio"], row["tokens_per_second_ratio"]
            spread = f"{cpu_ratio['median']:.3f} ({cpu_ratio['min']:.3f} to {cpu_ratio['max']:.3f})"
            ratios = [row["peer"], spread, f"{wall_ratio['median']:.2f}"]
        print(
            f"| {row['name']} | {wall['median']:,.0f} ({wall['min']:,.0f} to {wall['max']:,.0f}) "
            f"| {cpu['median']:,.0f} ({cpu['min']:,.0f} to {cpu['max']:,.0f}) | {' | '.join(ratios)} | {peak:,.0f} |"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="contestants whose name contains one of these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=5, help="timed steps a round")
    parser.add_argument("--warmup", type=int, default=4, help="steps before the first round")
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--picotron", type=Path, metavar="CHECKOUT", help="let its axes compete too, from this folder")
    arguments = parser.parse_args()
    all_names = [*CONTESTANTS, *(sorted(PICOTRON) if arguments.picotron else [])]
    if arguments.picotron:
        if not (arguments.picotron / "picotron" / "model.py").is_file():
            parser.error(f"{arguments.picotron} is no checkout of picotron: it has no picotron/model.py")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(arguments.picotron), os.environ.get("PYTHONPATH"))))
    asked_for = any("as it is" in text or text.startswith("4") for text in arguments.only)
    apart = {name for name in all_names if AS_IT_IS in name or any(f" {axis} " in name for axis in CROWDED)}
    names = [name for name in all_names if any(text in name for text in arguments.only) and (asked_for or name not in apart)]
    if not names:
        parser.error(f"no contestant's name contains {arguments.only}; they are: {', '.join(all_names)}")
    rows = summarise(compete(names, rounds=arguments.rounds, warmup=arguments.warmup, steps=arguments.steps))
    born = certificate(arguments)
    print_table(rows)
    machine = f"{born['processor']}, {born['cores']} cores, torch {born['versions']['torch']}"
    print(f"\n{machine}, commit {born['commit']}: {born['command']}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"certificate": born, "results": rows}, indent=2) + "\n")
    return 1 if any(row["failure"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
