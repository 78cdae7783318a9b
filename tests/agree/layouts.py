"""Layouts of two and four ranks, chosen by hypothesis, of models small enough for many of them."""

from __future__ import annotations

from dataclasses import replace

from agree.axes import Case
from agree.small_models import DEMO
from hypothesis import strategies as st

from ultrascale.description.layout import Layout

MODEL = replace(
    DEMO, vocab_size=128, hidden_size=64, intermediate_size=128, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    name="dense",
)  # fmt: skip
EXPERTS = replace(MODEL, model_type="mixtral", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, name="experts")
SCHEDULES = (
    ("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("breadth-first", 2),
    ("dualpipe", 1),
)  # fmt: skip
CUTS = (
    Layout(tp=2), Layout(cp=2), Layout(pp=2), Layout(dp=2), Layout(tp=2, cp=2), Layout(tp=2, pp=2), Layout(cp=2, pp=2),
    Layout(dp=2, tp=2), Layout(dp=2, cp=2), Layout(dp=2, pp=2), Layout(tp=4), Layout(cp=4),
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout that the trainer runs, a model that it suits and a number of micro-batches."""
    cut = draw(st.sampled_from(CUTS))
    model = draw(st.sampled_from([MODEL, EXPERTS]))
    schedule, virtual_stages = draw(st.sampled_from(SCHEDULES)) if cut.pp > 1 else ("1f1b", 1)
    plane = cut.tp * cut.cp * cut.dp
    if model is EXPERTS and plane > 1:
        wide = [replace(cut, ep=4)] if plane == 4 else []
        cut = draw(st.sampled_from([cut, replace(cut, ep=2), replace(cut, expert_tp=2), *wide]))
    layout = replace(
        cut,
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=draw(st.booleans()),
        cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])) if cut.cp > 1 else "ring",
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
    )
    return Case(model, layout, length=64, num_micro_batches=draw(st.sampled_from([2, 3, 5])))
