"""Modules recomputed by name: gradients bit by bit those of none, bytes and products those that are planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree.axes import Case
from agree.layouts import EXPERTS, MODEL
from agree.small_models import DEMO, LATENT, LLAMA, WITH_EXPERTS
from agree.small_models import FAMILIES as DENSE
from agree.test_axes_memory_agrees import differences
from agree.test_memory_agrees import difference_percent
from agree.test_recompute_agrees import backward

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.plan.memory.replay import rank_shape
from ultrascale.work.recompute import available_modules, recomputed_ops, resolved
from ultrascale.work.work import block_work

FAMILIES = {
    "llama": LLAMA,
    "post-norm": DENSE["post-norm"],
    "gemma": DENSE["gemma"],
    "latent": LATENT,
    "qwen3-moe": WITH_EXPERTS["qwen3-moe"],
    "gpt-oss": WITH_EXPERTS["gpt-oss"],
    "deepseek-v3": WITH_EXPERTS["deepseek-v3"],
}
OF_EXPERTS = replace(
    WITH_EXPERTS["deepseek-v3"], vocab_size=4096, hidden_size=128, moe_intermediate_size=64, max_position_embeddings=256
)


def ways(model: Model) -> list[str]:
    """Each module of a model alone, all of them, all that do not hold others, and what it chooses."""
    modules = available_modules(model)
    return [
        *modules,
        "+".join(modules),
        "+".join(name for name in modules if name not in ("moe", "mlp", "shared_experts")),
        "selective",
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_the_same_bits_and_products_are_the_planned_ones_whatever_is_named(family: str) -> None:
    model = FAMILIES[family]
    plain, without = backward(model, Layout())
    for mode in ways(model):
        layout = Layout(recompute=mode)
        again, flops = backward(model, layout)
        assert all(torch.equal(one, other) for one, other in zip(plain, again, strict=True)), mode
        shape = replace(rank_shape(layout, 64, documents=False, device="cpu"), micro_batch_size=2)
        planned = sum(
            op.flops
            for layer in range(model.num_hidden_layers)
            for op in recomputed_ops(
                resolved(layout.block_recompute(layer), model, layer, layout),
                block_work(model, layer, shape),
                reruns_last=False,
            )
            if op.kind != "attention"
        )
        assert flops - without == planned, mode


@pytest.mark.parametrize("mode", ways(DEMO))
def test_the_planned_peak_of_one_process_is_the_measured_one(mode: str) -> None:
    layout = Layout(recompute=mode, micro_batch_size=2)
    assert abs(difference_percent(DEMO, layout, 128, 1)) < 0.05


@pytest.mark.parametrize("mode", ways(OF_EXPERTS))
def test_the_planned_peak_of_experts_and_latents_is_the_measured_one(mode: str) -> None:
    assert abs(difference_percent(OF_EXPERTS, Layout(recompute=mode, micro_batch_size=2), 128, 1)) < 0.2


@pytest.mark.parametrize("sequence_parallel", [True, False])
def test_every_rank_of_tp_peaks_at_the_planned_bytes_when_modules_are_named(sequence_parallel: bool) -> None:
    blocks = ("norm+mlp", "norm+mlp_act+core_attn", "core_attn", "selective")[: MODEL.num_hidden_layers]
    layout = Layout(recompute="blocks", recompute_blocks=blocks, tp=2, micro_batch_size=4, sequence_parallel=sequence_parallel)
    found = differences(Case(MODEL, layout, num_micro_batches=1))
    assert max(map(abs, found)) < 3.0, found


@pytest.mark.parametrize("mode", ["norm+moe_act", "moe"])
def test_every_rank_of_a_pipeline_of_experts_peaks_at_the_planned_bytes_by_modules(mode: str) -> None:
    layout = Layout(recompute=mode, pp=2, micro_batch_size=4)
    found = differences(Case(EXPERTS, layout, num_micro_batches=4))
    assert max(map(abs, found)) < 3.0, found
