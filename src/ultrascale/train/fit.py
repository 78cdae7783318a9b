"""Whether a run fits its devices, said in one line before it starts."""

from __future__ import annotations

from ultrascale.plan.memory import MemoryPlan, is_replayed, plan_memory
from ultrascale.plan.report import HEADROOM_BYTES, HEADROOM_FRACTION
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.run import Run
from ultrascale.spec.units import format_bytes


def stage_peaks(run: Run) -> list[int]:
    """Live bytes at the peak of the first rank of every pipeline stage, as planned for CUDA. Empty: not planned."""
    return [plan.peak.total for plan in _stage_plans(run)]


def _stage_plans(run: Run) -> list[MemoryPlan]:
    layout, batch = run.layout, run.batch
    if not is_replayed(run.model, layout):
        return []
    return [
        plan_memory(
            run.model, layout, sequence_length=batch.sequence_length, sequences_per_batch=batch.sequences_per_batch,
            documents=run.data.document_mask, device="cuda", rank=rank, steps=2,
            optimizer=run.optimizer.name,
        )
        for rank in range(0, layout.world_size, layout.world_size // layout.pp)
    ]  # fmt: skip


def expect_fits(run: Run, capacity_bytes: int, *, anyway: bool = False) -> str | None:
    """What each stage will need of a device with `capacity_bytes`, in one line; None if it is not planned.

    Raises SpecError if a stage cannot fit, unless `anyway`. Compiled blocks may keep less for the backward pass than planned,
    so that of those only weights, gradients and optimizer states must fit.
    """
    plans = _stage_plans(run)
    if not plans:
        return None
    peaks = [plan.peak.total for plan in plans]
    least = [plan.before_update.total for plan in plans] if run.compile else peaks
    usable = round(capacity_bytes * (1 - HEADROOM_FRACTION["cuda"])) - HEADROOM_BYTES["cuda"]
    told = ", ".join(map(format_bytes, peaks)) if len(set(map(format_bytes, peaks))) > 1 else format_bytes(max(peaks))
    whom = f"the {len(peaks)} pipeline stages need" if len(peaks) > 1 else "each rank needs"
    line = f"memory: {whom} {told} of tensors; a device has {format_bytes(capacity_bytes)}, {format_bytes(usable)} for them"
    worst = max(range(len(least)), key=least.__getitem__)
    if least[worst] > usable and not anyway:
        rank = worst * (run.layout.world_size // run.layout.pp)
        states = f"; weights, gradients and optimizer states alone take {format_bytes(least[worst])}" if run.compile else ""
        rule = f"does not fit: {line.removeprefix('memory: ')}{states}"
        remedy = (
            f"`ultrascale trace RUN.TOML --rank {rank} --explain-oom` says what to change; --ignore-memory starts it anyway."
        )
        raise SpecError([Problem("layout", rule, remedy)])
    return line
