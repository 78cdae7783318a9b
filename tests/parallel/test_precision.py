"""bf16 on one rank: fp32 parameters, bf16 copies that compute, and the numbers that several ranks get from FSDP2."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from models.families import FAMILIES
from ranks import run_ranks

from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.prove import shrink_model
from ultrascale.description.layout import Layout, Precision
from ultrascale.description.run import Batch, Optimizer, Run
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.parallel.share import Share, local, local_gradient
from ultrascale.train.optimizers.optimizer import build_optimizer
from ultrascale.train.trainer import Trainer

CPU = torch.device("cpu")
LLAMA, TIED = shrink_model(FAMILIES["llama"]), shrink_model(FAMILIES["gpt2"])


def run_of(model, dp: int = 1, **layout) -> Run:
    return Run(
        model,
        steps=10,
        layout=Layout(dp=dp, micro_batch_size=2, precision="bf16", **layout),
        batch=Batch(sequence_length=24, sequences_per_batch=4),
        optimizer=Optimizer(learning_rate=1e-2, warmup_steps=1),
    )


def share_of(precision: Precision, *, seed: int = 0) -> Share:
    return build_share(LLAMA, Layout(precision=precision), Ranks(0, 1, CPU), seed=seed)


def gradients_and_weights(rank: int, run: Run) -> list[torch.Tensor]:
    """Of two steps, on this rank."""
    group = dist.group.WORLD if run.layout.dp > 1 else None
    batch = run.batch
    loader = RandomDocuments(sequence_length=batch.sequence_length, vocab_size=run.model.vocab_size, seed=1)
    trainer = Trainer(run, Ranks(rank, run.layout.dp, CPU, group), loader)
    found = []
    for _ in range(2):
        norm = trainer.compute_gradients().norm
        found += [g.clone() for p in trainer.share.parameters() if (g := local_gradient(p)) is not None]
        trainer.update(norm)
    return found + [local(parameter).detach() for parameter in trainer.decoder.parameters()]


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("model", [LLAMA, TIED], ids=["untied", "tied"])
def test_two_micro_batches_on_one_rank_give_the_bits_of_one_on_each_of_two_ranks(model, recompute):
    """Each micro-batch's gradient is rounded to bf16 and the two are summed in fp32, here by autograd, there by all-reduce."""
    alone = gradients_and_weights(0, run_of(model, recompute=recompute))
    together = run_ranks(2, gradients_and_weights, run_of(model, dp=2, recompute=recompute))
    assert len(alone) == 3 * len(list(Decoder(model).parameters()))
    for one, *others in zip(alone, *together, strict=True):
        assert one.dtype == torch.float32 and all(torch.equal(one, other) for other in others)


def test_parameters_and_gradients_are_fp32_and_what_computes_is_bf16():
    decoder = share_of("bf16").decoder
    seen = []
    decoder.layers["0"].register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    tokens = torch.arange(8)[None]
    loss = decoder(tokens, targets=tokens)
    loss.backward()
    assert seen == [torch.bfloat16] and loss.dtype == torch.float32
    parameters = list(decoder.parameters())
    assert {p.dtype for p in parameters} == {p.grad.dtype for p in parameters if p.grad is not None} == {torch.float32}
    assert all(p.grad is not None and bool((p.grad == p.grad.bfloat16()).all()) for p in parameters)
    assert [copy.dtype for copy in computing_copies(decoder)] == [torch.bfloat16] * len(parameters)
    assert decoder.state_dict().keys() == Decoder(LLAMA).state_dict().keys()


def test_the_copies_follow_every_change_of_the_parameters():
    share, other = share_of("bf16"), share_of("bf16", seed=1).decoder
    decoder = share.decoder
    tokens = torch.arange(8)[None]
    with torch.no_grad():
        before = decoder(tokens, targets=tokens)
        for parameter, value in zip(decoder.parameters(), other.parameters(), strict=True):
            parameter.detach().copy_(value)  # as a checkpoint is loaded
        assert before != decoder(tokens, targets=tokens) == other(tokens, targets=tokens)
    decoder(tokens, targets=tokens).backward()
    optimizer = build_optimizer(share, Optimizer(learning_rate=0.1))
    optimizer.step()
    decoder(tokens, targets=tokens)
    copies = computing_copies(decoder)
    assert all(torch.equal(p.bfloat16(), copy) for p, copy in zip(decoder.parameters(), copies, strict=True))


def test_fp32_and_fp64_compute_with_the_parameters_themselves():
    for precision in ("fp32", "fp64"):
        assert computing_copies(share_of(precision).decoder) == []


def test_one_rank_joins_no_group_in_bf16():
    with process_group(Layout(precision="bf16"), device="cpu") as ranks:
        assert (ranks.world, ranks.host_group, dist.is_initialized()) == (1, None, False)
