"""Loss against bytes of training on islands, and the time of an outer step over a long line.

    python benchmarks/cpu/islands.py loss --islands 2 --steps 128 --output FILE     # over loopback
    python benchmarks/cpu/islands.py line --islands 2 --output FILE                 # 100 Mbit/s, 100 ms there and back; as root
    python benchmarks/cpu/islands.py wall --islands 2 --steps 64 --output FILE      # training over that line; as root
    python benchmarks/cpu/islands.py draw FILE ... --output docs/pictures/islands.svg

`loss` trains a model of 4.1M parameters on bytes of this repository's own texts: by data parallelism, and on islands that meet
every H steps; it gives the validation loss after the last step, where all islands have met, and the bytes that an island sent.
`line` sends the moves of that model through `islands.link.Link` between network namespaces that a shaped line joins, beside
what `ultrascale plan far` says of it. `wall` trains over that line, and compares its wall time with the mean of steps that have
no outer step, for all steps, and what `plan far` says of the outer ones.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # here once and not on every rank
import torch.distributed.fsdp
from shaped_link import shaped_link
from torch._C._distributed_c10d import FileStore

from ultrascale.data.indexed import ShardWriter
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Checkpoint, Data, Evaluation, Log, Optimizer, Run, Source
from ultrascale.description.sections.islands import Islands, Outer, Wire
from ultrascale.islands.link import Link
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.view.far_apart import far_apart
from ultrascale.train.loop import train

MODEL = Model(
    vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4,
    head_dim=64, max_position_embeddings=64, name="islands-4m",
)  # fmt: skip
PARAMETERS = num_parameters(MODEL)
AVERAGE = Outer("sgd", lr=1.0, momentum=0.0)
TOKENS = 128
BITS_PER_SECOND, ONE_WAY_SECONDS, REPEATS = 1e8, 0.05, 5
HELD_OUT = 20
"""One document of so many is held out."""
NEW_NETWORK = 0x40000000


def corpus(folder: Path) -> None:
    """The repository's texts as bytes, a file a document."""
    root = Path(__file__).parents[2]
    files = sorted([*root.glob("src/**/*.py"), *root.glob("docs/*.md"), *root.glob("tests/**/*.py")])
    for name, some in (("train", [f for i, f in enumerate(files) if i % HELD_OUT]), ("held-out", files[::HELD_OUT])):
        writer = ShardWriter(folder / name, "uint16")
        for file in some:
            text = np.frombuffer(file.read_bytes(), np.uint8).astype(np.uint16)
            writer.add_documents(text, [len(text)])
        writer.finish()


def run_of(folder: Path, name: str, islands: Islands, *, dp: int, steps: int) -> Run:
    """4 sequences of 32 bytes a step over all islands."""
    return Run(
        model=MODEL, name=name, folder=str(folder), steps=steps, device="cpu", layout=Layout(dp=dp), islands=islands,
        batch=Batch(sequence_length=32, sequences_per_batch=TOKENS // 32),
        data=Data((Source(str(folder / "train")),), (Source(str(folder / "held-out")),), document_mask=False),
        optimizer=Optimizer(learning_rate=1e-3, warmup_steps=steps // 8),
        checkpoint=Checkpoint(every_steps=None, export=False), evaluation=Evaluation(every_steps=steps, sequences=256),
        log=Log(memory_steps=0), collective_timeout_seconds=600.0,
    )  # fmt: skip


def _train(rendezvous: str, run: Run) -> None:
    """On a rank."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    train(run, rendezvous=rendezvous)


def loss(count: int, steps: int, folder: Path, output: Path | None) -> None:
    """Validation loss and bytes of each way."""
    ways: dict[str, tuple[Islands, int]] = {"data parallelism": (Islands(), count)}
    ways |= {"H = 8, int4": (Islands(count, 8, AVERAGE, dtype="int4"), 1)}
    ways |= {f"H = {h}": (Islands(count, h, AVERAGE), 1) for h in (32, 8, 128)}
    ways |= {"H = 32, Nesterov": (Islands(count, 32), 1), "H = 1": (Islands(count, 1, AVERAGE), 1)}
    found: dict[str, Any] = {}
    for name, (islands, dp) in ways.items():
        run = run_of(folder, name.replace(" ", "").replace("=", "-").replace(",", "-"), islands, dp=dp, steps=steps)
        started = time.time()
        run_forked(run.num_processes, _train, run)
        last = json.loads((folder / run.name / "metrics.jsonl").read_text().splitlines()[-1])
        each_step = 2 * (count - 1) * -(-PARAMETERS // count) * 4
        found[name] = {
            "validation_loss": last["val/loss"], "sent_bytes": last.get("outer/sent_bytes", each_step * steps),
            "outer_steps": last.get("outer/steps", 0), "seconds": round(time.time() - started, 1),
        }  # fmt: skip
        print(name, found[name], flush=True)
        _write(output, {"islands": count, "steps": steps, "tokens": steps * TOKENS, "parameters": PARAMETERS, "ways": found})


def line(count: int, output: Path | None) -> None:
    """Seconds of an outer step's messages, measured and planned."""
    found: dict[str, Any] = {}
    for wire in ("fp32", "bf16", "int8", "int4"):
        islands = Islands(count, dtype=wire)
        piece = islands.piece(PARAMETERS, 1)
        with shaped_link(count, bits_per_second=BITS_PER_SECOND, one_way_seconds=ONE_WAY_SECONDS) as names:
            seconds = run_forked(count, _send, names, wire, piece * count)
        slowest = [max(some) for some in zip(*seconds, strict=True)][1:]
        planned = _planned(islands)
        measured = statistics.median(slowest)
        found[wire] = {"measured_seconds": measured, "planned_seconds": planned, "planned_over_measured": planned / measured,
                       "all": slowest, "sent_bytes": islands.sent_bytes(PARAMETERS, 1, 4)}  # fmt: skip
        print(wire, found[wire], flush=True)
        _write(output, {"islands": count, "bits_per_second": BITS_PER_SECOND, "one_way_seconds": ONE_WAY_SECONDS,
                        "parameters": PARAMETERS, "outer_steps": found})  # fmt: skip


def _planned(islands: Islands) -> float:
    """Seconds of an outer step's messages over the line."""
    piece = islands.piece(PARAMETERS, 1)
    return far_apart(
        PARAMETERS, distance_kilometres=ONE_WAY_SECONDS * 2e5, line_bits_per_second=BITS_PER_SECOND, step_seconds=1.0,
        num_sites=islands.count, bits_per_parameter=islands.encoded_bytes(piece, 4) * 8 / piece,
    ).all_reduce_seconds  # fmt: skip


def wall(count: int, steps: int, folder: Path, output: Path | None) -> None:
    """Wall time of training over the line, measured and planned."""
    found: dict[str, Any] = {}
    ways: list[tuple[int, Wire]] = [(8, "fp32"), (32, "fp32"), (8, "int4")]
    for every, wire in ways:
        islands, name = Islands(count, every, AVERAGE, dtype=wire), f"H-{every}-{wire}"
        run = run_of(folder, name, islands, dp=1, steps=steps)
        with shaped_link(count, bits_per_second=BITS_PER_SECOND, one_way_seconds=ONE_WAY_SECONDS) as names:
            run_forked(count, _train_over, names, run)
        rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        known = {row["step"]: row["perf/step_s"] for row in rows if "perf/step_s" in row}
        outer = [step for step in known if islands.due(step, steps)]
        inner = statistics.fmean(seconds for step, seconds in known.items() if step not in outer)
        planned, measured = inner * len(known) + _planned(islands) * len(outer), sum(known.values())
        found[name] = {"measured_seconds": measured, "planned_seconds": planned, "planned_over_measured": planned / measured,
                       "step_seconds": inner, "steps": len(known), "outer_steps": len(outer)}  # fmt: skip
        print(name, found[name], flush=True)
        _write(output, {"islands": count, "bits_per_second": BITS_PER_SECOND, "one_way_seconds": ONE_WAY_SECONDS,
                        "parameters": PARAMETERS, "ways": found})  # fmt: skip


def _train_over(rendezvous: str, names: list[str], run: Run) -> None:
    """On an island, in its namespace."""
    _enter(names)
    _train(rendezvous, run)


def _enter(names: list[str]) -> None:
    """Move this process into the namespace of its rank."""
    rank = int(os.environ["RANK"])
    with open(f"/var/run/netns/{names[rank]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = f"line{rank}"


def _send(rendezvous: str, names: list[str], wire: Any, elements: int) -> list[float]:
    """On an island, in its namespace: seconds of each exchange."""
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    _enter(names)
    store = FileStore(rendezvous.removeprefix("file://"), len(names))
    link = Link(Ranks(0, 1, torch.device("cpu"), island=rank, store=store), len(names), timeout_seconds=120.0)
    own, seconds = torch.randn(elements), []
    for step in range(REPEATS + 1):  # the first opens TCP's window
        link.arrive(step)
        started = time.perf_counter()
        link.mean(own, wire)
        seconds.append(time.perf_counter() - started)
    return seconds


def draw(files: list[Path], output: Path) -> None:
    """Loss against bytes."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    drawn, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    for file, marker in zip(files, "osv", strict=False):
        known = json.loads(file.read_text())
        label = f"{known['islands']} islands, {known['steps']} steps"
        points = sorted((one["sent_bytes"] / 2**20, one["validation_loss"], name) for name, one in known["ways"].items())
        axes.plot([p[0] for p in points], [p[1] for p in points], marker, label=label)
        for megabytes, value, name in points:
            axes.annotate(name, (megabytes, value), xytext=(4, 4), textcoords="offset points", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlabel("MiB sent by an island")
    axes.set_ylabel("validation loss, nats a byte")
    axes.legend(frameon=False)
    drawn.savefig(output)


def _write(output: Path | None, known: dict[str, Any]) -> None:
    if output is not None:
        output.write_text(json.dumps(known, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=("loss", "line", "wall", "draw"))
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--islands", type=int, default=2)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--output", type=Path)
    asked = parser.parse_args()
    if asked.what == "draw":
        draw(asked.files, asked.output)
    elif asked.what == "line":
        line(asked.islands, asked.output)
    else:
        with tempfile.TemporaryDirectory(prefix="islands-") as text:
            corpus(Path(text))
            measure = wall if asked.what == "wall" else loss
            measure(asked.islands, asked.steps, Path(text), asked.output)


if __name__ == "__main__":
    main()
