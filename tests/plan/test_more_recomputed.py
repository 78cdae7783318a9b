"""More recomputed never needs more memory, and in fp8 selective recomputation saves too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.plan.columns.block_memory import block_columns, block_memory
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.replay import plan_fullest_rank
from ultrascale.plan.search.search import search
from ultrascale.plan.search.space import legal_layouts
from ultrascale.plan.time.blocks import distinct_shapes
from ultrascale.plan.time.price import price
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Shape

DENSE = ("llama-3.2-1b", "qwen3-0.6b", "gpt2-xl", "gemma-2-9b")
SCHEDULES = {"1f1b": 1, "zb-h1": 1, "zb-v": 2, "dualpipe-v": 2, "interleaved": 2}
OURS = STACKS["ultrascale"]


@st.composite
def layouts(draw) -> tuple[str, Layout]:
    schedule, pp, dp = draw(st.sampled_from([*SCHEDULES])), draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 8]))
    piped: dict[str, Any] = {"schedule": schedule, "virtual_stages": SCHEDULES[schedule]} if pp > 1 else {}
    return draw(st.sampled_from(DENSE)), Layout(
        dp=dp, pp=pp, tp=draw(st.sampled_from([1, 2, 4])), zero_stage=draw(st.sampled_from([0, 1, 2, 3])) if dp > 1 else 0,
        precision=draw(st.sampled_from(["bf16", "fp8"])), micro_batch_size=draw(st.sampled_from([1, 2])), **piped,
    )  # fmt: skip


@given(layouts())
@settings(max_examples=25, deadline=None)
def test_more_recomputed_never_needs_more_memory(drawn: tuple[str, Layout]) -> None:
    name, layout = drawn
    model = replace(preset(name), num_hidden_layers=8)
    if model.num_attention_heads % layout.tp:
        return
    asked = {"sequence_length": 1024, "sequences_per_batch": layout.dp * layout.micro_batch_size * 4 * layout.pp}
    none, selective, full = (
        plan_fullest_rank(model, replace(layout, recompute=way), **asked).peak.total for way in ("none", "selective", "full")
    )
    assert full <= selective <= none


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
@pytest.mark.parametrize("name", DENSE)
def test_selective_recomputation_saves_a_tenth_of_a_dense_block(name: str, precision: Any) -> None:
    """In fp8 products keep what they rounded, so that norms and activation functions save nothing by themselves."""
    model, shape = preset(name), Shape(1, 1024, precision, device="cuda")
    none, selective = (block_memory(model, 0, shape, recompute=way, stack=OURS).saved_bytes for way in ("none", "selective"))
    assert selective < 0.9 * none


@pytest.mark.parametrize("stack", ["ultrascale", "megatron", "deepspeed"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_blocks_played_together_are_those_played_one_by_one(stack: str, recompute: str) -> None:
    model = preset("mixtral-8x7b")
    workload = Workload(model, parse_cluster("32xh100"), 4096, 64, STACKS[stack])
    shapes = distinct_shapes(workload, legal_layouts(workload).table)[0][::7]
    for splits in (False, True):
        asked: dict[str, Any] = {"recompute": recompute, "stack": workload.stack, "splits": splits}
        alone = [block_memory(model, 0, shape, **asked) for shape in shapes]
        rows = [(one.saved_bytes, one.forward_peak_bytes, one.backward_peak_bytes, one.waiting_bytes) for one in alone]
        assert np.array_equal(block_columns(model, 0, shapes, **asked), rows)


def test_a_search_holds_named_modules_for_all_its_layouts() -> None:
    workload = Workload(preset("llama-3-8b"), parse_cluster("8xh100"), 4096, 64, OURS)
    asked = {"recompute": ("mlp_act+norm",), "cp": (1,)}
    best = search(workload, constraints=asked).best
    assert best is not None and best.layout.recompute == "norm+mlp_act"
    table = legal_layouts(workload, constraints=asked).table
    rows = np.linspace(0, len(table) - 1, 12).astype(int)
    together, alone = (price(workload, table.take(rows)), [price(workload, LayoutTable.of([table.layout(r)])) for r in rows])
    assert together.step_seconds == pytest.approx([float(one.step_seconds[0]) for one in alone])
    assert together.memory.reserved == pytest.approx([float(one.memory.reserved[0]) for one in alone])


@pytest.mark.parametrize(
    ("stack", "ways", "said"),
    [
        ("ultrascale", ("moe_act",), "this model has"),
        ("ultrascale", ("norm", "full"), "alone"),
        ("torchtitan", ("norm",), "stack"),
    ],
)
def test_modules_that_cannot_be_held_are_told_in_one_sentence(stack: str, ways: tuple[str, ...], said: str) -> None:
    workload = Workload(preset("llama-3-8b"), parse_cluster("8xh100"), 4096, 64, STACKS[stack])
    with pytest.raises(SpecError) as error:
        search(workload, constraints={"recompute": ways})
    assert said in str(error.value.problems[0])
