"""What being watched costs a step: signs of life, the watchdog beside the ranks, stragglers' windows, digests of replicas.

    python benchmarks/cpu/watch_overhead.py [--output benchmarks/cpu/results/watch-DATE.json]

Two ranks train a model of 3.7M parameters, whose weights both hold whole (the most there is to compare). Steps with and
without take turns in one run, so that what else the machine does falls on both. The figure is the median of the ratios of
neighbours, with quartiles and where that median lies in 95 of 100 draws of the same pairs (bootstrap), in processor time of a
rank, of which a busy machine takes little; beside it the same from its parts (beats of a step times the time of one, a window's
sum over its steps). A comparison of replicas is timed by itself and counted once in 100 steps, as by default; the watchdog
itself is given as a share of one processor. Torch's flight recorder is on in both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # here once and not on every rank
import torch.distributed.fsdp

from ultrascale import heartbeat
from ultrascale.data.indexed import ShardWriter
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Faults, Optimizer, Run, Source
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.mesh import process_group
from ultrascale.train.corpora import build_loader
from ultrascale.train.folder.resume import tensors_of
from ultrascale.train.observers.digests import compare
from ultrascale.train.observers.stragglers import Stragglers
from ultrascale.train.trainer import Trainer

MODEL = Model(
    vocab_size=2048, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
    num_key_value_heads=4, head_dim=64, max_position_embeddings=256, name="watched",
)  # fmt: skip
DRAWS = 2000
WARM_UP = 3


def measure(rendezvous: str, run: Run, signs: str, pairs: int) -> dict[str, Any]:
    """On a rank: seconds of steps with and without, in turns, and of a comparison."""
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "512"
    with process_group(run.layout, device="cpu", rendezvous=rendezvous) as ranks:
        trainer = Trainer(run, ranks, build_loader(run, run.data.sources))
        heartbeat.start(Path(signs), ranks.rank, hang_seconds=600.0)
        heart, stragglers = heartbeat._heart, Stragglers(run.layout, ranks, run.faults.straggler_steps or 1)
        for _ in range(WARM_UP):
            trainer.train_step()
        times: dict[bool, list[float]] = {True: [], False: []}
        for pair in range(pairs):
            for on in (True, False) if pair % 2 else (False, True):
                heartbeat._heart = heart if on else None
                times[on].append(step(trainer, stragglers if on else None))
        heartbeat._heart = heart
        parts = in_parts(trainer, heart)
        compared = []
        for _ in range(10):
            started = time.process_time()
            found = compare(tensors_of(trainer), ranks)
            compared.append(time.process_time() - started)
        assert not found.blamed and found.num_compared == 3 * len(trainer.share.local_parameters)
        return {"on": times[True], "off": times[False], "compare": compared, **parts}


def in_parts(trainer: Trainer, heart: Any) -> dict[str, float]:
    """Beats of a step, and processor seconds of a beat and of a window's sum: what the ratios hold, each by itself."""
    before, times, token = heart._beats, 2000, torch.zeros(trainer.ranks.world, dtype=torch.float64)
    trainer.train_step()
    beats, started = heart._beats - before, time.process_time()
    for _ in range(times):
        with waiting("a sum over all ranks", trainer.ranks.host_group, tensor=token):
            pass
    beat, started = (time.process_time() - started) / times / 2, time.process_time()
    for _ in range(100):
        trainer.ranks.sum(token)
    return {"beats": beats, "beat": beat, "sum": (time.process_time() - started) / 100}


def step(trainer: Trainer, stragglers: Stragglers | None) -> float:
    """Its processor seconds."""
    trainer.ranks.barrier()
    started, before = time.process_time(), time.perf_counter()
    trainer.train_step()
    heartbeat.steps_done(trainer.steps_done)
    if stragglers is not None:
        stragglers.count(time.perf_counter() - before)
    return time.process_time() - started


def interval_of_median(values: list[float]) -> tuple[float, float]:
    """Where the median lies in 95 of 100 draws of as many of `values` with replacement."""
    draw = random.Random(0)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWS))
    return medians[DRAWS // 40], medians[-DRAWS // 40]


def main() -> None:
    """Measure, print, and write if asked."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--pairs", type=int, default=150)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        watchdog = subprocess.Popen([sys.executable, "-m", "ultrascale.launch.watchdog", folder, "--parent", str(os.getpid())])
        try:
            run = make_run(Path(folder))
            found = run_forked(2, measure, run, folder, asked.pairs)[0]
        finally:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            watchdog.kill()
            watchdog.wait()
        after, elapsed = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
    watchdog_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    result = summary(found, run) | {"watchdog_percent_of_a_processor": round(100 * watchdog_seconds / elapsed, 2)}
    print(json.dumps(result, indent=1))
    if asked.output is not None:
        asked.output.write_text(json.dumps(result, indent=1) + "\n")


def make_run(folder: Path) -> Run:
    """Two copies of the state, on random tokens."""
    numbers = np.random.default_rng(0)
    writer = ShardWriter(folder / "tokens", "uint16")
    writer.add_documents(numbers.integers(0, MODEL.vocab_size, 60_000), [600] * 100)
    writer.finish()
    return Run(
        model=MODEL, folder=str(folder), steps=1_000_000, device="cpu", layout=Layout(dp=2, zero_stage=0, micro_batch_size=2),
        batch=Batch(sequence_length=256, sequences_per_batch=4), data=Data(sources=(Source(str(folder / "tokens")),)),
        optimizer=Optimizer(learning_rate=1e-4),
    )  # fmt: skip


def summary(found: dict[str, Any], run: Run) -> dict[str, Any]:
    """Ratios of neighbours, and the share of a comparison."""
    ratios = [on / off - 1 for on, off in zip(found["on"], found["off"], strict=True)]
    seconds, comparison = statistics.median(found["off"]), statistics.median(found["compare"])
    every = Faults().digest_every_steps or 1
    watching = found["beats"] * found["beat"] + found["sum"] / (Faults().straggler_steps or 1)
    return {
        "date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, "processors": os.cpu_count(),
        "load_average": os.getloadavg()[0], "step_processor_seconds_off": round(seconds, 4), "pairs": len(ratios),
        "watching_percent": {
            name: round(100 * value, 2)
            for name, value in zip(("q1", "median", "q3"), statistics.quantiles(ratios, n=4), strict=True)
        },
        "median_lies_in": [round(100 * end, 2) for end in interval_of_median(ratios)],
        "watching_percent_in_parts": round(100 * watching / seconds, 3),
        "beats_per_step": found["beats"], "beat_microseconds": round(found["beat"] * 1e6, 1),
        "comparison_processor_seconds": round(comparison, 4), "digests_percent": round(100 * comparison / (every * seconds), 2),
        "layout": {key: value for key, value in asdict(run.layout).items() if key in ("dp", "zero_stage", "micro_batch_size")},
    }  # fmt: skip


if __name__ == "__main__":
    main()
