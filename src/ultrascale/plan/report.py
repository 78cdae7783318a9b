"""Everything that `ultrascale plan` reports about one run, as data: memory, time, whether it fits, and alternatives that fit.

Memory is a replay of the layout's step by the trainer's rules (`plan.search.replayed`), plus the allocator's share on devices
whose rates are in the catalogue. A search lists the same number for the same layout. Time comes from `plan.time.price`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.catalogue.cluster import Accelerator, Cluster
from ultrascale.catalogue.machines import missing_dtype_problem
from ultrascale.catalogue.stacks.stack import Stack, with_attention, with_optimizer
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.config.choices import expect_choices
from ultrascale.config.rules.run_rules import micro_batch_problems
from ultrascale.config.rules.trainable import untrainable, untrainable_layout
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run, run_of_island
from ultrascale.plan.flops import CONVENTION, model_flops_per_token
from ultrascale.plan.islands import IslandsPlan, plan_islands
from ultrascale.plan.layouts import PLAIN_RECOMPUTE
from ultrascale.plan.memory.replay import MemoryPlan, num_micro_batches, plan_fullest_rank, plan_memory
from ultrascale.plan.workload import Workload

if TYPE_CHECKING:
    from ultrascale.plan.columns.footprint import Footprint
    from ultrascale.plan.costs.storage import Storage
    from ultrascale.plan.time.price import Prediction

CPU_RESERVE_BYTES = 2**29
"""Bytes reserved on a CPU for the interpreter and torch: about 0.4 GiB a process."""
DEFAULT_OPTIMIZER = "adamw"
"""Optimizer that reports and command lines do not mention."""
Device = Literal["cpu", "cuda"]


@dataclass(frozen=True)
class RunPlan:
    """The prediction for one run."""

    run: Run
    cluster: Cluster
    stack: Stack
    memory: MemoryPlan
    """The replay."""
    prediction: Prediction | None
    """Predicted time, and memory outside the replay; None if the device's rates are measured at run time."""
    capacity_bytes: int
    """The device's memory."""
    reserve_bytes: int
    """Bytes that must stay free: a fraction of the device, and without a prediction also memory that the replay omits."""
    islands: IslandsPlan | None = None
    """Traffic between islands, if there are several: `run` is then one of them, with its part of the batch."""

    @property
    def usable_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.reserve_bytes)

    @property
    def headroom_bytes(self) -> int:
        """Bytes of `usable_bytes` that the run does not need; negative if it does not fit."""
        return self.usable_bytes - self.needed_bytes

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the peak."""
        return self.memory.peak.total

    @property
    def needed_bytes(self) -> int:
        """Bytes of device memory that the run needs; with a prediction, including what the allocator cannot release and memory
        outside torch."""
        if self.prediction is None:
            return self.peak_bytes
        return round(float(self.prediction.memory.needed))

    @property
    def fits(self) -> bool:
        if self.prediction is None:
            return self.needed_bytes <= self.usable_bytes
        return bool(self.prediction.memory.fits)

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one rank in a step."""
        return num_micro_batches(self.run.layout, self.run.batch.sequences_per_batch)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dictionary: bytes, seconds, FLOPs, tokens."""
        run = self.run
        return (
            {
                "model": run.model.name,
                "num_parameters": num_parameters(run.model),
                "cluster": self.cluster.name,
                "nodes": self.cluster.num_nodes,
                "accelerators_per_node": self.cluster.node.num_accelerators,
                "stack": self.stack.name,
                "layout": asdict(run.layout),
                "sequence_length": run.batch.sequence_length,
                "sequences_per_batch": run.batch.sequences_per_batch,
                "num_micro_batches": self.num_micro_batches,
                "document_mask": run.data.document_mask,
                "optimizer": self.stack.optimizer,
                "trainable": not not_trainable(run),
                "fits": self.fits,
                "memory": self._memory_json(),
                "time": None if self.prediction is None else prediction_json(self.prediction)["time"],
                "failures": None if self.prediction is None else _of_failures(self.prediction.workload),
                "time_convention": CONVENTION,
            }
            | self._recomputation_json()
            | ({} if self.islands is None else {"islands": self.islands.to_json()})
        )

    def _recomputation_json(self) -> dict[str, Any]:
        """Memory that recomputation saves and time that it adds, for models with experts (without published figures)."""
        if self.prediction is None or not self.run.model.num_experts:
            return {}
        from ultrascale.plan.view.recomputation import recompute_tradeoffs  # here: plans for CPUs do without

        ways = recompute_tradeoffs(self.prediction.workload, self.run.layout)
        return {
            "recomputation": {
                choice.mode: {"saved_bytes": choice.saved_bytes, "added_fraction": choice.added_seconds / choice.step_seconds}
                for choice in ways
            }
        }

    def _memory_json(self) -> dict[str, Any]:
        memory = self.memory
        return {
            "peak_bytes": memory.peak.total,
            "peak_phase": memory.peak.phase,
            "peak_bytes_by_category": memory.peak.by_category,
            "peak_bytes_by_part": {f"{c}/{label}": n for (c, label), n in memory.peak.by_label.items()},
            "between_steps_bytes": memory.between_steps.total,
            "saved_bytes_by_layer": memory.saved_by_layer,
            "needed_bytes": self.needed_bytes,
            "capacity_bytes": self.capacity_bytes,
            "reserve_bytes": self.reserve_bytes,
            "headroom_bytes": self.headroom_bytes,
        }


def _of_failures(workload: Workload) -> dict[str, Any]:
    from ultrascale.plan.costs.stops import stops

    failures = stops(workload)
    return {
        "between_seconds": failures.between_seconds, "per_day": failures.per_day, "save_seconds": failures.save_seconds,
        "save_is_measured": workload.save_seconds is not None, "save_every_seconds": failures.save_every_seconds,
        "restart_seconds": failures.restart_seconds, "spare_nodes": failures.spare_nodes, "goodput": failures.goodput,
    }  # fmt: skip


def prediction_json(prediction: Prediction) -> dict[str, Any]:
    """Prediction of a layout as a JSON-able dictionary: bytes, seconds, FLOPs, tokens."""
    from ultrascale.plan.time.price import half_precision_peak  # here: plans for CPUs do without

    workload = prediction.workload
    peak = half_precision_peak(workload.cluster.accelerator)
    hardware = prediction.hfu() * peak / prediction.tokens_per_second_per_gpu
    return {
        "layout": asdict(prediction.layout),
        "num_micro_batches": prediction.num_micro_batches,
        "fits": bool(prediction.memory.fits),
        "memory": _footprint_json(prediction.memory),
        "time": {
            "seconds_per_step": prediction.step_seconds,
            "seconds_per_step_interval": list(step_interval(prediction)),
            "waterfall_seconds": prediction.waterfall,
            "tokens_per_step": workload.tokens_per_step,
            "tokens_per_second": prediction.tokens_per_second,
            "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
            "mfu": prediction.mfu(),
            "mfu_full": prediction.mfu(full_attention=True),
            "hfu": prediction.hfu(),
            "model_flops_per_token": model_flops_per_token(workload.model, workload.sequence_length),
            "hardware_flops_per_token": hardware,
            "peak_flops_per_second": peak,
        },
    }


def step_interval(prediction: Prediction) -> tuple[float, float]:
    """80 % prediction interval of the step time, in seconds, from errors on measured runs (`plan.intervals`)."""
    from ultrascale.plan.intervals import interval, kind_of

    seconds = prediction.step_seconds
    return interval(seconds, kind_of(prediction.workload, prediction.layout), fastest=seconds, slowest=seconds)


def _footprint_json(memory: Footprint) -> dict[str, Any]:
    sizes = {
        "peak_allocated_bytes": memory.allocated, "peak_reserved_bytes": memory.reserved, "outside_torch_bytes": memory.outside,
        "needed_bytes": memory.needed, "headroom_bytes": memory.headroom, "capacity_bytes": memory.capacity,
    }  # fmt: skip
    whole = {name: round(float(value)) for name, value in sizes.items()}
    by_category = {name: round(float(value)) for name, value in memory.categories.items()}
    return {**whole, "peak_phase": memory.phase, "peak_bytes_by_category": by_category}


def workload_of(
    run: Run,
    cluster: Cluster,
    stack: Stack,
    *,
    expert_imbalance: float = 1.0,
    storage: Storage | None = None,
    save_seconds: float | None = None,
) -> Workload:
    """Workload of `run`: everything except the layout. Raises SpecError for GEMM precisions that our trainer does not
    support."""
    if stack.name == "ultrascale" and run.layout.precision in ("mxfp8", "nvfp4"):
        raise SpecError([problem for problem in untrainable_layout(run.layout) if problem.key == "layout.precision"])
    batch = run.batch
    length, sequences, documents = batch.sequence_length, batch.sequences_per_batch, run.data.document_mask
    stack = _with_optimizer_of(run, with_attention(stack, run.layout.attention, deterministic=run.deterministic))
    return Workload(run.model, cluster, length, sequences, stack, documents, expert_imbalance, storage, save_seconds)


def _with_optimizer_of(run: Run, stack: Stack) -> Stack:
    return stack if run.optimizer.name == DEFAULT_OPTIMIZER else with_optimizer(stack, run.optimizer.name)


_NO_RATES = (
    "has no published rates, and without them only what our trainer runs is planned", "Name GPUs, such as --gpus 8xh100.",
)  # fmt: skip


def not_trainable(run: Run) -> list[str]:
    """Dotted keys of `run` that our trainer does not support."""
    return [problem.key for problem in (*untrainable(run.model, run.layout), *micro_batch_problems(run))]


def plan_run(
    run: Run, cluster: Cluster, stack: Stack = STACKS["ultrascale"], *, expert_imbalance: float = 1.0,
    storage: Storage | None = None, save_seconds: float | None = None,
) -> RunPlan:  # fmt: skip
    """Memory and time of `run` on `cluster`, with the run's optimizer; with islands, of one island on its own cluster. Raises
    SpecError for an unknown choice, and if the batch or the device does not suit the layout."""
    conditions: Any = {"expert_imbalance": expert_imbalance, "storage": storage, "save_seconds": save_seconds}
    expect_choices(run)
    if run.islands.count > 1:
        return replace(plan_run(run_of_island(run), cluster, stack, **conditions), islands=plan_islands(run))
    stack = _with_optimizer_of(run, stack)
    if run.layout.recompute == "auto":
        from ultrascale.plan.search.recompute_choice import with_recomputation  # here: plans for CPUs do without

        run = with_recomputation(run, cluster, stack, expert_imbalance=expert_imbalance)
    device, knows_rates = device_of(cluster.accelerator), has_rates(cluster.accelerator, run.layout.precision)
    prediction = None
    if knows_rates:
        from ultrascale.plan.search.replayed import with_replay
        from ultrascale.plan.time.price import predict  # here: plans for CPUs do without

        prediction = with_replay(predict(workload_of(run, cluster, stack, **conditions), run.layout))
        memory = prediction.replay
        assert memory is not None
    elif stack.name == "ultrascale" and not untrainable(run.model, run.layout):
        memory = plan_fullest_rank(
            run.model,
            run.layout,
            sequence_length=run.batch.sequence_length,
            sequences_per_batch=run.batch.sequences_per_batch,
            documents=run.data.document_mask,
            device=device,
            optimizer=run.optimizer.name,
        )
    else:
        problems = untrainable(run.model, run.layout)
        if not problems and not cluster.accelerator.measured_at_run_time:
            problems = [missing_dtype_problem(cluster.accelerator, run.layout.precision)]
        raise SpecError(problems or [Problem("cluster", *_NO_RATES)])
    capacity = int(cluster.accelerator.memory_bytes.value)
    reserve = capacity - live_room(cluster.accelerator, run.layout, stack)
    if prediction is not None:
        from ultrascale.plan.columns.footprint import MARGIN

        reserve = round(capacity * MARGIN)
    return RunPlan(run, cluster, stack, memory, prediction, capacity, reserve)


def alternatives(run: Run, cluster: Cluster, *, any_stage: bool = True, any_way: bool = True) -> list[RunPlan]:
    """Plans of `run` for each ZeRO stage and recomputation, from the least work and traffic to the least memory.

    `any_stage` False keeps the run's ZeRO stage, `any_way` False its recomputation.
    """
    layout = run.layout
    every = (0,) if layout.dp == 1 else (0, 1, 2, 3) if layout.dp_shard is None else (1, 2, 3)
    stages = every if any_stage else (layout.zero_stage,)
    modes = PLAIN_RECOMPUTE if any_way else (layout.recompute,)
    layouts = [replace(layout, zero_stage=stage, recompute=mode) for mode in modes for stage in stages]
    return [plan_run(replace(run, layout=layout), cluster) for layout in layouts]


def first_that_fits(plans: list[RunPlan]) -> RunPlan | None:
    """The first of `plans` that fits; None if none does."""
    return next((plan for plan in plans if plan.fits), None)


def device_of(accelerator: Accelerator) -> Device:
    """Torch device type: `cpu` or `cuda` (ROCm counts as CUDA, as in torch)."""
    return "cpu" if accelerator.name == "cpu" else "cuda"


def has_rates(accelerator: Accelerator, precision: str) -> bool:
    """True if the catalogue gives the device's peak rate in this precision, so that it is not measured at run time."""
    return precision in ("fp16", *accelerator.peak_flops) and not accelerator.measured_at_run_time


def live_room(accelerator: Accelerator, layout: Layout, stack: Stack) -> int:
    """Bytes of live tensors that fit a device, for comparison with the peak of a replay alone."""
    capacity = int(accelerator.memory_bytes.value)
    if device_of(accelerator) == "cpu":
        return capacity - CPU_RESERVE_BYTES
    from ultrascale.plan.columns.footprint import live_limit  # here: plans for CPUs do without

    return live_limit(capacity, layout, joins_segments=stack.joins_segments)


def plan_rank(
    run: Run,
    rank: int,
    device: Literal["cpu", "cuda"],
    *,
    steps: int = 1,
    sequences_per_batch: int | None = None,
    keeps_timeline: bool = False,
) -> MemoryPlan:
    """`plan.memory.replay.plan_memory` for one rank of `run`. `sequences_per_batch`: overrides the run's."""
    return plan_memory(
        run.model, run.layout, sequence_length=run.batch.sequence_length, documents=run.data.document_mask, device=device,
        sequences_per_batch=run.batch.sequences_per_batch if sequences_per_batch is None else sequences_per_batch, rank=rank,
        optimizer=run.optimizer.name, steps=steps, keeps_timeline=keeps_timeline,
    )  # fmt: skip
