"""Training speed of one CUDA device: tokens/s, MFU, HFU and peak memory, planned beside measured.

    python benchmarks/gpu/train_speed.py --output benchmarks/gpu/results/NAME.json [--only 1b] [--steps 8]

Each case runs in a process of its own, through the trainer itself, on random tokens. The ceiling is a large matrix product,
timed in the same call. MFU is given over the catalogue's peak, causal and full convention; sizes that do not fit are cut in
depth, which their name says. Where there is no CUDA the script runs at toy sizes, so that it is never broken when needed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ultrascale.data.loader import Sequences
from ultrascale.measure.machine import measure_matmul_ceiling, peak_flops
from ultrascale.parallel.mesh import process_group
from ultrascale.plan.memory import plan_memory
from ultrascale.plan.time import hardware_flops_per_token, model_flops_per_token
from ultrascale.spec.layout import Layout
from ultrascale.spec.model_presets import preset
from ultrascale.spec.run import Batch, Data, Log, Run
from ultrascale.train.trainer import Trainer

GIB = 2**30


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    name: str
    model: str
    num_layers: int | None
    sequence_length: int
    micro_batch_size: int
    num_micro_batches: int = 1
    recompute: str = "none"
    compile: bool = True
    document_mask: bool = False


CASES = [
    Case("1b eager", "llama-3.2-1b", None, 4096, 4, compile=False),
    Case("1b", "llama-3.2-1b", None, 4096, 4),
    Case("1b selective", "llama-3.2-1b", None, 4096, 8, recompute="selective"),
    Case("1b full", "llama-3.2-1b", None, 4096, 8, recompute="full"),
    Case("1b documents", "llama-3.2-1b", None, 4096, 4, document_mask=True),
    Case("1b accumulate 4", "llama-3.2-1b", None, 4096, 4, 4),
    Case("8b, 16 of 32 layers", "llama-3.1-8b", 16, 4096, 2),
    Case("8b, 16 of 32 layers, eager", "llama-3.1-8b", 16, 4096, 2, compile=False),
    Case("8b, 16 of 32 layers, full", "llama-3.1-8b", 16, 8192, 2, recompute="full"),
]


class RandomTokens:
    """Sequences of random tokens in documents of 512 tokens."""

    def __init__(self, sequence_length: int, vocab_size: int):
        self.sequence_length, self.vocab_size = sequence_length, vocab_size

    def read(self, numbers: Iterable[int]) -> Sequences:
        count = len(list(numbers))
        stream = np.random.default_rng(0).integers(0, self.vocab_size, (count, self.sequence_length + 1))
        index = np.broadcast_to(np.arange(self.sequence_length), (count, self.sequence_length))
        ids = np.arange(count)
        return Sequences(stream[:, :-1].copy(), stream[:, 1:].copy(), (index % 512).copy(), (index // 512).copy(), ids)

    def fingerprint(self) -> str:
        return "random tokens"


def build_run(case: Case) -> Run:
    """The run of a case; at toy size where there is no CUDA."""
    model = preset(case.model)
    if case.num_layers is not None:
        model = replace(model, num_hidden_layers=case.num_layers)
    length, device = case.sequence_length, "cuda"
    if not torch.cuda.is_available():
        small = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
        model = replace(model, **small, head_dim=16, num_hidden_layers=2, vocab_size=512)
        length, device = 64, "cpu"
    layout = Layout(
        micro_batch_size=case.micro_batch_size,
        recompute=case.recompute,  # pyright: ignore[reportArgumentType]
        precision="bf16",
    )
    batch = Batch(length, case.micro_batch_size * case.num_micro_batches)
    data = Data(document_mask=case.document_mask)
    return Run(model, device=device, compile=case.compile, layout=layout, batch=batch, data=data, log=Log(memory_steps=0))


def measure(case: Case, steps: int) -> dict[str, Any]:
    """Train `steps` steps after three of warm-up, in this process."""
    run = build_run(case)
    with process_group(run.layout, device=run.device) as ranks:
        started = time.perf_counter()
        loader = RandomTokens(run.batch.sequence_length, run.model.vocab_size)
        trainer = Trainer(run, ranks, loader, draw_on_device=True)
        for _ in range(3):
            trainer.train_step()
        ready = time.perf_counter() - started
        seconds = []
        for _ in range(steps):
            start = time.perf_counter()
            trainer.train_step()  # ends with the host knowing the loss, so the device is done but for the update
            if ranks.device.type == "cuda":
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        row = report(case, run, ranks.device, statistics.median(seconds))
        return row | {"seconds_per_step": seconds, "seconds_until_warm": ready}


def report(case: Case, run: Run, device: torch.device, seconds: float) -> dict[str, Any]:
    """The figures of a case whose median step took `seconds`."""
    length, tokens = run.batch.sequence_length, run.batch.sequence_length * run.batch.sequences_per_batch
    peak = peak_flops("auto", run.layout.precision, device).flops_per_second
    rate = tokens / seconds / peak
    plan = plan_memory(
        run.model, run.layout, sequence_length=length, sequences_per_batch=run.batch.sequences_per_batch,
        documents=run.data.document_mask, device="cuda" if device.type == "cuda" else "cpu",
    )  # fmt: skip
    on_cuda = device.type == "cuda"
    return {
        "case": case.name,
        "tokens_per_second": tokens / seconds,
        "mfu_causal": rate * model_flops_per_token(run.model, length),
        "mfu_full": rate * model_flops_per_token(run.model, length, full_attention=True),
        "hfu_causal": rate * hardware_flops_per_token(run.model, run.layout, length),
        "planned_peak_gib": plan.peak.total / GIB,
        "measured_peak_gib": torch.cuda.max_memory_allocated() / GIB if on_cuda else None,
        "reserved_peak_gib": torch.cuda.max_memory_reserved() / GIB if on_cuda else None,
    }


def main() -> int:
    """Run the cases, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--only", default="", help="cases whose name begins so")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--case", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case is not None:
        print(json.dumps(measure(CASES[arguments.case], arguments.steps)))
        return 0
    record = machine() | {"steps": arguments.steps, "rows": []}
    print(f"{record['device']}: matrix product {record['ceiling_tflops']:.0f} TFLOP/s bf16")
    for index, case in enumerate(CASES):
        if case.name.startswith(arguments.only):
            record["rows"].append(row := run_apart(index, arguments.steps))
            print(line(row), flush=True)
            if arguments.output is not None:
                arguments.output.parent.mkdir(parents=True, exist_ok=True)
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def run_apart(index: int, steps: int) -> dict[str, Any]:
    """A case in a process of its own; one that fails is a row with its reason."""
    command = [sys.executable, __file__, "--case", str(index), "--steps", str(steps)]
    environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    return {"case": CASES[index].name, "failed": done.stderr.strip().splitlines()[-1:]}


def machine() -> dict[str, Any]:
    """Where and with what this was measured."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    ceiling = measure_matmul_ceiling("bf16", device, budget_seconds=1.0)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "device": ceiling.device,
        "ceiling_tflops": ceiling.flops_per_second / 1e12,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "command": " ".join(["python", *sys.argv]),
    }


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "failed" in row:
        return f"{row['case']:<28} failed: {' '.join(row['failed'])}"
    low, high = min(row["seconds_per_step"]), max(row["seconds_per_step"])
    text = f"{row['case']:<28} {row['tokens_per_second']:>9,.0f} tok/s  step {low:.3f}-{high:.3f} s"
    text += f"  MFU {row['mfu_causal']:.1%} causal {row['mfu_full']:.1%} full  HFU {row['hfu_causal']:.1%}"
    measured = "" if row["measured_peak_gib"] is None else f" measured {row['measured_peak_gib']:.1f}"
    measured += "" if row["reserved_peak_gib"] is None else f" reserved {row['reserved_peak_gib']:.1f}"
    return f"{text}  memory planned {row['planned_peak_gib']:.1f}{measured} GiB  warm after {row['seconds_until_warm']:.0f} s"


if __name__ == "__main__":
    sys.exit(main())
