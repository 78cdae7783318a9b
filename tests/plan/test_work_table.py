"""The table of work under every axis, against published formulas and against itself: ranks do together what one does alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.catalogue.stacks.stack import Kernels
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import layer_weights
from ultrascale.plan.columns.block_memory import block_memory
from ultrascale.work.recompute import recompute_of_mode, saved_bytes_by_kind
from ultrascale.work.work import Shape, block_work, embedding_work, head_work

GPT3 = Model(
    vocab_size=51200, hidden_size=12288, intermediate_size=4 * 12288, num_hidden_layers=96, num_attention_heads=96,
    num_key_value_heads=96, head_dim=128, max_position_embeddings=2048, model_type="gpt2", norm="layernorm", gated_mlp=False,
    position_embedding="learned", qkv_bias=True, attention_output_bias=True, mlp_bias=True,
)  # fmt: skip
MT_NLG = replace(
    GPT3, hidden_size=20480, intermediate_size=4 * 20480, num_attention_heads=128, num_key_value_heads=128, head_dim=160
)
OLD = replace(STACKS["megatron"], kernels=Kernels("unfused", attention="math", dropout=True, masks_in_kernel=True))
"""Megatron of 2022: scores in memory, dropout after attention and MLP."""
NORM_BYTES = 16
"""Mean and 1 / deviation of two norms in fp32, for each token outside tensor-parallel regions: the formulas leave them out."""
LLAMA = preset("llama-3-8b")
MEGATRON = STACKS["megatron"]
EXPERTS = ("mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "deepseek-v3", "gpt-oss-20b", "olmoe-1b-7b")


def saved(model: Model, batch: int, *, tp: int = 1, sequence_parallel: bool = False, recompute="none") -> int:
    shape = Shape(batch, 2048, "bf16", device="cuda", tp=tp, sequence_parallel=sequence_parallel, kernels=OLD.kernels)
    return block_memory(model, 0, shape, recompute=recompute, stack=OLD).saved_bytes


def test_layernorm_is_one_kernel_in_programs_that_fuse_nothing():
    """torch's layer_norm saves its input and two numbers a row; an RMSNorm of single operations an fp32 copy."""
    one, many = (Shape(1, 2048, "bf16", device="cuda", kernels=Kernels(norm=norm)) for norm in (True, False))
    assert block_work(GPT3, 0, one) == block_work(GPT3, 0, many)
    assert block_work(LLAMA, 0, one) != block_work(LLAMA, 0, many)


@pytest.mark.parametrize("model", [GPT3, MT_NLG])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_a_block_keeps_what_korthikanti_et_al_say_byte_by_byte(model: Model, tp: int) -> None:
    """arXiv 2205.05198, table 2: s b h (10 + 24/t + 5 a s / (h t)), all of it over t with sequence parallelism."""
    s, b, h, a = 2048, 4, model.hidden_size, model.num_attention_heads
    scores = 5 * a * s * s * b
    assert saved(model, b, tp=tp) == s * b * h * 10 + (s * b * h * 24 + scores) // tp + NORM_BYTES * s * b
    assert saved(model, b, tp=tp, sequence_parallel=True) == (s * b * h * 34 + scores + NORM_BYTES * s * b) // tp


@pytest.mark.parametrize("tp", [1, 8])
def test_recomputing_attention_leaves_34_sbh_and_recomputing_blocks_2_sbh(tp: int) -> None:
    s, b, h = 2048, 4, GPT3.hidden_size
    selective = saved(GPT3, b, tp=tp, sequence_parallel=True, recompute="selective")
    full = saved(GPT3, b, tp=tp, sequence_parallel=True, recompute="full")
    assert (selective, full) == (s * b * (34 * h + NORM_BYTES) // tp, 2 * s * b * h // tp)


@pytest.mark.parametrize(("model", "percent"), [(GPT3, 70), (MT_NLG, 65)])
def test_recomputing_attention_saves_the_share_that_the_paper_prints(model: Model, percent: int) -> None:
    """Section 5: 70 percent of activation memory for GPT-3, 65 for MT-NLG 530B."""
    share = 1 - saved(model, 1, recompute="selective") / saved(model, 1)
    assert round(100 * share) == percent


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", ["llama-3-8b", *EXPERTS])
def test_a_block_gives_back_all_it_took(name: str, recompute) -> None:
    """Peaks hold what is saved, and the backward pass needs no less than the gradient of the residual stream beside it."""
    model = preset(name)
    shape = Shape(2, 4096, "bf16", device="cuda", kernels=MEGATRON.kernels)
    block = block_memory(model, model.num_hidden_layers - 1, shape, recompute=recompute, stack=MEGATRON)
    hidden = 2 * 4096 * model.hidden_size * 2
    layer = model.num_hidden_layers - 1
    recomputation = recompute_of_mode(recompute, model, layer, shape, MEGATRON)
    by_kind = saved_bytes_by_kind(block_work(model, layer, shape), recomputation, hidden, MEGATRON.selective)
    assert sum(by_kind.values()) == block.saved_bytes
    assert block.forward_peak_bytes >= block.saved_bytes and block.backward_peak_bytes >= block.saved_bytes + hidden


@pytest.mark.parametrize("kernels", [Kernels(), MEGATRON.kernels, STACKS["nanotron"].kernels, STACKS["torchtitan"].kernels])
@pytest.mark.parametrize("name", ["llama-3-8b", "qwen3-8b", *EXPERTS])
def test_every_weight_of_every_kind_of_block_belongs_to_an_operation(name: str, kernels: Kernels) -> None:
    model = preset(name)
    for layer in {0, model.num_hidden_layers - 1}:
        prefix = len(f"layers.{layer}.")
        named = {
            one for op in block_work(model, layer, Shape(1, 64, "bf16", device="cuda", kernels=kernels)) for one in op.weights
        }
        assert named == {weight.name[prefix:] for weight in layer_weights(model, layer)}


@given(
    name=st.sampled_from(["llama-3-8b", "mixtral-8x7b", "deepseek-v3"]), tp=st.sampled_from([1, 2, 4, 8]),
    cp=st.sampled_from([1, 2, 4]), method=st.sampled_from(["ring", "all-gather", "all-to-all"]), sp=st.booleans(),
)  # fmt: skip
@settings(max_examples=60, deadline=None)
def test_ranks_of_tp_and_cp_compute_together_what_one_computes_alone(name: str, tp: int, cp: int, method, sp: bool) -> None:
    """Latent attention's narrow projections and the router are on every rank of tp, unless the sequence is cut."""
    model = preset(name)
    layer = model.num_hidden_layers - 1
    whole = Shape(1, 4096, "bf16", device="cuda", kernels=MEGATRON.kernels)
    part = replace(whole, tp=tp, cp=cp, cp_method=method, sequence_parallel=sp)
    alone, each = (sum(op.flops for op in block_work(model, layer, shape)) for shape in (whole, part))
    narrow = sum(
        op.flops for op in block_work(model, layer, whole) if op.makes[0].name in ("q_latent", "kv_latent", "router_logits")
    )
    assert each * tp * cp == alone + (0 if sp else (tp - 1) * narrow)


@pytest.mark.parametrize("name", ["llama-3-8b", *EXPERTS])
def test_products_have_the_flops_of_their_operations(name: str) -> None:
    model = preset(name)
    shape = Shape(2, 4096, "bf16", device="cuda", tp=2, cp=2, ep=4, kernels=MEGATRON.kernels)
    ops = [op for layer in {0, model.num_hidden_layers - 1} for op in block_work(model, layer, shape) if op.kind == "matmul"]
    assert all(op.product is not None for op in ops)
    assert [op.flops for op in ops] == pytest.approx([2 * o.m * o.n * o.k * o.count for o in (op.product for op in ops) if o])


def sent(model: Model, shape: Shape, axis: str) -> list[tuple[str, int, str]]:
    layer = model.num_hidden_layers - 1
    return [(c.kind, c.num_bytes, c.when) for op in block_work(model, layer, shape) for c in op.collectives if c.axis == axis]


def test_tensor_parallel_ranks_reduce_twice_forward_and_twice_backward() -> None:
    """Shoeybi et al. 2019, section 3; with sequence parallelism (Korthikanti et al. 2022, section 4.2.2) an all-reduce is a
    reduce-scatter and an all-gather, and inputs that are kept cut are gathered once more."""
    whole = 2 * 4096 * LLAMA.hidden_size * 2
    plain = Shape(2, 4096, "bf16", device="cuda", tp=4, sequence_parallel=False, kernels=MEGATRON.kernels)
    assert sorted(sent(LLAMA, plain, "tp")) == sorted([("all_reduce", whole, "forward"), ("all_reduce", whole, "backward")] * 2)
    cut = sent(LLAMA, replace(plain, sequence_parallel=True), "tp")
    counts = {(kind, when): cut.count((kind, whole, when)) for kind, _, when in cut}
    assert counts == {
        ("all_gather", "forward"): 2, ("reduce_scatter", "forward"): 2,
        ("all_gather", "backward"): 4, ("reduce_scatter", "backward"): 2,
    }  # fmt: skip


def test_context_parallel_ranks_send_keys_and_values_or_swap_heads() -> None:
    shape = Shape(1, 8192, "bf16", device="cuda", cp=4, kernels=MEGATRON.kernels)
    both = 8192 * 2 * LLAMA.key_value_size * 2
    ring = [("all_gather", both, "forward"), ("all_gather", both, "backward"), ("reduce_scatter", both, "backward")]
    assert sent(LLAMA, shape, "cp") == ring
    swaps = sent(LLAMA, replace(shape, cp_method="all-to-all"), "cp")
    widths = [LLAMA.query_size, LLAMA.key_value_size, LLAMA.key_value_size, LLAMA.query_size]
    assert [one[1] for one in swaps if one[2] == "forward"] == [2048 * width * 2 for width in widths]
    assert [one[0] for one in swaps] == ["all_to_all"] * 8


def test_rings_of_ranks_that_swap_heads_send_both() -> None:
    """Fang and Zhao 2024 (USP): (h-1)/h (2Q + C) among h neighbours, C of each of the n/h places of the ring."""
    shape = Shape(1, 8192, "bf16", device="cuda", cp=8, cp_method="ring+all-to-all", cp_heads=4, kernels=MEGATRON.kernels)
    tokens, both = 8192 // 8, 2 * LLAMA.key_value_size * 2
    traffic = sent(LLAMA, shape, "cp")
    forward = [(kind, num_bytes) for kind, num_bytes, when in traffic if when == "forward"]
    widths = [LLAMA.query_size, LLAMA.key_value_size, LLAMA.key_value_size]
    swapped = [("all_to_all", tokens * width * 2) for width in widths]
    assert forward == [*swapped, ("all_gather", 2 * tokens * both), ("all_to_all", tokens * LLAMA.query_size * 2)]
    scores = next(op.scores for op in block_work(LLAMA, 0, shape) if op.scores)
    assert (scores.heads, scores.key_value_heads, scores.queries, scores.keys) == (8, 2, 4096, 8192)


def test_heads_of_keys_go_to_every_rank_whose_queries_read_them() -> None:
    """Eight heads of keys over 32 ranks: each of them to four, so that keys and values are sent four times over."""
    shape = Shape(1, 8192, "bf16", device="cuda", cp=32, cp_method="all-to-all", kernels=MEGATRON.kernels)
    keys = [num_bytes for kind, num_bytes, when in sent(LLAMA, shape, "cp") if when == "forward"][1]
    assert keys == 4 * (8192 // 32) * LLAMA.key_value_size * 2


def test_gradients_of_keys_travel_in_fp32_where_the_trainer_says_so() -> None:
    shape = Shape(1, 8192, "bf16", device="cuda", cp=4)
    whole = 8192 * 2 * LLAMA.key_value_size * 2
    for stack, widened in (("ultrascale", 2), ("torchtitan", 2), ("megatron", 1)):
        found = sent(LLAMA, replace(shape, kernels=STACKS[stack].kernels), "cp")
        assert found[-1] == ("reduce_scatter", widened * whole, "backward"), stack


def test_every_token_goes_to_its_experts_and_back() -> None:
    model = preset("mixtral-8x7b")
    shape = Shape(1, 4096, "bf16", device="cuda", ep=8, kernels=MEGATRON.kernels)
    copies = 4096 * model.num_experts_per_tok * model.hidden_size * 2
    assert sorted(sent(model, shape, "ep")) == sorted(
        [("all_to_all", copies, "forward"), ("all_to_all", copies, "backward")] * 2
    )
    busiest = replace(shape, expert_imbalance=1.5)
    assert {one[1] for one in sent(model, busiest, "ep")} == {copies * 3 // 2}


def test_the_vocabulary_is_cut_over_tp() -> None:
    shape = Shape(1, 4096, "bf16", device="cuda", tp=8, kernels=MEGATRON.kernels)
    project = next(op for op in head_work(LLAMA, shape) if op.name == "lm_head")
    assert project.product == (4096, LLAMA.vocab_size // 8, LLAMA.hidden_size, 1)
    small = [c for op in head_work(LLAMA, shape) for c in op.collectives if c.kind == "all_reduce"]
    assert [c.num_bytes for c in small] == [4096 * 4] * 3
    assert [c.kind for op in embedding_work(LLAMA, shape) for c in op.collectives] == ["reduce_scatter", "all_gather"]


def test_a_chunked_loss_of_others_computes_its_logits_once_and_keeps_none() -> None:
    """torchtitan 0.3 (ChunkedLossWrapper) and Liger go by rows; ours goes by slabs of the vocabulary where rows are many."""
    model, rows = preset("llama-3-8b"), 65_536

    def head(kernels: Kernels):
        return head_work(model, Shape(1, rows, "bf16", device="cuda", kernels=kernels))

    ours, theirs, whole = (head(kernels) for kernels in (Kernels(), STACKS["torchtitan-2026"].kernels, MEGATRON.kernels))
    product, logits = rows * model.vocab_size * model.hidden_size, rows * model.vocab_size * 2
    assert (ours[-1].flops, theirs[-1].flops) == (8 * product, 6 * product)
    assert theirs[-1].scratch_bytes + sum(kept.num_bytes for kept in theirs[-1].makes) < logits / 2
    assert any(kept.num_bytes == logits for op in whole for kept in op.makes)
