"""What stands for a run that is too large: layouts of few ranks with all of its axes, and its kind of model made small."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.check.cases import cases
from ultrascale.check.small import micro_batch_counts, provable, shrink_model, small_layouts
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.description.architecture.families import TRAINED
from ultrascale.description.architecture.weights import num_parameters
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Run
from ultrascale.schedules.build import build_schedule
from ultrascale.schedules.kinds.custom import to_csv


def axes(layout: Layout) -> dict[str, int]:
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "tp", "cp", "pp", "ep", "expert_tp")}
    return {axis: size for axis, size in sizes.items() if size > 1}


@pytest.mark.parametrize("dp, processes", [(1, 2), (2, 2), (7, 7), (8, 8), (64, 4)])
def test_a_run_is_proven_with_its_own_number_of_processes_unless_that_is_one_or_too_many(dp, processes):
    assert [layout.dp for layout in small_layouts(Layout(dp=dp))] == [processes]


@pytest.mark.parametrize(
    "dp, shard, processes, expected", [(64, 8, 4, 2), (4, 2, 7, 1), (4, 4, 7, 7), (8, 2, 4, 2), (4, 2, 1, 1), (4, None, 6, 6)]
)
def test_several_copies_of_the_state_stay_several_over_another_number_of_processes(dp, shard, processes, expected):
    (layout,) = small_layouts(Layout(dp=dp, zero_stage=3, dp_shard=shard), processes)
    assert (layout.dp, layout.shard_size, layout.problems()) == (processes, expected, [])


@pytest.mark.parametrize(
    "own, found",
    [
        ({"dp": 16, "tp": 8, "pp": 4}, [{"dp": 2, "tp": 2, "pp": 2}]),
        ({"dp": 2, "tp": 4, "ep": 8}, [{"dp": 2, "tp": 4, "ep": 8}]),
        ({"dp": 64, "ep": 8, "expert_tp": 4}, [{"dp": 4, "ep": 2, "expert_tp": 2}]),
        ({"dp": 4, "tp": 8, "cp": 8, "pp": 16, "ep": 8},
         [{"tp": 2, "cp": 2, "pp": 2, "ep": 2}, {"dp": 2, "cp": 2, "pp": 2, "ep": 2}, {"dp": 2, "tp": 2, "pp": 2, "ep": 2},
          {"dp": 2, "tp": 2, "cp": 2, "ep": 2}]),
        ({"cp": 16, "tp": 8, "cp_method": "ring+all-to-all", "cp_heads": 4}, [{"cp": 4, "tp": 2}]),
    ],
)  # fmt: skip
def test_a_run_of_many_ranks_is_proven_by_layouts_that_together_have_all_of_its_axes(own, found):
    layouts = small_layouts(Layout(**own))
    assert sorted(map(sorted, map(dict.items, map(axes, layouts)))) == sorted(map(sorted, map(dict.items, found)))
    assert [layout.problems() for layout in layouts] == [[]] * len(layouts)
    assert max(layout.world_size for layout in layouts) <= 8


@pytest.mark.parametrize("processes, found", [(2, {"pp": 2}), (3, {"dp": 3}), (4, {"pp": 2, "tp": 2}), (6, {"dp": 3, "pp": 2})])
def test_asked_for_fewer_processes_it_keeps_as_many_axes_as_fit(processes, found):
    (layout,) = small_layouts(Layout(dp=4, tp=4, pp=4), processes)
    assert axes(layout) == found


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2, tp=2, ep=2), Layout(dp=4, tp=2, ep=4, expert_tp=2), Layout(tp=3)])
@pytest.mark.parametrize(
    "preset",
    [p for p, m in PRESETS.items() if "nemotron" not in p and "megatron" not in p and m.model_type in TRAINED],
)
def test_every_model_made_small_can_be_cut_and_keeps_its_kind(preset, layout):
    model = PRESETS[preset]
    cut = layout if model.num_experts else replace(layout, ep=1, expert_tp=1)
    small = shrink_model(model, cut)
    assert small.problems() + parallelism_problems(small, cut, sequence_length=23) == []
    assert num_parameters(small) < 250_000
    kept = ("model_type", "norm", "qkv_bias", "qk_norm", "attention_sinks", "topk_method", "scoring_func", "latent_attention")
    assert [getattr(small, key) for key in kept] == [getattr(model, key) for key in kept]
    assert (small.num_experts > 0, small.sliding_window is None) == (model.num_experts > 0, model.sliding_window is None)


@pytest.mark.parametrize(("dp", "ep", "is_cut"), [(64, 1, True), (64, 8, True), (8, 1, False), (8, 4, False)])
def test_experts_that_zero_cuts_between_rows_or_whole_ones_are_cut_so_in_the_proof(dp, ep, is_cut):
    run = Run(PRESETS["mixtral-8x7b"], layout=Layout(dp=dp, ep=ep, zero_stage=3))
    for case in cases(run, own_layout=True):
        small, layout = case.run.model, case.run.layout
        assert (small.num_experts // layout.ep % layout.expert_shard_size > 0) is is_cut, case


def test_a_schedule_from_a_file_keeps_its_ranks_and_its_number_of_micro_batches(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text(to_csv(build_schedule("1f1b", 4, 5)))
    (layout,) = small_layouts(Layout(pp=4, dp=16, schedule=str(path)))
    assert axes(layout) == {"pp": 4, "dp": 2}
    assert micro_batch_counts(layout) == (5,)


def test_a_proof_is_in_float64_on_odd_sequences_of_the_runs_own_micro_batch():
    run = Run(PRESETS["llama-3-8b"], layout=Layout(tp=2, precision="bf16", micro_batch_size=8), batch=Batch(8192, 64))
    small = provable(run)
    assert (small.layout.precision, small.layout.micro_batch_size, small.batch.sequence_length) == ("fp64", 2, 61)


@pytest.mark.parametrize("preset", ["tiny-mistral", "tiny-gpt-oss", "mistral-7b-v0.1"])
@pytest.mark.parametrize("cp", [1, 2, 4, 8])
def test_a_window_ends_within_the_piece_that_a_rank_holds_also_in_a_model_proven_whole(preset, cp):
    small = provable(Run(PRESETS[preset], layout=Layout(cp=cp)))
    assert small.model.sliding_window is not None
    assert 2 <= small.model.sliding_window <= max(2, small.batch.sequence_length // (2 * cp) - 1)


def test_every_learned_position_has_a_token():
    small = provable(Run(PRESETS["tiny-gpt2"], layout=Layout(dp=2)))
    assert small.model.max_position_embeddings == small.batch.sequence_length == 61
