"""Elastic runs: the fastest layout of a run on another number of ranks, with the same global batch.

Training does not depend on the layout: the step number alone determines its sequences, and any layout can load a checkpoint. A
run that loses or gains machines continues with a layout that suits the new number of ranks.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.run import Run
from ultrascale.description.units import count_of
from ultrascale.plan.report import workload_of
from ultrascale.plan.search.search import fastest
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.workload import Workload

KEPT = (
    "precision", "fp8_scaling", "fp8_amax_history_len", "fp8_amax_compute_algo", "fp8_keep_blocks", "fp8_all_gather",
    "reduce_dtype", "attention", "pipeline_runtime", "offload_optimizer",
)  # fmt: skip
"""Fields that stay the run's: those that its results depend on, and where it computes."""


def elastic_layout(run: Run, world: int, *, device: str = "cpu") -> Layout:
    """Layout of `run` for `world` ranks, with its settings `KEPT` and for every batch size of its ramp: the run's own if it
    fits, else the fastest that the planner finds, or on machines without known rates (such as a CPU) the most similar one.
    `device`: of the catalogue, if the run does not name its machines.

    Raises SpecError if no layout is legal.
    """
    if run.layout.world_size == world:
        return run.layout
    named = parse_cluster(f"{world}x{device}" if run.cluster == "auto" else run.cluster)
    cluster = replace(named, num_accelerators=world, name=f"{world} of {named.name}")
    batches = [run.batch.sequences_per_batch, *(stage.sequences_per_batch for stage in run.batch.ramp)]
    workload = workload_of(run, cluster, STACKS["ultrascale"]).with_batch(gcd(*batches))
    kept = {name: getattr(run.layout, name) for name in KEPT}
    base = Layout(**kept)
    if base.precision == "fp64":  # many accelerators have no rate of it in the catalogue
        base = replace(base, precision="fp32")
    if workload.accelerator.peak_flops:
        prediction = fastest(workload, base=base)
        layout = None if prediction is None else prediction.layout
    else:
        layout = _most_like(run.layout, workload, base)
    if layout is None:
        sequences = count_of(gcd(*batches), "sequence")
        rule = f"the planner finds no layout of this run for {count_of(world, 'rank')} and a batch of {sequences}"
        raise mistake("--elastic", rule, "Use another number of processes, or say the layout yourself.")
    return replace(layout, **kept)


def _most_like(layout: Layout, workload: Workload, base: Layout) -> Layout | None:
    """The legal layout most similar to `layout`; differences weigh in this order: tp, cp, pp, ep, ZeRO, recomputation,
    micro-batch."""
    table = legal_layouts(workload, base=base).table

    def changes(candidate: Layout) -> tuple[float, ...]:
        axes = ("tp", "cp", "pp", "ep", "expert_tp", "zero_stage")
        choices = (
            candidate.recompute != layout.recompute,
            candidate.schedule != layout.schedule,
            candidate.cp_method != layout.cp_method,
        )
        shard = candidate.dp_shard not in (None, candidate.dp)
        by = [abs(getattr(candidate, axis) - getattr(layout, axis)) for axis in axes]
        return (*by, *choices, shard, abs(candidate.micro_batch_size - layout.micro_batch_size))

    return min((table.layout(row) for row in range(len(table))), key=changes, default=None)
