"""Time that a pipeline adds to a step: filling and draining it, and its messages.

For a whole table by formulas: exact for equal stages, close for unequal ones. For one layout by simulating the schedule's
actions with the durations of each stage (`plan.pipeline.play`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import accumulate

import numpy as np

from ultrascale.description.layout import NARROW, Layout
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.laws.collectives import send_seconds
from ultrascale.plan.layouts import SCHEDULE_NAMES, Column, Floats, LayoutTable, by_schedule, distinct
from ultrascale.plan.pipeline.pipeline_bounds import bubble_seconds
from ultrascale.plan.pipeline.play import StageSeconds
from ultrascale.plan.time.blocks import Blocks, price_blocks
from ultrascale.plan.time.passes import PassSeconds, pass_seconds
from ultrascale.plan.time.stages import Parts, Stages, chunk_layers_of, kinds_with_kept
from ultrascale.plan.workload import Workload

SPLITS_BACKWARD = by_schedule(lambda schedule: bool(schedule.splits_backward))


def stage_seconds(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> StageSeconds:
    """Seconds of one micro-batch in every stage of one layout's pipeline; independent of the schedule's order of passes."""
    table = LayoutTable.of([layout if layout.known_schedule else replace(layout, schedule=Layout.schedule)])
    blocks = price_blocks(workload, table)
    passes = pass_seconds(workload, table, blocks, constants, chunk_parts(workload, layout, blocks))
    return seconds_of_chunks(workload, table, passes)


def rank_and_chunk_passes(
    workload: Workload, layout: Layout, table: LayoutTable, stages: Stages, constants: Constants
) -> tuple[PassSeconds, PassSeconds]:
    """Passes of one layout by sort of rank, and by pipeline stage; computed together, since calls are most of the cost."""
    blocks = price_blocks(workload, table)
    pairs = zip(stages.parts, chunk_parts(workload, layout, blocks), strict=True)
    passes = pass_seconds(workload, table, blocks, constants, Parts(*map(np.concatenate, pairs)))
    sorts = len(stages.layers)
    return passes.rows(slice(sorts)), passes.rows(slice(sorts, None))


def chunk_parts(workload: Workload, layout: Layout, blocks: Blocks) -> Parts:
    """For one layout's stages: blocks of each kind [stages, kinds, 1], 1 if the embedding is there, 1 if the head is there
    [stages, 1], and the blocks that stay in bf16 in an fp8 run."""
    chunks = chunk_layers_of(workload, layout.num_stages, layout.layers_per_stage)
    num_kinds, kept = len(blocks.kinds), layout.fp8_keep_blocks if layout.precision in NARROW else 0
    return _parts_of(tuple(chunks), kinds_with_kept(workload.model, blocks.kind_of_layer, num_kinds, kept), num_kinds)


@lru_cache(maxsize=1024)
def _parts_of(chunks: tuple[int, ...], of_layer: tuple[int, ...], num_kinds: int) -> Parts:
    of_stage = [of_layer[end - count : end] for count, end in zip(chunks, accumulate(chunks), strict=True)]
    counts = np.array([[[kinds.count(kind)] for kind in range(2 * num_kinds)] for kinds in of_stage], dtype=float)
    in_fp8, in_bf16 = counts[:, :num_kinds], counts[:, num_kinds:]
    embedding, head = np.zeros((len(chunks), 1)), np.zeros((len(chunks), 1))
    embedding[0] = head[-1] = 1
    return Parts(in_fp8 + in_bf16, embedding, head, in_bf16)


def seconds_of_chunks(workload: Workload, table: LayoutTable, passes: PassSeconds) -> StageSeconds:
    """Durations for a simulation, from the passes of one layout's stages."""
    inputs = passes.input_gradient + passes.recompute + passes.backward_traffic
    more_input, more_weight = passes.split_input.copy(), passes.split_weight.copy()
    more_input[0], more_weight[0] = -inputs[0], inputs[0]  # the first stage does an unsplit backward pass in W
    return StageSeconds(
        forward=passes.forward + passes.forward_traffic,
        input_gradient=inputs,
        weight_gradient=passes.weight_gradient,
        send=_send_seconds(workload, table),
        # Paired passes hide only the experts' traffic: other traffic counts as part of their compute.
        forward_communication=passes.forward_expert_parallel,
        backward_communication=passes.expert_parallel - passes.forward_expert_parallel,
        receives_block=not workload.stack.overlaps_sends,
        split_input=more_input,
        split_weight=more_weight,
    )


def busiest_rank_seconds(layout: Layout, seconds: StageSeconds, num_micro_batches: int, split_share: float) -> float:
    """Compute seconds of the busiest rank in a step, over its stages and all micro-batches. `split_share`: fraction of backward
    passes that are split."""
    more = split_share * np.add(seconds.split_input, seconds.split_weight)
    of_stage = np.ravel(np.add(seconds.forward, seconds.input_gradient) + np.add(seconds.weight_gradient, more))
    known = SCHEDULES[layout.schedule]
    busiest = max(of_stage[[*stages]].sum() for stages in known.stages_of_ranks(layout.pp, len(of_stage)))
    return float(busiest) / known.copies * num_micro_batches


def with_and_without_sends(seconds: StageSeconds, num_stages: int) -> StageSeconds:
    """Two cases: with messages that take no time, and as they are."""
    send_seconds = float(np.ravel(np.asarray(seconds.send))[0])
    return replace(seconds, send=np.broadcast_to([0.0, send_seconds], (num_stages - 1, 2)))


def without_expert_parallel(seconds: StageSeconds) -> StageSeconds:
    """`seconds` without messages and without the experts' traffic, which paired passes hide."""
    return replace(
        seconds,
        forward=np.asarray(seconds.forward) - seconds.forward_communication,
        input_gradient=np.asarray(seconds.input_gradient) - seconds.backward_communication,
        forward_communication=0.0,
        backward_communication=0.0,
        send=0.0,
    )


def waiting_seconds(
    workload: Workload, table: LayoutTable, stages: Stages, passes: PassSeconds, micro_batches: Column
) -> tuple[Floats, Floats]:
    """Idle seconds of the busiest rank of each layout: while the pipeline fills and drains, and for sends.

    All stages are taken to cost their mean: exact if they are equal, a little low otherwise.
    """
    pp, v = table.pp, table.virtual_stages
    share = stages.exists / (pp * v)
    is_split = SPLITS_BACKWARD[table.schedule]
    forward = ((passes.forward + passes.forward_traffic) * share).sum(axis=0)
    inputs = passes.input_gradient + passes.recompute + passes.backward_traffic + is_split * passes.split_input
    inputs = (inputs * share).sum(axis=0)
    weights = ((passes.weight_gradient + is_split * passes.split_weight) * share).sum(axis=0)
    send = _send_seconds(workload, table)
    bubble, sends = np.zeros(len(table)), np.zeros(len(table))
    for number in distinct(table.schedule[pp > 1]):
        rows = np.flatnonzero((table.schedule == number) & (pp > 1))
        columns = (column[rows] for column in (pp, v, micro_batches, forward, inputs, weights))
        without, whole = bubble_seconds(SCHEDULE_NAMES[number], *columns, send=np.array([np.zeros(len(rows)), send[rows]]))
        bubble[rows], sends[rows] = without, whole - without
    if not workload.stack.overlaps_sends:
        sends += np.where(pp > 1, 2 * micro_batches * v * send, 0.0)
    return bubble, sends


def _send_seconds(workload: Workload, table: LayoutTable) -> Floats:
    """Seconds to send one activation to the next stage, [layouts]."""
    tokens = table.micro_batch_size * workload.sequence_length / table.cp
    tokens = tokens / np.where(table.sequence_parallel > 0, table.tp, 1)
    num_bytes = tokens * workload.model.hidden_size * 2.0
    return send_seconds(workload.cluster, num_bytes, stride=table.tp * table.cp * table.dp, size=table.pp)
