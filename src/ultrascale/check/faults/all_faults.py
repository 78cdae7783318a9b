"""Planted faults: the classic ways to be wrong, each of which the proof must see. A proof that cannot fail proves nothing.

They are in `faults_step` (batch, loss, norm, update), `faults_dropout`, `faults_data`, `faults_tensor`, `faults_context`,
`faults_pipeline` and `faults_experts`; each names the peer that had it, if one is known. All are planted into a finished
trainer, in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from difflib import get_close_matches

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.faults import (
    faults_context,
    faults_data,
    faults_dropout,
    faults_experts,
    faults_pipeline,
    faults_step,
    faults_tensor,
)
from ultrascale.check.faults.fault import FAULTS
from ultrascale.check.small import Case, made_small, provable
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.run import Optimizer, Run
from ultrascale.train.trainer import Trainer

MODULES = (faults_step, faults_dropout, faults_data, faults_tensor, faults_context, faults_pipeline, faults_experts)
CLASSIC = ("missing-reduce", "mean-of-means", "counted-twice", "shifted-batch")
"""Names of faults that fit any run of several data-parallel ranks."""
SHARP = Optimizer(learning_rate=1e-2, clip_grad_norm=0.1, warmup_steps=1)
"""Updates so large that wrong ones show, and gradients always clipped."""


def suitable(run: Run) -> list[str]:
    """The faults that a run can have, one process proving nothing about those between processes."""
    return [name for name, fault in FAULTS.items() if fault.fits(run)]


def expect_known(name: str) -> None:
    """Raise SpecError unless `name` is a fault, or `all`."""
    if name != "all" and name not in FAULTS:
        near = get_close_matches(name, FAULTS, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Choose one of {', '.join(FAULTS)}, or all."
        raise mistake("--plant", f"knows no fault {name!r}", remedy)


def expect_fault(name: str, run: Run) -> None:
    """Raise SpecError unless `name` is a fault (or `all`) that can be planted into `run`."""
    expect_known(name)
    if name != "all" and not FAULTS[name].fits(run):
        remedy = f"Choose one of {', '.join(suitable(run))}, or all."
        raise mistake("--plant", f"{name} needs {FAULTS[name].needs}", remedy)


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


@contextmanager
def planted(fault: str | None, trainer: Trainer) -> Iterator[None]:
    """While inside, `trainer` has the fault. None plants nothing. Raises KeyError for a fault that is not known."""
    if fault is None:
        yield
        return
    with FAULTS[fault].plant(trainer):
        yield
