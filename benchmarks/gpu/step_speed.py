"""Training speed of one GPU beside Hugging Face, a plain torch.compile loop and Liger's kernels, planned beside measured.

    python benchmarks/gpu/step_speed.py --output results.json [--shapes 1b 3b 8b] [--only ours plain] [--budget 530]
    python benchmarks/gpu/step_speed.py --toy                   # anywhere: tiny shapes, eager, on the CPU

bf16, one GPU, sequence 4096. Each contestant runs in a process of its own with a limit of time, so that one that fails or hangs
is a row with its reason; one that runs out of memory is tried again with half the micro-batch, accumulated. They take turns:
a second round of all of them follows as far as the budget goes (its kernels are compiled already), and the spread is over all
steps of both. After every row the record is written. Depth is cut where 18 bytes a parameter take more than 60 percent of the
device: the name says so. The ceiling is a large matrix product, timed at the start and at the end of the same call.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from claims import step_claims
from step_contestants import Case

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.units import format_bytes
from ultrascale.kernels.fp8.fp8_matrices import multiplies_fp8
from ultrascale.measure.machine.ceilings import measure_matmul_ceiling, peak_flops
from ultrascale.plan.flops import model_flops_per_token

HERE = Path(__file__).parent
STATE_BYTES = 18
"""Of a parameter: fp32 master, gradient and two moments, and the copy that computes, bf16."""
STATE_SHARE = 0.6
"""Of the device, that states may take: the rest is for activations and, of peers, logits."""
SHAPES = {"1b": ("llama-3.2-1b", 4, 4), "3b": ("smollm3-3b", 2, 4), "8b": ("llama-3.1-8b", 2, 4)}
"""Model, micro-batch, and how many make a step: with one an update of all weights follows every 8192 tokens, which nobody
trains with."""
ORDER = (
    ("ours", ("8b", "1b", "3b")), ("ours, fp8", ("8b",)), ("plain", ("8b", "1b", "3b")), ("transformers", ("8b", "1b", "3b")),
    ("liger", ("8b", "1b", "3b")), ("ours, fp8", ("1b", "3b")),
)  # fmt: skip
"""Contestants and their shapes, the most wanted first: the last may find no time. Then `MORE`, of the first shape alone."""
CONTESTANTS = tuple(dict.fromkeys(name for name, _ in ORDER))
MORE = (
    "ours, eager",
    "ours, full",
    "ours, documents",
    "plain, graphs",
    "transformers, layers compiled",
    "transformers, bf16 weights",
)
SEQUENCE = {False: 4096, True: 64}
"""By whether it is a toy."""
LIMIT_SECONDS = 150.0
"""Of one contestant: compiling a whole model of Hugging Face's takes a minute."""
ENOUGH_SECONDS = 20.0
"""Less than this is not worth a start."""


@dataclass
class Row:
    """A contestant on a shape, in all its rounds."""

    shape: str
    case: Case
    rounds: list[dict[str, Any]] = field(default_factory=list)
    failed: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def seconds(self) -> list[float]:
        """Of every timed step."""
        return [seconds for one in self.rounds for seconds in one["seconds"]]


class Process:
    """A contestant's process, waiting for its turn."""

    def __init__(self, row: Row, folder: Path, number: int):
        self.row, self.log = row, folder / f"{number}.log"
        description = folder / f"{number}.json"
        description.write_text(json.dumps(asdict(row.case)))
        environment = {
            **os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "TOKENIZERS_PARALLELISM": "false",
            "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or str(folder / "compiled"),
        }  # fmt: skip
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "step_contestants.py"), str(description)], stdin=subprocess.PIPE,
                stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True,
            )  # fmt: skip

    def play(self, limit_seconds: float) -> dict[str, Any]:
        """Let it run; its row, or {"failed": why}."""
        deadline = time.monotonic() + limit_seconds
        told = self._hear(deadline)
        if told == "imported":
            assert self.process.stdin is not None
            self.process.stdin.write(b"go\n")
            self.process.stdin.flush()
            told = self._hear(deadline)
        if told == "warm":
            told = self._hear(deadline)
        self.end()
        return told if isinstance(told, dict) else {"failed": f"said {told!r}"}

    def end(self) -> None:
        """Nothing of it stays on the device, compiling processes of its own included."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _hear(self, deadline: float) -> Any:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        line = self.process.stdout.readline() if ready else b""
        if line:
            return json.loads(line)
        last = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        return {"failed": f"ended: {' '.join(last)}" if ready else "over its time"}


def rows_of(arguments: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """What is to be run, the most wanted first."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    wanted = [(name, shape) for name, shapes in ORDER for shape in shapes if shape in arguments.shapes]
    for name, shape in [*wanted, *((name, arguments.shapes[0]) for name in MORE)]:
        if not arguments.only or name in arguments.only:
            row = _row(shape, name, memory, arguments, device)
            if name != "ours, fp8" or _runs_fp8(row):
                yield row


def left_out(arguments: argparse.Namespace, rows: list[Row]) -> list[str]:
    """What this call leaves out though nobody said so, and why."""
    asked = arguments.only or [*CONTESTANTS, *MORE]
    told = []
    if arguments.toy:
        told.append("left out: compiling, device memory, planned times (tiny shapes, eager, on the CPU)")
    if "ours, fp8" in asked and not any(row.case.contestant == "ours, fp8" for row in rows):
        told.append("left out: ours, fp8 (this device has no products in 8 bits)")
    elsewhere = [name for name in MORE if name in asked]
    if elsewhere and len(arguments.shapes) > 1:
        told.append(f"on {arguments.shapes[0]} alone: {'; '.join(elsewhere)}")
    return told


def _row(shape: str, name: str, memory: int | None, arguments: argparse.Namespace, device: torch.device) -> Row:
    model_name, micro_batch, accumulate = SHAPES[shape]
    layers = None if arguments.toy or memory is None else layers_that_fit(preset(model_name), memory)
    length, toy = SEQUENCE[arguments.toy], arguments.toy
    case = Case(name, model_name, layers, length, micro_batch, accumulate, arguments.steps, toy, device.type)
    return Row(shape, case, notes=[] if layers is None else [f"{layers} of {preset(model_name).num_hidden_layers} layers"])


def _runs_fp8(row: Row) -> bool:
    """Whether this device multiplies in 8 bits: emulated it says nothing of speed."""
    return not row.case.toy and multiplies_fp8(torch.device(row.case.device))


def layers_that_fit(model: Model, memory_bytes: int) -> int | None:
    """As many layers, a multiple of four, as leave room beside the states; None for all."""
    room = STATE_SHARE * memory_bytes / STATE_BYTES
    if num_parameters(model) <= room:
        return None
    counts = range(4, model.num_hidden_layers, 4)
    fits = [count for count in counts if num_parameters(replace(model, num_hidden_layers=count)) <= room]
    return max(fits, default=4)


def compete(rows: list[Row], record: dict[str, Any], arguments: argparse.Namespace, save: Any) -> None:
    """Play two rounds, the next contestant importing while one runs."""
    deadline = time.monotonic() + arguments.budget
    with tempfile.TemporaryDirectory() as place:
        for number in (1, 2):
            waiting = [row for row in rows if not row.failed]
            following: Process | None = None
            for at, row in enumerate(waiting):
                left = deadline - time.monotonic()
                if left < ENOUGH_SECONDS:
                    break
                own = following or Process(row, Path(place), at)
                coming = waiting[at + 1] if at + 1 < len(waiting) else None
                following = Process(coming, Path(place), at + 1) if coming is not None else None
                _take(row, own.play(min(left, arguments.limit)), Path(place), deadline, arguments.limit)
                print(line(row, record, number), flush=True)
                save()
            if following is not None:
                following.end()
    for row in rows:
        if not row.rounds and not row.failed:
            row.failed = "no time left in this call"


def _take(
    row: Row, told: dict[str, Any], place: Path, deadline: float, limit: float, start: Callable[..., Any] = Process
) -> None:
    """Keep a round; after running out of memory try half the micro-batch, twice as often, in a process that `start` makes."""
    while told.get("out_of_memory") and row.case.micro_batch_size > 1 and deadline - time.monotonic() > ENOUGH_SECONDS:
        case = row.case
        row.case = replace(case, micro_batch_size=case.micro_batch_size // 2, accumulate=2 * case.accumulate)
        row.notes.append(f"out of memory with {case.micro_batch_size} sequences at once")
        told = start(row, place, 99).play(min(limit, deadline - time.monotonic()))
    if "failed" in told:
        if row.rounds:
            row.notes.append(f"second round: {told['failed']}")
        else:
            row.failed = told["failed"]
    else:
        row.rounds.append(told)


def figures(row: Row, record: dict[str, Any]) -> dict[str, Any]:
    """A row of the record: MFU of the median step in both conventions, over the peak and over the measured ceiling."""
    case = row.case
    facts = {
        "shape": row.shape, "contestant": case.contestant, "notes": row.notes, "micro_batch_size": case.micro_batch_size,
        "accumulate": case.accumulate, "sequence_length": case.sequence_length,
    }  # fmt: skip
    if not row.rounds:
        return facts | {"failed": row.failed or "no time left in this call"}
    from step_contestants import shape_of

    model, seconds = shape_of(case), median(row.seconds)
    tokens = case.micro_batch_size * case.accumulate * case.sequence_length
    causal = tokens / seconds * model_flops_per_token(model, case.sequence_length)
    full = tokens / seconds * model_flops_per_token(model, case.sequence_length, full_attention=True)
    kept = ("version", "until_warm_seconds", "loss", "peak_allocated_bytes", "peak_reserved_bytes")
    planned = {key: value for key, value in row.rounds[0].items() if key.startswith("planned")}
    return facts | planned | {key: row.rounds[0][key] for key in kept} | {
        "tokens_per_second": tokens / seconds,
        "step_seconds": seconds,
        "step_seconds_spread": [min(row.seconds), max(row.seconds)],
        "rounds_median_seconds": [median(one["seconds"]) for one in row.rounds],
        "mfu_causal": causal / record["peak_flops_per_second"],
        "mfu_full": full / record["peak_flops_per_second"],
        "share_of_ceiling_causal": causal / record["ceiling_flops_per_second"],
    }  # fmt: skip


def line(row: Row, record: dict[str, Any], number: int) -> str:
    """What is said as soon as a contestant has run."""
    found = figures(row, record)
    name = f"round {number}  {row.shape}  {row.case.contestant}"
    if "failed" in found:
        return f"{name:<44} failed: {found['failed']}"
    return f"{name:<44} {found['tokens_per_second']:>10,.0f} tok/s  MFU {found['mfu_causal']:.1%} causal"


def table(record: dict[str, Any]) -> str:
    """All rows in Markdown, each beside the others of its shape."""
    ran = [row for row in record["rows"] if "failed" not in row]
    ours = {row["shape"]: row["tokens_per_second"] for row in ran if row["contestant"] == "ours"}
    head = (
        "| shape | contestant | tokens/s | ours is | step ms (lowest to highest) | MFU causal | full | of ceiling "
        "| allocated (planned) | reserved | planned step ms |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )
    in_order = sorted(record["rows"], key=lambda row: list(SHAPES).index(row["shape"]))
    return "\n".join([head, *(_table_row(row, ours.get(row["shape"])) for row in in_order)])


def _table_row(row: dict[str, Any], ours: float | None) -> str:
    notes = "".join(f"; {note}" for note in row["notes"])
    if "failed" in row:
        return f"| {row['shape']} | {row['contestant']}{notes} | {row['failed']} |" + " |" * 8
    low, high = (seconds * 1e3 for seconds in row["step_seconds_spread"])
    ratio = "" if ours is None or row["contestant"] == "ours" else f"{ours / row['tokens_per_second']:.2f}x"
    planned = "" if "planned_peak_bytes" not in row else f" ({format_bytes(row['planned_peak_bytes'])})"
    planned_step = "" if "planned_step_seconds" not in row else f"{row['planned_step_seconds'] * 1e3:.1f}"
    return (
        f"| {row['shape']} | {row['contestant']}{notes} | {row['tokens_per_second']:,.0f} | {ratio} "
        f"| {row['step_seconds'] * 1e3:.1f} ({low:.1f} to {high:.1f}) | {row['mfu_causal']:.1%} | {row['mfu_full']:.1%} "
        f"| {row['share_of_ceiling_causal']:.1%} | {_bytes(row['peak_allocated_bytes'])}{planned} "
        f"| {_bytes(row['peak_reserved_bytes'])} | {planned_step} |"
    )


def _bytes(num_bytes: float | None) -> str:
    return "" if num_bytes is None else format_bytes(num_bytes)


def machine(arguments: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    """Where and with what this is measured. FLOPs per second."""
    ceiling = measure_matmul_ceiling("bf16", device, budget_seconds=0.2 if arguments.toy else 1.0)
    peak = peak_flops("auto", "bf16", device)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the contestants want all of it
    commit = ""
    with suppress(OSError):  # a bare machine may have no git
        asked = ["git", "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=False, cwd=HERE).stdout.strip()
    return {
        "device": ceiling.device,
        "ceiling_flops_per_second": ceiling.flops_per_second,
        "ceiling_spread": ceiling.spread,
        "peak_flops_per_second": peak.flops_per_second,
        "peak_origin": peak.origin,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "command": " ".join(["python", "benchmarks/gpu/step_speed.py", *sys.argv[1:]]),
        "conventions": "MFU: 6N + attention over the dense bf16 peak, attention causal or as the full square; median step",
    }


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON, written after every row")
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--only", nargs="+", choices=[*CONTESTANTS, *MORE], help="these contestants alone")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--budget", type=float, default=530.0, help="seconds for all of them")
    parser.add_argument("--limit", type=float, default=LIMIT_SECONDS, help="seconds for one of them")
    parser.add_argument("--toy", action="store_true", help="tiny shapes, eager; on the CPU")
    arguments = parser.parse_args(words)
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --toy runs tiny shapes on the CPU")
    return arguments


def main() -> int:
    """Run the contestants, print the table, write the record."""
    arguments = parse()
    device = torch.device("cpu" if arguments.toy else "cuda")
    record = machine(arguments, device)
    ceiling, peak = record["ceiling_flops_per_second"] / 1e12, record["peak_flops_per_second"] / 1e12
    print(
        f"{record['device']}: matrix product {ceiling:.3g} TFLOP/s bf16, peak {peak:.3g} ({record['peak_origin']})", flush=True
    )
    rows = list(rows_of(arguments, device))
    record["left_out"] = left_out(arguments, rows)
    print(*record["left_out"], sep="\n", end="\n" if record["left_out"] else "", flush=True)

    def save() -> None:
        record["rows"] = [figures(row, record) for row in rows]
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")

    compete(rows, record, arguments, save)
    record["ceiling_at_the_end"] = measure_matmul_ceiling("bf16", device, budget_seconds=0.2).flops_per_second
    save()
    print(f"\n{table(record)}")
    if not arguments.toy:  # tiny shapes on a CPU have nothing to hold
        print("", *step_claims(record["rows"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
