"""Blocks recomputed each in its way: gradients bit by bit those of none, bytes and products those that are planned."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from agree.axes import Case
from agree.layouts import EXPERTS, MODEL
from agree.small_models import DEMO, LATENT, LLAMA, WITH_EXPERTS, batch_of
from agree.small_models import FAMILIES as DENSE
from agree.test_axes_memory_agrees import differences
from agree.test_axes_work_agrees import COUNTED
from agree.test_memory_agrees import difference_percent
from torch.utils.flop_counter import FlopCounterMode

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.recomputed import KINDS, mode_name
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.plan.memory.replay import rank_shape
from ultrascale.work.recompute import recomputed_ops
from ultrascale.work.work import block_work, work

FAMILIES = {
    "llama": LLAMA,
    "post-norm": DENSE["post-norm"],
    "gemma": DENSE["gemma"],
    "latent": LATENT,
    "qwen3-moe": WITH_EXPERTS["qwen3-moe"],
    "deepseek-v3": WITH_EXPERTS["deepseek-v3"],
}
SINGLE = [mode_name([kind]) for kind in KINDS]


def told(model: Model, *modes: str) -> Layout:
    """A layout whose blocks take these ways in turn."""
    blocks = tuple(modes[layer % len(modes)] for layer in range(model.num_hidden_layers))
    return Layout(recompute="blocks", recompute_blocks=blocks)


def backward(model: Model, layout: Layout) -> tuple[list[torch.Tensor], int]:
    """Gradients of one micro-batch, and the FLOPs that torch counted for them."""
    torch.manual_seed(0)
    decoder = Decoder(model)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    apply_recompute(decoder, layout)
    torch.manual_seed(1)
    with FlopCounterMode(display=False, custom_mapping=COUNTED) as counter:
        decoder(**batch_of(model, 2, 64, documents=False)).backward()
    gradients = [parameter.grad for parameter in decoder.parameters() if parameter.grad is not None]
    attention = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" in str(op))
    return gradients, counter.get_total_flops() - attention


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_bits_and_products_are_the_planned_ones_whatever_is_computed_again(family: str) -> None:
    model = FAMILIES[family]
    plain, without = backward(model, Layout())
    for mode in ("full", *SINGLE, mode_name(KINDS)):
        layout = told(model, mode, "none")
        again, flops = backward(model, layout)
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True)), mode
        shape = rank_shape(layout, 64, documents=False, device="cpu")
        shape = replace(shape, micro_batch_size=2)
        planned = sum(
            op.flops
            for layer in range(model.num_hidden_layers)
            for op in recomputed_ops(
                layout.block_recompute(layer), block_work(model, layer, shape), reruns_last=model.is_moe(layer)
            )
            if op.kind != "attention"
        )
        assert flops - without == planned, mode


@pytest.mark.parametrize("kinds", [some for size in (1, 3) for some in combinations(KINDS[:5], size)], ids="+".join)
def test_the_planned_peak_of_one_process_is_the_measured_one_for_every_set_of_kinds(kinds: tuple[str, ...]) -> None:
    layout = replace(told(DEMO, mode_name(kinds), "full", mode_name(kinds), "none"), micro_batch_size=2)
    assert abs(difference_percent(DEMO, layout, 128, 1)) < 0.05


def test_the_planned_peak_of_experts_whose_products_are_computed_again_is_the_measured_one() -> None:
    model = replace(
        WITH_EXPERTS["deepseek-v3"], vocab_size=4096, hidden_size=128, moe_intermediate_size=64, max_position_embeddings=256
    )
    for mode in ("selective+experts", mode_name(KINDS)):
        assert abs(difference_percent(model, replace(told(model, mode), micro_batch_size=2), 128, 1)) < 0.2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_rank_of_tp_peaks_at_the_planned_bytes_when_kinds_are_computed_again(sequence_parallel: bool) -> None:
    layout = replace(
        told(MODEL, mode_name(KINDS), "selective+mlp"), tp=2, micro_batch_size=4, sequence_parallel=sequence_parallel
    )
    found = differences(Case(MODEL, layout, num_micro_batches=1))
    assert max(map(abs, found)) < 3.0, found  # seen: 2.5 where sequences stay whole and the last product's result is kept


def test_every_rank_of_a_pipeline_of_experts_peaks_at_the_planned_bytes_block_by_block() -> None:
    layout = replace(told(EXPERTS, "full", mode_name(KINDS)), pp=2, micro_batch_size=4)
    found = differences(Case(EXPERTS, layout, num_micro_batches=4))
    assert max(map(abs, found)) < 3.0, found


def test_the_table_saves_a_block_of_every_set_of_kinds_what_its_results_take() -> None:
    shape = rank_shape(Layout(micro_batch_size=2), 128, documents=False, device="cpu")
    names = {op.name: op.recompute_kind for _, op in work(DEMO, shape) if op.recompute_kind}
    assert names == {
        "self_attn.q_proj": "qkv", "self_attn.k_proj": "qkv", "self_attn.v_proj": "qkv", "self_attn.core": "attention",
        "self_attn.o_proj": "output", "mlp.gate_proj": "mlp", "mlp.up_proj": "mlp", "mlp.down_proj": "down",
    }  # fmt: skip
