"""Rehearsal of the demo's own model on this machine: measures the rate from which the demo predicts the time of a step.

A CPU has no datasheet with this rate, and a large GEMM reaches several times that of a small model. So as many processes as
will train run a few forward and backward passes, each alone: no communication, no optimizer, no data.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from ultrascale.catalogue.machines import usable_cores
from ultrascale.description.layout import Precision
from ultrascale.description.run import Run
from ultrascale.launch.forked import run_forked
from ultrascale.models.decoder import Decoder
from ultrascale.models.initialise import initialise
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
from ultrascale.plan.flops import hardware_flops_per_token
from ultrascale.work.ops import Shape

PASSES = 2
PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16")


@dataclass(frozen=True)
class Rehearsal:
    """FLOPs per second that one process reached while all processes were computing."""

    flops_per_second: dict[Precision, float]

    @property
    def fastest(self) -> Precision:
        """Precision to train in on this machine."""
        return max(self.flops_per_second, key=lambda precision: self.flops_per_second[precision])


def rehearse(run: Run) -> Rehearsal:
    """Time the passes of one micro-batch of `run` on `run.layout.world_size` processes. Raises RankFailed."""
    per_rank = run_forked(run.layout.world_size, _seconds_on_rank, run)
    flops = hardware_flops_per_token(run.model, run.layout, Shape(1, run.batch.sequence_length))
    flops *= run.layout.micro_batch_size * run.batch.sequence_length
    return Rehearsal({p: flops / max(seconds[p] for seconds in per_rank) for p in PRECISIONS})


def step_seconds(run: Run, flops_per_second: float) -> float:
    """Step time in seconds at a process's rehearsed rate. A lower bound: communication, optimizer and data are excluded."""
    tokens = run.batch.sequences_per_batch * run.batch.sequence_length
    flops = tokens * hardware_flops_per_token(run.model, run.layout, Shape(1, run.batch.sequence_length))
    return flops / (flops_per_second * run.layout.dp)


def threads_of_a_rank(num_processes: int) -> int:
    """Threads that the launcher gives each process."""
    setting = os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdigit() else max(1, usable_cores() // num_processes)


def _seconds_on_rank(rendezvous: str, run: Run) -> dict[str, float]:
    torch.set_num_threads(threads_of_a_rank(run.layout.world_size))
    return {precision: _seconds_of_a_pass(run, precision) for precision in PRECISIONS}


def _seconds_of_a_pass(run: Run, precision: Precision) -> float:
    """The fastest of a few: slower ones are disturbed by other work."""
    decoder = Decoder(run.model)
    initialise(decoder, run.model, run.seed)
    decoder = decoder.to(TORCH_DTYPE[precision])
    shape = (run.layout.micro_batch_size, run.batch.sequence_length)
    tokens = torch.randint(run.model.vocab_size, shape, generator=torch.Generator().manual_seed(run.seed))
    positions = torch.arange(shape[1]).expand(shape) if run.data.document_mask else None
    documents = torch.zeros(shape, dtype=torch.int64) if run.data.document_mask else None
    seconds: list[float] = []
    for _ in range(1 + PASSES):
        started = time.perf_counter()
        decoder(tokens, targets=tokens, positions=positions, document_ids=documents).backward()
        decoder.zero_grad()
        seconds.append(time.perf_counter() - started)
    return min(seconds[1:])
