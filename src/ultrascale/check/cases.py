"""Cases of a proof: the layouts, embeddings and accumulations in which a run is proven, and the same with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.faults.table import FAULTS, expect_fault
from ultrascale.check.small import Case, micro_batch_counts, provable, shrink_model, small_layouts
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run

SHARP = Optimizer(learning_rate=1e-2, clip_grad_norm=0.1, warmup_steps=1)
"""Updates so large that wrong ones show, with gradients always clipped."""


def cases(run: Run, *, own_layout: bool = False, processes: int | None = None) -> Iterator[Case]:
    """Every ZeRO stage over few processes with the run's own axes, over all ranks and in groups (HSDP), the embedding tied and
    untied, with and without accumulation, sequence parallelism on and off. With `own_layout` only the run's own settings of
    these.

    `processes`: number of processes; None: the run's own number, or what a laptop can start.
    """
    for layout in small_layouts(run.layout, processes):
        base = provable(replace(run, layout=layout), run.layout)
        model_tied = base.model.tie_word_embeddings
        for tied in (model_tied,) if own_layout else (model_tied, not model_tied):
            model = replace(base.model, tie_word_embeddings=tied)
            for variant in (base.layout,) if own_layout else _every_layout(base.layout):
                for count in micro_batch_counts(variant):
                    batch = replace(base.batch, sequences_per_batch=count * variant.dp * variant.micro_batch_size)
                    yield Case(_case_name(variant, count, tied=tied), replace(base, model=model, layout=variant, batch=batch))


def _case_name(layout: Layout, accumulation: int, *, tied: bool) -> str:
    shard = f" shard {layout.shard_size}" if layout.zero_stage and layout.shard_size < layout.dp else ""
    micro_batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    sizes = [(axis, getattr(layout, axis)) for axis in ("tp", "cp", "pp", "ep", "expert_tp")]
    axes = "".join(f" {axis} {size}" for axis, size in sizes if size > 1)
    whole = " whole sequences" if layout.tp > 1 and not layout.sequence_parallel else ""
    return f"dp {layout.dp}{axes}{whole} zero {layout.zero_stage}{shard} x {micro_batches}, {'tied' if tied else 'untied'}"


def _every_layout(layout: Layout) -> list[Layout]:
    """Every ZeRO stage (if ranks share weights), over all ranks and over groups of half of them and of the layout's own size;
    with tp sequence parallelism on and off."""
    groups = {layout.dp // 2} if layout.dp >= 4 and layout.dp % 2 == 0 else set()
    if layout.zero_stage and layout.shard_size < layout.dp:
        groups.add(layout.shard_size)
    stages = (0, 1, 2, 3) if layout.dp * layout.cp > 1 or layout.world_size == 1 else (layout.zero_stage,)
    layouts = [replace(layout, zero_stage=stage, dp_shard=None) for stage in stages]
    layouts += [replace(layout, zero_stage=stage, dp_shard=size) for size in sorted(groups) for stage in (1, 2, 3)]
    return layouts + ([replace(layout, sequence_parallel=not layout.sequence_parallel)] if layout.tp > 1 else [])


def with_faults(cases: list[Case], name: str) -> list[Case]:
    """Each of `cases` with the fault `name`; with `all`, with each fault that applies, one at a time. Raises SpecError as
    `expect_fault`.

    Settings under which a fault would change nothing are changed: gradients are clipped, weights decay, updates are large.
    """
    expect_fault(name, max((case.run for case in cases), key=lambda run: run.batch.sequences_per_batch))
    names = list(FAULTS) if name == "all" else [name]
    return [
        Case(f"{fault}: {case.name}", replace(case.run, optimizer=_sharp(case.run.optimizer)), fault)
        for fault in names
        for case in cases
        if FAULTS[fault].fits(case.run)
    ]


def _sharp(base: Optimizer) -> Optimizer:
    clip = None if base.clip_grad_norm is None else min(base.clip_grad_norm, SHARP.clip_grad_norm or 1.0)
    return replace(base, learning_rate=1e-2, warmup_steps=1, weight_decay=max(base.weight_decay, 0.1), clip_grad_norm=clip)


def smallest_run_of(name: str) -> Run:
    """The smallest run in which the fault `name` can be detected, with large updates and clipping."""
    smallest_run = FAULTS[name].smallest_run
    layout = Layout(micro_batch_size=1, **smallest_run.layout)
    model = replace(shrink_model(PRESETS[smallest_run.preset], layout), **smallest_run.model)
    run = provable(Run(model, steps=10, layout=layout, optimizer=SHARP))
    batch = replace(run.batch, sequence_length=24, sequences_per_batch=smallest_run.micro_batches * layout.dp)
    return replace(run, batch=batch)
