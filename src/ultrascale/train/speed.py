"""Speed and memory of a run on this machine, compared with its plan: the run's first steps, without a profiler.

    steps 1 to 2            live memory: on a CPU tensor by tensor, on CUDA by the allocator
    up to `warm`            warm-up, not measured
    the next `steps`        timed

The result is one JSON object, `Speed`.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ultrascale.description.problems import SpecError
from ultrascale.description.progress import step_span
from ultrascale.description.run import Run
from ultrascale.measure.machine.ceilings import device_name, is_here, peak_flops
from ultrascale.output_file import write_output
from ultrascale.plan.flops import model_flops_per_token
from ultrascale.plan.report import plan_run
from ultrascale.train.folder.run_folder import environment
from ultrascale.train.start.aside import begun_aside, counted_steps, planned_memory, timed_steps
from ultrascale.train.start.fit import cluster_of
from ultrascale.train.trainer import Trainer

MEMORY_STEPS = 2
"""The second step is the first to hold everything that persists between steps."""


@dataclass(frozen=True)
class Speed:
    """Measured and planned time and memory. None: not planned for this device, or not counted (compiled blocks on a CPU)."""

    step_seconds: list[float]
    """Seconds of each timed step on rank 0; all ranks end a step together."""
    tokens_per_step: int
    ranks: int
    mfu: float
    """Model FLOPs (6N + causal attention) at the median step over `peak_flops`."""
    peak_flops: float
    """Per second, of one device."""
    peak_origin: str
    planned_step_seconds: float | None
    planned_peak_bytes: int
    """Live bytes, of the rank that `measured_peak_bytes` is of."""
    measured_peak_bytes: int | None
    """The most of any rank."""
    planned_reserved_bytes: int | None
    """By CUDA's caching allocator, on the rank that the plan says is the fullest."""
    measured_reserved_bytes: int | None
    fullest_rank: int
    device: str
    environment: dict[str, Any]

    @property
    def median_seconds(self) -> float:
        """Median seconds of a step."""
        return median(self.step_seconds)

    @property
    def tokens_per_second_per_rank(self) -> float:
        """Tokens per second and rank, at the median step."""
        return self.tokens_per_step / self.median_seconds / self.ranks


def measure_speed(run: Run, steps: int, out: Path, *, warm: int, rendezvous: str = "env://") -> Speed | None:
    """Time `steps` steps of `run` after `warm` warm-up steps, in this process and its peers. Writes the result to the file
    `out`.

    Returns the result on rank 0, None on other ranks. Raises SpecError (the run does not fit the processes or the data),
    DataError, OutOfDeviceMemory.
    """
    with begun_aside(run, warm + steps, out.parent, rendezvous=rendezvous) as trainer:
        ranks = trainer.ranks
        watched = min(MEMORY_STEPS, warm)
        memory = _memory(trainer, watched)
        for _ in range(warm - watched):
            trainer.train_step()
        seconds = timed_steps(trainer, steps)
        if ranks.device.type == "cuda":  # maximum over all steps: the allocator may have grown after the first ones
            memory = _Memory(memory.planned, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        memories = [_Memory(**of_rank) for of_rank in ranks.gather_json(asdict(memory))]
        if not ranks.is_first:
            return None
        speed = _speed(trainer, seconds, memories)
        write_output(out, json.dumps(asdict(speed), indent=1) + "\n")
        return speed


@dataclass(frozen=True)
class _Memory:
    """Peak memory of one rank, bytes."""

    planned: int
    measured: int | None
    reserved: int | None = None


def _memory(trainer: Trainer, steps: int) -> _Memory:
    """Run `steps` steps. Returns the memory they took."""
    planned = planned_memory(trainer, steps).peak.total
    if trainer.ranks.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()  # drawing the initial weights may take more memory than a step
        for _ in range(steps):
            trainer.train_step()
        return _Memory(planned, None)
    memory = counted_steps(trainer, steps)
    return _Memory(planned, None if memory is None else memory.peak.total)


def _speed(trainer: Trainer, seconds: list[float], memories: list[_Memory]) -> Speed:
    run, ranks = trainer.run, trainer.ranks
    fullest = max(range(len(memories)), key=lambda rank: (memories[rank].measured or 0, memories[rank].planned))
    tokens = step_span(run.batch, 0).num_sequences * run.batch.sequence_length
    peak = peak_flops(run.cluster, run.layout.precision, ranks.device)
    per_token = model_flops_per_token(run.model, run.batch.sequence_length)
    named = run if is_here(run.cluster, ranks.device) else replace(run, cluster="auto")  # planned for where it is timed
    try:
        prediction = plan_run(named, cluster_of(named, ranks.device)).prediction
    except SpecError:  # as many ranks may not fill whole nodes of the catalogue; the measurement is kept without a plan
        prediction = None
    return Speed(
        step_seconds=seconds,
        tokens_per_step=tokens,
        ranks=ranks.world,
        mfu=tokens / median(seconds) / ranks.world * per_token / peak.flops_per_second,
        peak_flops=peak.flops_per_second,
        peak_origin=peak.origin,
        planned_step_seconds=None if prediction is None else float(prediction.step_seconds),
        planned_peak_bytes=memories[fullest].planned,
        measured_peak_bytes=memories[fullest].measured,
        planned_reserved_bytes=None if prediction is None else int(prediction.memory.reserved),
        measured_reserved_bytes=memories[fullest].reserved,
        fullest_rank=fullest,
        device=device_name(ranks.device),
        environment=environment(),
    )
