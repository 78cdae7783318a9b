"""A fresh run for measurements of its first steps. Its folder is neither read nor written.

A step's time and memory do not depend on its weights, so the run starts from initial weights, and its state is discarded.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

from torch import nn

from ultrascale.config.rules.trainable import expect_trainable_run
from ultrascale.description.progress import step_span
from ultrascale.description.run import Run
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.mesh import process_group
from ultrascale.parallel.time_limits import START_SECONDS
from ultrascale.plan.memory.replay import MemoryPlan
from ultrascale.plan.report import plan_rank
from ultrascale.train.corpora import build_loader, with_absolute_paths
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.start.agreement import expect_same_run
from ultrascale.train.start.chosen_kernels import choose_kernels
from ultrascale.train.start.chosen_recompute import choose_recomputation
from ultrascale.train.start.deterministic import deterministic
from ultrascale.train.start.fit import cluster_of, memory_bytes
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch.out_of_memory import explained_out_of_memory


@contextmanager
def begun_aside(run: Run, steps: int, folder: Path, *, rendezvous: str) -> Iterator[Trainer]:
    """The trainer of `run` on this rank, before its first step, with data for `steps` steps. `folder`: for choices made by
    speed.

    All ranks exit together. Raises SpecError (the run does not fit the processes or the data), DataError, OutOfDeviceMemory.
    """
    expect_trainable_run(run)
    run = with_absolute_paths(replace(run, steps=max(run.steps, steps)))
    timeout_seconds = max(START_SECONDS, run.collective_timeout_seconds)
    joined = process_group(run.layout, device=run.device, timeout_seconds=timeout_seconds, rendezvous=rendezvous)
    with deterministic(run), joined as ranks:
        expect_same_run(run, ranks)
        folder.mkdir(parents=True, exist_ok=True)
        chosen = choose_kernels(run, ranks, RunFolder(folder))
        device_bytes = memory_bytes(run, ranks.device)
        run = choose_recomputation(chosen.run, ranks, RunFolder(folder), cluster_of(run, ranks.device), device_bytes)
        with explained_out_of_memory(run, ranks.rank, folder / "run.toml"):
            yield Trainer(run, ranks, build_loader(run, run.data.sources), kernels=chosen.forms)
        ranks.barrier()  # ranks exit together: the launcher may wait forever for a rank if another exited long before it


def counted_steps(trainer: Trainer, steps: int) -> LiveMemory | None:
    """Run `steps` steps and count every live tensor; None, and nothing counted, if blocks are compiled."""
    memory = None if trainer.run.compile else LiveMemory(nn.ModuleList(trainer.share.stages.values()), trainer.optimizer)
    if memory is not None:
        trainer.on_phase = memory.mark
    with memory or nullcontext():
        for _ in range(steps):
            trainer.train_step()
    trainer.on_phase = lambda phase, step: None
    return memory


def planned_memory(trainer: Trainer, steps: int) -> MemoryPlan:
    """Memory plan of this rank's first `steps` steps: a replay that keeps its timeline."""
    run, ranks = trainer.run, trainer.ranks
    device = "cuda" if ranks.device.type == "cuda" else "cpu"
    first = step_span(run.batch, 0).num_sequences
    return plan_rank(run, ranks.rank, device, steps=steps, sequences_per_batch=first, keeps_timeline=True)


def timed_steps(trainer: Trainer, steps: int) -> list[float]:
    """Seconds of each of the next `steps` steps. Each step waits for its device, because the norm of its gradient is read."""
    trainer.ranks.settle()
    seconds = []
    for _ in range(steps):
        started = time.perf_counter()
        trainer.train_step()
        seconds.append(time.perf_counter() - started)
    return seconds
