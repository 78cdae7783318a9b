"""The CPU's claims again on one CUDA device, at small sizes: python -m pytest -m gpu."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.oracle.reference import Reference
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout, Precision
from ultrascale.description.run import Batch, Data, Log, Run
from ultrascale.kernels.attention.attention_core import attention, attention_mask
from ultrascale.kernels.loss.cross_entropy import linear_cross_entropy
from ultrascale.kernels.rotary import rotary_angles
from ultrascale.parallel.mesh import process_group
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.train.start.deterministic import deterministic
from ultrascale.train.step import StepResult
from ultrascale.train.trainer import Trainer

pytestmark = pytest.mark.gpu

LLAMA = Model(
    vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=32, max_position_embeddings=256,
)  # fmt: skip


def run_with(precision: Precision = "fp32", *, data: Data | None = None, compiled: bool = False, **layout: Any) -> Run:
    return Run(
        LLAMA, device="cuda", compile=compiled, layout=Layout(micro_batch_size=2, precision=precision, **layout),
        batch=Batch(128, 4), data=data or Data(), log=Log(memory_steps=0),
    )  # fmt: skip


def loader_of(run: Run) -> RandomDocuments:
    return RandomDocuments(
        sequence_length=run.batch.sequence_length, vocab_size=run.model.vocab_size, seed=1, document_mask=run.data.document_mask
    )


def train(run: Run, steps: int = 3) -> list[StepResult]:
    with process_group(run.layout, device=run.device) as ranks:
        trainer = Trainer(run, ranks, loader_of(run))
        return [trainer.train_step() for _ in range(steps)]


def test_rotary_positions_are_the_cpus_to_the_last_bits_of_fp32():
    positions = torch.arange(4096)
    there, here = (rotary_angles(LLAMA, positions.to(device), torch.float32) for device in ("cuda", "cpu"))
    for one, other in zip(there, here, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0.0, atol=2e-7)


@pytest.mark.usefixtures("angles_of_the_cpu")
@pytest.mark.parametrize("recompute", ["none", "selective", "full", "every-k"])
@pytest.mark.parametrize("documents", [True, False])
def test_fp64_training_on_cuda_equals_the_reference(documents, recompute):
    run = run_with("fp64", recompute=recompute, data=Data(document_mask=documents))
    found = train(run)
    reference = Reference(run, loader_of(run))
    for result in found:
        expected = reference.train_step()
        assert result.gradients.loss == pytest.approx(expected.loss, rel=1e-11)
        assert result.gradients.norm == pytest.approx(expected.norm, rel=1e-11)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_bf16_training_stays_near_the_reference(recompute, compiled):
    run = run_with("bf16", recompute=recompute, compiled=compiled)
    found = train(run)
    reference = Reference(replace(run, layout=replace(run.layout, precision="fp64")), loader_of(run))
    for result in found:
        expected = reference.train_step()
        assert result.gradients.loss == pytest.approx(expected.loss, rel=5e-3)
        assert result.gradients.norm == pytest.approx(expected.norm, rel=5e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_the_copies_that_compute_in_bf16_follow_the_fused_update(compiled):
    run = run_with("bf16", compiled=compiled)
    tokens = torch.arange(128, device=run.device)[None]
    with process_group(run.layout, device=run.device) as ranks:
        trainer = Trainer(run, ranks, loader_of(run))
        for _ in range(2):
            before = [parameter.detach().clone() for parameter in trainer.decoder.parameters()]
            trainer.train_step()
            with torch.no_grad():
                trainer.decoder(tokens, targets=tokens)  # copies are filled as a forward pass begins
            after, copies = list(trainer.decoder.parameters()), computing_copies(trainer.decoder)
            assert {parameter.dtype for parameter in after} == {torch.float32} and len(copies) == len(after)
            assert not any(torch.equal(old, new) for old, new in zip(before, after, strict=True))
            assert all(torch.equal(copy, new.bfloat16()) for copy, new in zip(copies, after, strict=True))


def test_training_twice_gives_the_same_bits_on_request():
    run = replace(run_with("bf16", data=Data(document_mask=False)), deterministic=True)
    with deterministic(run):
        first, second = train(run), train(run)
    assert [r.gradients.loss for r in first] == [r.gradients.loss for r in second]
    assert [r.gradients.norm for r in first] == [r.gradients.norm for r in second]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fused_loss_equals_cross_entropy_over_whole_logits(dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(300, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(1000, 64, device="cuda", generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, 1000, (300,), device="cuda", generator=generator)
    targets[::7] = -100
    linear_cross_entropy(hidden, weight, targets).backward()
    wide_hidden, wide_weight = (t.detach().double().requires_grad_() for t in (hidden, weight))
    loss = torch.nn.functional.cross_entropy(wide_hidden @ wide_weight.t(), targets, reduction="sum")
    loss.backward()
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for found, expected in ((hidden.grad, wide_hidden.grad), (weight.grad, wide_weight.grad)):
        assert found is not None and expected is not None
        assert float((found.double() - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("window", [None, 16])
def test_masked_attention_equals_plain_mathematics(window):
    generator = torch.Generator("cuda").manual_seed(0)
    query = torch.randn(2, 64, 4, 32, device="cuda", generator=generator)
    key, value = (torch.randn(2, 64, 2, 32, device="cuda", generator=generator) for _ in range(2))
    documents = (torch.arange(64, device="cuda") // 20).expand(2, 64)
    mask = attention_mask(64, 64, document_ids=documents, window=window, dtype=torch.float32, device=torch.device("cuda"))
    found = attention(query, key, value, mask)
    near = torch.arange(64, device="cuda")[:, None] - torch.arange(64, device="cuda")
    seen = (near >= 0) & (near < (window or 64)) & (documents[0][:, None] == documents[0])
    scores = torch.einsum("bshe,bthe->bhst", query, key.repeat_interleave(2, dim=2)) / 32**0.5
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    expected = torch.einsum("bhst,bthe->bshe", weights, value.repeat_interleave(2, dim=2))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "none"), ("bf16", "full")])
def test_planned_memory_is_near_the_allocators_peak(precision, recompute):
    model = replace(LLAMA, hidden_size=1024, intermediate_size=4096, num_hidden_layers=8, head_dim=128, num_attention_heads=8)
    run = replace(
        run_with(precision, recompute=recompute, data=Data(document_mask=False)), model=replace(model, vocab_size=8192)
    )
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    train(run)
    measured = torch.cuda.max_memory_allocated() - before
    planned = plan_memory(run.model, run.layout, sequence_length=128, sequences_per_batch=4, device="cuda").peak.total
    assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("compiled", [False, True])
def test_delayed_scales_of_fp8_follow_current_ones_and_are_of_every_product(compiled):
    delayed, current = (train(run_with("fp8", compiled=compiled, fp8_scaling=scaling), 6) for scaling in ("delayed", "tensor"))
    for found, expected in zip(delayed, current, strict=True):
        assert found.gradients.loss == pytest.approx(expected.gradients.loss, rel=0.02)
    run = run_with("fp8", compiled=compiled, fp8_scaling="delayed", fp8_amax_history_len=4)
    with process_group(run.layout, device=run.device) as ranks:
        trainer = Trainer(run, ranks, loader_of(run))
        for _ in range(3):
            trainer.train_step()
        history = trainer.share.amax_history
        assert history is not None and history.updates == 3
        assert (history.history[:, :3] > 0).sum() == 3 * 18 * 3  # of 7 products 4 inputs, 7 weights, 7 gradients; blocks, steps
        assert not history.history[:, 3].any()
