"""Memory of whole tables of layouts: against the exact replay, against closed formulas, and against published peaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights, num_parameters
from ultrascale.description.layout import Layout
from ultrascale.plan.columns.footprint import CATEGORIES, stage_memory
from ultrascale.plan.columns.rank_state import rank_state
from ultrascale.plan.layouts import LayoutTable
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.plan.time.stages import partition_stages
from ultrascale.plan.workload import Workload

GIB = 2**30
LLAMA = preset("llama-3-8b")
SMALL = replace(LLAMA, num_hidden_layers=16)
MEGATRON, NANOTRON = STACKS["megatron"], STACKS["nanotron"]


def footprint(model: Model, layout: Layout, *, stack: str | Stack = "ultrascale", length=4096, micro_batches=4, gpus="64xh100"):
    chosen = STACKS[stack] if isinstance(stack, str) else stack
    workload = Workload(model, parse_cluster(gpus), length, layout.dp * layout.micro_batch_size * micro_batches, chosen)
    return stage_memory(workload, LayoutTable.of([layout])).row(0)


@given(
    dp=st.sampled_from([1, 2, 8, 64]), zero=st.sampled_from([0, 1, 2, 3]), size=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["none", "selective", "full", "every-k"]), count=st.sampled_from([1, 2, 5]),
    precision=st.sampled_from(["bf16", "fp16", "fp32", "fp64"]), bucket=st.sampled_from([1, 2]), documents=st.booleans(),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_our_own_trainer_takes_what_the_exact_replay_says(
    dp: int, zero, size: int, recompute, count: int, precision, bucket: int, documents: bool
) -> None:
    """Median 0.1 percent on Llama-3-8B; the ends of passes stand for all that is between them. Of all 2,808 cases of one
    block a bucket one is 3.1 percent low (ZeRO 3 over 8, full recomputation, one micro-batch of 1, fp32, documents), the others
    within 2.8. Two blocks a bucket under ZeRO 3 peak in between, 4.5 percent higher."""
    layout = Layout(
        dp=dp, zero_stage=zero if dp > 1 else 0, micro_batch_size=size, recompute=recompute, precision=precision,
        layers_per_bucket=bucket,
    )  # fmt: skip
    sequences = dp * size * count
    workload = Workload(SMALL, parse_cluster("64xh100"), 4096, sequences, documents=documents)
    ours = stage_memory(workload, LayoutTable.of([layout])).row(0).allocated
    exact = plan_memory(SMALL, layout, sequence_length=4096, sequences_per_batch=sequences, documents=documents).peak.total
    assert ours == pytest.approx(exact, rel=0.05 if bucket > 1 else 0.032)


@pytest.mark.parametrize(("billions", "gigabytes"), [(1, 16), (7, 112), (70, 1120), (405, 6480)])
def test_weights_gradients_and_optimizer_take_sixteen_bytes_a_parameter(billions: int, gigabytes: int) -> None:
    """The playbook's table: bf16 weights and gradients, fp32 master and two moments."""
    narrow = replace(MEGATRON, gradient_bytes=2, pads_vocab_to=1)
    state = footprint(LLAMA, Layout(precision="bf16"), stack=narrow).categories
    each = sum(state[name] for name in ("weights", "gradients", "optimizer")) / num_parameters(LLAMA)
    assert each * billions == pytest.approx(gigabytes, rel=1e-9)


@pytest.mark.parametrize(("zero", "expected"), [(0, 18), (1, 6 + 12 / 8), (2, 2 + 16 / 8)])
def test_megatrons_distributed_optimizer_cuts_what_zero_says(zero, expected: float) -> None:
    state = footprint(
        LLAMA, Layout(dp=8, zero_stage=zero, precision="bf16"), stack=replace(MEGATRON, pads_vocab_to=1)
    ).categories
    each = sum(state[name] for name in ("weights", "gradients", "optimizer")) / num_parameters(LLAMA)
    assert each == pytest.approx(expected, rel=1e-9)


def test_experts_are_cut_by_expert_parallelism_and_their_optimizer_by_what_repeats_them() -> None:
    """Each of 8 ranks of ep holds one of Mixtral's 8 experts; 4 ranks repeat it."""
    model = preset("mixtral-8x7b")
    layout = Layout(dp=32, zero_stage=1, ep=8, precision="bf16")
    state = footprint(model, layout, stack=replace(MEGATRON, pads_vocab_to=1)).categories
    experts = 32 * 8 * 3 * model.moe_intermediate_size * model.hidden_size
    dense = num_parameters(model) - experts
    assert state["weights"] == 2 * (dense + experts / 8)
    assert state["optimizer"] == pytest.approx(12 * (dense / 32 + experts / 8 / 4))


def test_categories_sum_to_what_is_allocated_and_a_table_equals_its_rows() -> None:
    layouts = [
        Layout(dp=8, zero_stage=3, precision="bf16"),
        Layout(dp=8, tp=2, pp=4, zero_stage=1, precision="bf16", recompute="selective"),
        Layout(dp=4, tp=8, pp=2, zero_stage=1, precision="bf16", recompute="full", virtual_stages=4, schedule="interleaved"),
        Layout(pp=8, precision="bf16", recompute="every-k", virtual_stages=2, schedule="interleaved"),
    ]
    for stack in STACKS.values():
        workload = Workload(LLAMA, parse_cluster("64xh100"), 8192, 64, stack)
        table = stage_memory(workload, LayoutTable.of(layouts))
        assert sum(table.categories[name] for name in CATEGORIES) == pytest.approx(table.allocated)
        rows = [stage_memory(workload, LayoutTable.of([layout])).row(0) for layout in layouts]
        assert [row.allocated for row in rows] == pytest.approx(list(table.allocated))
        assert [row.fits for row in rows] == list(table.fits)


@given(
    stack=st.sampled_from(sorted(STACKS)), tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2]),
    dp=st.sampled_from([1, 2, 8, 32]), zero=st.sampled_from([0, 1, 2, 3]), size=st.sampled_from([1, 4]),
    recompute=st.sampled_from(["none", "selective", "full"]), count=st.sampled_from([1, 2, 8]),
    model=st.sampled_from(["llama-3-8b", "mixtral-8x7b"]), axis=st.sampled_from(["tp", "dp", "cp", "pp", "zero_stage", "ep"]),
)  # fmt: skip
@settings(max_examples=150, deadline=None)
def test_memory_rises_with_more_sharding_only_by_buffers_that_sharding_needs(
    stack, tp, pp, dp, zero, size, recompute, count, model, axis
) -> None:
    """A rank's micro-batches stay equal. Sweeps of 40,000 pairs rise by these and nothing else."""
    layout = Layout(dp=dp, tp=tp, pp=pp, zero_stage=zero, precision="bf16", micro_batch_size=size, recompute=recompute)
    now = getattr(layout, axis)
    more = replace(layout, **{axis: min(now + 1, 3) if axis == "zero_stage" else 2 * now})
    if axis == "ep" and (model == "llama-3-8b" or 2 * now > dp * tp):
        return
    fewer, cut = (footprint(preset(model), one, stack=STACKS[stack], micro_batches=count) for one in (layout, more))
    assert cut.allocated - fewer.allocated <= needed(preset(model), layout, axis, stack) + 1


def needed(model: Model, layout: Layout, axis: str, stack: str) -> float:
    """Bytes of what sharding along `axis` needs and one rank less does not."""
    tokens = layout.micro_batch_size * 4096
    weights = layer_weights(model, 0)
    experts = sum(w.numel for w in weights if w.is_expert)  # which tp does not cut
    dense = sum(w.numel for w in weights) - experts
    block = max(dense, 2 * model.vocab_size * model.hidden_size) / layout.tp + experts
    if axis == "ep":  # what comes from other ranks, and again in the order of experts; selective recomputation keeps it
        kept = model.num_hidden_layers if layout.recompute == "selective" else 0
        return (4 + 2 * kept) * tokens * model.num_experts_per_tok * model.hidden_size * 2
    if axis == "tp" and STACKS[stack].kernels.gathers_logits:  # a rank's part beside the whole vocabulary, twice
        return 2 * tokens * model.vocab_size * 4
    reduced = 3 * 4 * block if layout.dp == 1 and STACKS[stack].gathers == "buckets" else 0.0  # one process reduces nothing
    if axis == "cp" and layout.tp > 1 and STACKS[stack].kernels.cross_entropy == "chunked":
        # The loss of few tokens is not made slab by slab of the vocabulary (`kernels.loss.cross_entropy_columns`): gradients
        # whole.
        return reduced + 3 * 2 * model.vocab_size * model.hidden_size / layout.tp
    if axis in ("dp", "cp"):
        return reduced
    if axis == "zero_stage" and STACKS[stack].gathers == "buckets":  # ZeRO 2 reduces with every micro-batch
        return 4 * block
    if axis == "zero_stage" and layout.zero_stage == 2:  # a block gathered, and its gradients on their way out
        return 12 * block
    return 0.0


def peaks(
    layout: Layout, *, stack, layers: int, hidden: int, heads: int, kv_heads: int, ffn: int, vocab: int, count: int, tied=False
):
    """Peaks of the first, a middle and the last rank in GiB."""
    model = Model(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv_heads, head_dim=hidden // heads, max_position_embeddings=4096, tie_word_embeddings=tied,
    )  # fmt: skip
    return footprint(model, layout, stack=stack, micro_batches=count, gpus="8xh100").by_rank / GIB


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "published"), [(4, 1, 2, 66.55), (4, 2, 1, 60.68), (1, 8, 1, 28.3)], ids=["pp2", "tp2", "tp8"]
)  # fmt: skip
def test_megatron_peaks_where_simumax_measured_it(dp: int, tp: int, pp: int, published: float) -> None:
    """Llama-3-70B of 12 layers on 8 B200, Megatron-LM with TE 2.11: largest max_allocated (SimuMax docs/b200, 1.2, 2026)."""
    layout = Layout(dp=dp, tp=tp, pp=pp, zero_stage=1, precision="bf16")
    shape = {"layers": 12, "hidden": 8192, "heads": 64, "kv_heads": 8, "ffn": 28672, "vocab": 128256}
    assert peaks(layout, stack="megatron", count=4, tied=False, **shape).max() == pytest.approx(published, rel=0.01)


@pytest.mark.parametrize(
    ("dp", "tp", "pp", "size", "count", "published"),
    [(1, 8, 2, 32, 32, 60.04), (4, 2, 1, 8, 32, 42.63), (1, 4, 4, 16, 64, 45.99)],
)  # fmt: skip
def test_nanotron_peaks_where_its_logs_say(dp: int, tp: int, pp: int, size: int, count: int, published: float) -> None:
    """The 1B model of huggingface/bench_cluster on H100 (2024): max_allocated of rank 0, which has the most blocks."""
    old = replace(NANOTRON, autograd_gradient_bytes=0, kernels=replace(NANOTRON.kernels, gathers_again=False))
    layout = Layout(dp=dp, tp=tp, pp=pp, zero_stage=1, micro_batch_size=size, precision="bf16")
    shape = {"layers": 24, "hidden": 2048, "heads": 32, "kv_heads": 32, "ffn": 4096, "vocab": 50257}
    assert peaks(layout, stack=old, count=count, tied=True, **shape)[0] == pytest.approx(published, rel=0.01)


def test_what_other_streams_keep_is_reserved_though_not_allocated_at_the_peak() -> None:
    """FSDP's cut gradients come from the reduction's stream: their memory is there at the head's peak, before they are."""
    one = footprint(
        LLAMA,
        Layout(dp=8, zero_stage=3, precision="bf16", micro_batch_size=2),
        stack="torchtitan",
        length=8192,
        micro_batches=1,
    )
    assert one.phase == "head backward" and one.categories["gradients"] == 0
    assert one.reserved > one.allocated + num_parameters(LLAMA) * 4 / 8


def test_offloading_takes_activations_and_optimizer_state_from_the_device() -> None:
    layout = Layout(dp=8, zero_stage=1, precision="bf16")
    plain, none = (
        footprint(LLAMA, one, stack="megatron")
        for one in (layout, replace(layout, offload_activations=True, offload_optimizer=True))
    )
    assert none.categories["optimizer"] == 0 and none.categories["activations"] < plain.categories["activations"] / 4


def test_a_layout_that_needs_more_than_the_device_has_does_not_fit() -> None:
    layout = Layout(dp=8, zero_stage=1, precision="bf16")
    assert not footprint(LLAMA, layout, stack="megatron", gpus="8xa100-40").fits
    assert footprint(LLAMA, replace(layout, recompute="full"), stack="megatron", gpus="8xh200").fits


def test_multi_token_prediction_keeps_a_projection_a_second_loss_and_in_a_pipeline_an_embedding() -> None:
    """DeepSeek-V3's one block more (section 2.2) beside a model whose last block is an ordinary one."""
    with_it = preset("deepseek-v3")
    one_more = replace(with_it, num_nextn_predict_layers=0, num_hidden_layers=with_it.num_hidden_layers + 1)
    stack = replace(MEGATRON, pads_vocab_to=1)
    whole = Layout(dp=64, ep=64, zero_stage=1, precision="bf16")
    d, vocab = with_it.hidden_size, with_it.vocab_size
    for layout, shared in ((whole, 0), (replace(whole, pp=2), vocab * d)):
        workloads = [Workload(model, parse_cluster("128xh100"), 4096, 256, stack) for model in (with_it, one_more)]
        weights = [rank_weights(workload, layout) for workload in workloads]
        assert weights[0] - weights[1] == 2 * (2 * d * d + 3 * d + shared)  # in bf16
    logits = 4096 * vocab * 2
    peaks = [footprint(model, whole, stack=stack).by_rank[0] for model in (with_it, one_more)]
    state = (2 + 4 + 12 / 64) * (2 * d * d + 3 * d)
    assert peaks[0] - peaks[1] - state == pytest.approx(logits, rel=0.2)


def rank_weights(workload: Workload, layout: Layout) -> float:
    """Bytes of weights on the last rank of the pipeline."""
    table = LayoutTable.of([layout])
    state = rank_state(workload, table, partition_stages(workload, table), np.array([4]))
    return float(state.weights[-1 if layout.pp > 1 else 0, 0])


@pytest.mark.parametrize(
    ("zero", "ep", "most"), [(2, 1, 1.01), (3, 1, 1.01), (1, 2, 1.05), (3, 2, 1.5), (3, 4, 1.4), (2, 8, 1.05)]
)
def test_experts_fewer_than_ranks_are_held_in_equal_shares(zero, ep: int, most: float) -> None:
    """Eight experts over 64 ranks: each holds rows of one. With ep they are buckets of their own, of which more are taken to be
    there at once than are."""
    model = replace(preset("mixtral-8x7b"), num_hidden_layers=4)
    layout = Layout(dp=64, ep=ep, zero_stage=zero, recompute="full")
    ours = footprint(model, layout, micro_batches=2).allocated
    exact = plan_memory(model, layout, sequence_length=4096, sequences_per_batch=128)
    assert 0.99 < ours / exact.peak.total < most
    assert exact.between_steps.total == pytest.approx(12 * num_parameters(model) / 64, rel=0.001)


@pytest.mark.parametrize(("zero", "dp"), [(0, 8), (1, 8), (2, 8), (3, 2)])
def test_deepspeed_casts_the_gradients_that_a_rank_updates_to_fp32(zero, dp: int) -> None:
    """stage_1_and_2.py casts those of a whole shard at once, stage3.py those of a sub-group of at most a billion."""
    layout = Layout(dp=dp, zero_stage=zero, recompute="full", precision="bf16")
    with_copies = footprint(LLAMA, layout, stack="deepspeed", length=256, micro_batches=1)  # an update needs most
    updated = num_parameters(LLAMA) / (dp if zero else 1)
    assert with_copies.categories["buffers"] == pytest.approx(4 * min(updated, 1e9 if zero == 3 else updated), rel=0.01)
    in_host = replace(layout, offload_optimizer=True)
    without = footprint(LLAMA, in_host, stack="deepspeed", length=256, micro_batches=1)
    assert without.categories["buffers"] < 0.6 * with_copies.categories["buffers"]
    played = plan_memory(LLAMA, in_host, sequence_length=256, sequences_per_batch=dp, stack=STACKS["deepspeed"])
    assert without.allocated == pytest.approx(played.peak.total, rel=0.05)


@pytest.mark.parametrize(("zero", "expected"), [(0, 6), (1, 6), (2, 4 / 8)])
def test_bloom_s_optimizer_holds_sums_in_fp32_beside_gradients_in_bf16(zero, expected: float) -> None:
    one = footprint(LLAMA, Layout(dp=8, zero_stage=zero, recompute="full", precision="bf16"), stack="megatron-deepspeed")
    assert one.categories["gradients"] == pytest.approx(expected * num_parameters(LLAMA), rel=0.01)
