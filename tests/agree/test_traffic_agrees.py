"""Every collective of a step of the trainer against the planner's: kind, group, pass, number and bytes, summed over ranks."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL, cases
from agree.small_models import WITH_EXPERTS
from agree.traffic import Key, watched
from hypothesis import given, settings
from ranks import run_ranks

from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import DTYPE_BYTES, Layout
from ultrascale.plan.memory.replay import rank_shape, stage_parts
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.messages import messages
from ultrascale.work.fp8_slots import SLOT_BYTES, num_slots
from ultrascale.work.ops import Collective
from ultrascale.work.recompute import resent_ops, resolved
from ultrascale.work.sharding.places import Coordinates, shard_of
from ultrascale.work.work import block_work, embedding_work, head_work, prediction_work

BLOCKWISE = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
OF_CONTEXT = {("all_gather", "cp"): "keys", ("reduce_scatter", "cp"): "gradients of keys", ("all_to_all", "cp"): "swap"}
Totals = dict[Key, tuple[int, int]]


def sent_by(rank: int, case: Case) -> Totals:
    """What a rank sends in a step: calls and bytes."""
    step = RankStep(case, rank)
    if step.share.amax_history is not None:  # not the first step of a run
        step.share.amax_history.begin(1)
    batches = step.batches()
    with watched() as traffic:
        step.train(batches)
    return {key: (count, traffic.num_bytes[key]) for key, count in traffic.calls.items()}


def measured(case: Case) -> Totals:
    """Of all ranks together."""
    calls: Counter[Key] = Counter()
    num_bytes: Counter[Key] = Counter()
    for sent in run_ranks(case.layout.world_size, sent_by, case):
        for key, (count, size) in sent.items():
            calls[key] += count
            num_bytes[key] += size
    return {key: (calls[key], num_bytes[key]) for key in calls}


def planned(case: Case) -> Totals:
    """The same of what blocks, embedding and head send."""
    layout = case.layout
    calls: Counter[Key] = Counter()
    num_bytes: Counter[Key] = Counter()
    for rank in range(layout.world_size):
        for item, when in planned_of(case, Coordinates.of(layout, rank)):
            kind = OF_CONTEXT.get((item.kind, item.axis), item.kind)
            size, stride = layout.group(item.axis)
            key = Key(kind, (size, stride), when)
            calls[key] += case.num_micro_batches
            num_bytes[key] += round(item.num_bytes * share_that_leaves(item, layout)) * case.num_micro_batches
    if once := num_slots(case.model, layout) * SLOT_BYTES:
        key = Key("all_reduce", (layout.world_size, 1), "forward")
        calls[key] += layout.world_size
        num_bytes[key] += layout.world_size * once
    return {key: (calls[key], num_bytes[key]) for key in calls}


def share_that_leaves(item: Collective, layout: Layout) -> float:
    """Of cp what is counted is what leaves a rank: after an all-gather over gloo gradients of keys that were seen."""
    if item.axis != "cp":
        return 1.0
    unseen = item.kind == "reduce_scatter" and layout.cp_method == "all-gather"
    return (layout.cp - 1) / layout.cp * item.sent_share * (0.75 if unseen else 1.0)


def planned_of(case: Case, at: Coordinates) -> list[tuple[Collective, str]]:
    """A rank's collectives of one micro-batch, each with the pass in which it is sent."""
    shape = rank_shape(case.layout, case.length, documents=False, device="cpu")
    found: list[tuple[Collective, str]] = []
    for part in stage_parts(case.model, case.layout, case.length, at).values():
        ends = [*(embedding_work(case.model, shape) if part.is_first else ())]
        ends += head_work(case.model, shape) if part.is_last else ()
        if part.is_last and case.model.num_nextn_predict_layers:  # none of these blocks is recomputed here
            assert case.layout.recompute == "none"
            ends += (*prediction_work(case.model, shape), *head_work(case.model, shape))
            ends += block_work(case.model, case.model.num_hidden_layers, shape)
        found += [(item, item.when) for op in ends for item in op.collectives]
        for layer in part.layers:
            ops = block_work(case.model, layer, shape)
            found += [(item, item.when) for op in ops for item in op.collectives]
            again = resent_ops(
                None if layer is None else resolved(case.layout.block_recompute(layer), case.model, layer, case.layout), ops
            )
            found += [(item, "backward") for op in again for item in op.collectives if item.when == "forward"]
    return found


def only(totals: Totals, kinds: tuple[str, ...]) -> Totals:
    return {key: value for key, value in totals.items() if key.kind in kinds}


@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_every_collective_of_blocks_and_ends_is_planned(case: Case) -> None:
    found, told = measured(case), planned(case)
    assert only(found, BLOCKWISE) == only(told, BLOCKWISE), str(case)
    in_context = tuple(OF_CONTEXT.values())
    # Queries, keys and values are swapped in one message, and a hop is a message: bytes alone are compared.
    bytes_of = [{key: size for key, (_, size) in only(one, in_context).items()} for one in (found, told)]
    assert bytes_of[0] == bytes_of[1], str(case)


@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=2, sequence_parallel=False), Layout(tp=2, ep=2), Layout(dp=2, ep=2)], ids=str
)
def test_every_collective_of_predicting_a_token_more_is_planned(layout: Layout) -> None:
    model = replace(WITH_EXPERTS["deepseek-v3"], num_nextn_predict_layers=1, name="predicts")
    case = Case(model, replace(layout, micro_batch_size=2), num_micro_batches=2)
    found, told = only(measured(case), BLOCKWISE), only(planned(case), BLOCKWISE)
    assert found == told
    assert told != only(planned(replace(case, model=replace(model, num_nextn_predict_layers=0))), BLOCKWISE)


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tp=2, recompute="selective"),
        Layout(tp=2, recompute="full"),
        Layout(tp=2, sequence_parallel=False, recompute="selective"),
        Layout(tp=2, sequence_parallel=False, recompute="full"),
        Layout(cp=2, recompute="selective"),
        Layout(cp=2, cp_method="all-to-all", recompute="full"),
        Layout(tp=2, cp=2, ep=2, recompute="every-k"),
    ],
    ids=str,
)
def test_every_collective_of_latent_attention_is_planned_however_it_is_recomputed(layout: Layout) -> None:
    case = Case(replace(WITH_EXPERTS["deepseek-v3"], name="latent"), replace(layout, micro_batch_size=2))
    found, told = measured(case), planned(case)
    assert only(found, BLOCKWISE) == only(told, BLOCKWISE)
    bytes_of = [{key: size for key, (_, size) in only(one, tuple(OF_CONTEXT.values())).items()} for one in (found, told)]
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize("recompute", ["none", "selective", "full", "norm+mlp_act"])
@pytest.mark.parametrize("tp", [2, 4])
def test_every_sum_of_norms_over_all_heads_is_planned(tp: int, recompute: str) -> None:
    """OLMoE and OLMo 2: with tp each of the two norms of a block sums its squares over ranks, and once more backward."""
    case = Case(replace(WITH_EXPERTS["olmoe"], name="olmoe"), Layout(tp=tp, recompute=recompute, micro_batch_size=2))
    found, told = only(measured(case), BLOCKWISE), only(planned(case), BLOCKWISE)
    assert found == told
    alone = replace(case.model, qk_norm_whole=False, model_type="qwen3_moe")
    assert told != only(planned(replace(case, model=alone)), BLOCKWISE)


@pytest.mark.parametrize("layout", [
    Layout(tp=2, precision="fp8"),
    Layout(tp=2, precision="fp8", fp8_scaling="tensor", sequence_parallel=False, recompute="selective"),
    Layout(tp=2, expert_tp=2, precision="fp8", recompute="full"),
    Layout(tp=2, expert_tp=2, precision="fp8", fp8_scaling="tensor"),
    Layout(tp=2, precision="fp8", fp8_scaling="delayed", recompute="selective"),
    Layout(tp=2, expert_tp=2, precision="fp8", fp8_scaling="delayed", sequence_parallel=False),
], ids=str)  # fmt: skip
def test_every_collective_of_fp8_is_planned_with_those_for_scales(layout: Layout) -> None:
    case = Case(EXPERTS if layout.expert_tp > 1 else MODEL, replace(layout, micro_batch_size=2))
    found, told = only(measured(case), BLOCKWISE), only(planned(case), BLOCKWISE)
    assert found == told
    assert told != only(planned(replace(case, layout=replace(case.layout, precision="bf16"))), BLOCKWISE)


@settings(max_examples=3, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_messages_of_a_pipeline_are_those_of_its_schedule(case: Case) -> None:
    layout = replace(case.layout, tp=1, cp=1, ep=1, expert_tp=1, dp=2, pp=2)
    case = replace(case, layout=layout, num_micro_batches=4)
    schedule = build_schedule(layout.schedule, 2, 4, layout.virtual_stages)
    size = rank_shape(layout, case.length, documents=False, device="cpu").outer_tokens * case.model.hidden_size * 4
    count = layout.dp * len(messages(schedule))
    assert {key.group: value for key, value in measured(case).items() if key.kind == "send"} == {(2, 2): (count, count * size)}


@pytest.mark.parametrize(
    "zero_stage, shard, gathers, reductions", [(0, 1, 0, 0), (1, 4, 1, 1), (2, 2, 1, 3), (3, 4, 6, 3), (3, 2, 6, 3)]
)
def test_parameters_and_gradients_are_sent_as_often_as_the_planner_says(zero_stage, shard, gathers, reductions) -> None:
    layout = Layout(dp=4, dp_shard=shard, zero_stage=zero_stage)
    found = measured(Case(MODEL, layout, num_micro_batches=3))
    sizes = {weight.name: weight.numel * DTYPE_BYTES["fp32"] for weight in weights(MODEL)}
    whole, root = sum(sizes.values()), sum(sizes[weight.name] for weight in weights(MODEL) if weight.layer is None)
    total: Counter[str] = Counter()
    for key, (_, num_bytes) in found.items():
        total[key.kind] += num_bytes // layout.dp
    assert total["gradients"] == reductions * whole
    # Between a forward pass and the backward pass after it what is outside the blocks stays.
    assert total["parameters"] == gathers * whole - (3 * root if zero_stage == 3 else 0)
    assert total["copies of gradients"] == (whole // shard if shard < layout.dp else 0)


def test_shares_of_gradients_that_tp_leaves_are_summed_once_a_step() -> None:
    layout = Layout(tp=2)
    found = measured(Case(EXPERTS, layout, num_micro_batches=3))
    at = Coordinates.of(layout, 0)
    shares = sum(w.numel * 4 for w in weights(EXPERTS) if shard_of(w, layout, at).is_partial)
    assert found[Key("shares of gradients", (2, 1), "forward")] == (2, 2 * shares)
