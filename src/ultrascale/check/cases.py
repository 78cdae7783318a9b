"""Cases of a proof: the layouts, embeddings and accumulations in which a run is proven, and the same with a planted fault."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.faults.table import FAULTS, expect_fault
from ultrascale.check.small import Case, made_small, micro_batch_counts, provable, small_layouts
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer, Run

SHARP = Optimizer(learning_rate=1e-2, clip_grad_norm=0.1, warmup_steps=1)
"""Updates so large that wrong ones show, and gradients always clipped."""


def cases(run: Run, *, own_layout: bool = False, processes: int | None = None) -> Iterator[Case]:
    """Every ZeRO stage over few processes that have the run's own axes, whole and in groups, the embedding tied and untied,
    with and without accumulation, sequence parallelism on and off. With `own_layout` only the run's own settings of these.

    `processes`: how many; None: the run's own number, or what a laptop can start.
    """
    for layout in small_layouts(run.layout, processes):
        base = provable(replace(run, layout=layout), run.layout)
        own = base.model.tie_word_embeddings
        for tied in (own,) if own_layout else (own, not own):
            model = replace(base.model, tie_word_embeddings=tied)
            for one in (base.layout,) if own_layout else _every_layout(base.layout):
                for count in micro_batch_counts(one):
                    batch = replace(base.batch, sequences_per_batch=count * one.dp * one.micro_batch_size)
                    yield Case(_case_name(one, count, tied=tied), replace(base, model=model, layout=one, batch=batch))


def _case_name(layout: Layout, accumulation: int, *, tied: bool) -> str:
    shard = f" shard {layout.shard_size}" if layout.zero_stage and layout.shard_size < layout.dp else ""
    micro_batches = "1 micro-batch" if accumulation == 1 else f"{accumulation} micro-batches"
    others = [(axis, getattr(layout, axis)) for axis in ("tp", "cp", "pp", "ep", "expert_tp")]
    axes = "".join(f" {axis} {size}" for axis, size in others if size > 1)
    whole = " whole sequences" if layout.tp > 1 and not layout.sequence_parallel else ""
    return f"dp {layout.dp}{axes}{whole} zero {layout.zero_stage}{shard} x {micro_batches}, {'tied' if tied else 'untied'}"


def _every_layout(own: Layout) -> list[Layout]:
    """Every ZeRO stage (where ranks share weights), over all ranks and over groups of half of them and of the layout's own
    size; with tp sequence parallelism on and off."""
    groups = {own.dp // 2} if own.dp >= 4 and own.dp % 2 == 0 else set()
    if own.zero_stage and own.shard_size < own.dp:
        groups.add(own.shard_size)
    stages = (0, 1, 2, 3) if own.dp * own.cp > 1 or own.world_size == 1 else (own.zero_stage,)
    found = [replace(own, zero_stage=stage, dp_shard=None) for stage in stages]
    found += [replace(own, zero_stage=stage, dp_shard=size) for size in sorted(groups) for stage in (1, 2, 3)]
    return found + ([replace(own, sequence_parallel=not own.sequence_parallel)] if own.tp > 1 else [])


def with_faults(cases: list[Case], name: str) -> list[Case]:
    """Each of `cases` with the fault `name`, or one by one with `all` that it can have. Raises SpecError as `expect_fault`.

    Settings under which a fault would change nothing are sharpened: clipping bites, weights decay, updates are large.
    """
    expect_fault(name, max((case.run for case in cases), key=lambda run: run.batch.sequences_per_batch))
    names = list(FAULTS) if name == "all" else [name]
    return [
        Case(f"{fault}: {case.name}", replace(case.run, optimizer=_sharp(case.run.optimizer)), fault)
        for fault in names
        for case in cases
        if FAULTS[fault].fits(case.run)
    ]


def _sharp(given: Optimizer) -> Optimizer:
    clip = None if given.clip_grad_norm is None else min(given.clip_grad_norm, SHARP.clip_grad_norm or 1.0)
    return replace(given, learning_rate=1e-2, warmup_steps=1, weight_decay=max(given.weight_decay, 0.1), clip_grad_norm=clip)


def home_of(name: str) -> Run:
    """The least run in which the fault `name` can be seen, with updates so large that wrong ones show, and clipped."""
    home = FAULTS[name].home
    layout = Layout(micro_batch_size=1, **home.layout)
    model = replace(made_small(PRESETS[home.preset], layout), **home.model)
    run = provable(Run(model, steps=10, layout=layout, optimizer=SHARP))
    batch = replace(run.batch, sequence_length=24, sequences_per_batch=home.micro_batches * layout.dp)
    return replace(run, batch=batch)
