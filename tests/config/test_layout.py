from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.description.layout import Axis, Layout
from ultrascale.description.schedules import SCHEDULES

LLAMA = PRESETS["llama-3-8b"]
MIXTRAL = PRESETS["mixtral-8x7b"]


def keys(problems):
    return [problem.key for problem in problems]


small = st.sampled_from([1, 2, 3, 4])


@given(tp=small, cp=small, dp=small, pp=small)
def test_groups_of_every_axis_tile_all_ranks(tp, cp, dp, pp):
    layout = Layout(dp=dp, tp=tp, cp=cp, pp=pp)
    ranks = {
        ((p * dp + d) * cp + c) * tp + t: (p, d, c, t)
        for p, d, c, t in product(range(pp), range(dp), range(cp), range(tp))
    }  # fmt: skip
    assert sorted(ranks) == list(range(layout.world_size))
    fixed_places: dict[Axis, tuple[int, ...]] = {"tp": (0, 1, 2), "cp": (0, 1, 3), "dp": (0, 3)}
    for axis, fixed in fixed_places.items():
        size, stride = layout.group(axis)
        first = min(rank for rank, place in ranks.items() if all(place[i] == 0 for i in fixed))
        members = {rank for rank, place in ranks.items() if all(place[i] == 0 for i in fixed)}
        assert members == {first + n * stride for n in range(size)}


def test_experts_are_cut_out_of_the_ranks_of_a_pipeline_stage():
    layout = Layout(dp=8, tp=2, cp=2, pp=4, ep=8, expert_tp=2)
    assert (layout.group("expert_tp"), layout.group("ep"), layout.group("expert_dp")) == ((2, 1), (8, 2), (2, 16))
    assert (layout.group("pp"), layout.world_size, layout.problems()) == ((2, 32), 128, [])


def test_the_state_is_cut_over_data_and_context_ranks_and_repeated_over_the_rest():
    layout = Layout(dp=8, cp=2, tp=4, zero_stage=3, dp_shard=2)
    assert (layout.group("shard"), layout.group("replicate"), layout.group("dp")) == ((4, 4), (4, 16), (16, 4))
    assert Layout(dp=8, cp=2).group("shard") == (1, 1)


@pytest.mark.catalogue(61)
@pytest.mark.parametrize(
    ("layout", "found", "remedy"),
    [
        ({"schedule": "1f2b"}, "layout.schedule", "Did you mean '1f1b'"),
        ({"pp": 2, "schedule": "interleaved"}, "layout.virtual_stages", "Use 2 or more"),
        ({"pp": 2, "schedule": "zb-v"}, "layout.virtual_stages", "Use 2"),
        ({"pp": 2, "schedule": "dualpipe-v", "virtual_stages": 4}, "layout.virtual_stages", "Use 2"),
        ({"pp": 2, "virtual_stages": 2}, "layout.virtual_stages", "interleaved"),
        ({"pp": 2, "schedule": "dualpipe", "virtual_stages": 2}, "layout.virtual_stages", 'schedule = "dualpipe-v"'),
        ({"pp": 3, "schedule": "dualpipe"}, "layout.pp", "Use 2 or 4"),
        ({"pp": 2, "layers_per_stage": (3, 2, 1)}, "layout.layers_per_stage", "even cut"),
        ({"pp": 3, "layers_per_stage": (3, 0, 3)}, "layout.layers_per_stage", "even cut"),
        ({"dp": 4, "ep": 3}, "layout.ep", "[1, 2, 4]"),
        ({"dp": 4, "tp": 2, "ep": 4, "expert_tp": 4}, "layout.ep", "[1, 2]"),
        ({"precision": "bf16", "reduce_dtype": "fp8"}, "layout.reduce_dtype", "bf16"),
        ({"tp": 0}, "layout.tp", "range"),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused_with_what_works(layout, found, remedy):
    (problem,) = Layout(**layout).problems()
    assert problem.key == found
    assert remedy in problem.remedy


@pytest.mark.parametrize("schedule", [*SCHEDULES, "mine.csv"])
def test_every_schedule_has_a_number_of_virtual_stages_that_suits_it(schedule):
    stages = SCHEDULES[schedule].stages_a_rank(3) if schedule in SCHEDULES else 1
    assert Layout(pp=4, schedule=schedule, virtual_stages=stages).problems() == []


@pytest.mark.catalogue(61)
@pytest.mark.parametrize(
    ("model", "layout", "found", "remedy"),
    [
        (LLAMA, {"tp": 3}, ["layout.tp", "layout.tp"], "[1, 2, 4, 8, 16, 32]"),
        (LLAMA, {"tp": 64}, ["layout.tp"], "[1, 2, 4, 8, 16, 32]"),
        (PRESETS["qwen2.5-7b"], {"tp": 14}, ["layout.tp", "layout.tp"], "[1, 2, 4]"),
        (LLAMA, {"pp": 35}, ["layout.pp"], "pp = 34"),
        (LLAMA, {"pp": 8, "virtual_stages": 5, "schedule": "interleaved"}, ["layout.pp"], "pp = 6"),
        (LLAMA, {"pp": 2, "layers_per_stage": (16, 15)}, ["layout.layers_per_stage"], "even cut"),
        (LLAMA, {"dp": 2, "ep": 2}, ["layout.ep"], "use tp"),
        (MIXTRAL, {"dp": 16, "ep": 16}, ["layout.ep"], "[1, 2, 4, 8]"),
        (MIXTRAL, {"dp": 3, "expert_tp": 3}, ["layout.expert_tp"], "[1, 2]"),
        (LLAMA, {"cp": 64, "cp_method": "all-to-all"}, ["layout.cp"], "ring"),
        (PRESETS["deepseek-v3"], {"tp": 256}, ["layout.tp"], "128"),
        (replace(LLAMA, vocab_size=3), {"tp": 4}, ["layout.tp"], "3 or less"),
        (replace(LLAMA, hidden_size=3, num_nextn_predict_layers=1), {"tp": 4}, ["layout.tp"], "3 or less"),
    ],
)
def test_a_model_that_a_layout_cannot_divide_is_refused_with_what_would(model, layout, found, remedy):
    problems = parallelism_problems(model, Layout(**layout))
    assert keys(problems) == found
    assert remedy in problems[0].remedy


def test_more_tensor_parallel_ranks_than_key_value_heads_repeat_them():
    assert parallelism_problems(LLAMA, Layout(tp=32)) == []
    assert parallelism_problems(PRESETS["llama-3.2-1b"], Layout(tp=16)) == []


@pytest.mark.parametrize(
    ("layout", "length", "pieces"),
    [({"cp": 3}, 2, 3), ({"cp": 4, "tp": 8}, 31, 32), ({"cp": 4, "cp_method": "all-to-all"}, 3, 4), ({"tp": 8}, 7, 8)],
)  # fmt: skip
def test_sequences_need_a_token_for_each_rank_that_cuts_them_and_not_more(layout, length, pieces):
    (problem,) = parallelism_problems(LLAMA, Layout(**layout), sequence_length=length)
    assert f"into {pieces} pieces" in problem.rule and f"of {pieces} tokens or more" in problem.remedy
    assert parallelism_problems(LLAMA, Layout(**layout), sequence_length=pieces) == []
    assert parallelism_problems(LLAMA, Layout(**layout), sequence_length=8191) == []


def test_without_sequence_parallelism_tensor_ranks_take_any_length():
    assert parallelism_problems(LLAMA, Layout(tp=8, sequence_parallel=False), sequence_length=7) == []
    assert parallelism_problems(LLAMA, Layout(dp=7), sequence_length=1) == []


def test_embedding_and_head_may_be_stages_of_their_own():
    llama = PRESETS["llama-3.1-405b"]
    cut = Layout(pp=16, virtual_stages=8, schedule="interleaved", layers_per_stage=(0, *[1] * 126, 0))
    assert cut.problems() == []
    assert parallelism_problems(llama, cut) == []


def test_a_recomputation_that_is_none_is_said_once_and_all_choices_in_the_remedy():
    (problem,) = Layout(recompute="maybe").problems()
    assert problem.rule == "has 'maybe', which is neither none, selective, full nor a module of a block"
    assert "every-k, auto, blocks" in problem.remedy
