"""Speed and memory of a run, compared with its plan."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import asdict
from math import isfinite

import torch
from torch import nn

from ultrascale.description.progress import step_span, tokens_after
from ultrascale.description.run import Run, run_of_island
from ultrascale.description.units import format_bytes
from ultrascale.measure.compare import CategoryDifference, compare_memory, compare_run
from ultrascale.measure.machine.ceilings import PEAK_FILE, stored_or_measured_peak
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.flops import hardware_flops_per_token, model_flops_per_token
from ultrascale.plan.memory.replay import MemoryPlan, rank_shape
from ultrascale.plan.report import plan_rank
from ultrascale.run_rows import document
from ultrascale.train.observers.metrics import Metrics, Row
from ultrascale.train.session.moments import LoopObserver, Session, StepDone
from ultrascale.train.start.compiled import compile_seconds

GIB = 2**30


class Performance(LoopObserver):
    """Turns steps into metrics, and compares planned with measured memory in the first steps of a new run.

    On the CPU live memory is counted tensor by tensor, which slows those steps; their speed is not reported. Nor is that of the
    first step after a start, which includes warm-up or compilation.
    """

    def __init__(self, run: Run, ranks: Ranks, metrics: Metrics):
        self.run, self.ranks, self.metrics = run_of_island(run), ranks, metrics
        self.shares = sum(run.degrees)
        length = run.batch.sequence_length
        self.model_flops = model_flops_per_token(run.model, length)
        documents = run.data.document_mask
        shape = rank_shape(run.layout, length, documents=documents, device="cuda" if ranks.device.type == "cuda" else "cpu")
        self.hardware_flops = hardware_flops_per_token(run.model, run.layout, shape)
        peak_file = metrics.folder.path / PEAK_FILE
        self.peak = stored_or_measured_peak(peak_file, run.cluster, run.layout.precision, ranks.device)
        if self.peak.ceiling is not None:
            metrics.report(PEAK_FILE, asdict(self.peak.ceiling))
        self.planned_peak = self._plan(self.run.batch.sequences_per_batch).peak.total
        self.memory: LiveMemory | None = None
        self._is_warm = self._warned_of_peak = False
        self._watching = ExitStack()
        self._last_watched = 0

    def started(self, session: Session, until_end: ExitStack) -> None:
        """Measure the memory of the first `log.memory_steps` steps, if the run is new."""
        trainer = session.trainer
        until_end.enter_context(self._watching)
        self._say_what_mfu_means()
        if trainer.steps_done == 0:
            self._last_watched = min(self.run.log.memory_steps, self.run.steps)
        if self.ranks.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()  # drawing the initial weights may take more memory than a step
        elif self._last_watched and self.run.compile:
            self._last_watched = 0
            self.metrics.line("memory is not counted: blocks are compiled, and counting on the CPU would keep them from it")
        elif self._last_watched:
            self.memory = LiveMemory(nn.ModuleList(trainer.share.stages.values()), trainer.optimizer)
            trainer.on_phase = self.memory.mark
            self._watching.callback(lambda: setattr(trainer, "on_phase", lambda phase, step: None))
            self._watching.enter_context(self.memory)

    def after_step(self, session: Session, done: StepDone) -> None:
        """Add the values of a step."""
        result, run = done.result, self.run
        gradients = result.gradients
        tokens = gradients.span.num_sequences * run.batch.sequence_length
        values: Row = {
            "train/loss": gradients.loss if isfinite(gradients.loss) else None,
            "train/grad_norm": gradients.norm if isfinite(gradients.norm) else None,
            "train/lr": result.learning_rate,
            "train/noise_scale_tokens": gradients.noise_scale_tokens,
            "progress/tokens": tokens_after(run.batch, gradients.step + 1) * self.shares // run.layout.dp,
            "progress/tokens_per_batch": tokens,
        }
        values |= result.outer
        if gradients.loss_scale is not None:
            values |= {"train/loss_scale": gradients.loss_scale}
        if gradients.loss_scale is not None or result.skipped_steps:
            values |= {"train/skipped_steps": result.skipped_steps}
        if (balance := gradients.expert_balance) is not None:
            values |= {
                "moe/load_max_over_mean": balance.worst,
                "moe/load_min_over_mean": balance.idlest,
                "moe/auxiliary_loss": balance.auxiliary_loss,
            }
        if self.memory is None and self._is_warm:
            values |= self._speed(tokens, done.seconds, gradients.data_seconds)
        self._is_warm = True
        values["plan/peak_gib"] = self.planned_peak / GIB
        if self.run.compile:
            values["perf/compile_s"] = compile_seconds()
        if self.ranks.device.type == "cuda":
            allocated = torch.cuda.max_memory_allocated()
            values["mem/peak_allocated_gib"] = allocated / GIB
            values["mem/peak_allocated_percent"] = 100 * allocated / torch.cuda.mem_get_info()[1]
            reserved = torch.cuda.max_memory_reserved()
            values["mem/peak_reserved_gib"] = reserved / GIB
            values["mem/reserved_over_allocated"] = reserved / max(1, allocated)  # above 1: what fragmentation costs
        if gradients.step + 1 == self._last_watched:
            self._compare_memory()
        done.values |= values

    def _speed(self, tokens: int, seconds: float, data_seconds: float) -> Row:
        per_rank = tokens / seconds / self.ranks.world
        mfu = per_rank * self.model_flops / self.peak.flops_per_second
        hfu = per_rank * self.hardware_flops / self.peak.flops_per_second
        if is_too_low := max(mfu, hfu) > 1:
            self._say_that_peak_is_too_low(max(mfu, hfu))
        return {
            "perf/step_s": seconds,
            "perf/data_wait_s": data_seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_gpu": per_rank,
            "perf/mfu": None if is_too_low else mfu,
            "perf/hfu": None if is_too_low else hfu,
        }

    def _say_what_mfu_means(self) -> None:
        per_token = f"{self.model_flops:.3g} model FLOPs a token (6N + attention, causal)"
        self.metrics.line(f"mfu: {per_token} over {self.peak.flops_per_second / 1e12:.3g} TFLOP/s, {self.peak.origin}")

    def _say_that_peak_is_too_low(self, share: float) -> None:
        if not self._warned_of_peak:
            peak = f"the peak of {self.peak.flops_per_second / 1e12:.3g} TFLOP/s ({self.peak.origin})"
            self.metrics.line(f"warning: {peak} is too low, a step reached {share:.0%} of it: MFU is left out of such steps")
        self._warned_of_peak = True

    def _compare_memory(self) -> None:
        # Values of the batch-size ramp's first stage, if there is a ramp.
        sequences = step_span(self.run.batch, 0).num_sequences
        plan = self._plan(sequences, steps=self._last_watched, keeps_timeline=True)
        if self.memory is not None:
            report = compare_run(plan, self.memory) | {
                "planned_timeline": [{"step": s + 1, "phase": p, "bytes": b} for s, p, b in plan.timeline],
                "measured_timeline": self.memory.timeline(),
            }
            rows = compare_memory(plan, self.memory.peak.by_category)
        else:
            peak = torch.cuda.max_memory_allocated()
            rows = compare_memory(plan, {}, measured_total=peak)
            report = {"measured_peak_bytes": peak, "measured_reserved_bytes": torch.cuda.max_memory_reserved()}
            report |= {"planned_peak_bytes": plan.peak.total, "by_category": [asdict(row) for row in rows]}
        self._watching.close()
        self.memory = None
        self.metrics.report("memory.json", document("memory", report))
        self.metrics.lines(map(_memory_line, rows))

    def _plan(self, sequences_per_batch: int, *, steps: int = 1, keeps_timeline: bool = False) -> MemoryPlan:
        device = "cuda" if self.ranks.device.type == "cuda" else "cpu"
        return plan_rank(
            self.run,
            self.ranks.rank,
            device,
            sequences_per_batch=sequences_per_batch,
            steps=steps,
            keeps_timeline=keeps_timeline,
        )


def _memory_line(row: CategoryDifference) -> str:
    measured = "" if row.measured_bytes is None else f"measured {format_bytes(row.measured_bytes):>10}"
    difference = "" if row.percent is None else f"difference {round(row.percent, 1) + 0.0:.1f}% of the peak"
    return f"memory  {row.name:<14} planned {format_bytes(row.planned_bytes):>10}  {measured}  {difference}".rstrip()
