"""Partition of the decoder blocks into pipeline stages: one pure function for the planner, the trainer and the proof.

As given (`layout.layers_per_stage`), or so that the slowest stage is as fast as possible. The head and its loss count, layers
may differ (experts, windows), and prediction blocks are on the last stage. The cost is FLOPs from the table of work, forward
and backward: equal on every machine, so that a run keeps its partition. The embedding costs almost nothing; if blocks do not
divide, the first stage, which holds it, has one fewer.

    Llama 3.2 1B, 4 stages   5 5 5 1   its head does the work of 3.7 blocks: 4 4 4 4 would take 1.54 times as long

Also nanotron's partition, and the reasons why its pipeline cannot run.

Its model is a list of parts: embedding, blocks, norm, head, cast and loss. A block or the head costs the size of its matrices,
the rest nothing; a rank takes parts until its share of the total cost is used up, then the next rank starts (`build_model` in
nanotron.models.base, 2025). A costly head uses up the shares of several ranks, and with few blocks per rank the last ranks get
nothing:

    16 blocks, head of 4, 16 ranks    2 1 1 2 1 1 1 2 1 1 1 2 +head, cast, loss and nothing

Its 1F1B asserts at least pp - 1 micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

from ultrascale.catalogue.stacks.stack import StageCut
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.work.ops import Op
from ultrascale.work.work import Shape, block_work, head_work

HALVINGS = 60
"""Bisections of the interval that contains the best time; its ends are then neighbours in fp64."""


def stage_layers(model: Model, layout: Layout, sequence_length: int, stage_cut: StageCut = "balanced") -> tuple[range, ...]:
    """Decoder blocks of each of the pp x virtual_stages stages, in the model's order; the first and last may have none.

    `stage_cut`: as in `Stack.stage_cut`. Blocks of multi-token prediction are not included: they are on the last stage.
    Raises SpecError if there are fewer blocks than inner stages, or `layers_per_stage` does not sum to the model's blocks.
    """
    layers, stages, per_stage = model.num_hidden_layers, layout.num_stages, layout.layers_per_stage
    if per_stage is not None and (len(per_stage) != stages or sum(per_stage) != layers):
        rule = f"must share {layers} layers among {stages} stages, is {list(per_stage)}"
        raise mistake("layout.layers_per_stage", rule, "Change it, or leave it out.")
    if stages - 2 > layers and stage_cut == "balanced":
        rule = f"pp x virtual_stages = {stages} stages, but the model has {layers} layers"
        raise mistake("layout.pp", rule, f"Use at most {layers + 2} stages.")
    if per_stage is not None:
        counts: Sequence[int] = per_stage
    elif stage_cut == "balanced":
        counts = balanced_layers(model, stages, sequence_length)
    else:
        counts = without_predictions(stage_blocks(model, stages, sequence_length, stage_cut), model)
    return tuple(range(*pair) for pair in pairwise([0, *accumulate(counts)]))


def stage_blocks(model: Model, num_stages: int, sequence_length: int, stage_cut: StageCut) -> list[int]:
    """Blocks of each stage, prediction blocks included, by `Stack.stage_cut`.

    balanced: as our trainer. even: equal, the remainder to the stages after the first. by-share: as nanotron.
    """
    more = model.num_nextn_predict_layers
    total = model.num_hidden_layers + more
    if num_stages == 1:
        return [total]
    if stage_cut == "balanced":
        *earlier, last = balanced_layers(model, num_stages, sequence_length)
        return [*earlier, last + more]
    if stage_cut == "even":
        base, extra = divmod(total, num_stages)
        first = max(0, extra - (num_stages - 2))
        return [base + first, *(base + (i < extra - first) for i in range(num_stages - 2)), base]
    return layers_by_share(model, num_stages)


def without_predictions(counts: Sequence[int], model: Model) -> list[int]:
    """`counts` of blocks by stage without the blocks of multi-token prediction, which come last."""
    blocks, remaining = list(counts), model.num_nextn_predict_layers
    for stage in reversed(range(len(blocks))):
        removed = min(remaining, blocks[stage])
        blocks[stage] -= removed
        remaining -= removed
    return blocks


@lru_cache(maxsize=4096)
def balanced_layers(model: Model, num_stages: int, sequence_length: int) -> tuple[int, ...]:
    """Blocks of each stage that minimize the largest cost of a stage, with the other stages near the mean."""
    blocks, head = _costs(model, sequence_length)
    if num_stages == 1:
        return (len(blocks),)
    sums = [0.0, *accumulate(blocks)]
    low, high = 0.0, sums[-1] + head
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _earliest_starts(sums, head, num_stages, middle) else (middle, high)
    starts = _earliest_starts(sums, head, num_stages, high)
    assert starts is not None
    return _near_the_mean(sums, head, starts, high)


def _earliest_starts(sums: Sequence[float], head: float, num_stages: int, limit: float) -> list[int] | None:
    """[stage]: the earliest first block with which the stage and all after it cost at most `limit` each.

    None if the blocks do not all fit. Every inner stage has at least one block.
    """
    starts = [0] * num_stages
    end, budget = len(sums) - 1, limit - head
    for stage in reversed(range(num_stages)):
        before = max(0, stage - 1)  # blocks that the stages between the first and this one need
        starts[stage] = max(bisect_left(sums, sums[end] - budget), before)
        if budget < 0 or (0 < stage < num_stages - 1 and starts[stage] >= end):
            return None
        end, budget = starts[stage], limit
    return starts if starts[0] == 0 else None


def _near_the_mean(sums: Sequence[float], head: float, earliest: Sequence[int], limit: float) -> tuple[int, ...]:
    """Blocks of each stage, first to last: each takes the number nearest to the mean of the remaining cost that later stages
    can complete."""
    num_stages, total = len(earliest), len(sums) - 1
    counts, start = [], 0
    for stage in range(num_stages - 1):
        mean = (sums[-1] - sums[start] + head) / (num_stages - stage)
        between = num_stages - 2 - stage  # stages before the last that still need a block each
        least = max(earliest[stage + 1], start + (stage > 0))
        most = min(bisect_right(sums, sums[start] + limit) - 1, total - between)
        below = bisect_right(sums, sums[start] + mean) - 1
        above = min(below + 1, total)
        nearer = above if stage and sums[above] - sums[start] - mean < mean - sums[below] + sums[start] else below
        end = min(max(nearer, least), most)
        counts.append(end - start)
        start = end
    return (*counts, total - start)


@lru_cache(maxsize=256)
def _costs(model: Model, sequence_length: int) -> tuple[list[float], float]:
    """FLOPs of every block, and of the last stage's additional work: prediction blocks, and the head once and for each."""
    shape = Shape(1, sequence_length)
    of_kind: dict[tuple[bool, int | None], float] = {}
    by_layer = []
    for layer in range(model.num_hidden_layers + model.num_nextn_predict_layers):
        kind = model.is_moe(layer), model.window(layer)
        if kind not in of_kind:
            of_kind[kind] = sum(map(_flops, block_work(model, layer, shape)))
        by_layer.append(of_kind[kind])
    head = sum(map(_flops, head_work(model, shape))) * (1 + model.num_nextn_predict_layers)
    return by_layer[: model.num_hidden_layers], head + sum(by_layer[model.num_hidden_layers :])


def _flops(op: Op) -> float:
    """Forward and backward FLOPs; of attention only the computed part of the score matrix."""
    return (op.flops + op.backward_flops) * (1.0 if op.scores is None else op.scores.share)


WITHOUT_COST = 2
"""Number of parts after the head: the cast of its logits to fp32, and the loss."""


def ranks_by_share(model: Model, num_ranks: int) -> list[int]:
    """The rank of every part: embedding, blocks, norm, head, cast, loss."""
    attention = 4 * model.num_attention_heads * model.head_dim * model.hidden_size
    block = attention + 3 * model.intermediate_size * model.hidden_size
    blocks = [block] * (model.num_hidden_layers + model.num_nextn_predict_layers)
    costs = [0, *blocks, 0, model.vocab_size * model.hidden_size, *[0] * WITHOUT_COST]
    total, done, rank, ranks = sum(costs), 0, 0, []
    for cost in costs:
        done += cost
        ranks.append(rank)
        rank += done * num_ranks > total * (rank + 1)
    return ranks


def layers_by_share(model: Model, num_ranks: int) -> list[int]:
    """Blocks of every rank."""
    of_blocks = ranks_by_share(model, num_ranks)[1 : -2 - WITHOUT_COST]
    return [of_blocks.count(rank) for rank in range(num_ranks)]


def cannot_run(model: Model, pp: int, micro_batches: Sequence[int] = ()) -> str:
    """Reason why nanotron's pipeline of `pp` ranks fails with each of these numbers of micro-batches; empty if it does not."""
    if pp == 1:
        return ""
    used = ranks_by_share(model, pp)[-1] + 1
    if used < pp:
        return f"nanotron's cut leaves {pp - used} of {pp} ranks without a part of the model"
    if micro_batches and max(micro_batches) < pp - 1:
        return "nanotron's 1F1B needs pp - 1 micro-batches at least"
    return ""
