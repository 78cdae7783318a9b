"""picotron as a contestant of `train_speed.py --picotron FOLDER`, of its own parts from a checkout; no weights, no data set.

    python peer_picotron.py NAME FOLDER WARMUP_STEPS STEPS_PER_ROUND      with the checkout on PYTHONPATH

NAME is `picotron dp2 fp32` (or tp2, pp2, cp2). Model, cut, schedule, gradient bucket and attention are picotron's; the loop
around them does what its training script does in a step: zero gradients, passes, mean of the loss over ranks, AdamW. Two things
are not as in that script: tokens are random ones, and under cp alone the gradients are summed over ranks, which its script does
only where dp > 1 (replicas that drift apart would be no peer to a right result).
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from contestants import Pace, run_steps
from plain_llama import FFN, HEADS, HIDDEN, LAYERS, SEQUENCE, SEQUENCES, VOCAB_SIZE
from torch import Tensor, nn

MICRO_BATCHES = {"dp2": (SEQUENCES // 2, 1), "tp2": (SEQUENCES, 1), "pp2": (2, SEQUENCES // 2), "cp2": (SEQUENCES, 1)}
"""Sequences of a micro-batch, and micro-batches of a rank, by the axis of two: as ours are cut."""


def part(name: str) -> Any:
    return importlib.import_module(f"picotron.{name}")


class Loader:
    """Micro-batches of random tokens in the form its passes read, each rank its positions: tokens, targets [B, S / cp]."""

    def __init__(self, axis: str):
        self.micro_batch_size, self.grad_acc_steps = MICRO_BATCHES[axis]
        groups = part("process_group_manager").process_group_manager
        self.length = SEQUENCE // groups.cp_world_size
        self.first = groups.cp_rank * self.length
        self.generator = torch.Generator().manual_seed(1 + groups.dp_rank)

    def __next__(self) -> dict[str, Tensor | None]:
        windows = torch.randint(VOCAB_SIZE, (self.micro_batch_size, SEQUENCE + 1), generator=self.generator)
        own = slice(self.first, self.first + self.length)
        positions = torch.arange(SEQUENCE)[own].expand(self.micro_batch_size, -1).contiguous()
        return {
            "input_ids": windows[:, :-1][:, own].contiguous(), "target_ids": windows[:, 1:][:, own].contiguous(),
            "position_ids": positions, "hidden_states": None,
        }  # fmt: skip


def cut_model(axis: str) -> nn.Module:
    """The benchmark's Llama in fp32, cut by picotron over two processes."""
    config = SimpleNamespace(
        hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, vocab_size=VOCAB_SIZE, max_position_embeddings=SEQUENCE, rms_norm_eps=1e-5,
        rope_theta=10000.0,
    )  # fmt: skip
    model: nn.Module = part("model").Llama(config=config)
    if axis == "tp2":
        part("tensor_parallel.tensor_parallel").apply_tensor_parallel(model)
    if axis == "pp2":
        return part("pipeline_parallel.pipeline_parallel").PipelineParallel(model, config)
    if axis == "cp2":
        part("context_parallel.context_parallel").apply_context_parallel(model)
    if axis in ("dp2", "cp2"):
        model = part("data_parallel.data_parallel").DataParallelBucket(model)
    return model


def passes(axis: str, model: nn.Module, loader: Loader) -> Callable[[], float]:
    """Forward and backward passes of a step, to its loss."""
    if axis == "pp2":
        schedule = part("pipeline_parallel.pipeline_parallel").train_step_pipeline_1f1b
        shape = (loader.micro_batch_size, loader.length, HIDDEN)
        return lambda: schedule(model, loader, shape, torch.device("cpu"), torch.float32) or 0.0

    def whole() -> float:
        batch = next(loader)
        targets = batch["target_ids"]
        assert targets is not None
        loss = F.cross_entropy(model(input_ids=batch["input_ids"]).flatten(0, 1), targets.flatten())
        loss.backward()
        return loss.item()

    return whole


def main() -> None:
    name, _, warmup, steps = sys.argv[1:]
    axis = name.split()[1]
    os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32"}
    pace = Pace(int(warmup), int(steps))
    dist.init_process_group("gloo")
    sizes = {f"{kind}_size": 2 if axis == f"{kind}2" else 1 for kind in ("tp", "cp", "pp", "dp")}
    part("process_group_manager").setup_process_group_manager(**sizes)
    groups = part("process_group_manager").process_group_manager
    torch.manual_seed(0)
    model = cut_model(axis)
    run_passes = passes(axis, model, Loader(axis))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)

    def step() -> None:
        optimizer.zero_grad()
        loss = torch.tensor(run_passes())
        if groups.pp_is_last_stage:
            dist.all_reduce(loss, group=groups.cp_dp_group)
        optimizer.step()
        if hasattr(model, "reset"):
            model.reset()  # pyright: ignore

    run_steps(pace, step)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
