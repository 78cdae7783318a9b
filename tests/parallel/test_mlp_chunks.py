"""mlp_chunks: feed-forward layers a piece at a time give the gradients of whole ones, in the memory that is planned."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import MODEL
from agree.small_models import DEMO, FAMILIES, LLAMA, WITH_EXPERTS, batch_of
from agree.test_memory_agrees import difference_percent
from ranks import run_ranks
from torch.utils.flop_counter import FlopCounterMode

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.rules.run_rules import parallelism_problems
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.measure.memory import LiveMemory
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.mlp_chunks import apply_mlp_chunks
from ultrascale.parallel.share import local
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.work.work import Shape, work


def backward(model: Model, chunks: int, dtype: torch.dtype = torch.float64) -> tuple[float, list[torch.Tensor], int]:
    """Loss, gradients, and the FLOPs that torch counted for them."""
    torch.manual_seed(0)
    decoder = Decoder(model).to(dtype)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.05)
    apply_mlp_chunks(decoder, Layout(mlp_chunks=chunks))
    torch.manual_seed(1)
    with FlopCounterMode(display=False) as counter:
        loss = decoder(**batch_of(model, 3, 32, documents=False))
        loss.backward()
    return float(loss.detach()), [one.grad for one in decoder.parameters() if one.grad is not None], counter.get_total_flops()


GPT_OSS_LIKE = replace(LLAMA, mlp_bias=True)
MODELS = {"llama": LLAMA, "gpt2": FAMILIES["gpt2"], "bias": GPT_OSS_LIKE, "some dense": WITH_EXPERTS["deepseek-v3"]}


@pytest.mark.parametrize("chunks", [2, 5, 1000])
@pytest.mark.parametrize("family", MODELS)
def test_pieces_give_the_loss_and_the_gradients_of_the_whole(family: str, chunks: int) -> None:
    loss, whole, _ = backward(MODELS[family], 1)
    in_pieces, found, _ = backward(MODELS[family], chunks)
    assert in_pieces == pytest.approx(loss, rel=1e-14)
    for one, other in zip(whole, found, strict=True):
        assert torch.allclose(one, other, rtol=1e-11, atol=1e-12)


def test_narrow_gradients_are_summed_over_pieces_in_fp32() -> None:
    _, exact, _ = backward(LLAMA, 1)
    _, whole, _ = backward(LLAMA, 1, torch.bfloat16)
    _, pieces, _ = backward(LLAMA, 24, torch.bfloat16)

    def error(found: list[torch.Tensor]) -> float:
        return sum(float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True))

    assert error(pieces) < 1.1 * error(whole)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_torch_counts_the_flops_of_the_table(family: str) -> None:
    model, shape = MODELS[family], Shape(3, 32, mlp_chunks=4)
    _, _, flops = backward(model, 4, torch.float32)
    table = sum(op.flops + op.backward_flops for _, op in work(model, shape) if op.kind != "attention")
    # FlopCounterMode counts no `addmm_`: the head's gradient, here all sums over pieces, and of a pair the second's input.
    head = 2 * shape.num_tokens * model.vocab_size * model.hidden_size
    product = 2 * shape.num_tokens * model.hidden_size * model.intermediate_size
    in_place = 4 if model.gated_mlp else 2
    assert flops == table - head - model.num_hidden_layers * in_place * product


LAYOUTS = {
    "ZeRO 3, bf16": Layout(dp=2, zero_stage=3, precision="bf16"),
    "ZeRO 2": Layout(dp=2, zero_stage=2, precision="fp64", recompute="full"),
    "cp": Layout(cp=2, precision="fp64"),
    "pp": Layout(pp=2, precision="fp64", offload_activations=True),
    "bf16 on one rank": Layout(precision="bf16"),
}  # fmt: skip


def gradients_of(rank: int, case: Case) -> list[torch.Tensor]:
    step = RankStep(case, rank)
    step.train(step.batches())
    return [local(one.grad).clone() for one in step.share.parameters() if one.grad is not None]


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_every_rank_has_the_gradients_of_whole_layers(layout: Layout) -> None:
    count = 4 if layout.pp > 1 else 2
    cases = [Case(MODEL, replace(layout, micro_batch_size=2, mlp_chunks=chunks), num_micro_batches=count) for chunks in (1, 3)]
    whole, pieces = (run_ranks(layout.world_size, gradients_of, case) for case in cases)
    tolerance = 1e-11 if layout.precision == "fp64" else 2e-2
    for expected, found in zip(whole, pieces, strict=True):
        assert all(float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-12 for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "none"), ("bf16", "full")])
def test_the_planned_peak_is_the_measured_one(precision, recompute) -> None:
    model = replace(DEMO, intermediate_size=2048, vocab_size=512)
    layout = Layout(micro_batch_size=8, precision=precision, recompute=recompute, mlp_chunks=8)
    assert abs(difference_percent(model, layout, 128, 2)) < 1.0


def test_wide_activations_never_exist_whole() -> None:
    model, peaks = replace(DEMO, intermediate_size=2048, vocab_size=512), []
    for chunks in (1, 8):
        case = Case(model, Layout(micro_batch_size=8, mlp_chunks=chunks), length=128, num_micro_batches=1)
        step = RankStep(case, 0)
        with LiveMemory(step.share.decoder) as memory:
            step.train(step.batches())
        planned = plan_memory(model, case.layout, sequence_length=128, sequences_per_batch=8, device="cpu")
        assert sum(planned.saved_by_layer[0].values()) < 11.2e6 or chunks == 1
        peaks.append(memory.peak.total)
    wide = 4 * 3 * 2048 * 8 * 128 * model.num_hidden_layers
    assert peaks[0] - peaks[1] > 0.8 * wide


def test_the_planner_prices_gate_and_up_a_second_time_and_less_memory() -> None:
    workload = Workload(PRESETS["llama-3-8b"], parse_cluster("8xh100"), 65536, 8)
    layout = Layout(dp=8, zero_stage=3, precision="bf16", recompute="full")
    whole, pieces = (predict(workload, replace(layout, mlp_chunks=chunks)) for chunks in (1, 16))
    assert pieces.memory.allocated < 0.85 * whole.memory.allocated
    assert 1.0 < pieces.step_seconds / whole.step_seconds < 1.25


def test_what_pieces_do_not_go_with_is_refused() -> None:
    for layout in (Layout(tp=2), Layout(recompute="selective"), Layout(pp=2, schedule="zb-h1")):
        with pytest.raises(SpecError, match=r"layout\.mlp_chunks"):
            expect_trainable(MODEL, replace(layout, mlp_chunks=2))
    (problem,) = parallelism_problems(WITH_EXPERTS["mixtral"], Layout(mlp_chunks=2))
    assert problem.key == "layout.mlp_chunks" and "no dense" in problem.rule
