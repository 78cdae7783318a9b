"""The planner against traces: layouts of up to 64 ranks, chosen by hypothesis, of models of real sizes. No process is started.

What a plan says of a rank is held to what the trainer's own steps do there: weights and optimizer state, messages by kind and
group, FLOPs of products, all exactly; the peak within 3 percent. A change to the trainer that the planner does not know fails
here. CI takes a part of the layouts; `ULTRASCALE_TRACED_LAYOUTS=240` takes so many.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, NamedTuple

import pytest
from agree.drawn_options import with_options
from agree.small_models import FAMILIES as DENSE
from agree.small_models import LLAMA, WITH_EXPERTS
from agree.traced import last_before
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ultrascale.config.rules.run_rules import run_problems
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch, Checkpoint, Data, Run
from ultrascale.plan.memory.tally import TrafficKey
from ultrascale.trace.planned import Planned, planned_rank
from ultrascale.trace.rank import trace_rank
from ultrascale.trace.recording.record import RankTrace
from ultrascale.trace.views.compare import traffic_of

LAYOUTS = int(os.environ.get("ULTRASCALE_TRACED_LAYOUTS", "20"))
LIMIT_PERCENT = 3.0
MIB = 2**20
MOST_NAMED = 8
COUNT_BYTES = 4
"""Of the number of updates that AdamW keeps for each parameter, and a plan leaves out."""
WITHOUT_COUNTS = ("adamw-bf16", "adamw-8bit")
"""Optimizers that keep one number of updates for all."""
LENGTH = 1024
MODEL = replace(
    LLAMA, vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=LENGTH, name="dense",
)  # fmt: skip
EXPERTS = replace(MODEL, model_type="mixtral", num_experts=8, num_experts_per_tok=2, moe_intermediate_size=1408, name="experts")
PREDICTS = replace(
    WITH_EXPERTS["deepseek-v3"], vocab_size=32_000, hidden_size=1024, num_hidden_layers=4, num_nextn_predict_layers=1,
    num_attention_heads=16, num_key_value_heads=16,
    max_position_embeddings=LENGTH, name="predicts a token more",
)  # fmt: skip
CAPPED = replace(EXPERTS, expert_capacity_factor=1.0, name="experts of limited capacity")
TIED = replace(MODEL, model_type="qwen3", qk_norm=True, tie_word_embeddings=True, sliding_window=None, name="tied")
GPT_OSS = replace(
    WITH_EXPERTS["gpt-oss"], vocab_size=32_000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, moe_intermediate_size=1408, sliding_window=128, max_position_embeddings=LENGTH,
    name="sinks and windows",
)  # fmt: skip
WHOLE_NORMS = replace(
    WITH_EXPERTS["olmoe"], vocab_size=32_000, hidden_size=1024, num_hidden_layers=4, num_attention_heads=16, head_dim=64,
    num_key_value_heads=8, moe_intermediate_size=1408, max_position_embeddings=LENGTH, name="norms over all heads",
)  # fmt: skip
GLM = replace(
    WITH_EXPERTS["glm4-moe"], vocab_size=32_000, hidden_size=1024, num_hidden_layers=4, num_nextn_predict_layers=1,
    num_attention_heads=16, num_key_value_heads=4, head_dim=64, moe_intermediate_size=704, shared_expert_intermediate_size=704,
    max_position_embeddings=LENGTH, name="heads that turn by half",
)  # fmt: skip
POST_NORM = replace(
    MODEL, norm_placement="post", qk_norm=True, qk_norm_whole=True, name="norms of results",
)  # fmt: skip
GEMMA = replace(
    DENSE["gemma"], vocab_size=32_000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
    num_key_value_heads=8, head_dim=64, max_position_embeddings=LENGTH, sliding_window=128, name="two bases of RoPE",
)  # fmt: skip
MODELS = (MODEL, MODEL, EXPERTS, EXPERTS, CAPPED, PREDICTS, TIED, GPT_OSS, WHOLE_NORMS)
LENGTHS, ODD_VOCABULARY = (LENGTH, LENGTH, 1023, 1021), 32_001
SCHEDULES = (
    ("1f1b", 1), ("afab", 1), ("zb-h1", 1), ("interleaved", 2), ("zb-v", 2), ("dualpipe-v", 2), ("breadth-first", 2),
    ("dualpipe", 1),
)  # fmt: skip


class Traced(NamedTuple):
    """A rank of a run."""

    run: Run
    rank: int

    def __str__(self) -> str:
        layout, defaults = self.run.layout, Layout()
        told = [f"{name}={value!r}" for name, value in vars(layout).items() if value != getattr(defaults, name)]
        name = self.run.optimizer.name
        told += (
            ["documents"] * self.run.data.document_mask
            + ["dropout"] * (self.run.model.dropout > 0)
            + [name] * (name != "adamw")
        )
        batch = f"{self.run.batch.sequences_per_batch} x {self.run.batch.sequence_length}"
        return f"{self.run.model.name}, rank {self.rank}: {', '.join(told)}, {batch}, vocabulary {self.run.model.vocab_size}"


@st.composite
def traced(draw: st.DrawFn) -> Traced:
    """A layout that the trainer runs, with some options, and one of its ranks."""
    model, length = draw(st.sampled_from(MODELS)), draw(st.sampled_from(LENGTHS))
    if draw(st.booleans()):
        model = replace(model, vocab_size=ODD_VOCABULARY)
    axis = st.sampled_from([1, 1, 2, 4])
    tp, cp, dp, pp = draw(axis), draw(axis), draw(axis), draw(st.sampled_from([1, 1, 2, 4]))
    schedule, virtual_stages = draw(st.sampled_from(SCHEDULES)) if pp > 1 else ("1f1b", 1)
    if pp * virtual_stages > 4:
        virtual_stages, schedule = 1, "1f1b"
    plane, ep, expert_tp = tp * cp * dp, 1, 1
    if model.num_experts:
        ep = draw(st.sampled_from([n for n in (1, 2, 4, 8) if plane % n == 0]))
        expert_tp = draw(st.sampled_from([n for n in (1, 2) if plane % (ep * n) == 0]))
    zero_stage: Literal[0, 1, 2, 3] = draw(st.sampled_from([0, 1, 2, 3]))
    layout = Layout(
        dp=dp, tp=tp, cp=cp, pp=pp, schedule=schedule, virtual_stages=virtual_stages, zero_stage=zero_stage,
        dp_shard=draw(st.sampled_from([None, 2])) if zero_stage and dp == 4 else None,
        sequence_parallel=draw(st.booleans()),
        cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])),
        recompute=draw(st.sampled_from(["none", "selective", "full", "every-k"])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp32"])), micro_batch_size=draw(st.sampled_from([1, 2])),
        layers_per_bucket=1 if model.num_experts else draw(st.sampled_from([1, 2])), ep=ep,
        expert_tp=expert_tp,
    )  # fmt: skip
    count = draw(st.sampled_from([2, 3, 8])) * (pp if schedule in ("interleaved", "dualpipe-v", "breadth-first") else 1)
    layout = replace(layout, pipeline_runtime="torch" if pp > 1 and (tp + cp + dp + zero_stage) % 3 == 0 else "ultrascale")
    sequences = dp * layout.micro_batch_size * count
    data = Data(document_mask=draw(st.booleans()))
    run = Run(model, layout=layout, batch=Batch(length, sequences), data=data, checkpoint=Checkpoint(export=False))
    run = draw(with_options(run))
    return Traced(run, draw(st.integers(0, run.layout.world_size - 1)))


def test_plan_and_trace_agree_on_any_layout(capsys: pytest.CaptureFixture[str]) -> None:
    found: list[tuple[Apart, Traced]] = []
    wrong: list[str] = []

    @settings(
        max_examples=LAYOUTS, deadline=None, derandomize=True, database=None, phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
    )  # fmt: skip
    @given(one=traced())
    def agree(one: Traced) -> None:
        if not list(problems_of(one.run)):
            apart, differences = compared(one)
            found.append((apart, one))
            wrong.extend(f"{difference}: {one}" for difference in differences)

    agree()
    with capsys.disabled():
        print(f"\n{len(found)} layouts traced")
        for name in Apart._fields:
            sizes = sorted(((getattr(apart, name), str(one)) for apart, one in found), key=lambda pair: abs(pair[0]))
            (half, _), (worst, where) = sizes[len(sizes) // 2], sizes[-1]
            print(f"{name}: half within {abs(half):.2f} %, the worst {worst:+.2f} %: {where}")
    assert not wrong, "\n".join(wrong)


class Apart(NamedTuple):
    """How far a plan is from its trace, in percent of the trace."""

    peak: float
    activations: float
    """The most that activations take in a step, whenever that is: at a peak that many moments share, each side may name
    another, and at one that gradients make there may be none."""


def compared(one: Traced) -> tuple[Apart, list[str]]:
    """How far the plan is from the trace, and everything that does not agree."""
    run, wrong = one.run, []
    found, planned = trace_rank(run, one.rank, device="cuda", round_to=1), planned_rank(run, one.rank, "cuda")
    assert planned is not None
    start, end = found.span(1)
    sizes = {index: now["activations"] for index, (tick, now) in enumerate(found.timeline()) if start <= tick < end}
    most = max(sizes, key=sizes.__getitem__)
    apart = Apart(
        100 * (planned.peak.total / found.peak_bytes(1) - 1), 100 * (planned.highest["activations"] / sizes[most] - 1)
    )
    sent, sends = traffic_of(found, 1), planned.traffic
    for name, traced_value, planned_value in (
        *state_of(found, planned, counts=run.optimizer.name not in WITHOUT_COUNTS),
        ("products", products_of(found), planned.flops),
        ("attention", found.total_flops(1) - products_of(found), planned.attention_flops),
    ):
        if traced_value != planned_value:
            wrong.append(f"{name}: traced {traced_value}, planned {planned_value}")
    for way in {*sent, *sends}:
        if sent.get(way) != sends.get(way):
            wrong.append(f"{way}: traced {sent.get(way)}, planned {sends.get(way)}; {issued(found, way)}")
    if abs(apart.peak) > LIMIT_PERCENT:
        wrong.append(f"peak: {apart.peak:+.2f} %, {by_category(found, planned)}; {largest(found, found.peak_at(1))}")
    if abs(apart.activations) > LIMIT_PERCENT:
        wrong.append(f"activations: {apart.activations:+.2f} %; {largest(found, most, 'activations')}")
    return apart, wrong


def issued(found: RankTrace, way: TrafficKey) -> str:
    """The lines that send what is counted as `way`, with one message's bytes."""
    lines = {f"{one.line} ({one.num_bytes} bytes)" for one in found.sent if (one.kind, one.size, one.stride) == way}
    return f"sent by {', '.join(sorted(lines)) or 'nobody'}"


def largest(found: RankTrace, index: int, *categories: str) -> str:
    """What fills memory after a change, of these categories or of all but weights and moments: operations with their lines."""
    sizes: Counter[str] = Counter()
    for block, size in found.alive_at(index):
        if block.category in (categories or ("gradients", "activations", "temporary", "communication", "other")):
            sizes[f"{block.what} at {block.line}"] += size
    return "alive are " + ", ".join(f"{what} {size / MIB:.1f} MiB" for what, size in sizes.most_common(MOST_NAMED))


def state_of(found: RankTrace, planned: Planned, *, counts: bool) -> Iterator[tuple[str, int, int]]:
    """Weights, gradients and optimizer state as the update finds them: (category, traced, planned). `counts`: the optimizer
    keeps the number of updates for each parameter."""
    index = last_before(found, 1, "optimizer")
    held, told = found.by_category(index), planned.before_update.by_category
    # One a parameter, two of a tied weight of which a rank has both copies; three where its moments have one element.
    counted = Counter(
        b.what for b, size in found.alive_at(index) if counts and b.category == "optimizer" and size == COUNT_BYTES
    )
    count_bytes = COUNT_BYTES * sum(number if number < 3 else number // 3 for number in counted.values())
    yield "parameters", held["parameters"], told["parameters"]
    yield "gradients", held["gradients"], told["gradients"]
    yield "optimizer", held["optimizer"] - count_bytes, told["optimizer"]


def by_category(found: RankTrace, planned: Planned) -> str:
    """MiB at either peak where they differ: traced/planned."""
    held, told = found.by_category(found.peak_at(1)), planned.peak.by_category
    return " ".join(f"{name} {held[name] / MIB:.2f}/{told[name] / MIB:.2f}" for name in held if held[name] != told[name])


def problems_of(run: Run) -> Iterator[object]:
    """Why the trainer would refuse a run."""
    yield from (*run.layout.problems(), *run_problems(run))
    try:
        expect_trainable(run.model, run.layout)
    except SpecError as error:
        yield error


def products_of(trace: RankTrace) -> int:
    """FLOPs of matrix products of the second step."""
    attention = sum(flops for (step, op, _), flops in trace.flops.items() if step == 1 and "attention" in op)
    return trace.total_flops(1) - attention


LAYOUTS_OF_FAMILIES: dict[str, Layout] = {
    "one": Layout(), "tp": Layout(tp=2), "dp": Layout(dp=2, zero_stage=3, recompute="selective"),
    "dp tp": Layout(dp=2, tp=2, zero_stage=1, recompute="core_attn+mlp_act"), "pp": Layout(pp=2, recompute="full"),
    "cp tp": Layout(cp=2, tp=2, zero_stage=2, recompute="selective+attention"),
}  # fmt: skip
"""For families that are not drawn."""
LAYOUTS_OF_EXPERTS = {"ep": Layout(dp=2, tp=2, ep=4), "moe": Layout(tp=2, sequence_parallel=False, recompute="moe")}


@pytest.mark.parametrize("model", [GLM, POST_NORM, GEMMA], ids=lambda model: model.name)
@pytest.mark.parametrize("name", [*LAYOUTS_OF_FAMILIES, *LAYOUTS_OF_EXPERTS])
def test_a_family_is_planned_as_it_is_traced(model: Model, name: str) -> None:
    if name in LAYOUTS_OF_EXPERTS and not model.num_experts:
        pytest.skip("has no experts")
    layout = replace((LAYOUTS_OF_FAMILIES | LAYOUTS_OF_EXPERTS)[name], precision="bf16", micro_batch_size=2)
    run = Run(model, layout=layout, batch=Batch(LENGTH, 4 * layout.dp * layout.pp), data=Data(document_mask=False))
    assert [compared(Traced(run, rank))[1] for rank in (0, layout.world_size - 1)] == [[], []]


@pytest.mark.parametrize("layout", [Layout(tp=2, dp=2, zero_stage=3), Layout(tp=2, pp=2)], ids=["tp dp", "tp pp"])
def test_a_step_with_delayed_scales_of_fp8_is_planned_with_its_one_message(layout: Layout) -> None:
    layout = replace(layout, precision="fp8", fp8_scaling="delayed", micro_batch_size=2)
    _, wrong = compared(Traced(Run(MODEL, layout=layout, batch=Batch(LENGTH, 8), data=Data(document_mask=False)), 0))
    assert not wrong


@pytest.mark.parametrize("window", [None, 200])
@pytest.mark.parametrize("cp", [2, 4])
def test_what_each_rank_of_a_ring_sends_and_works_on_is_planned(cp: int, window: int | None) -> None:
    model = replace(MODEL, model_type="mistral", sliding_window=window, num_hidden_layers=1)
    run = Run(model, layout=Layout(cp=cp, precision="bf16"), batch=Batch(LENGTH, 2), data=Data(document_mask=False))
    for rank in range(cp):
        found, planned = trace_rank(run, rank), planned_rank(run, rank, "cuda")
        assert planned is not None
        assert traffic_of(found, 1) == planned.traffic
        assert found.total_flops(1) - products_of(found) == planned.attention_flops


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("tp, sequence_parallel", [(1, True), (2, True), (2, False)])
def test_a_vocabulary_that_is_worked_through_slab_by_slab_is_planned(tp, sequence_parallel, recompute) -> None:
    model = replace(MODEL, vocab_size=128_256, max_position_embeddings=8192, num_hidden_layers=2)
    layout = Layout(tp=tp, sequence_parallel=sequence_parallel, precision="bf16", recompute=recompute)
    run = Run(model, layout=layout, batch=Batch(8192, 2), data=Data(document_mask=False))
    _, wrong = compared(Traced(run, 0))
    assert not wrong


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("core", ["auto", "sdpa"])
@pytest.mark.parametrize("window", [None, 256])
def test_documents_told_by_their_ends_are_planned_without_a_mask_and_with_one_where_asked_for(core, recompute, window) -> None:
    model = replace(MODEL, model_type="mistral" if window else "llama", sliding_window=window, num_hidden_layers=2)
    layout = Layout(precision="bf16", recompute=recompute, attention=core, micro_batch_size=2)
    run = Run(model, layout=layout, batch=Batch(LENGTH, 4), data=Data(document_mask=window is None))
    _, wrong = compared(Traced(run, 0))
    assert not wrong
    ran = {block.what for block in trace_rank(run, 0).blocks if "_attention" in block.what and "." not in block.what}
    one_kernel = "_flash_attention_forward" if core == "auto" else "_scaled_dot_product_efficient_attention"
    assert {name for name in ran if "backward" not in name} == {one_kernel}


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_what_the_loss_over_tp_keeps_for_each_row_is_planned(sequence_parallel: bool) -> None:
    """Of a small vocabulary it is 3 percent of the logits."""
    layout = Layout(tp=2, micro_batch_size=4, sequence_parallel=sequence_parallel, recompute="selective")
    run = Run(LLAMA, layout=layout, batch=Batch(256, 8), data=Data(document_mask=False))
    apart, wrong = compared(Traced(run, 0))
    assert not wrong
    assert abs(apart.peak) < 0.02


@pytest.mark.parametrize(
    "layout, documents", [(Layout(tp=2), False), (Layout(cp=8), True), (Layout(pp=2), False)], ids=["tp", "cp", "pp"]
)
def test_a_batch_on_the_device_is_planned_as_it_is_traced(layout: Layout, documents: bool) -> None:
    """Also where some micro-batches are traced for all: positions count, and over cp the document indices are on the host."""
    run = Run(LLAMA, layout=layout, batch=Batch(128, 11), data=Data(document_mask=documents))
    found, planned = trace_rank(run, 0, device="cuda", round_to=1), planned_rank(run, 0, "cuda")
    assert planned.peak.by_category["other"] == found.by_category(found.peak_at(1))["other"] > 0
