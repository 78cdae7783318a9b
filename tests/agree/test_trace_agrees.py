"""The planner against traces: layouts of up to 64 ranks, chosen by hypothesis, of models of real sizes. No process is started.

What a plan says of a rank is held to what the trainer's own steps do there: weights, gradients and optimizer state, messages by
kind and group, FLOPs of products, all exactly; the peak within 3 percent. A change to the trainer that the planner does not know
fails here. CI takes a part of the layouts; `ULTRASCALE_TRACED_LAYOUTS=200` takes so many.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import NamedTuple

from agree.small_models import LLAMA
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultrascale.plan.memory import is_replayed, plan_memory
from ultrascale.spec.layout import Layout
from ultrascale.spec.problems import SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Batch, Data, Run
from ultrascale.spec.trainable import expect_trainable
from ultrascale.trace.compare import traffic_of
from ultrascale.trace.planned import Traffic, Way, planned_rank
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.record import RankTrace

LAYOUTS = int(os.environ.get("ULTRASCALE_TRACED_LAYOUTS", "20"))
LIMIT_PERCENT = 3.0
LENGTH = 1024
MODEL = replace(
    LLAMA, vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=LENGTH, name="dense",
)  # fmt: skip
EXPERTS = replace(MODEL, model_type="mixtral", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1408, name="experts")
SCHEDULES = (
    ("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("breadth-first", 2),
)  # fmt: skip


class Traced(NamedTuple):
    """A rank of a run."""

    run: Run
    rank: int

    def __str__(self) -> str:
        layout, defaults = self.run.layout, Layout()
        told = [f"{name}={value!r}" for name, value in vars(layout).items() if value != getattr(defaults, name)]
        documents = ["documents"] if self.run.data.document_mask else []
        return f"{self.run.model.name}, rank {self.rank}: {', '.join([*told, *documents])}, {self.run.batch.sequences_per_batch}"


@st.composite
def traced(draw: st.DrawFn) -> Traced:
    """A layout that the trainer runs, and one of its ranks."""
    model = draw(st.sampled_from([MODEL, EXPERTS]))
    axis = st.sampled_from([1, 1, 2, 4])
    tp, cp, dp, pp = draw(axis), draw(axis), draw(axis), draw(st.sampled_from([1, 1, 2, 4]))
    schedule, virtual_stages = draw(st.sampled_from(SCHEDULES)) if pp > 1 else ("1f1b", 1)
    if pp * virtual_stages > 4:
        virtual_stages, schedule = 1, "1f1b"
    plane, experts = tp * cp * dp, {}
    if model is EXPERTS:
        ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if plane % n == 0]))
        expert_tp = draw(st.sampled_from([n for n in (1, 2) if plane % (ep * n) == 0]))
        experts = {"ep": ep, "expert_tp": expert_tp}
    zero_stage = draw(st.sampled_from([0, 1, 2, 3]))
    layout = Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, schedule=schedule, virtual_stages=virtual_stages, zero_stage=zero_stage,
        dp_shard=draw(st.sampled_from([None, 2])) if zero_stage and dp == 4 else None,
        sequence_parallel=draw(st.booleans()),
        cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
        precision=draw(st.sampled_from(["bf16", "bf16", "fp32"])), micro_batch_size=draw(st.sampled_from([1, 2])),
        layers_per_bucket=draw(st.sampled_from([1, 1, 2])), **experts,
    )  # fmt: skip
    count = draw(st.sampled_from([2, 3, 8])) * (pp if schedule in ("interleaved", "dualpipe-v", "breadth-first") else 1)
    sequences = dp * layout.micro_batch_size * count
    documents = draw(st.booleans()) if cp == 1 else False
    run = Run(model, layout=layout, batch=Batch(LENGTH, sequences), data=Data(document_mask=documents))
    return Traced(run, draw(st.integers(0, layout.world_size - 1)))
