"""Gathers in fp8 beside gathers in bf16: whole steps on every GPU of this machine, and what a rank does to its shard before.

    python benchmarks/gpu/gather_speed.py --output benchmarks/gpu/results/NAME.json [--shape llama-3.1-8b] [--layers 8]

Steps: ZeRO 3 over all GPUs, products in fp8 in each of the three scalings, with `fp8_all_gather` and without, in turns, two
rounds; the losses of both must be the same to the bit. They need two GPUs: one gathers nothing. Shards: on one GPU, of a
block's weights cut over eight ranks, the cast to bf16 in one kernel against rounding to fp8 one by one, and what each sends.
`--toy` runs both on the CPU, two processes and one scaling, at tiny sizes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, get_args

import numpy as np
import torch

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.data.loader import Sequences
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights
from ultrascale.description.layout import Fp8Scaling, Layout
from ultrascale.description.run import Batch, Data, Log, Run
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, SMALLEST, largest_of, rounded
from ultrascale.measure.machine.ceilings import device_name
from ultrascale.parallel.mesh import process_group
from ultrascale.train.trainer import Trainer
from ultrascale.work.fp8_slots import weights_gathered_in_fp8

WARM_UP, TIMED = 3, 20
ROUNDS = {False: 2, True: 1}
LENGTH = {False: 4096, True: 64}
"""Of a sequence, by whether it is a toy."""
RANKS_OF_SHARDS = 8
Row = dict[str, Any]


class RandomTokens:
    """A loader of random tokens, the same for a sequence's number whoever asks."""

    def __init__(self, vocabulary: int, length: int):
        self.vocabulary, self.length = vocabulary, length

    def read(self, numbers: Iterable[int]) -> Sequences:
        """As many sequences as there are numbers, each one document."""
        numbers = list(numbers)
        drawn = [np.random.default_rng(number).integers(0, self.vocabulary, self.length + 1) for number in numbers]
        stream, places = np.stack(drawn), np.broadcast_to(np.arange(self.length), (len(numbers), self.length))
        return Sequences(stream[:, :-1].copy(), stream[:, 1:].copy(), places.copy(), np.zeros_like(places), np.array(numbers))

    def fingerprint(self) -> str:
        """What its tokens follow from."""
        return "random tokens"


def shape_of(asked: argparse.Namespace) -> Model:
    """As deep as asked; tiny where it is a toy."""
    model = preset(asked.shape)
    if asked.toy:
        model = replace(
            model,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
        )
    return replace(model, num_hidden_layers=2 if asked.toy else asked.layers)


def run_of(asked: argparse.Namespace, ranks: int, scaling: Fp8Scaling, in_fp8: bool) -> Run:
    """ZeRO 3 over all ranks, a sequence each."""
    layout = Layout(dp=ranks, zero_stage=3, precision="fp8", fp8_scaling=scaling, fp8_all_gather=in_fp8)
    return Run(
        shape_of(asked), steps=10**6, device="cpu" if asked.toy else "cuda", compile=not asked.toy, layout=layout,
        batch=Batch(LENGTH[asked.toy], ranks), data=Data(document_mask=False), log=Log(memory_steps=0),
    )  # fmt: skip


def steps_of(run: Run, count: int) -> Row:
    """Train: seconds of each timed step, losses, and this rank's peak bytes."""
    with process_group(run.layout, device=run.device) as ranks:
        on_cuda = ranks.device.type == "cuda"
        loader = RandomTokens(run.model.vocab_size, run.batch.sequence_length)
        trainer = Trainer(run, ranks, loader, draw_on_device=True)
        losses = [trainer.train_step().gradients.loss for _ in range(WARM_UP)]
        if on_cuda:
            torch.cuda.reset_peak_memory_stats()
        seconds = []
        for _ in range(count):
            start = time.perf_counter()
            losses.append(trainer.train_step().gradients.loss)
            if on_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        return {"seconds": seconds, "losses": losses, "peak_bytes": torch.cuda.max_memory_allocated() if on_cuda else None}


def on_all_ranks(asked: argparse.Namespace, ranks: int, scaling: Fp8Scaling, in_fp8: bool) -> Row:
    """The same in a process for each rank; what the first one says. Raises RuntimeError with the words of one that failed."""
    with socket.socket() as free, tempfile.TemporaryDirectory() as place:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
        words = [sys.executable, __file__, "--shape", asked.shape, "--layers", str(asked.layers), "--steps", str(asked.steps)]
        words += [*(["--toy"] if asked.toy else []), "--as-rank", scaling, str(int(in_fp8))]
        common = {**os.environ, "WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        logs = [Path(place) / str(rank) for rank in range(ranks)]
        free.close()
        children = []
        for rank, log in enumerate(logs):
            with log.open("w") as errors:
                children.append(subprocess.Popen(
                    words, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stdout=subprocess.PIPE, stderr=errors,
                    text=True,
                ))  # fmt: skip
        told = [child.communicate()[0] for child in children]
        for child, log in zip(children, logs, strict=True):
            if child.returncode:
                raise RuntimeError(log.read_text(errors="replace")[-2000:])
    return json.loads(told[0].splitlines()[-1])


def compete(asked: argparse.Namespace, ranks: int) -> Iterator[Row]:
    """A row of each scaling. Raises SystemExit where gathers in fp8 change a loss."""
    for scaling in ("row",) if asked.toy else get_args(Fp8Scaling):
        rounds: dict[bool, list[Row]] = {False: [], True: []}
        for _ in range(ROUNDS[asked.toy]):
            for in_fp8, found in rounds.items():
                found.append(on_all_ranks(asked, ranks, scaling, in_fp8))
        if rounds[False][0]["losses"] != rounds[True][0]["losses"]:
            raise SystemExit(
                f"{scaling}: gathers in fp8 change the loss: {rounds[False][0]['losses']}, {rounds[True][0]['losses']}"
            )
        of = {in_fp8: median(s for one in found for s in one["seconds"]) for in_fp8, found in rounds.items()}
        yield {
            "scaling": scaling, "ranks": ranks, "bf16_step_seconds": of[False], "fp8_step_seconds": of[True],
            "faster": of[False] / of[True], "bf16_peak_bytes": rounds[False][0]["peak_bytes"],
            "fp8_peak_bytes": rounds[True][0]["peak_bytes"],
        }  # fmt: skip


def shards(asked: argparse.Namespace, device: torch.device) -> Iterator[Row]:
    """What a rank does to its part of a block before a gather, in fp32 masters, and the bytes that it sends."""
    model = shape_of(asked)
    layout = Layout(dp=RANKS_OF_SHARDS, zero_stage=3, precision="fp8", fp8_all_gather=True)
    names = weights_gathered_in_fp8(model, layout)
    sizes = [weight.shape for weight in layer_weights(model, 0) if weight.name in names]
    parts = [torch.randn(-(-rows // RANKS_OF_SHARDS), columns, device=device) for rows, columns in sizes]
    into = [torch.empty_like(part, dtype=torch.bfloat16) for part in parts]
    scales = {
        "tensor": [(part.abs().max() / torch.finfo(FORWARD).max).view(1, 1) for part in parts],
        "row": [largest_of(part, "row").clamp_min(SMALLEST) / torch.finfo(FORWARD).max for part in parts],
    }

    def cast() -> None:
        torch._foreach_copy_(into, parts)  # pyright: ignore[reportPrivateImportUsage]

    num_bytes = sum(part.numel() for part in parts)
    yield {"what": "cast to bf16", "seconds": timed(cast, device), "bytes_sent": 2 * num_bytes}
    for name, of_parts in scales.items():

        def to_fp8(of_parts: list[torch.Tensor] = of_parts) -> None:
            for part, scale in zip(parts, of_parts, strict=True):
                rounded(part.to(torch.bfloat16), scale)

        yield {"what": f"rounded to fp8 by {name}", "seconds": timed(to_fp8, device), "bytes_sent": num_bytes}


def timed(run: Callable[[], None], device: torch.device) -> float:
    """Median seconds, the host's launches included: FSDP2 does this between two blocks."""
    found = []
    for _ in range(TIMED):
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - start)
    return median(found)


def line(row: Row) -> str:
    """A row for people."""
    if "what" in row:
        return f"{row['what']:<26} {row['seconds'] * 1e6:9.1f} us  {row['bytes_sent'] / 2**20:8.2f} MiB sent a block"
    peaks = [row["bf16_peak_bytes"], row["fp8_peak_bytes"]]
    memory = "" if None in peaks else "; peak GiB " + " and ".join(f"{peak / 2**30:.2f}" for peak in peaks)
    times = f"{row['bf16_step_seconds'] * 1e3:.1f} ms gathered in bf16, {row['fp8_step_seconds'] * 1e3:.1f} in fp8"
    return f"{row['scaling']:<8} over {row['ranks']} ranks: {times} ({row['faster']:.2f}x){memory}"


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=8, help="of the shape: gathers of all are alike")
    parser.add_argument("--steps", type=int, default=8, help="timed steps of a round")
    parser.add_argument("--toy", action="store_true", help="tiny sizes, two processes on the CPU")
    parser.add_argument("--as-rank", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args(words)
    if not asked.toy and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --toy runs tiny sizes on the CPU")
    return asked


def main() -> int:
    """Measure, print, write."""
    asked = parse()
    ranks = 2 if asked.toy else torch.cuda.device_count()
    if asked.as_rank is not None:
        scaling, in_fp8 = asked.as_rank
        told = steps_of(run_of(asked, int(os.environ["WORLD_SIZE"]), scaling, in_fp8 == "1"), asked.steps)
        print(json.dumps(told), flush=True)
        return 0
    device = torch.device("cpu" if asked.toy else "cuda")
    record: Row = {
        "device": device_name(device), "gpus": ranks, "torch": torch.__version__, "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"), "shards": [], "steps": [],
    }  # fmt: skip

    def keep(kind: str, row: Row) -> None:
        record[kind].append(row)
        print(line(row), flush=True)
        if asked.output is not None:
            asked.output.parent.mkdir(parents=True, exist_ok=True)
            asked.output.write_text(json.dumps(record, indent=1) + "\n")

    for row in shards(asked, device):
        keep("shards", row)
    if ranks == 1:
        print("one GPU gathers nothing: whole steps need two")
    for row in compete(asked, ranks) if ranks > 1 else ():
        keep("steps", row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
