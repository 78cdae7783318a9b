"""Traces a rank: builds the trainer as on the cluster, and runs some of its steps.

pretended_rank    simulated process, device and process groups          (pretend.py)
Trainer           the real one: model, parallelism, optimizer
train_step        the real one, on sequences without content            (batches.py)
Recorder          records every operation                               (recorder.py)

Without values there is no routing: every expert is chosen equally often, as the planner assumes.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count as count_from
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn

from ultrascale.config.rules.trainable import expect_trainable_run
from ultrascale.data.loader import Sequences
from ultrascale.description.run import Run, run_of_island
from ultrascale.islands.outer_state import OuterState
from ultrascale.kernels.choice.device_kind import Kind
from ultrascale.models import experts
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.parallel.expert import expert_dispatch
from ultrascale.parallel.expert.expert_dispatch import ExpertDispatch, UnderWay
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.schedules.actions import Action
from ultrascale.schedules.actions import Kind as ActionKind
from ultrascale.torch_private import pad_shards
from ultrascale.trace.recording.pretend import pretended_rank
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.recording.recorder import Recorder, TraceError
from ultrascale.trace.views.lines import is_code, line_of_error
from ultrascale.train.trainer import Trainer
from ultrascale.work.sharding.places import even_part

MOST_ALIKE = 3
"""Micro-batches of a step that are traced without a pipeline: the first, one in between, the last."""
STEPS = 2
"""Number of traced steps: in the first, FSDP2 allocates memory that it keeps; the second equals all that follow."""
ALLOCATION = {"cpu": 1, "cuda": 512}
"""Bytes to a multiple of which allocations are rounded up: 512 in CUDA's caching allocator."""


class EmptySequences:
    """Data loader that returns token 0, with a fixed number of equally long documents in each sequence."""

    def __init__(self, sequence_length: int, *, documents: int):
        self.length, self.documents = sequence_length, documents

    def read(self, numbers: range) -> Sequences:
        """As many sequences as there are `numbers`."""
        shape = (len(numbers), self.length)
        each, places = max(1, self.length // self.documents), np.arange(self.length)
        numbers_in = np.minimum(places // each, self.documents - 1)
        ids = np.broadcast_to(numbers_in, shape).astype(np.int64)
        positions = np.broadcast_to(places - numbers_in * each, shape)
        return Sequences(
            np.zeros(shape, np.int64), np.zeros(shape, np.int64), positions.astype(np.int64), ids, np.asarray(numbers)
        )

    def fingerprint(self) -> str:
        return "empty"


def documents_of(cp: int) -> int:
    """Number of documents in each sequence, if documents are masked: two; with cp one, which the planner assumes too, since it
    maximizes attention's work and communication."""
    return 1 if cp > 1 else 2


def trace_rank(
    run: Run,
    rank: int,
    *,
    device: Kind = "cuda",
    steps: int = STEPS,
    round_to: int | None = None,
    plays_all: bool = False,
    documents: int | None = None,
    on_pass: Callable[[int], None] = lambda number: None,
) -> RankTrace:
    """Trace `steps` steps of one rank of `run`. `round_to`: rounding of allocations in bytes (default: the device allocator's).
    `documents`: number in each sequence (default: `documents_of`). `on_pass` is called before each
    forward pass with its number, from 1.

    Without a pipeline all micro-batches between the first and the last are equal: one is traced for all unless `plays_all`.

    Raises SpecError if the trainer refuses the run, with its message, and TraceError for an operation that needs values.
    """
    expect_trainable_run(run)
    islands, run = run.islands, run_of_island(run)
    count = num_micro_batches(run.layout, run.batch.sequences_per_batch)
    traced = count if run.layout.pp > 1 or plays_all else min(count, MOST_ALIKE)
    run = replace(run, compile=False, log=replace(run.log, gradient_noise_scale=False))
    trace = RankTrace(run.model, run.layout, rank, device, round_to=round_to or ALLOCATION[device])
    trace.micro_batches = (traced, count)
    documents = documents_of(run.layout.cp) if documents is None else documents
    if run.data.document_mask:
        trace.documents = {1: "one document", 2: "two documents"}.get(documents, f"{documents} documents")
    with pretended_rank(rank, run.layout.world_size, device) as (ranks, streams), balanced_routing():
        recorder = Recorder(trace, stream_name=lambda: streams.current.name)
        with recorder, named_errors():
            trainer = Trainer(run, ranks, EmptySequences(run.batch.sequence_length, documents=documents))  # pyright: ignore[reportArgumentType]
            record_steps(trainer, recorder, steps, on_pass)
        if islands.count > 1:
            outer = OuterState(islands, trainer.share)
            trace.outer = outer.sent_bytes(), outer.host_bytes()
    return trace


@contextmanager
def named_errors() -> Iterator[None]:
    """Context that turns unexpected errors into a TraceError with the line of their origin.

    Covers what torch refuses for tensors without values outside of an operation (`tensor.numpy()`, a custom operation without
    `register_fake`, a constant on another device), and errors in a model. Assertions of this program pass through.
    """
    try:
        yield
    except Exception as error:
        *_, (innermost, _) = traceback.walk_tb(error.__traceback__)
        is_assert = isinstance(error, AssertionError) and is_code(innermost.f_code.co_filename)
        if is_assert or isinstance(error, MemoryError) or type(error).__module__.startswith("ultrascale."):
            raise
        where = line_of_error(error)
        text = (str(error).strip() or "no more is said").splitlines()[0]
        raise TraceError(
            f"{where} cannot be traced, where tensors have shapes alone: {type(error).__name__}: {text}"
        ) from error


def record_steps(
    trainer: Trainer, recorder: Recorder, steps: int, on_pass: Callable[[int], None] = lambda number: None
) -> None:
    """Run the next steps of `trainer` under `recorder`, which must be entered."""
    stages = nn.ModuleList(trainer.share.stages.values())
    for module in sharded_modules(stages):  # now, before the first forward pass, to count as parameters
        pad_shards(module)
    recorder.watch(stages, trainer.optimizer, {shard.parameter: shard.name for shard in trainer.share.local_parameters})

    def begin(phase: str, step: int) -> None:
        if phase in ("optimizer", "between"):
            recorder.mark(phase, step)

    trainer.on_phase = begin
    number = count_from(1)
    saved_on_action, piped = trainer.passes.on_action, trainer.share.layout.pp > 1
    traced, count = recorder.trace.micro_batches
    train = trainer.passes.train
    if traced < count:
        setattr(trainer.passes, "train", lambda batches, num_targets: train(batches[:traced], num_targets))  # noqa: B010

    setattr(trainer, "to_device", recorder.as_batch(trainer.to_device))  # noqa: B010
    agree = trainer.agree_on_targets
    # Other ranks' target counts are missing here, and a step without a target does not update.
    setattr(trainer, "agree_on_targets", lambda batches: max(1, agree(batches)))  # noqa: B010

    def mark_action(action: Action) -> None:
        if action.kind is ActionKind.FORWARD:
            on_pass(next(number))
        phase = "forward" if action.kind is ActionKind.FORWARD else "backward"
        where = f"@{action.stage}" if piped else ""
        recorder.times = 1 + count - traced if action.micro_batch == 1 else 1
        recorder.mark(phase, trainer.steps_done, f"{action.kind.value}{action.micro_batch}{where}")
        saved_on_action(action)

    trainer.passes.on_action = mark_action
    for step in range(steps):
        recorder.mark("data", step)
        trainer.train_step()


@contextmanager
def balanced_routing() -> Iterator[None]:
    """Context in which expert dispatch gets balanced loads instead of reading them from the device; no token is dropped."""
    now: list[tuple[ExpertDispatch, int]] = []
    start = ExpertDispatch.start

    def start_knowing(self: ExpertDispatch, tokens: Tensor, routing: Any) -> UnderWay:
        now[:] = [(self, pairs_of_experts_here(self, *routing[0].shape))]
        return start(self, tokens, routing)

    def to_host(sent: Tensor, from_rank: Tensor) -> tuple[list[int], list[list[int]]]:
        torch.cat([sent, from_rank.flatten()])  # the tensor that is copied to the host, temporarily
        dispatch, pairs = now[0]
        to_expert = balanced(pairs, len(sent))
        ep_rank = 0 if dispatch.ep is None else dispatch.ep.rank()
        local_pairs = sum(to_expert[dispatch.bounds[ep_rank] : dispatch.bounds[ep_rank + 1]])
        return to_expert, [[local_pairs] * from_rank.shape[1] for _ in range(from_rank.shape[0])]

    def all_kept(counts: Tensor, pairs: Tensor) -> int:
        counts.sum()
        return len(pairs)

    with (
        patch.object(ExpertDispatch, "start", start_knowing),
        patch.object(expert_dispatch, "_to_host", to_host),
        patch.object(experts, "num_kept", all_kept),
    ):
        yield


def pairs_of_experts_here(dispatch: ExpertDispatch, num_tokens: int, choices: int) -> int:
    """(token, expert) pairs that this rank sends, of [N, k] choices."""
    if dispatch.same_tokens is not None:
        num_tokens = even_part(num_tokens, dispatch.same_tokens.size(), dispatch.same_tokens.rank())[1]
    return num_tokens * choices


def balanced(pairs: int, experts: int) -> list[int]:
    """Choices of each expert, balanced."""
    return [even_part(pairs, experts, expert)[1] for expert in range(experts)]
