"""What recomputation by modules keeps, for all families, stacks and layouts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.recomputed import MODULES, modules_name, parse_mode
from ultrascale.plan.columns.block_memory import block_memory
from ultrascale.plan.constants import CONSTANTS
from ultrascale.plan.time.price import predict
from ultrascale.plan.view.recomputation import recomputation_statement
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Shape
from ultrascale.work.recompute import (
    available_modules,
    recompute_of_mode,
    recomputed_ops,
    regions,
    saved_bytes,
    selective_modules,
)
from ultrascale.work.work import block_work

NAMES = st.sampled_from(sorted(PRESETS))
RUNS = ("llama-3-8b", "gpt2-xl", "qwen3-30b-a3b", "olmoe-1b-7b", "deepseek-v2-lite", "gpt-oss-20b", "mixtral-8x7b")


def modules_of(model: Model) -> st.SearchStrategy[str]:
    return st.sets(st.sampled_from(available_modules(model)), min_size=1).map(modules_name)


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Model, int, Shape, str]:
    """A block of a model, a shape, and some of its modules."""
    model = PRESETS[draw(NAMES)]
    tp, cp = (
        draw(st.sampled_from([tp for tp in (1, 2, 4) if model.num_attention_heads % tp == 0])),
        draw(st.sampled_from([1, 2])),
    )
    if model.num_attention_heads % (tp * cp):
        cp = 1
    shape = Shape(
        draw(st.sampled_from([1, 2])), draw(st.sampled_from([1024, 4096])), draw(st.sampled_from(["bf16", "fp8"])),
        documents=draw(st.booleans()), device=draw(st.sampled_from(["cpu", "cuda"])), tp=tp,
        sequence_parallel=draw(st.booleans()),
        cp=cp, cp_method=draw(st.sampled_from(["ring", "all-gather", "all-to-all"])),
        ep=draw(st.sampled_from([1, 4])) if model.num_experts else 1,
    )  # fmt: skip
    return model, draw(st.sampled_from([0, model.num_hidden_layers - 1])), shape, draw(modules_of(model))


@settings(max_examples=150, deadline=None)
@given(blocks(), st.sampled_from(sorted(STACKS)))
def test_no_set_of_modules_keeps_more_than_nothing_recomputed_or_less_than_all(
    block: tuple[Model, int, Shape, str], name: str
) -> None:
    model, layer, shape, some = block
    stack = STACKS[name]
    shape = replace(shape, kernels=stack.kernels)
    none, named, whole = (
        block_memory(model, layer, shape, recompute=way, stack=stack).saved_bytes for way in ("none", some, "full")
    )
    assert whole <= named <= none


@settings(max_examples=100, deadline=None)
@given(blocks(), st.sampled_from(sorted(STACKS)))
def test_modules_that_free_memory_are_computed_again(block: tuple[Model, int, Shape, str], name: str) -> None:
    model, layer, shape, some = block
    stack = STACKS[name]
    shape = replace(shape, kernels=stack.kernels)
    none, named = (block_memory(model, layer, shape, recompute=way, stack=stack).saved_bytes for way in ("none", some))
    ops, again = block_work(model, layer, shape), recompute_of_mode(some, model, layer, shape, stack)
    assert again is not None
    run = recomputed_ops(again, ops, reruns_last=False)
    dropped = {one for region in regions(ops, again.modules, as_megatron=again.as_megatron) for one in region.drops}
    assert named == none or run
    assert dropped <= {one.name for op in run for one in op.makes}


def test_deepseek_keeps_what_its_report_says() -> None:
    """Section 3.2.3 and 3.3.3: norms and up-projections are made again, SwiGLU's inputs are kept in 8 bits, once."""
    model, stack = PRESETS["deepseek-v3"], STACKS["hai-llm"]
    shape = Shape(1, 4096, "fp8", device="cuda", ep=64, kernels=stack.kernels)
    kept = block_memory(model, 10, shape, recompute="norm+mla_up_proj", stack=stack).saved_bytes
    rows, inner, hidden = 4096 * 8, 2 * 2048, 7168  # of this rank's experts, whose tokens are as many as its own
    assert kept == pytest.approx(rows * (hidden + inner) + 4096 * (128 * 128 * 2 + inner + 2 * 2 * hidden), rel=0.12)


@settings(max_examples=100, deadline=None)
@given(blocks())
def test_selective_recomputation_keeps_less_than_none_and_more_than_full(block: tuple[Model, int, Shape, str]) -> None:
    model, layer, shape, _ = block
    none, some, whole = (
        block_memory(model, layer, shape, recompute=way, stack=STACKS["ultrascale"]).saved_bytes
        for way in ("none", "selective", "full")
    )
    assert whole < some < none


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(RUNS), st.sampled_from(["ultrascale", "megatron"]), st.data(), st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 3]), st.sampled_from([1, 2]), st.booleans(),
)  # fmt: skip
def test_a_run_needs_less_memory_and_more_time_the_more_of_it_is_recomputed(
    name: str, stack: str, data: st.DataObject, tp: int, pp: int, stage: int, size: int, sequence_parallel: bool
) -> None:
    model = PRESETS[name]
    workload = Workload(model, parse_cluster("16xh100"), 4096, 64, STACKS[stack])
    stage = min(stage, 1) if stack == "megatron" else stage
    layout = Layout(
        dp=16 // (tp * pp), tp=tp, pp=pp, zero_stage=stage, micro_batch_size=size, precision="bf16",  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel, ep=4 if model.num_experts else 1,
    )  # fmt: skip
    some = data.draw(modules_of(model))
    found = {way: predict(workload, replace(layout, recompute=way)) for way in ("none", "selective", some, "full")}
    needs = {way: float(one.memory.allocated) for way, one in found.items()}
    assert needs["full"] <= needs["selective"] <= needs["none"]
    assert needs[some] <= needs["none"]
    # A region that holds a gather may stand in the peak of the block at work.
    assert needs["full"] <= 1.02 * needs[some]
    seconds = {way: one.step_seconds for way, one in found.items()}
    assert seconds["none"] <= seconds["selective"] <= seconds["full"] and seconds["none"] <= seconds[some]


def test_products_that_selective_recomputation_runs_again_are_slowed_like_all_others() -> None:
    workload = Workload(PRESETS["deepseek-v2-lite"], parse_cluster("8xh100"), 4096, 64, STACKS["ultrascale"])
    layout = Layout(dp=8, ep=8, zero_stage=2, precision="bf16", recompute="selective")
    slow = replace(CONSTANTS, compute_derate=2 * CONSTANTS.compute_derate)
    again, again_slow = (predict(workload, layout, one).waterfall["recompute"] for one in (CONSTANTS, slow))
    assert again < again_slow < 2 * again


def test_selective_recomputation_of_deepseek_v3_is_what_its_report_says() -> None:
    """Section 3.2.3: norms and up-projections of latents are computed again, and SwiGLU's result."""
    chosen = selective_modules(PRESETS["deepseek-v3"], True, True)
    assert chosen == ("norm", "mlp_act", "moe_act", "mla_up_proj")


@pytest.mark.parametrize(("ep", "share"), [(1, 0.64), (4, 0.86)])
def test_of_fine_experts_selective_recomputation_saves_a_third_alone_and_a_seventh_over_ranks(ep: int, share: float) -> None:
    stack = STACKS["ultrascale"]
    shape = Shape(1, 4096, "bf16", device="cuda", ep=ep)
    none, some = (
        block_memory(PRESETS["qwen3-30b-a3b"], 0, shape, recompute=way, stack=stack).saved_bytes
        for way in ("none", "selective")
    )
    assert some == pytest.approx(share * none, rel=0.01)


@pytest.mark.parametrize(
    ("name", "module", "kept"),
    [
        ("llama-3-8b", "norm", {"attention_in", "mlp_in"}),
        ("llama-3-8b", "mlp_act", {"product"}),
        ("llama-3-8b", "mlp", {"gate", "up", "product"}),
        ("llama-3-8b", "core_attn", {"attended", "logsumexp"}),
        ("qwen3-30b-a3b", "moe_act", {"expert_product"}),
        ("qwen3-30b-a3b", "moe_permute", {"expert_in"}),
        ("deepseek-v3", "mla_up_proj", {"q_rotated", "k", "v"}),
        ("deepseek-v3", "shared_experts", {"shared_gate", "shared_up", "shared_product"}),
    ],
)
def test_a_module_lets_go_of_what_its_name_says(name: str, module: str, kept: set[str]) -> None:
    model = PRESETS[name]
    ops = block_work(model, model.num_hidden_layers - 1, Shape(1, 4096, "bf16", device="cuda"))
    dropped = {name for region in regions(ops, {module}) for name in region.drops}
    assert {name for name in dropped if not name.endswith("_inverse_rms")} == kept


@pytest.mark.parametrize("name", [name for name in PRESETS if name.startswith("tiny-")])
def test_every_module_that_a_model_is_said_to_have_frees_bytes_of_some_block(name: str) -> None:
    model = PRESETS[name]
    shape = Shape(1, 512, "bf16", device="cuda")
    blocks = [block_work(model, layer, shape) for layer in range(model.num_hidden_layers)]
    for module in available_modules(model):
        freed = max(saved_bytes(ops, regions(ops, {module})) for ops in blocks)
        assert freed > 0, f"{module}: work.recompute._place puts no operation of {name} into it"


def test_layernorm_and_every_other_module_of_megatron_needs_less_and_never_more() -> None:
    for name in ("llama-3-70b", "deepseek-v3", "qwen3-30b-a3b"):
        model, stack = PRESETS[name], STACKS["megatron"]
        shape = Shape(1, 4096, "bf16", device="cuda", tp=4, ep=4 if model.num_experts else 1, kernels=stack.kernels)
        layer = model.num_hidden_layers - 1
        plain = block_memory(model, layer, shape, recompute="none", stack=stack)
        own = [module for module in available_modules(model) if regions(block_work(model, layer, shape), {module})]
        for module in ("layernorm", *own):
            found = block_memory(model, layer, shape, recompute=module, stack=stack)
            assert found.saved_bytes < plain.saved_bytes, module
            assert found.forward_peak_bytes <= plain.forward_peak_bytes, module
            assert found.backward_peak_bytes <= plain.backward_peak_bytes, module


def test_a_module_that_a_model_does_not_have_is_refused_with_those_it_has() -> None:
    (problem,) = parallelism_problems(PRESETS["llama-3-8b"], Layout(recompute="moe_act+norm"))
    assert problem.key == "layout.recompute"
    assert problem.rule == "names moe_act, and this model has norm, mlp_act, core_attn, mlp"
    (problem,) = Layout(recompute="norms").problems()
    assert problem.key == "layout.recompute" and "norm" in problem.remedy


def test_names_are_told_in_one_order_and_in_megatrons_spelling_too() -> None:
    assert parse_mode("core_attn+layernorm") == parse_mode("norm+core_attn")
    assert modules_name({"core_attn", "norm"}) == "norm+core_attn"
    assert modules_name(reversed(MODULES)) == "+".join(MODULES)


def test_a_plan_says_what_selective_recomputation_is_here() -> None:
    workload = Workload(PRESETS["qwen3-30b-a3b"], parse_cluster("8xh100"), 4096, 64)
    said = recomputation_statement(workload, Layout(dp=8, ep=8, zero_stage=3, precision="bf16"))
    assert "selective (norm+moe_act again) saves" in said
