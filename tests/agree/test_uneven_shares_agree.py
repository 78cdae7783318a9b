"""What a plan says of a rank is that rank's share, where ranks divide neither sequence nor vocabulary nor widths."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from agree.test_trace_agrees import EXPERTS, GPT_OSS, MODEL, Traced, compared, problems_of
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.trace.rank import trace_rank
from ultrascale.work.sharding.places import Coordinates
from ultrascale.work.work import Shape

DRAWN = 12
SMALL = replace(MODEL, num_hidden_layers=1)
CAPPED = replace(EXPERTS, num_hidden_layers=1, expert_capacity_factor=1.0)
GPT2 = replace(preset("gpt2"), num_hidden_layers=1, dropout=0.0)


def expect_agreement(model: Model, rank: int, length: int, **layout: object) -> None:
    own = Layout(precision="bf16", **layout)  # pyright: ignore[reportArgumentType]
    run = Run(model, layout=own, batch=Batch(length, 2 * own.dp), data=Data(document_mask=False))
    _, wrong = compared(Traced(run, rank))
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_an_odd_sequence_over_cp_gives_each_rank_its_own_work_and_messages(method, rank) -> None:
    expect_agreement(SMALL, rank, 1023, cp=2, cp_method=method)


def test_an_odd_sequence_is_cut_over_a_ring_then_heads_then_tp() -> None:
    for rank in (0, 3, 5):
        expect_agreement(SMALL, rank, 1021, tp=2, cp=4, cp_method="ring+all-to-all", cp_heads=2)


def test_shares_of_one_sequence_add_up_to_it() -> None:
    for method in ("ring", "all-to-all", "ring+all-to-all"):
        layout = Layout(tp=2, cp=4, cp_method=method, cp_heads=2 if "+" in method else 1)
        shapes = [
            Shape(3, 1021, tp=2, cp=4, cp_method=method, cp_heads=layout.cp_heads, coordinates=Coordinates.of(layout, rank))
            for rank in range(8)
        ]
        assert sum(shape.outer_tokens for shape in shapes) == 3 * 1021
        assert max(shape.local_length for shape in shapes) == 256
        assert min(shape.local_length for shape in shapes) == 255


@pytest.mark.parametrize("rank", [0, 1])
def test_a_vocabulary_and_a_width_that_tp_does_not_divide(rank) -> None:
    expect_agreement(replace(SMALL, vocab_size=32_001, intermediate_size=2817), rank, 1024, tp=2)


def test_the_last_shards_of_a_copy_are_shorter_and_padded_alike() -> None:
    for rank in (1, 7):
        expect_agreement(GPT2, rank, 1023, tp=3, dp=3, zero_stage=2)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_experts_of_either_rank_get_of_an_odd_number_of_tokens(rank) -> None:
    expect_agreement(replace(CAPPED, expert_capacity_factor=None), rank, 1023, tp=2, ep=2)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_choices_that_ranks_show_each_other_where_experts_have_a_capacity(recompute) -> None:
    expect_agreement(CAPPED, 1, 1024, tp=2, cp=2, ep=2, recompute=recompute)


def test_experts_of_limited_capacity_that_are_all_on_one_rank() -> None:
    expect_agreement(CAPPED, 1, 1023, dp=2, zero_stage=3, recompute="full")


@pytest.mark.parametrize("method", ["ring", "all-gather", "all-to-all"])
def test_documents_that_cp_cuts_are_one_in_a_sequence_and_the_trace_says_so(method) -> None:
    layout = Layout(cp=2, cp_method=method, precision="bf16", micro_batch_size=2)
    run = Run(SMALL, layout=layout, batch=Batch(1023, 4), data=Data(document_mask=True))
    _, wrong = compared(Traced(run, 1))
    assert not wrong, "\n".join(wrong)
    assert trace_rank(run, 1).documents == "one document"
    assert trace_rank(replace(run, layout=Layout(micro_batch_size=2)), 0).documents == "two documents"


@pytest.mark.parametrize("layout", [
    {"dp": 16, "zero_stage": 1}, {"dp": 12, "zero_stage": 2, "recompute": "full"}, {"dp": 16, "zero_stage": 3, "ep": 4},
    {"dp": 12, "dp_shard": 6, "zero_stage": 3}, {"dp": 6, "tp": 2, "expert_tp": 2, "zero_stage": 3},
    {"dp": 8, "pp": 2, "ep": 4, "zero_stage": 2},
], ids=str)  # fmt: skip
def test_rows_of_experts_that_ranks_do_not_divide(layout: dict[str, Any]) -> None:
    for rank in (0, 5):
        expect_agreement(replace(EXPERTS, num_hidden_layers=2), rank, 1024, **layout)


def test_a_share_of_a_sequence_with_capacity_that_nothing_divides() -> None:
    expect_agreement(CAPPED, 3, 1021, tp=2, cp=2, ep=4)


def test_biases_of_experts_are_sums_that_a_product_makes() -> None:
    expect_agreement(GPT_OSS, 1, 1024, tp=2, ep=2)
    expect_agreement(GPT_OSS, 5, 1024, dp=16, ep=2, zero_stage=3)


@st.composite
def odd(draw: st.DrawFn) -> Traced:
    """Any rank of a layout without a pipeline or with one of two stages, of lengths and vocabularies that little divides."""
    model = draw(st.sampled_from([SMALL, CAPPED, GPT_OSS]))
    model = replace(model, num_hidden_layers=2, vocab_size=draw(st.sampled_from([32_000, 32_001])))
    tp, cp, dp, pp = (draw(st.sampled_from([1, 2])) for _ in range(4))
    layout = Layout(
        tp=tp, cp=cp, dp=dp, pp=pp, ep=2 if model.num_experts and tp * cp * dp > 1 else 1, precision="bf16",
        sequence_parallel=draw(st.booleans()), cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])),
        recompute=draw(st.sampled_from(["none", "full"])), zero_stage=draw(st.sampled_from([0, 1, 3])),
    )  # fmt: skip
    run = Run(
        model, layout=layout, batch=Batch(draw(st.sampled_from([1021, 1023])), 2 * dp),
        data=Data(document_mask=cp > 1 and draw(st.booleans())),
    )  # fmt: skip
    return Traced(run, draw(st.integers(0, layout.world_size - 1)))


def test_any_rank_of_odd_layouts_is_planned_as_it_is_traced() -> None:
    @settings(
        max_examples=DRAWN, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(one=odd())
    def agree(one: Traced) -> None:
        if not list(problems_of(one.run)):
            _, wrong = compared(one)
            assert not wrong, "\n".join([str(one), *wrong])

    agree()
