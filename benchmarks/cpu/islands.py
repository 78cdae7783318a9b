"""Loss against bytes of training on islands, and the time of an outer step over a long line.

    python benchmarks/cpu/islands.py loss --islands 4 --steps 512 --output FILE     # over loopback; goes on with FILE
    python benchmarks/cpu/islands.py line --islands 4 --output FILE                 # 100 Mbit/s, 100 ms there and back; as root
    python benchmarks/cpu/islands.py wall --islands 4 --steps 128 --output FILE     # training over that line; as root
    python benchmarks/cpu/islands.py draw FILE ... --output docs/pictures/islands.svg

`loss` trains a model of 4.1M parameters on bytes of this repository's own texts: by data parallelism, and on islands that meet
every H steps; it gives the validation loss after the last step, where all islands have met, and the bytes that an island sent.
"alone first" has one island do the first quarter of the steps, with the whole batch and without a message, and all go on from
there: DiLoCo's own runs begin with trained weights too.
`line` sends the deltas of that model through `islands.link` between network namespaces that a shaped line joins, beside what
`ultrascale plan far --uplink` says of it. `wall` trains over that line. Its plan is made of

    steps          those of the slowest island of each round, without what its outer loop took, measured in the same run: what
                   a step takes on this machine, with whoever else is at its processors, is not to be planned here
    outer steps    the seconds of `plan far --uplink`, and what the same messages take over loopback, measured just before: the
                   processor's part
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
from dataclasses import replace
from datetime import date
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
from ultrascale.islands.link import IslandLink
from ultrascale.islands.outer_loop import OuterLoop
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.view.far_apart import far_apart
from ultrascale.train.loop import train
from ultrascale.train.step import StepResult
from ultrascale.train.trainer import Trainer

MODEL = Model(
    vocab_size=256, hidden_size=256, intermediate_size=704, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=4,
    head_dim=64, max_position_embeddings=64, name="islands-4m",
)  # fmt: skip
PARAMETERS = num_parameters(MODEL)
AVERAGE = Outer("sgd", lr=1.0, momentum=0.0)
TOKENS = 128
ALONE = 4
"""One step of so many is done by one island alone, where that begins."""
BITS_PER_SECOND, ONE_WAY_SECONDS, REPEATS = 1e8, 0.05, 5
MOST_ROUNDS = 12
"""Outer steps of a way whose wall time is measured."""
HELD_OUT = 20
"""One document of so many is held out."""
NEW_NETWORK = 0x40000000
OUTER_SECONDS = "outer_seconds.json"


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


def _train(rendezvous: str, run: Run, until: int | None = None) -> None:
    """On a rank; stops after the step `until`, as when it is told to."""
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    step = Trainer.train_step

    def stopping(trainer: Trainer) -> StepResult:
        if trainer.steps_done + 1 == until:
            trainer.request_stop()
        return step(trainer)

    Trainer.train_step = stopping  # pyright: ignore[reportAttributeAccessIssue]
    train(run, rendezvous=rendezvous)


def loss(count: int, steps: int, folder: Path, output: Path | None) -> None:
    """Validation loss and bytes of each way."""
    int4 = Islands(count, 8, AVERAGE, dtype="int4")
    ways: dict[str, tuple[Islands, int, int]] = {
        "data parallelism": (Islands(), count, 0), "H = 8, int4": (int4, 1, 0),
        "H = 3, int4": (replace(int4, every_steps=3), 1, 0), "H = 8, int4, alone first": (int4, 1, steps // ALONE),
    }  # fmt: skip
    ways |= {f"H = {h}": (Islands(count, h, AVERAGE), 1, 0) for h in (32, 128, 8, 1)}
    ways |= {"H = 32, Nesterov": (Islands(count, 32), 1, 0)}
    found: dict[str, Any] = {} if output is None or not output.exists() else json.loads(output.read_text())["ways"]
    for name, (islands, dp, alone) in [one for one in ways.items() if one[0] not in found]:
        run = run_of(folder, name.replace(" ", "").replace("=", "-").replace(",", "-"), islands, dp=dp, steps=steps)
        started = time.time()
        if alone:
            run_forked(1, _train, replace(run, islands=Islands()), alone)
        run_forked(run.num_processes, _train, run)
        last = json.loads((folder / run.name / "metrics.jsonl").read_text().splitlines()[-1])
        each_step = 2 * (count - 1) * -(-PARAMETERS // count) * 4
        found[name] = {
            "validation_loss": last["val/loss"], "sent_bytes": last.get("outer/sent_bytes", each_step * steps),
            "outer_steps": last.get("outer/steps", 0), "seconds": round(time.time() - started, 1),
        }  # fmt: skip
        print(name, found[name], flush=True)
        known = {"islands": count, "steps": steps, "tokens": steps * TOKENS, "parameters": PARAMETERS}
        _write(output, known | {"date": f"{date.today()}", "ways": found})


def line(count: int, output: Path | None) -> None:
    """Seconds of an outer step's messages, measured and planned."""
    found: dict[str, Any] = {}
    for wire in ("fp32", "bf16", "int8", "int4"):
        islands = Islands(count, dtype=wire)
        with shaped_link(count, bits_per_second=BITS_PER_SECOND, one_way_seconds=ONE_WAY_SECONDS) as names:
            slowest = _messages(islands, names)
        here, planned, measured = statistics.median(_messages(islands, None)), _planned(islands), statistics.median(slowest)
        found[wire] = {"measured_seconds": measured, "planned_seconds": planned, "loopback_seconds": here,
                       "planned_over_measured": (planned + here) / measured,
                       "all": slowest, "sent_bytes": islands.sent_bytes(PARAMETERS, 1, 4)}  # fmt: skip
        print(wire, found[wire], flush=True)
        _write(output, _over_line(count) | {"outer_steps": found})


def _over_line(count: int) -> dict[str, Any]:
    return {"islands": count, "bits_per_second": BITS_PER_SECOND, "one_way_seconds": ONE_WAY_SECONDS,
            "parameters": PARAMETERS, "date": f"{date.today()}",
            "congestion_control": Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()}  # fmt: skip


def _messages(islands: Islands, names: list[str] | None) -> list[float]:
    """Seconds of the messages of outer steps on the slowest island, between namespaces or over loopback."""
    seconds = run_forked(islands.count, _send, names, islands.dtype, islands.piece(PARAMETERS, 1) * islands.count)
    return [max(some) for some in zip(*seconds, strict=True)][1:]


def _planned(islands: Islands) -> float:
    """Seconds of an outer step's messages over the line."""
    piece = islands.piece(PARAMETERS, 1)
    return far_apart(
        PARAMETERS, distance_kilometres=ONE_WAY_SECONDS * 2e5, line_bits_per_second=BITS_PER_SECOND, step_seconds=1.0,
        num_sites=islands.count, bits_per_parameter=islands.encoded_bytes(piece, 4) * 8 / piece, uplink=True,
    ).all_reduce_seconds  # fmt: skip


def wall(count: int, steps: int, folder: Path, output: Path | None) -> None:
    """Wall time of training over the line, measured and planned."""
    found: dict[str, Any] = {}
    ways: list[tuple[int, Wire]] = [(1, "fp32"), (8, "int4"), (8, "fp32"), (32, "fp32"), (128, "fp32")]
    for every, wire in ways:
        islands, name = Islands(count, every, AVERAGE, dtype=wire), f"H-{every}-{wire}"
        run = run_of(folder, name, islands, dp=1, steps=min(max(steps, every), MOST_ROUNDS * every))
        messages = statistics.median(_messages(islands, None))
        with shaped_link(count, bits_per_second=BITS_PER_SECOND, one_way_seconds=ONE_WAY_SECONDS) as names:
            run_forked(count, _train_over, names, run)
        whole, each = _seconds(folder / name), [_seconds(own, outer=True) for own in _folders(folder / name, count)]
        outer = [step for step in whole if islands.due(step, run.steps)]
        inner, since = 0.0, min(whole) - 1
        for step in [*outer, max(whole)]:
            inner, since = inner + max(sum(one[k] for k in range(since + 1, step + 1)) for one in each), step
        planned, measured = inner + (_planned(islands) + messages) * len(outer), sum(whole.values())
        found[name] = {"measured_seconds": measured, "planned_seconds": planned, "planned_over_measured": planned / measured,
                       "step_seconds": inner / len(whole), "line_seconds": _planned(islands), "loopback_seconds": messages,
                       "steps": len(whole), "outer_steps": len(outer)}  # fmt: skip
        print(name, found[name], flush=True)
        _write(output, _over_line(count) | {"ways": found})


def _folders(folder: Path, count: int) -> list[Path]:
    return [folder / (f"islands/{number}" if number else "") for number in range(count)]


def _seconds(folder: Path, *, outer: bool = False) -> dict[int, float]:
    """Seconds of each step of an island, where they are known; with `outer` less those of its outer loop."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    beside = json.loads((folder / OUTER_SECONDS).read_text())
    return {row["step"]: row["perf/step_s"] - beside[row["step"] - 1] * outer for row in rows if "perf/step_s" in row}


def _train_over(rendezvous: str, names: list[str], run: Run) -> None:
    """On an island, in its namespace."""
    _enter(names)
    after_step, beside = OuterLoop.after_step, list[float]()

    def timed(loop: OuterLoop, steps_done: int) -> bool:
        started = time.perf_counter()
        done = after_step(loop, steps_done)
        beside.append(time.perf_counter() - started)
        return done

    OuterLoop.after_step = timed  # pyright: ignore[reportAttributeAccessIssue]
    _train(rendezvous, run)
    own = _folders(Path(run.folder) / run.name, len(names))[int(os.environ["RANK"])]
    (own / OUTER_SECONDS).write_text(json.dumps(beside))


def _enter(names: list[str]) -> None:
    """Move this process into the namespace of its rank."""
    rank = int(os.environ["RANK"])
    with open(f"/var/run/netns/{names[rank]}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), NEW_NETWORK):
            raise OSError(ctypes.get_errno(), "setns")
    os.environ["GLOO_SOCKET_IFNAME"] = f"line{rank}"


def _send(rendezvous: str, names: list[str] | None, wire: Any, elements: int) -> list[float]:
    """On an island, in its namespace: seconds of each exchange."""
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if names is not None:
        _enter(names)
    store = FileStore(rendezvous.removeprefix("file://"), count)
    link = IslandLink(
        Ranks(0, 1, torch.device("cpu"), island=rank, store=store), count, timeout_seconds=120.0, likes={"all": True}
    )
    own, seconds = torch.randn(elements), []
    for step in range(REPEATS + 1):  # the first opens TCP's window
        link.arrive(step)
        started = time.perf_counter()
        link.groups["all"].mean(own, wire)
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
            left, up = megabytes > 4096, marker == "s"
            offset = (-6, -9 if up else 2) if left else (5, 4 if up else -8)
            side = "right" if left else "left"
            axes.annotate(name, (megabytes, value), xytext=offset, textcoords="offset points", fontsize=7, ha=side)
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
