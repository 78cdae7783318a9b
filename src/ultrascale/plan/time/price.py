"""Prices a whole table of layouts at once: seconds of a step by part, and memory.

    one micro-batch on a rank   blocks x (GEMMs, attention, element-wise work, recomputation, exposed tp, cp, ep traffic)
    one step on a rank          micro-batches x that + exposed all-gathers and reductions of data parallelism
    one step                    the slowest rank + its waiting (bubble, sends, stragglers) + the optimizer

The parts of `PriceTable.waterfall` sum to `step_seconds`. `predict` prices one layout and simulates its pipeline action by
action.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.schedules import SCHEDULES, schedule_for
from ultrascale.plan.columns.footprint import Footprint, stage_memory
from ultrascale.plan.columns.fp8_state import agreed_scales_seconds
from ultrascale.plan.columns.rank_activations import rank_activations
from ultrascale.plan.columns.rank_state import MASTERS, shards
from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.costs.storage import checkpoint_share, read_seconds
from ultrascale.plan.flops import hardware_flops_per_token, model_flops_per_token
from ultrascale.plan.laws.collectives import collective_seconds
from ultrascale.plan.laws.compute import elementwise_seconds
from ultrascale.plan.laws.curves import steady
from ultrascale.plan.layouts import PRECISIONS, SCHEDULE_NAMES, Bools, Column, Floats, LayoutTable, by_schedule
from ultrascale.plan.memory.replay import MemoryPlan, rank_shape
from ultrascale.plan.pipeline.pipeline_steady import long_step_seconds
from ultrascale.plan.pipeline.pipelined import (
    busiest_rank_seconds,
    rank_and_chunk_passes,
    seconds_of_chunks,
    stage_seconds,
    waiting_seconds,
    with_and_without_sends,
    without_expert_parallel,
)
from ultrascale.plan.pipeline.play import StageSeconds
from ultrascale.plan.split_backward import split_share_of, split_shares
from ultrascale.plan.time.blocks import price_blocks
from ultrascale.plan.time.data_traffic import data_parallel_seconds
from ultrascale.plan.time.offload import exposed_seconds, offloaded_update
from ultrascale.plan.time.passes import PassSeconds, pass_seconds
from ultrascale.plan.time.stages import FIRST, Stages, partition_stages
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.executable import Schedule
from ultrascale.work.fp8_slots import SLOT_BYTES, num_slots

IN_PASSES = ("compute", "recompute", "tensor_parallel", "context_parallel", "expert_parallel")
"""Parts of a step that are those of a micro-batch's passes, times their number."""

PAIRED = by_schedule(lambda schedule: schedule.pairs)
NEWTON_SCHULZ_FLOPS = 30
"""FLOPs per matrix element and unit of the shorter side: five steps of three GEMMs, two of them square (Jordan 2024)."""
NEWTON_SCHULZ_EFFICIENCY = 0.6
"""Fraction of peak FLOPs that these GEMMs, thousands wide, reach."""
MATRIX_BYTES = 2
"""Bytes of an element of a matrix that Muon orthogonalises: bf16."""


@dataclass(frozen=True)
class PriceTable:
    """Prices of every layout of a table: seconds of a step by part, one column each; they sum to `step_seconds`."""

    workload: Workload
    table: LayoutTable
    step_seconds: Floats
    waterfall: dict[str, Floats]
    busiest_seconds: Floats
    """Seconds of the passes of the busiest rank of a pipeline, with and without the experts' traffic, [2, layouts]."""
    memory: Footprint
    num_micro_batches: Column

    @property
    def fits(self) -> Bools:
        return self.memory.fits

    def row(self, index: int) -> Prediction:
        """Prediction of one layout."""
        parts = {name: float(column[index]) for name, column in self.waterfall.items()}
        return Prediction(
            self.workload, self.table.layout(index), float(self.step_seconds[index]), parts,
            tuple(self.busiest_seconds[:, index].tolist()), self.memory.row(index), int(self.num_micro_batches[index]),
        )  # fmt: skip


@dataclass(frozen=True)
class Prediction:
    """Predicted time and memory of one layout."""

    workload: Workload
    layout: Layout
    step_seconds: float
    waterfall: dict[str, float]
    busiest_seconds: tuple[float, float]
    """Seconds of the passes of the busiest rank of its pipeline, with and without the experts' traffic."""
    memory: Footprint
    """Footprint of this layout alone."""
    num_micro_batches: int
    replay: MemoryPlan | None = None
    """Replay of the fullest rank, if `memory` comes from it (`plan.search.replayed`)."""

    @property
    def tokens_per_second(self) -> float:
        return self.workload.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.layout.world_size

    def mfu(self, *, full_attention: bool = False) -> float:
        """Model FLOPs utilization over the dense bf16 peak, with causal or full attention."""
        flops = model_flops_per_token(self.workload.model, self.workload.sequence_length, full_attention=full_attention)
        return flops * self.tokens_per_second_per_gpu / half_precision_peak(self.workload.accelerator)

    def hfu(self) -> float:
        """Hardware FLOPs utilization (recomputation included) over the dense bf16 peak."""
        length = self.workload.sequence_length
        shape = rank_shape(self.layout, length, documents=self.workload.documents, device="cuda", stack=self.workload.stack)
        flops = hardware_flops_per_token(self.workload.model, self.layout, shape)
        return flops * self.tokens_per_second_per_gpu / half_precision_peak(self.workload.accelerator)


def half_precision_peak(accelerator: Accelerator) -> float:
    """Peak FLOPs per second by which MFU divides: dense bf16, or fp16 on devices without bf16."""
    return accelerator.peak_flops_per_second("bf16" if "bf16" in accelerator.peak_flops else "fp16")


def predict(workload: Workload, layout: Layout, constants: Constants = CONSTANTS) -> Prediction:
    """Prediction of one layout, with its pipeline simulated action by action.

    Raises SpecError if the schedule does not suit the number of stages and micro-batches.
    """
    if layout.pp > 1 and layout.schedule not in SCHEDULES:
        return _predict_file(workload, layout, constants)
    table = LayoutTable.of([layout])
    stages = partition_stages(workload, table, layout.layers_per_stage)
    if layout.pp == 1:
        return replace(price(workload, table, constants, stages).row(0), layout=layout)
    passes, of_chunks = rank_and_chunk_passes(workload, layout, table, stages, constants)
    prices = price(workload, table, constants, stages, adds_split_traffic=False, passes=passes)
    prediction = replace(prices.row(0), layout=layout)
    (share,) = _split_shares(table, np.array([prediction.num_micro_batches]))
    chunks = seconds_of_chunks(workload, table, of_chunks)
    return _with_simulated_pipeline(prediction, layout, chunks, share, pairs=bool(PAIRED[table.schedule[0]]))


def predict_rows(workload: Workload, table: LayoutTable) -> list[Prediction]:
    """`predict` of every row of `table`, priced together because calls are most of the cost."""
    if not len(table):
        return []
    prices = price(workload, table, adds_split_traffic=False)
    shares = _split_shares(table, prices.num_micro_batches)
    predictions = [prices.row(number) for number in range(len(table))]
    return [
        prediction
        if prediction.layout.pp == 1
        else _with_simulated_pipeline(
            prediction, prediction.layout, stage_seconds(workload, prediction.layout), share, pairs=pairs
        )
        for prediction, share, pairs in zip(predictions, shares, PAIRED[table.schedule].tolist(), strict=True)
    ]


def _split_shares(table: LayoutTable, micro_batches: Column) -> list[float]:
    """Fraction of backward passes that each layout's schedule splits into I and W; that of the first rank if the schedule
    splits only those at the ends of a step."""
    splits = [SCHEDULES[SCHEDULE_NAMES[number]].splits_backward for number in table.schedule]
    at_ends = split_shares(table, micro_batches)[FIRST].tolist()
    return [share if how == "ends" else float(how == "all") for how, share in zip(splits, at_ends, strict=True)]


def _predict_file(workload: Workload, layout: Layout, constants: Constants) -> Prediction:
    """Prediction for a schedule from a file: stages placed as by a known schedule, actions from the file."""
    count = workload.sequences_per_batch // (layout.dp * layout.micro_batch_size)
    schedule = build_schedule(layout.schedule, layout.pp, count)
    placed = replace(layout, schedule=_placed_as(layout, schedule))
    table = LayoutTable.of([placed])
    stages = partition_stages(workload, table, layout.layers_per_stage)
    prediction = replace(price(workload, table, constants, stages, adds_split_traffic=False).row(0), layout=layout)
    memory = stage_memory(workload, table, stages, schedule).row(0)
    return _with_simulated_pipeline(
        replace(prediction, memory=memory), placed, stage_seconds(workload, layout, constants), split_share_of(schedule),
        pairs=any(len(action.parts) > 1 for row in schedule for action in row),
    )  # fmt: skip


def _placed_as(layout: Layout, schedule: Schedule) -> str:
    """Name of a known schedule that places stages on ranks as the file does."""
    stages_of_ranks = [sorted({part.stage for action in row for part in action.parts}) for row in schedule]
    pp, stages = layout.pp, layout.num_stages
    if stages_of_ranks == [list(range(rank, stages, pp)) for rank in range(pp)]:
        return schedule_for(layout.virtual_stages)
    if stages == 2 * pp and stages_of_ranks == [[rank, stages - 1 - rank] for rank in range(pp)]:
        return schedule_for(2, "there and back")
    num_stages, virtual_stages = sum(map(len, stages_of_ranks)), layout.virtual_stages
    rule = f"{layout.schedule} has {num_stages} stages on {pp} ranks, and layout.virtual_stages is {virtual_stages}"
    remedy = "Set it to the stages a rank has; they must go around the ranks one after another, or there and back."
    raise mistake("layout.schedule", rule, remedy)


def _with_simulated_pipeline(
    prediction: Prediction, placed: Layout, seconds: StageSeconds, split_share: float, *, pairs: bool
) -> Prediction:
    """`prediction` with bubble and sends from a simulation of the schedule's actions. `placed`: the layout with a known
    schedule's name. `split_share`: fraction of backward passes that are split, which `prediction` counts as unsplit. `pairs`:
    the schedule pairs passes."""
    layout, count = prediction.layout, prediction.num_micro_batches
    played = partial(long_step_seconds, layout.schedule, layout.pp, count, virtual_stages=layout.virtual_stages)
    silent, whole = played(with_and_without_sends(seconds, layout.num_stages)).tolist()
    parts = dict(prediction.waterfall)
    parts["pipeline_sends"] = whole - silent
    if pairs and parts["expert_parallel"] > 0:  # they hide the experts' traffic: what it adds to the step is exposed
        seconds, both = without_expert_parallel(seconds), silent
        silent = played(seconds).item()
        parts["expert_parallel"] = max(both - silent, 0.0)
    unsplit, split = (busiest_rank_seconds(placed, seconds, count, share) for share in (0.0, split_share))
    more = max(split - unsplit, 0.0)
    parts["tensor_parallel"] += more
    parts["bubble"] = silent - prediction.busiest_seconds[int(pairs)] - more
    total, whole = _with_storage(prediction.workload, {name: np.asarray(part) for name, part in parts.items()})
    return replace(prediction, step_seconds=float(total), waterfall={name: float(part) for name, part in whole.items()})


def price(
    workload: Workload, table: LayoutTable, constants: Constants = CONSTANTS, stages: Stages | None = None, *,
    adds_split_traffic: bool = True, passes: PassSeconds | None = None,
) -> PriceTable:  # fmt: skip
    """Price every layout of `table`, which must be legal for the workload (`plan.search.space`, `config.rules.run_rules`).

    `stages`, `passes`: stages of the layouts, and seconds of passes by sort of rank, if already computed. `adds_split_traffic`:
    include the additional tp traffic of split backward passes.
    """
    stages = stages or partition_stages(workload, table)
    passes = passes or pass_seconds(workload, table, price_blocks(workload, table), constants, stages.parts)
    seconds, waterfall = price_time(workload, table, stages, constants, adds_split_traffic=adds_split_traffic, passes=passes)
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    total = passes.total
    rank = np.where(stages.exists > 0, total, 0.0).argmax(axis=0), np.arange(len(table))
    busiest = micro_batches * np.array([total[rank], (total - passes.expert_parallel)[rank]])
    return PriceTable(workload, table, seconds, waterfall, busiest, stage_memory(workload, table, stages), micro_batches)


def price_time(
    workload: Workload, table: LayoutTable, stages: Stages, constants: Constants = CONSTANTS, *,
    adds_split_traffic: bool=True,
    passes: PassSeconds | None = None,
) -> tuple[Floats, dict[str, Floats]]:  # fmt: skip
    """Seconds of a step of every layout, and by part: work of the slowest rank, then its waiting (bubble and sends). Arguments
    as of `price`."""
    micro_batches = workload.sequences_per_batch // (table.dp * table.micro_batch_size)
    passes = passes or pass_seconds(workload, table, price_blocks(workload, table), constants, stages.parts)
    data_parallel, slowed = data_parallel_seconds(workload, table, stages, passes, micro_batches, constants)
    bubble, sends = waiting_seconds(workload, table, stages, passes, micro_batches)
    if adds_split_traffic:
        more = split_shares(table, micro_batches) * (passes.split_input + passes.split_weight)
        passes = replace(passes, tensor_parallel=passes.tensor_parallel + more)
    slowest = np.where(stages.exists > 0, micro_batches * passes.total + data_parallel + slowed, 0.0).argmax(axis=0)
    every = np.arange(len(table))

    def of_slowest(column: Floats) -> Floats:
        return column[slowest, every]

    parts = {name: micro_batches * of_slowest(getattr(passes, name)) for name in IN_PASSES}
    parts["compute"] = parts["compute"] + of_slowest(slowed)
    hidden = _hidden_by_pairs(workload, table, parts, micro_batches)
    parts["expert_parallel"] = parts["expert_parallel"] - hidden
    if workload.stack.overlaps_expert_parallel:  # not of DualPipe's pairs: HAI-LLM's `overheads.products` has the SMs that send
        parts["compute"] = parts["compute"] + constants.overlap_slowdown * hidden
    parts |= {
        "data_parallel": of_slowest(data_parallel),
        "pipeline_sends": sends,
        "bubble": bubble,
        "optimizer": _optimizer(workload, table, stages, constants),
        "offload": of_slowest(_exposed_offload(workload, table, passes, micro_batches)),
    }
    running = sum(parts.values())
    nodes = np.maximum(table.world_size / workload.cluster.node.num_accelerators, 1.0)
    parts["rest"] = constants.step_seconds + running * constants.straggler_per_doubling * steady(np.log2(nodes))
    parts["rest"] += _agreed_amaxes(workload, table) + agreed_scales_seconds(workload, table, stages)
    overheads = workload.overheads
    if overheads.stall_nodes:
        stops = np.where(table.pp > 1, micro_batches * np.minimum(table.pp - 1, 2), 2)
        parts["rest"] += np.where(nodes >= overheads.stall_nodes, overheads.stall_seconds * stops, 0.0)
    return _with_storage(workload, parts)


def _agreed_amaxes(workload: Workload, table: LayoutTable) -> Floats:
    """Seconds of the all-reduce of a step's amaxes over all ranks, for fp8 with delayed scaling."""
    delayed = table.delays_fp8
    if not (delayed.any() and workload.stack.kernels.own_fp8):
        return np.zeros(len(table))
    block_counts, inverse = np.unique(table.kept_blocks, return_inverse=True)
    layouts = [Layout(precision="fp8", fp8_scaling="delayed", fp8_keep_blocks=int(blocks)) for blocks in block_counts]
    num_bytes = np.array([SLOT_BYTES * num_slots(workload.model, layout) for layout in layouts], dtype=float)[inverse]
    seconds = collective_seconds(
        workload.cluster, "all_reduce", num_bytes, size=table.world_size, stride=np.ones_like(table.dp)
    )
    return np.where(delayed, seconds, 0.0)


def _with_storage(workload: Workload, parts: dict[str, Floats]) -> tuple[Floats, dict[str, Floats]]:
    """Seconds of the step and its parts, with time for storage added."""
    running = np.asarray(sum(seconds for name, seconds in parts.items() if name not in ("data", "checkpoints")))
    parts["data"] = np.maximum(read_seconds(workload) - running, 0.0)
    parts["checkpoints"] = checkpoint_share(workload) * (running + parts["data"])
    return running + parts["data"] + parts["checkpoints"], parts


def _exposed_offload(workload: Workload, table: LayoutTable, passes: PassSeconds, micro_batches: Column) -> Floats:
    """Exposed seconds of activation offload, which overlaps with the forward and backward pass."""
    seconds = np.zeros((3, len(table)))
    rows = np.flatnonzero(table.offload_activations)
    if len(rows):
        row_stages = partition_stages(workload, table.take(rows))
        saved = rank_activations(workload, table.take(rows), row_stages, micro_batches[rows]).of_blocks
        exposed = exposed_seconds(workload, saved, passes.forward[:, rows], passes.backward[:, rows])
        seconds[:, rows] = micro_batches[rows] * exposed
    return seconds


def _hidden_by_pairs(workload: Workload, table: LayoutTable, parts: dict[str, Floats], micro_batches: Column) -> Floats:
    """Seconds of expert traffic hidden by pairing forward and backward passes, by the schedule or by the trainer.

    All but about pp micro-batches are paired (DeepSeek-V3, section 3.2.1; `plan.pipeline.play.duration_table`).
    """
    if not parts["expert_parallel"].any():
        return np.zeros(len(table))
    by_program = workload.stack.overlaps_expert_parallel & ((table.virtual_stages > 1) | (table.pp == 1))
    paired = (PAIRED[table.schedule] & (table.pp > 1)) | by_program
    in_pairs = np.maximum(1 - table.pp / micro_batches, 0.0)
    hidden = np.minimum(parts["expert_parallel"], parts["compute"] + parts["recompute"]) * in_pairs
    return np.where(paired, hidden, 0.0)


def _optimizer(workload: Workload, table: LayoutTable, stages: Stages, constants: Constants) -> Floats:
    """Seconds of the optimizer's update: reads the gradient, the master weight and both moments, writes the last three and the
    compute copy. In fp16, gradients are divided by the loss scale before."""
    stack, summed = workload.stack, workload.sequences_per_batch > table.dp * table.micro_batch_size
    dense, expert, num_shards, num_expert_shards = shards(table, stages)
    local, whole = dense / num_shards + expert / num_expert_shards, dense + expert
    per_parameter = stack.gradient_bytes + 2 * (stack.master_bytes + stack.moment_bytes) + stack.weight_bytes
    unscaling = np.where(table.precision == PRECISIONS.index("fp16"), 2.0 * stack.gradient_bytes, 0.0) * local
    # Two passes, of clipping and the norm over reduced gradients or of zeros where a step's sums begin, which are whole below
    # ZeRO 2. nanotron does all of it on whole ones.
    zeros = np.where((table.zero_stage == 0) | ((table.zero_stage == 1) & summed), whole, local)
    reads = np.where(table.zero_stage == 0, whole, local) + zeros
    of_gradients = stack.gradient_bytes * np.where((table.zero_stage <= 1) & stack.sums_whole_gradients, 4 * whole, reads)
    widths = MASTERS[table.precision] / 4  # a stack's bytes are those of runs with fp32 masters; of fp64 all are twice as wide
    num_bytes = widths * (local * per_parameter + unscaling + of_gradients).max(axis=0)
    seconds = elementwise_seconds(workload.accelerator, num_bytes * constants.optimizer_passes)
    if stack.optimizer == "muon":
        seconds = seconds + _matrix_exchange(workload, table, local.max(axis=0))
        flops = NEWTON_SCHULZ_FLOPS * workload.model.hidden_size * local.max(axis=0)
        seconds = seconds + flops / (half_precision_peak(workload.accelerator) * NEWTON_SCHULZ_EFFICIENCY)
    if not table.offload_optimizer.any():
        return seconds
    on_host = widths * offloaded_update(workload, local.max(axis=0), stages.layers.sum(axis=1).max(axis=0))
    return np.where(table.offload_optimizer > 0, on_host, seconds)


def _matrix_exchange(workload: Workload, table: LayoutTable, local: Floats) -> Floats:
    """Seconds to send Muon's matrix shards to their owners and back, in bf16, over ZeRO and tp ranks
    (`parallel.data.gathered_matrices`)."""
    shard = np.where(table.zero_stage > 0, table.dp_shard * table.cp, 1)
    seconds = np.zeros(len(table))
    for size, stride in ((shard, table.tp), (table.tp, np.ones_like(table.tp))):
        sent = 2 * collective_seconds(workload.cluster, "all_to_all", local * MATRIX_BYTES, size=size, stride=stride)
        seconds = seconds + np.where(size > 1, sent, 0.0)
    return seconds
