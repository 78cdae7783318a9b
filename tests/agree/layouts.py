"""Layouts of two and four ranks, chosen by hypothesis, of models small enough for many of them."""

from __future__ import annotations

from dataclasses import replace

from agree.axes import Case
from agree.small_models import DEMO
from hypothesis import strategies as st

from ultrascale.spec.layout import Layout

MODEL = replace(
    DEMO, vocab_size=128, hidden_size=64, intermediate_size=128, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
    name="dense",
)  # fmt: skip
EXPERTS = replace(MODEL, model_type="mixtral", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, name="experts")
SCHEDULES = (
    ("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("breadth-first", 2),
)  # fmt: skip
CUTS = (
    {"tp": 2}, {"cp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "cp": 2}, {"tp": 2, "pp": 2}, {"cp": 2, "pp": 2}, {"tp": 2, "dp": 2},
    {"cp": 2, "dp": 2}, {"dp": 2, "pp": 2}, {"tp": 4}, {"cp": 4},
)  # fmt: skip


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """A layout that the trainer runs, a model that it suits and a number of micro-batches."""
    cut = dict(draw(st.sampled_from(CUTS)))
    model = draw(st.sampled_from([MODEL, EXPERTS]))
    schedule, virtual_stages = draw(st.sampled_from(SCHEDULES)) if cut.get("pp") else ("1f1b", 1)
    plane = cut.get("tp", 1) * cut.get("cp", 1) * cut.get("dp", 1)
    if model is EXPERTS and plane > 1:
        cut |= draw(st.sampled_from([{}, {"ep": 2}, {"expert_tp": 2}, *([{"ep": 4}] if plane == 4 else [])]))
    layout = Layout(
        schedule=schedule,
        virtual_stages=virtual_stages,
        sequence_parallel=draw(st.booleans()),
        cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])) if "cp" in cut else "ring",
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
        zero_stage=draw(st.sampled_from([0, 1, 2, 3])),
        micro_batch_size=draw(st.sampled_from([1, 2])),
        **cut,
    )
    return Case(model, layout, length=64, num_micro_batches=draw(st.sampled_from([2, 3, 5])))
