"""Executes a pipeline schedule on this machine, and simulates the same schedule with the measured seconds of its passes.

Ranks are forked, hold one small block per stage, and run on the CPU with one thread each, through
`parallel.pipeline.pipeline_parallel`, as the trainer does. The planner simulates the schedule with the mean seconds of every
stage's passes, so the difference is what a plan omits: messages, Python between passes, passes of unequal length; and with more
ranks than cores, waiting for cores.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import torch

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout, PipelineRuntime
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.parallel.pipeline.pipeline_parallel import Pipeline, build_orders, pipeline_of
from ultrascale.plan.pipeline.play import Program, StageSeconds, Timeline, play
from ultrascale.schedules.actions import Action, Kind
from ultrascale.torch_private import load_compiler

WIDTH, LENGTH = 256, 128
"""Hidden size and tokens: a pass takes some milliseconds, ten times the overhead of Python and a message."""
STEPS = 4
"""Number of steps: the first warms up; of the others the fastest is shown, since other work only makes steps slower."""
TIMEOUT_SECONDS = 120.0
Row = list[tuple[str, int, int, float, float]]
"""Row of one rank: kind, micro-batch, stage, start and end of each pass."""


class PlannedAndExecuted(NamedTuple):
    """One step, planned and executed. Seconds from its start."""

    planned: Timeline
    executed: Timeline


def execute_schedule(name: str, program: Program, runtime: PipelineRuntime) -> PlannedAndExecuted:
    """Execute `program`, the schedule of this name, with as many processes as it has ranks, in the loop of `runtime`.

    Raises SpecError for a schedule that the trainer does not execute, and RankFailed if a process fails.
    """
    ranks = len(program.schedule)
    stages = program.num_stages // ranks
    layout = Layout(
        pp=ranks, schedule=name, virtual_stages=stages, layers_per_stage=(1,) * program.num_stages, pipeline_runtime=runtime
    )
    build_orders(layout, program.num_micro_batches)
    load_compiler()
    by_rank = run_forked(ranks, _steps_of_rank, layout, program.num_micro_batches)
    executed = min((_timeline(rows) for rows in zip(*by_rank, strict=True)), key=lambda timeline: timeline.step_seconds)
    return PlannedAndExecuted(play(program, mean_seconds(executed, program.num_stages)), executed)


def mean_seconds(timeline: Timeline, num_stages: int) -> StageSeconds:
    """Mean seconds of each stage's passes. If no backward pass is split, all of it counts as input gradient."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for row, starts, ends in zip(timeline.schedule, timeline.start, timeline.end, strict=True):
        for action, start, end in zip(row, starts, ends, strict=True):
            durations[action.kind, action.stage].append(end - start)

    def mean(kind: Kind, stage: int) -> float:
        return sum(durations[kind, stage]) / max(1, len(durations[kind, stage]))

    stages = range(num_stages)
    halves = Kind.INPUT_GRADIENT if any(kind is Kind.INPUT_GRADIENT for kind, _ in durations) else Kind.BACKWARD
    return StageSeconds(
        forward=[mean(Kind.FORWARD, stage) for stage in stages],
        input_gradient=[mean(halves, stage) for stage in stages],
        weight_gradient=[mean(Kind.WEIGHT_GRADIENT, stage) for stage in stages],
    )


def _timeline(rows: tuple[Row, ...]) -> Timeline:
    first = min(start for row in rows for *_, start, _ in row)
    start = [[begin - first for *_, begin, _ in row] for row in rows]
    end = [[done - first for *_, done in row] for row in rows]
    return Timeline(
        schedule=[[Action(Kind(kind), micro_batch, stage) for kind, micro_batch, stage, *_ in row] for row in rows],
        start=start,
        end=end,
        step_seconds=max(done for row in end for done in row),
        busy_seconds=[sum(e - s for s, e in zip(*pair, strict=True)) for pair in zip(start, end, strict=True)],
    )


def _steps_of_rank(rendezvous: str, layout: Layout, num_micro_batches: int) -> list[Row]:
    torch.set_num_threads(1)
    with process_group(layout, device="cpu", timeout_seconds=TIMEOUT_SECONDS, rendezvous=rendezvous) as ranks:
        steps = [_step(pipeline, num_micro_batches, ranks) for pipeline in [_pipeline(layout, ranks)] * STEPS]
        ranks.barrier()
    return steps[1:]


def _pipeline(layout: Layout, ranks: Ranks) -> Pipeline:
    model = Model(
        vocab_size=WIDTH, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_hidden_layers=layout.num_stages,
        num_attention_heads=4, num_key_value_heads=4, head_dim=WIDTH // 4, max_position_embeddings=LENGTH,
    )  # fmt: skip
    share = build_share(model, layout, ranks, seed=0, sequence_length=LENGTH)
    return pipeline_of(layout)(layout, share.stages, share.mesh.pipeline_groups(), ranks.device)


def _step(pipeline: Pipeline, num_micro_batches: int, ranks: Ranks) -> Row:
    """One step on random tokens, which all ranks start together."""
    tokens, offsets = torch.randint(WIDTH, (1, LENGTH)), torch.arange(LENGTH)

    def run_stage(stage: int, micro_batch: int, received: torch.Tensor | None) -> torch.Tensor:
        return pipeline.stages[stage](tokens if received is None else received, targets=tokens, positions=offsets)

    ranks.barrier()
    pipeline.train(num_micro_batches, run_stage, shape=(1, LENGTH, WIDTH), dtype=torch.float32)
    return [(done.action.kind.value, done.action.micro_batch, done.action.stage, *done[1:]) for done in pipeline.executed]
