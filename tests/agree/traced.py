"""The same steps for real: on forked ranks over gloo, seen by the recorder that sees a trace."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import _disable_current_modes

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.models import router
from ultrascale.parallel.mesh import Ranks
from ultrascale.trace.rank import EmptySequences, documents_of, record_steps
from ultrascale.trace.recording.recipes import tensors_in
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.recording.recorder import OWN_OPERATIONS, Handler, Recorder
from ultrascale.train.trainer import Trainer


def run_of(model: Model, layout: Layout, *, length: int = 64, num_micro_batches: int = 2, documents: bool = False) -> Run:
    """A run without data."""
    sequences = layout.dp * layout.micro_batch_size * num_micro_batches
    return Run(model, layout=layout, batch=Batch(length, sequences), data=Data(document_mask=documents))


class RealRecorder(Recorder):
    """Records operations and messages that happen, on the CPU."""

    def __init__(self, trace: RankTrace):
        super().__init__(trace)
        self.counted = ("cpu",)

    def _handler(self, func: Any) -> Handler:
        is_known = func.namespace in ("c10d", "_c10d_functional") or func in OWN_OPERATIONS
        return super()._handler(func) if is_known else self._really

    def _really(self, func: Any, args: Any, options: Any) -> Any:
        result = func(*args, **options)
        self._count_flops(func, args, options, result)
        for tensor in tensors_in((*args, *options.values())):
            self._count(tensor, self._region or "other")
        self._count_all(result, func)
        return result

    def _communicate(self, func: Any, args: Any, options: Any) -> Any:
        sent = self.trace.sent
        before = len(sent)
        self._note(func, args)
        sent[before:] = [replace(message, is_host=False) for message in sent[before:]]  # the device is the host
        return func(*args, **options)


def really(rank: int, run: Run, steps: int, *, documents: int | None = None) -> RankTrace:
    """What `trace_rank` tells, of steps that happen. Experts are chosen in turn, so that their loads are even."""
    router.choose = _in_turn
    world = run.layout.world_size
    trace = RankTrace(run.model, run.layout, rank, "cpu")
    ranks = Ranks(rank, world, torch.device("cpu"), dist.group.WORLD if world > 1 else None)
    recorder = RealRecorder(trace)
    with recorder:
        sequences = EmptySequences(run.batch.sequence_length, documents=documents or documents_of(run.layout.cp))
        trainer = Trainer(run, ranks, sequences)  # pyright: ignore[reportArgumentType]
        record_steps(trainer, recorder, steps)
    return trace


def _in_turn(scores: torch.Tensor, model: Model, bias: torch.Tensor | None) -> torch.Tensor:
    """As `models.router.choose`, with the same memory: the experts 0, 1, 2, ... one after the other."""
    found = scores.topk(model.num_experts_per_tok, -1).indices
    with _disable_current_modes():
        return found.copy_(torch.arange(found.numel()).view(found.shape) % model.num_experts)


SCALARS = 32
"""Bytes of a tensor that may come and go in another order: numbers on their way to the host, which on the CPU is no copy."""


def changes_of(trace: RankTrace) -> list[tuple[str, str, int]]:
    """Every change of memory in order, of all but batches and single numbers: category, what, bytes."""
    return [
        (block.category, block.what, change)
        for _, number, change in trace.changes
        if (block := trace.blocks[number]).category != "other" and abs(change) > SCALARS
    ]


def taken(trace: RankTrace) -> list[tuple[str, str, int]]:
    """What was allocated, in order. (gloo's thread may hold on to a tensor for a moment, so that it is let go of later.)"""
    return [change for change in changes_of(trace) if change[2] > 0]


def messages_of(trace: RankTrace) -> list[tuple[object, ...]]:
    """Every message in order."""
    return [(s.step, s.kind, s.axis, s.size, s.stride, s.num_bytes, s.line, s.during) for s in trace.sent]


def last_before(trace: RankTrace, step: int, phase: str) -> int:
    """Index of the last change before a phase of a step begins."""
    tick = next(mark.tick for mark in trace.marks if (mark.step, mark.phase) == (step, phase))
    return max(index for index, (changed_at, _, _) in enumerate(trace.changes) if changed_at <= tick)
