"""Everything `ultrascale plan` says about a run, as data: memory, time, whether it fits, and the ways to make it fit."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from ultrascale.plan.memory import MemoryPlan, plan_memory
from ultrascale.plan.time import CONVENTION, NOT_IN_IT, TimePlan, plan_time
from ultrascale.spec.cluster import Accelerator, Cluster
from ultrascale.spec.run import Run
from ultrascale.spec.weights import num_parameters

HEADROOM_FRACTION = {"cuda": 0.06, "cpu": 0.0}
"""Of the device's memory: what the allocator reserves and does not use. SimuMax takes 6 percent, others 10."""
HEADROOM_BYTES = {"cuda": 3 * 2**30, "cpu": 2**29}
"""CUDA's context and kernels 0.5 to 0.9 GiB, NCCL 1 to 2 GiB; on a CPU the interpreter and torch, about 0.4 GiB a process."""
RECOMPUTE_FROM_CHEAP = ("none", "selective", "full")
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RunPlan:
    """The prediction for one run."""

    run: Run
    cluster: Cluster
    memory: MemoryPlan
    time: TimePlan | None
    """None when the device's rates are measured at run time."""
    capacity_bytes: int
    """The device's memory."""
    headroom_bytes: int
    """What is kept free for what the plan does not count."""

    @property
    def usable_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.headroom_bytes)

    @property
    def fits(self) -> bool:
        return self.memory.peak.total <= self.usable_bytes

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary: bytes, seconds, FLOPs, tokens."""
        run, time, memory = self.run, self.time, self.memory
        return {
            "model": run.model.name,
            "num_parameters": num_parameters(run.model),
            "cluster": self.cluster.name,
            "layout": {name: getattr(run.layout, name) for name in run.layout.__dataclass_fields__},
            "sequence_length": run.batch.sequence_length,
            "sequences_per_batch": run.batch.sequences_per_batch,
            "num_micro_batches": memory.num_micro_batches,
            "document_mask": run.data.document_mask,
            "fits": self.fits,
            "memory": {
                "peak_bytes": memory.peak.total,
                "peak_phase": memory.peak.phase,
                "peak_bytes_by_category": memory.peak.by_category,
                "peak_bytes_by_part": {f"{c}/{label}": n for (c, label), n in memory.peak.by_label.items()},
                "between_steps_bytes": memory.between_steps.total,
                "saved_bytes_by_layer": list(memory.saved_by_layer),
                "capacity_bytes": self.capacity_bytes,
                "headroom_bytes": self.headroom_bytes,
            },
            "time": None if time is None else {name: getattr(time, name) for name in time.__dataclass_fields__},
            "time_convention": CONVENTION,
            "time_leaves_out": NOT_IN_IT,
        }


def plan_run(run: Run, cluster: Cluster) -> RunPlan:
    """Memory and time of `run` on `cluster`. Raises SpecError if the batch or the device does not suit the layout."""
    accelerator = cluster.accelerator
    device = device_of(accelerator)
    memory = plan_memory(
        run.model,
        run.layout,
        sequence_length=run.batch.sequence_length,
        sequences_per_batch=run.batch.sequences_per_batch,
        documents=run.data.document_mask,
        device=device,
    )
    time = None
    if not accelerator.measured_at_run_time and accelerator.matmul_fraction is not None:
        time = plan_time(
            run.model,
            run.layout,
            sequence_length=run.batch.sequence_length,
            sequences_per_batch=run.batch.sequences_per_batch,
            peak_flops_per_second=accelerator.peak_flops_per_second(run.layout.precision),
            achievable_fraction=accelerator.matmul_fraction.value,
            documents=run.data.document_mask,
        )
    capacity = int(accelerator.memory_bytes.value)
    headroom = round(capacity * HEADROOM_FRACTION[device]) + HEADROOM_BYTES[device]
    return RunPlan(run, cluster, memory, time, capacity, headroom)


def alternatives(run: Run, cluster: Cluster, *, any_stage: bool = True, any_way: bool = True) -> list[RunPlan]:
    """The same run for each ZeRO stage and way to recompute, from the least work and traffic to the least memory.

    `any_stage` or `any_way` False keeps the run's own.
    """
    layout = run.layout
    every = (0,) if layout.dp == 1 else (0, 1, 2, 3) if layout.dp_shard is None else (1, 2, 3)
    stages = every if any_stage else (layout.zero_stage,)
    ways = RECOMPUTE_FROM_CHEAP if any_way else (layout.recompute,)
    layouts = [replace(layout, zero_stage=stage, recompute=way) for way in ways for stage in stages]
    return [plan_run(replace(run, layout=layout), cluster) for layout in layouts]


def first_that_fits(plans: list[RunPlan]) -> RunPlan | None:
    """The first of `plans` that fits; None if none does."""
    return next((plan for plan in plans if plan.fits), None)


def device_of(accelerator: Accelerator) -> Device:
    """Where torch would run: `cpu` or `cuda` (ROCm counts as CUDA, as in torch)."""
    return "cpu" if accelerator.name == "cpu" else "cuda"
