"""Chosen steps of a real run under torch's profiler, on every rank: the time spent in each part, and the memory of the first
steps.

    steps 1 to 4        live memory by category; on CUDA also the allocator's history
    ...                 not measured
    first - 1           the profiler runs, and its output is discarded: it has its own warm-up
    first to last       profiled
    as many again       not profiled: time of a step without the profiler

The run's folder is neither read nor written: a step's time does not depend on its weights, so a fresh run starts, and its state
is discarded. Besides torch's events a trace has ranges for steps, phases, reading of data, attention, recomputed blocks, and
waits for other ranks (`parallel.lost.waiting`). Inside compiled blocks only ranges that the compiler keeps are visible.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule
from torch.utils.checkpoint import checkpoint

from ultrascale.description.run import Run
from ultrascale.description.units import count_of
from ultrascale.measure.compare import compare_run
from ultrascale.measure.machine.ceilings import peak_flops
from ultrascale.measure.plots import plot_memory
from ultrascale.measure.step.categories import CORE, PHASE, READING, RECOMPUTED
from ultrascale.measure.step.spans import STEP, SpanPiece, read_trace
from ultrascale.measure.step.step_report import RankSteps, StepReport, plot_steps, write_merged
from ultrascale.measure.step.waterfall import TopRow, top, waterfall
from ultrascale.parallel.activations.regions import RerunRegion
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.report import plan_run
from ultrascale.plan.time.step_parts import parts_at, step_parts
from ultrascale.run_rows import document
from ultrascale.train.folder.run_folder import environment
from ultrascale.train.start.aside import begun_aside, counted_steps, planned_memory, timed_steps
from ultrascale.train.start.fit import cluster_of
from ultrascale.train.trainer import Trainer

REPORT = "report.json"
MEMORY_STEPS = 4
SNAPSHOT_ENTRIES = 200_000
"""Most entries of the CUDA allocator's history: some steps of a large model; older entries are dropped."""
MERGED_RANKS = 16
"""Most ranks in the merged trace, one track each."""


def profile_run(
    run: Run, first: int, last: int, folder: Path, *, rendezvous: str = "env://", pictures: bool = True
) -> StepReport | None:
    """Profile steps `first` to `last` (counted from 1) of `run` in this process and its peers.

    Traces and memory measurements go into `folder`. Returns the report on rank 0, None on others. Raises SpecError (the run
    does not fit the processes or the data), DataError.
    """
    with begun_aside(run, 2 * last, folder, rendezvous=rendezvous) as trainer:
        run, ranks = trainer.run, trainer.ranks
        trace = folder / f"rank-{ranks.rank}.json.gz"
        unprofiled = _steps(trainer, first, last, trace)
        report = _report(run, ranks, trace, list(range(first, last + 1)), unprofiled)
        if report is not None:
            write_report(report, folder, pictures=pictures)
        return report


def _steps(trainer: Trainer, first: int, last: int, trace: Path) -> float:
    """Run all phases listed at the top of this file. Returns the seconds of a step without the profiler."""
    _watch_memory(trainer, min(MEMORY_STEPS, first - 2), trace.parent)
    while trainer.steps_done < first - 2:
        trainer.train_step()
    _profiled_steps(trainer, last - first + 1, trace)
    return median(timed_steps(trainer, last - first + 1))


def _watch_memory(trainer: Trainer, steps: int, folder: Path) -> None:
    """Write the memory of the first `steps` steps, with the plan."""
    ranks = trainer.ranks
    on_cuda = ranks.device.type == "cuda"
    if on_cuda:
        torch.cuda.memory._record_memory_history(max_entries=SNAPSHOT_ENTRIES)
    memory = counted_steps(trainer, steps)
    if on_cuda:
        torch.cuda.memory._dump_snapshot(str(folder / f"memory-rank-{ranks.rank}.pickle"))
        torch.cuda.memory._record_memory_history(enabled=None)
    plan = planned_memory(trainer, steps)
    if ranks.is_first:
        report: dict[str, Any] = {"planned_timeline": [{"step": s + 1, "phase": p, "bytes": b} for s, p, b in plan.timeline]}
        if memory is not None:
            report |= compare_run(plan, memory) | {"measured_timeline": memory.timeline()}
        if on_cuda:
            report |= {
                "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
                "peak_reserved_bytes": torch.cuda.max_memory_reserved(),
            }
        (folder / "memory.json").write_text(
            json.dumps(document("memory", report | {"planned_peak_bytes": plan.peak.total})) + "\n"
        )


def _profiled_steps(trainer: Trainer, count: int, path: Path) -> None:
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (trainer.ranks.device.type == "cuda")
    with _ranges_in(trainer):
        with profile(activities=activities, schedule=schedule(wait=0, warmup=1, active=count)) as profiler:
            for number in range(count + 1):
                if number <= 1:
                    trainer.ranks.settle()
                with record_function(f"{STEP}{trainer.steps_done + 1}"):
                    trainer.train_step()
                    if number == count:
                        trainer.ranks.settle()
                if number < count:
                    profiler.step()
        profiler.export_chrome_trace(str(path))


@contextmanager
def _ranges_in(trainer: Trainer) -> Iterator[None]:
    """Context in which `trainer` names its work in a profiler's trace."""
    phases = _Phases()
    read, to_device = trainer.read_micro_batches, trainer.to_device
    trainer.on_phase = phases.begin
    trainer.read_micro_batches = _named(READING, read)
    trainer.to_device = _named(READING, to_device)
    undo = (
        []
        if trainer.run.compile
        else [undo_part for stage in trainer.share.stages.values() for undo_part in _name_parts(stage)]
    )
    try:
        yield
    finally:
        phases.end()
        trainer.on_phase = lambda phase, step: None
        trainer.read_micro_batches, trainer.to_device = read, to_device
        for restore in undo:
            restore()


def _name_parts(stage: nn.Module) -> Iterator[Callable[[], None]]:
    """Name the attention core, and the inside of recomputed blocks, in the trace; yields a function that removes the names."""
    run_again = RerunRegion.run_again
    setattr(RerunRegion, "run_again", _named(RECOMPUTED, run_again))  # noqa: B010
    yield partial(setattr, RerunRegion, "run_again", run_again)
    for module in stage.modules():
        core, forward = getattr(module, "core", None), module.__dict__.get("forward")
        if callable(core) and not isinstance(core, nn.Module):
            setattr(module, "core", _named(CORE, core))  # noqa: B010
            yield partial(setattr, module, "core", core)
        if isinstance(forward, partial) and forward.func is checkpoint:
            inside, *others = forward.args
            module.forward = partial(checkpoint, _named(RECOMPUTED, inside), *others, **forward.keywords)
            yield partial(setattr, module, "forward", forward)


def _named(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def named(*arguments: Any, **options: Any) -> Any:
        with record_function(name):
            return function(*arguments, **options)

    return named


class _Phases:
    """Ranges in the trace, each from one phase to the next."""

    def __init__(self) -> None:
        self._now: record_function | None = None

    def begin(self, phase: str, step: int) -> None:
        """Start a new phase, for `Trainer.on_phase`."""
        self.end()
        self._now = record_function(f"{PHASE}{phase}")
        self._now.__enter__()

    def end(self) -> None:
        """End the current phase."""
        if self._now is not None:
            self._now.__exit__(None, None, None)
        self._now = None


def _report(run: Run, ranks: Ranks, trace: Path, steps: list[int], unprofiled: float) -> StepReport | None:
    """Read each rank's trace on that rank; rank 0 combines the results."""
    events = read_trace(trace)
    breakdown = waterfall(events)
    local_steps = RankSteps.of(ranks.rank, breakdown, top(events))
    pieces = breakdown.pieces if ranks.rank < MERGED_RANKS else ()
    reports = ranks.gather_json({"steps": asdict(local_steps), "pieces": pieces, "origin": events.origin})
    if not ranks.is_first:
        return None
    merged = {
        rank: [SpanPiece(start + shift, end + shift, category) for start, end, category in report["pieces"]]
        for rank, report in enumerate(reports[:MERGED_RANKS])
        for shift in [report["origin"] - reports[0]["origin"]]
    }
    write_merged(trace.parent / "merged.json.gz", merged, title=run.name)
    rows = [RankSteps(**report["steps"] | {"top": [TopRow(*row) for row in report["steps"]["top"]]}) for report in reports]
    planned, origin = planned_parts(run, ranks.device)
    facts = environment() | {"run": run.name, "model": run.model.name, "layout": asdict(run.layout)}
    return StepReport(steps, rows, planned, origin, unprofiled, facts)


def planned_parts(run: Run, device: torch.device) -> tuple[dict[str, float], str]:
    """Planned seconds of a step by category, and the kind of plan: for a CPU only a bound on its computation."""
    plan = plan_run(run, cluster_of(run, device))
    if plan.prediction is not None:
        return step_parts(plan.prediction), f"`ultrascale plan` for {plan.cluster.accelerator.title}"
    peak = peak_flops("auto", run.layout.precision, device)
    tokens = run.batch.sequences_per_batch * run.batch.sequence_length / run.layout.dp
    parts = parts_at(
        run.model, run.layout, sequence_length=run.batch.sequence_length, tokens_per_rank=tokens,
        flops_per_second=peak.flops_per_second, documents=run.data.document_mask,
    )  # fmt: skip
    return parts, f"only what is computed, at {peak.flops_per_second / 1e9:,.0f} GFLOP/s: {peak.origin}"


def write_report(report: StepReport, folder: Path, *, pictures: bool) -> None:
    """Write `report.json`, and the pictures if they are wanted and matplotlib is installed."""
    (folder / REPORT).write_text(json.dumps(report.to_json(), indent=1) + "\n")
    if not pictures or find_spec("matplotlib") is None:
        return
    plot_steps(report, folder / "steps.png")
    memory = json.loads((folder / "memory.json").read_text())
    planned, measured = memory["planned_timeline"], memory.get("measured_timeline", ())
    title = f"Memory of rank 0 in the first {count_of(planned[-1]['step'], 'step')}"
    plot_memory(
        measured or planned,
        folder / "memory.png",
        planned_peak_bytes=memory["planned_peak_bytes"],
        planned_timeline=planned if measured else (),
        title=title if measured else f"{title}, planned",
    )
