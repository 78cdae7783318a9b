"""One contestant of `train_speed.py` in a process of its own: python contestants.py NAME FOLDER WARMUP_STEPS STEPS_PER_ROUND

Every contestant trains the same shape on the same random tokens. Between rounds it waits for its turn, so that the rounds of
all contestants can be interleaved and drift of the machine hits all alike.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from math import prod
from pathlib import Path

import numpy as np
import torch
from plain_llama import FFN, HEADS, HIDDEN, LAYERS, SEQUENCE, SEQUENCES, VOCAB_SIZE, Llama, training_step

from ultrascale.data.indexed import ShardWriter

NUM_TOKENS = 2_000_000


class Pace:
    """Counts steps and talks with `train_speed.py`: `ready` once warm; for each `go` one step untimed, then a timed round.

    A report is one JSON line: wall seconds, user + system CPU seconds of this process, and its peak resident bytes so far.
    """

    def __init__(self, warmup: int, steps: int):
        self.steps, self.remaining, self.timed, self.over = steps, warmup, False, False
        self._wall = self._cpu = 0.0
        self._out = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)  # whatever a library prints must not reach the protocol

    def tick(self) -> None:
        """Call after every step; blocks between rounds."""
        self.remaining -= 1
        if self.remaining:
            return
        if self.timed:
            wall, cpu = time.perf_counter() - self._wall, cpu_seconds() - self._cpu
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
            print(json.dumps({"wall_seconds": wall, "cpu_seconds": cpu, "peak_bytes": peak}), file=self._out)
            self._wait()
        elif self._cpu:  # the untimed step of a round is done
            self._start_clock()
        else:
            print('"ready"', file=self._out)
            self._wait()

    def _wait(self) -> None:
        self.over = sys.stdin.readline().strip() != "go"
        self.remaining, self.timed, self._cpu = 1, False, 1.0

    def _start_clock(self) -> None:
        self.remaining, self.timed = self.steps, True
        self._wall, self._cpu = time.perf_counter(), cpu_seconds()


def cpu_seconds() -> float:
    """User and system seconds of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def write_tokens(folder: Path) -> None:
    """The text of the benchmark: one document of random tokens, in tokens.bin (plain uint16) and tokens.idx."""
    writer = ShardWriter(folder / "tokens", "uint16")
    writer.append(np.random.default_rng(0).integers(0, VOCAB_SIZE, NUM_TOKENS, dtype=np.uint16))
    writer.end_document()
    writer.finish()


def batches(folder: Path, count: int, rank: int) -> Callable[[], tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the token file, `count` a call: tokens and targets [count, S], int64."""
    stream = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")
    generator = np.random.default_rng(rank + 1)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        starts = generator.integers(0, len(stream) - SEQUENCE - 1, count)
        windows = torch.from_numpy(np.stack([stream[i : i + SEQUENCE + 1].astype(np.int64) for i in starts]))
        return windows[:, :-1], windows[:, 1:]

    return batch


def plain(pace: Pace, folder: Path, *, bf16: bool, compiled: bool) -> None:
    """A hand-written loop, eager or with torch.compile over the whole model."""
    model = Llama()
    chosen = torch.compile(model) if compiled else model
    run_steps(pace, training_step(chosen, batches(folder, SEQUENCES, 0), bf16=bf16))  # pyright: ignore


def ddp(pace: Pace, folder: Path, *, bf16: bool) -> None:
    """torch DistributedDataParallel in two processes, each with half of the batch."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = torch.nn.parallel.DistributedDataParallel(Llama(), gradient_as_bucket_view=True)
    run_steps(pace, training_step(model, batches(folder, SEQUENCES // world, rank), bf16=bf16))
    dist.destroy_process_group()


def dtensor(pace: Pace, folder: Path, *, bf16: bool) -> None:
    """The plain loop with tensor and sequence parallelism by torch's DTensor, cut as torchtitan cuts its Llama."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        loss_parallel,
        parallelize_module,
    )

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = {
        "attention_norm": SequenceParallel(), "mlp_norm": SequenceParallel(),
        "qkv": ColwiseParallel(input_layouts=Shard(1)), "out": RowwiseParallel(output_layouts=Shard(1)),
        "gate_up": ColwiseParallel(input_layouts=Shard(1)), "down": RowwiseParallel(output_layouts=Shard(1)),
    }  # fmt: skip
    plan = {f"blocks.{k}.{name}": style for k in range(LAYERS) for name, style in block.items()}
    plan["embed"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan["norm"] = SequenceParallel()
    plan["head"] = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(Llama(), mesh, plan)
    step = training_step(model, batches(folder, SEQUENCES, 0), bf16=bf16)
    with loss_parallel():
        run_steps(pace, step)
    dist.destroy_process_group()


def run_steps(pace: Pace, step: Callable[[], object]) -> None:
    while not pace.over:
        step()
        pace.tick()


def hf_trainer(pace: Pace, folder: Path, *, bf16: bool) -> None:
    """Hugging Face's Trainer with its LlamaForCausalLM, logging and saving switched off."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    class Ticking(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            pace.tick()
            control.should_training_stop = pace.over

    class Windows(torch.utils.data.Dataset):
        stream = np.memmap(folder / "tokens.bin", dtype=np.uint16, mode="r")

        def __len__(self) -> int:
            return len(self.stream) // SEQUENCE

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            tokens = torch.from_numpy(self.stream[index * SEQUENCE : (index + 1) * SEQUENCE].astype(np.int64))
            return {"input_ids": tokens, "labels": tokens}

    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, max_position_embeddings=SEQUENCE, tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    options = TrainingArguments(
        output_dir=str(folder / "hf"), per_device_train_batch_size=SEQUENCES, max_steps=10**6, use_cpu=True, bf16=bf16,
        logging_strategy="no", save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        learning_rate=3e-4, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=1.0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    Trainer(model=model, args=options, train_dataset=Windows(), callbacks=[Ticking()]).train()


def ours(pace: Pace, folder: Path, *, bf16: bool, compiled: bool = False, gloo_as_it_is: bool = False, **cut: int) -> None:
    """Ultrascale's own step, in as many processes as were started, on token files that its loader reads. `cut`: fields of the
    layout; processes that other axes leave are data parallel. `gloo_as_it_is`: its event loops preempt like any thread."""
    from ultrascale.data.loader import Loader
    from ultrascale.description.architecture.model import Model
    from ultrascale.description.layout import Layout
    from ultrascale.description.run import Batch, Checkpoint, Data, Log, Run, Source
    from ultrascale.parallel import mesh
    from ultrascale.parallel.mesh import process_group
    from ultrascale.train.trainer import Trainer

    if gloo_as_it_is:
        mesh.gloo_threads_as_batch = nullcontext
    world = int(os.environ.get("WORLD_SIZE", "1"))
    dp = world // prod(cut.get(axis, 1) for axis in ("tp", "cp", "pp"))
    micro_batch_size = cut.pop("micro_batch_size", SEQUENCES // dp)
    model = Model(VOCAB_SIZE, HIDDEN, FFN, LAYERS, HEADS, HEADS, HIDDEN // HEADS, SEQUENCE)
    run = Run(
        model, steps=10**6, device="cpu", compile=compiled,
        layout=Layout(dp=dp, micro_batch_size=micro_batch_size, precision="bf16" if bf16 else "fp32", **cut),  # pyright: ignore
        batch=Batch(sequence_length=SEQUENCE, sequences_per_batch=SEQUENCES),
        data=Data(sources=(Source(str(folder / "tokens")),), document_mask=False),
        checkpoint=Checkpoint(every_steps=None, export=False), log=Log(memory_steps=0),
    )  # fmt: skip
    loader = Loader(run.data.sources, sequence_length=SEQUENCE, vocab_size=VOCAB_SIZE, seed=run.seed, document_mask=False)
    with process_group(run.layout, device="cpu") as ranks:
        run_steps(pace, Trainer(run, ranks, loader).train_step)


AXES: dict[str, dict[str, object]] = {"dp2": {}, "tp2": {"tp": 2}, "pp2": {"pp": 2, "micro_batch_size": 2}, "cp2": {"cp": 2}}
"""Two processes, by what they cut; pp2 is 1F1B with four micro-batches."""
CROWDED: dict[str, dict[str, object]] = {"dp4": {"zero_stage": 3}, "tp4": {"tp": 4}, "pp4": {"pp": 4, "micro_batch_size": 2}}
"""Four processes, more than a laptop of two cores has processors."""
AS_IT_IS = "gloo as it is"
"""In the name of a contestant whose gloo threads preempt like any other."""
CONTESTANTS: dict[str, tuple[int, Callable[..., None], dict[str, object]]] = {}
"""name -> number of processes, function, its options."""
for precision in ("fp32", "bf16"):
    kind: dict[str, object] = {"bf16": precision == "bf16"}
    CONTESTANTS |= {
        f"plain eager {precision}": (1, plain, {**kind, "compiled": False}),
        f"ours eager {precision}": (1, ours, kind),
        f"plain compiled {precision}": (1, plain, {**kind, "compiled": True}),
        f"ours compiled {precision}": (1, ours, {**kind, "compiled": True}),
        f"HF Trainer {precision}": (1, hf_trainer, kind),
        f"DDP x2 {precision}": (2, ddp, kind),
        f"ours x2 ZeRO 0 {precision}": (2, ours, kind),
        f"ours x2 ZeRO 3 {precision}": (2, ours, {**kind, "zero_stage": 3}),
    }
    for axis, cut in AXES.items():
        CONTESTANTS |= {
            f"ours {axis} eager {precision}": (2, ours, {**kind, **cut}),
            f"ours {axis} compiled {precision}": (2, ours, {**kind, **cut, "compiled": True}),
        }
    CONTESTANTS[f"DTensor tp2 {precision}"] = (2, dtensor, kind)
    CONTESTANTS[f"ours pp2 torch's runtime {precision}"] = (2, ours, {**kind, **AXES["pp2"], "pipeline_runtime": "torch"})
for axis, cut in (AXES | CROWDED).items():
    world = 2 if axis in AXES else 4
    CONTESTANTS[f"ours {axis} eager fp32"] = (world, ours, {"bf16": False, **cut})
    CONTESTANTS[f"ours {axis} {AS_IT_IS} fp32"] = (world, ours, {"bf16": False, **cut, "gloo_as_it_is": True})


def main() -> None:
    name, folder, warmup, steps = sys.argv[1:]
    _, run, options = CONTESTANTS[name]
    torch.manual_seed(0)
    run(Pace(int(warmup), int(steps)), Path(folder), **options)


if __name__ == "__main__":
    main()
