"""The search against brute force: what is legal, what is dropped, what is ranked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS, changed_stack
from ultrascale.config.rules.run_rules import MOST_MICRO_BATCHES, parallelism_problems
from ultrascale.description.layout import Layout, Precision
from ultrascale.description.problems import SpecError
from ultrascale.plan.intervals import out_of_memory_risk
from ultrascale.plan.layouts import COLUMNS, LayoutTable
from ultrascale.plan.search import search as searching
from ultrascale.plan.search.bounds import pass_floor, state_floor
from ultrascale.plan.search.replayed import with_replay
from ultrascale.plan.search.scaling import counts, most_that_pay, scaling, smallest_that_fits
from ultrascale.plan.search.search import TIE, expected_seconds, pareto, price_all, risk, search
from ultrascale.plan.search.space import MIN_TOKENS_PER_CP_RANK, divisors, legal_layouts
from ultrascale.plan.time.price import Prediction, predict, price
from ultrascale.plan.view.search_view import distinct
from ultrascale.plan.workload import Workload

SMALL = replace(preset("llama-3-8b"), num_hidden_layers=8, vocab_size=32_000)


def small(gpus: str = "8xh100", *, batch: int = 16, stack: str = "megatron", length: int = 4096) -> Workload:
    return Workload(SMALL, parse_cluster(gpus), length, batch, STACKS[stack])


def real(
    model: str, gpus: str, *, batch: int, length: int = 8192, stack: str = "ultrascale", documents: bool = True
) -> Workload:
    return Workload(preset(model), parse_cluster(gpus), length, batch, STACKS[stack], documents=documents)


def brute_force(workload: Workload) -> Iterator[Layout]:
    """Megatron's layouts of a dense model by the rules of the description, nothing clever, without cp."""
    gpus, batch = workload.cluster.num_accelerators, workload.sequences_per_batch
    sizes = divisors(gpus)
    for tp, pp, stage, size, again, virtual in product(
        sizes, sizes, (0, 1), divisors(batch), ("none", "selective", "full"), range(1, workload.model.num_hidden_layers + 1)
    ):
        if gpus % (tp * pp):
            continue
        dp = gpus // (tp * pp)
        if batch % (dp * size) or (dp == 1 and stage) or size * workload.sequence_length > 2**17:
            continue
        per_rank = -(-workload.model.num_hidden_layers // pp)
        if virtual > 1 and (pp == 1 or per_rank % virtual or batch // (dp * size) % pp):
            continue
        schedule = "interleaved" if virtual > 1 else "1f1b"
        shards = {dp} if stage == 0 or dp <= max(2, 8 // tp) else {dp, max(2, 8 // tp)}
        for shard in shards:
            one = Layout(
                dp=dp, tp=tp, pp=pp, virtual_stages=virtual, schedule=schedule, zero_stage=stage, micro_batch_size=size,  # type: ignore[arg-type]
                recompute=again, precision="bf16", dp_shard=None if stage == 0 or shard == dp else shard,  # type: ignore[arg-type]
            )  # fmt: skip
            if not one.problems() and not parallelism_problems(workload.model, one, sequence_length=workload.sequence_length):
                yield one


def test_the_space_is_every_layout_that_the_rules_allow() -> None:
    workload = small()
    table = legal_layouts(workload, constraints={"cp": (1,)}).table
    found = [table.layout(row) for row in range(len(table))]
    assert len(found) == len(set(found)) > 100
    assert set(found) == set(brute_force(workload))


@pytest.mark.parametrize("model", ["llama-3-8b", "mixtral-8x7b"])
@pytest.mark.parametrize("stack", STACKS)
def test_every_row_is_legal_and_uses_all_devices(model: str, stack: str) -> None:
    workload = real(model, "64xh100", batch=256, length=16384, stack=stack)
    table = legal_layouts(workload).table
    assert (table.world_size == 64).all()
    assert (256 % (table.dp * table.micro_batch_size) == 0).all()
    for row in np.random.default_rng(0).choice(len(table), size=min(150, len(table)), replace=False):
        layout = table.layout(int(row))
        assert not layout.problems() + parallelism_problems(workload.model, layout, sequence_length=workload.sequence_length)


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [("llama-3-8b", "8xh100", 64), ("llama-3-70b", "64xa100", 256), ("mixtral-8x7b", "32xh100", 128)],
)
def test_bounds_are_below_the_prices_and_pruning_changes_neither_ranking_nor_front(model: str, gpus: str, batch: int) -> None:
    workload = real(model, gpus, batch=batch)
    space = legal_layouts(workload, constraints={"cp": (1,), "expert_tp": (1,)})
    everything = price(workload, space.table)
    for floor in (state_floor(workload, space.table), pass_floor(workload, space.table)):
        assert (floor <= everything.memory.allocated * (1 + 1e-9)).all()
    plain, pruned = (price_all(workload, space, num_ranked=20, prunes=prunes) for prunes in (False, True))
    assert plain.was_priced.all() and plain.fits.any()
    for kept in (plain, pruned):
        assert np.sort(kept.step_seconds[kept.fits])[:20] == pytest.approx(np.sort(plain.step_seconds[plain.fits])[:20])
    fronts = [_front(one.step_seconds[one.fits], one.peak_bytes[one.fits]) for one in (plain, pruned)]
    assert fronts[0] == pytest.approx(fronts[1])


@pytest.mark.parametrize("stack", ["ultrascale", "torchtitan", "megatron", "nanotron", "automodel", "deepspeed"])
@pytest.mark.parametrize(("model", "precision"), [("llama-3-8b", "fp8"), ("deepseek-v2-lite", "bf16"), ("gpt-oss-20b", "bf16")])
def test_no_layout_needs_less_than_what_its_pass_surely_holds(model: str, precision: Precision, stack: str) -> None:
    """Or a search would drop one that fits."""
    workload = replace(real(model, "16xh100", batch=64), stack=STACKS[stack])
    table = legal_layouts(workload, base=Layout(precision=precision)).table
    table = table.take(np.arange(0, len(table), max(1, len(table) // 400)))
    at_rest, in_pass = state_floor(workload, table), pass_floor(workload, table)
    allocated = price(workload, table).memory.allocated
    assert (at_rest <= allocated * (1 + 1e-9)).all()
    assert (in_pass <= allocated * (1 + 1e-9)).all()
    assert (in_pass > 0.5 * allocated).mean() > 0.2  # a bound that says something


def _front(seconds: np.ndarray, peak: np.ndarray) -> list[float]:
    """Memory of the front, by brute force."""
    return [p for s, p in sorted(zip(seconds, peak, strict=True)) if not ((seconds <= s) & (peak < p)).any()]


@pytest.mark.parametrize(("model", "gpus"), [("llama-3-8b", "8xh100"), ("llama-3-70b", "64xa100"), ("gpt3-175b", "128xh100")])
def test_even_micro_batches_over_even_cp_are_slower_than_half_of_each(model: str, gpus: str) -> None:
    """What is left out of the space for it is neither faster nor smaller, whatever the rest of the layout."""
    workload = real(model, gpus, batch=256, length=4096)
    searched, whole = (legal_layouts(workload, constraints=asked).table for asked in ({}, {"cp": (2, 4, 8)}))
    assert set(searched.cp) == {1, 2, 4, 8} and set(searched.micro_batch_size[searched.cp > 1]) == {1}
    cut = np.flatnonzero((whole.micro_batch_size % 2 == 0) & ((whole.dp_shard == whole.dp) | (whole.zero_stage == 0)))
    left_out = whole.take(np.random.default_rng(0).choice(cut, size=min(2000, len(cut)), replace=False))
    shard = np.where(left_out.zero_stage == 0, left_out.dp_shard, left_out.dp_shard * 2)
    halves = {
        "cp": left_out.cp // 2,
        "micro_batch_size": left_out.micro_batch_size // 2,
        "dp": left_out.dp * 2,
        "dp_shard": shard,
    }
    instead = LayoutTable(**(vars(left_out) | halves))
    prices = [price(workload, table) for table in (left_out, instead)]
    assert (prices[1].step_seconds <= prices[0].step_seconds * (1 + 1e-3)).all()
    needed = [one.memory.needed for one in prices]
    assert (needed[1] <= needed[0] * (1 + 1e-3)).all()


def test_shares_of_a_sequence_are_searched_down_to_a_few_hundred_tokens() -> None:
    gpt3 = real("gpt3-175b", "512xa100", batch=1536, length=2048)
    assert max(legal_layouts(gpt3).table.cp) == 2048 // MIN_TOKENS_PER_CP_RANK == 4


def test_rings_of_ranks_that_swap_heads_are_searched_where_cp_leaves_the_node() -> None:
    """Of llama-3-8b's 32 heads and nodes of 8: as many ranks of a node swap as are left beside tp."""
    table = legal_layouts(real("llama-3-8b", "32xh100", batch=64, length=65536), constraints={"zero_stage": [1]}).table
    both = [table.layout(row) for row in range(len(table)) if table.cp_heads[row] > 1]
    assert {(one.tp, one.cp, one.cp_heads) for one in both} == {
        (tp, cp, 8 // tp) for tp, cp in product((1, 2, 4), (4, 8, 16, 32)) if 8 < tp * cp <= 32
    }
    inside = legal_layouts(real("llama-3-8b", "8xh100", batch=64, length=65536), constraints={"cp_heads": [2], "cp": [8]}).table
    assert set(inside.cp_heads.tolist()) == {2}


def test_only_our_trainer_cuts_sequences_into_odd_pieces() -> None:
    """4,100 tokens over 4 ranks are 1,025 each: no early and late half of one length."""

    def cps(stack: str) -> set[int]:
        table = legal_layouts(small("8xh100", stack=stack, length=4100)).table
        return set(table.cp[table.tp == 1].tolist())

    assert cps("ultrascale") == {1, 2, 4} and cps("megatron") == {1, 2}


def test_bounds_drop_what_cannot_fit_and_what_cannot_matter() -> None:
    workload = real("llama-3-70b", "64xa100", batch=256)
    space = legal_layouts(workload)
    pruned = price_all(workload, space, num_ranked=20)
    capacity = workload.cluster.accelerator.memory_bytes.value
    assert pruned.too_large.sum() > 0.02 * len(space.table)
    assert (state_floor(workload, space.table)[pruned.too_large] > capacity).all()
    assert not pruned.fits[~pruned.was_priced].any()


def test_a_wide_search_is_as_fast_as_a_narrow_one_where_pairs_of_passes_hide_what_no_formula_counts() -> None:
    workload = real("llama-3-70b", "256xh100", batch=512)
    wide, narrow = (
        search(workload, constraints=asked, shown=1).best for asked in ({}, {"pp": [2], "schedule": ["dualpipe-v"]})
    )
    assert wide and narrow
    assert expected_seconds(wide) <= expected_seconds(narrow)


def test_a_rank_has_at_most_as_many_micro_batches_in_a_step_as_the_trainer_takes() -> None:
    table = legal_layouts(real("llama-3-8b", "64xh100", batch=2**23)).table
    counts = 2**23 // (table.dp * table.micro_batch_size)
    assert counts[table.pp > 1].max() == counts[table.pp == 1].max() == MOST_MICRO_BATCHES


@pytest.mark.parametrize("constraints", [{}, {"pp": (1,)}, {"pp": (4,)}, {"micro_batch_size": (1,)}])
def test_a_batch_of_which_no_rank_can_take_its_share_is_refused_with_the_largest_that_one_can(constraints) -> None:
    workload = real("llama-3-8b", "8xh100", batch=5**3 * 2**23)
    with pytest.raises(SpecError) as error:
        search(workload, constraints=constraints)
    (problem,) = error.value.problems
    assert problem.rule == "no layout of 8 GPUs is legal: a rank has at most 65536 micro-batches in a step"
    ranks, size = 8 // constraints.get("pp", (1,))[0], constraints.get("micro_batch_size", (16,))[0]
    assert f"a batch of at most {2**16 * ranks * size:,} sequences" in problem.remedy


def test_the_ranking_is_by_expected_time_and_the_front_holds_nothing_that_is_beaten() -> None:
    result = search(real("llama-3-8b", "16xh100", batch=64))
    seconds = [expected_seconds(one) for one in result.ranked]
    assert seconds == sorted(seconds) and all(one.memory.fits for one in result.ranked)
    assert result.num_tied == sum(s <= seconds[0] * (1 + TIE) for s in seconds) >= 1
    front = [(one.step_seconds, float(one.memory.needed)) for one in result.front]
    assert front == sorted(front) and [m for _, m in front] == sorted((m for _, m in front), reverse=True)
    assert pareto(result.front) == list(result.front) and result.front[0].step_seconds == pytest.approx(seconds[0], rel=0.05)
    cuts = [
        (one.layout.tp, one.layout.pp, one.layout.cp, one.layout.zero_stage, one.layout.recompute)
        for one in distinct(result.ranked)
    ]
    assert len(cuts) == len(set(cuts))


@pytest.mark.parametrize(
    ("model", "gpus", "batch"),
    [("llama-3-8b", "64xh100", 512), ("llama-3-70b", "256xh100", 1024), ("llama-3-8b", "8xa100", 64)],
)
def test_a_short_ranking_is_the_head_of_the_long_one_with_fewer_replays(model: str, gpus: str, batch: int) -> None:
    workload = real(model, gpus, batch=batch)
    short, long = search(workload, shown=3), search(workload)
    assert [replayed(one) for one in distinct(short.ranked)[:3]] == [replayed(one) for one in distinct(long.ranked)[:3]]
    assert [replayed(one) for one in distinct(short.replayed(None).ranked)[:10]] == [
        replayed(one) for one in distinct(long.ranked)[:10]
    ]


def test_a_short_ranking_replays_also_what_a_smaller_risk_would_bring_to_its_head(monkeypatch) -> None:
    first, *others = distinct(search(real("llama-3-8b", "64xh100", batch=512)).ranked)[:6]
    limit = float(first.memory.capacity) * 0.899
    risky = replace(first, memory=first.memory.replayed(int(first.memory.allocated + limit - first.memory.needed)))
    ranked = sorted([risky, *others], key=expected_seconds)
    assert risky.memory.fits and ranked[-1] is risky
    monkeypatch.setattr(searching, "with_replay", lambda one: first if one is risky else one)
    assert searching._first_replayed(ranked, 3) == [first, *others]


def replayed(one: Prediction) -> tuple[Layout, float, float]:
    return one.layout, one.step_seconds, float(one.memory.needed)


def test_what_is_asked_for_is_kept() -> None:
    asked = {"tp": (2, 4), "zero_stage": (1,), "recompute": ("full",), "dp_shard": (None,)}
    table = legal_layouts(real("llama-3-8b", "64xh100", batch=256), constraints=asked).table
    assert set(table.tp) == {2, 4} and set(table.zero_stage) == {1} and set(table.recompute) == {2}
    assert (table.dp_shard == table.dp).all()


@pytest.mark.parametrize(
    ("asked", "base", "found"),
    [({}, True, {True}), ({}, False, {False}), ({"tp_overlap": (False, True)}, False, {False, True})],
)
def test_products_of_tp_beside_their_messages_are_searched_where_asked_for(asked: dict, base: bool, found: set) -> None:
    workload = small("16xh100", stack="ultrascale")
    space = legal_layouts(workload, base=Layout(precision="bf16", tp_overlap=base), constraints={"tp": (1, 4, 16), **asked})
    table = space.table
    assert {bool(one) for one in table.tp_overlap[table.tp == 4]} == found
    assert not table.tp_overlap[table.tp != 4].any()  # nothing reads it, or tp leaves the node
    best = search(workload, base=Layout(precision="bf16"), constraints={"tp": (4,), "tp_overlap": (False, True)}).best
    assert best is not None and best.layout.tp_overlap
    seconds = price(workload, LayoutTable.of([best.layout, replace(best.layout, tp_overlap=False)])).step_seconds
    assert seconds[0] < seconds[1]


def test_tensor_parallelism_across_nodes_must_be_asked_for() -> None:
    workload = real("llama-3-8b", "64xh100", batch=256)
    assert max(legal_layouts(workload).table.tp) == 8
    assert any("leaves the node" in one.reason for one in legal_layouts(workload).refused)
    assert set(legal_layouts(workload, constraints={"tp": (16,)}).table.tp) == {16}


def test_tensor_parallelism_leaves_the_node_where_nothing_else_fits() -> None:
    workload = real("llama-3-70b", "64xa100-40", batch=8, stack="megatron")
    asked = {"pp": (1,), "cp": (1,)}
    inside = search(workload, constraints={**asked, "tp": (8,)})
    found = search(workload, constraints=asked)
    assert inside.best is None and found.best is not None and found.best.layout.tp > 8


@pytest.mark.parametrize(
    ("asked", "said", "remedy"),
    [
        ({"tp": (3,)}, "tp = 3 does not divide 64 GPUs", "2 or 4"),
        ({"pp": (64,)}, "more stages than 32 layers, embedding and head", "34 or less"),
        ({"dp": (64,)}, "dp = 64 does not divide the batch of 96 sequences", "64 or 128"),
        ({"tp": (64,)}, "must divide model.num_attention_heads = 32", "Choose one of"),
    ],
)
def test_what_cannot_be_is_told_with_the_nearest_that_can(asked: dict, said: str, remedy: str) -> None:
    with pytest.raises(SpecError) as error:
        search(real("llama-3-8b", "64xh100", batch=96), constraints=asked)
    (problem,) = error.value.problems
    assert said in problem.rule and remedy in problem.remedy


def test_what_needs_least_where_nothing_fits_is_told_by_its_replay_as_its_plan_is() -> None:
    smallest = search(real("deepseek-v3", "64xh100", batch=64)).smallest
    assert smallest is not None and smallest.replay is not None and not smallest.memory.fits
    assert smallest.memory.needed == with_replay(smallest).memory.needed


def test_more_gpus_than_a_batch_can_use_are_told_by_the_batch() -> None:
    with pytest.raises(SpecError) as error:
        search(real("llama-3-8b", "1000000xh100", batch=500))
    assert "does not divide the batch of 500 sequences" in str(error.value)


def test_a_model_that_fits_nowhere_names_what_needs_least_and_the_cluster_that_would_do() -> None:
    workload = real("llama-3.1-405b", "8xh100", batch=64)
    result = search(workload)
    assert result.best is None and not result.ranked and result.smallest is not None
    assert not result.smallest.memory.fits
    enough = smallest_that_fits(workload)
    assert enough is not None and enough.memory.fits
    half = replace(workload, cluster=parse_cluster(f"{enough.layout.world_size // 2}xh100"))
    assert search(half).best is None


def test_the_cluster_that_would_do_is_told_apart_from_twice_as_many_gpus() -> None:
    """96 were told that 192 would do, where 120 do."""
    workload = real("llama-3.1-405b", "96xh100", batch=480)
    assert search(workload).best is None
    enough = smallest_that_fits(workload)
    assert enough is not None and enough.memory.fits and 96 < enough.layout.world_size <= 120


def test_added_gpus_bring_less_and_less() -> None:
    workload = real("llama-3-8b", "16xh100", batch=128)
    assert counts(workload.cluster) == [2, 4, 8, 16, 32, 64, 128]
    found = scaling(workload, constraints={"cp": (1,)})
    speeds = [one.best.tokens_per_second for one in found if one.best]
    assert speeds == sorted(speeds)
    brings = [one.marginal_efficiency for one in found if one.marginal_efficiency is not None]
    assert all(0 < share <= 1.5 for share in brings)  # above 1 where the state had to be cut most
    most = most_that_pay(found)
    assert most is not None and most.best is not None and most.num_gpus >= 16


def test_a_table_gives_back_its_layouts() -> None:
    table = legal_layouts(small(stack="ultrascale")).table
    rows = range(0, len(table), 97)
    again = LayoutTable.of(table.layout(row) for row in rows)
    assert all((getattr(again, name) == getattr(table, name)[list(rows)]).all() for name in COLUMNS)


def test_the_risk_of_our_trainer_is_that_of_what_is_replayed_whatever_a_stack_is_set_to() -> None:
    asked = {one: out_of_memory_risk(0.9e9, 1e9, is_replayed=one) for one in (True, False)}
    assert 0 < asked[True] < asked[False] < 0.5
    layout = Layout(dp=8, zero_stage=3, precision="bf16")
    ours = predict(real("llama-3-8b", "8xh100", batch=64), layout)
    stack = changed_stack("torchtitan", {"selective": "modules"})
    changed = predict(replace(real("llama-3-8b", "8xh100", batch=64), stack=stack), layout)
    for one, is_ours in ((ours, True), (changed, False)):
        needed, capacity = float(one.memory.needed), float(one.memory.capacity)
        assert risk(one) == out_of_memory_risk(needed, capacity, is_replayed=is_ours)


def test_a_layout_needs_more_than_it_holds_and_less_than_the_allocator_keeps() -> None:
    memory = predict(real("llama-3-8b", "8xa100-40", batch=64), Layout(dp=8, zero_stage=3, precision="bf16")).memory
    assert memory.allocated + memory.outside < memory.needed < memory.reserved + memory.outside
    assert memory.fits == (memory.headroom >= 0) == (memory.needed <= memory.capacity * 0.9)
    assert memory.flushes == (memory.reserved + memory.outside > memory.capacity)


def test_a_pipeline_may_have_a_stage_for_the_embedding_and_one_for_the_head_as_llama_3_405b_has() -> None:
    workload = real("llama-3.1-405b", "1024xh100", batch=256, stack="megatron", documents=False)
    asked = {"tp": (8,), "pp": (16,), "cp": (1,), "schedule": ("interleaved",), "virtual_stages": (8,)}
    found = search(workload, constraints=asked)  # 128 stages of 126 layers
    assert found.best is not None and found.best.layout.num_stages == 128
    assert not parallelism_problems(workload.model, found.best.layout, sequence_length=8192)


def test_a_search_keeps_layouts_that_certainly_fit_where_faster_ones_of_their_schedule_do_not() -> None:
    workload = real("llama-3-70b", "64xh100", batch=128, stack="nemo", documents=False)
    free, narrow = search(workload), search(workload, constraints={"pp": (4,), "schedule": ("interleaved",)})
    assert free.best is not None and narrow.best is not None
    assert expected_seconds(free.best) <= expected_seconds(narrow.best)


def test_over_cp_alone_zero_shards_as_over_dp() -> None:
    """Ranks of cp hold the same weights: without their shards nothing of 8 billion parameters fits."""
    workload = real("llama-3.1-8b", "8xh100", batch=8, length=131_072)
    stages = {prediction.layout.zero_stage for prediction in search(workload, constraints={"cp": (8,)}).ranked}
    assert {2, 3} <= stages
    best = search(workload).best
    assert best is not None and best.step_seconds < 1.02 * predict(workload, Layout(
        cp=8, cp_method="all-gather", zero_stage=3, recompute="selective", precision="bf16",
    )).step_seconds  # fmt: skip


def test_hfu_counts_the_squares_of_masked_documents_only_where_they_are_computed() -> None:
    """Over cp our plan takes a sequence as one document, in time as in FLOPs."""
    layout = Layout(dp=1, cp=8, zero_stage=3, cp_method="all-to-all", precision="bf16")
    masked, plain = (
        predict(real("llama-3.1-8b", "8xh100", batch=8, length=131_072, documents=documents), layout)
        for documents in (True, False)
    )
    assert masked.step_seconds == plain.step_seconds and masked.hfu() == plain.hfu()
