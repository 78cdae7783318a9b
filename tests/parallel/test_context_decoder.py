"""A decoder whose sequences are cut over ranks has the loss and the gradients of one that sees them whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from models.families import FAMILIES
from parallel.test_peers_bugs import EXACT, worst
from ranks import run_ranks
from torch import Tensor

from ultrascale.check.prove import shrink_model
from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder, shift_targets
from ultrascale.models.initialise import initialise
from ultrascale.parallel.activations.recompute import apply_recompute
from ultrascale.parallel.context.context_parallel import ContextParallel, LocalBatch, apply_context_parallel, shard_batch

BATCH, LENGTH = 2, 24
LLAMA = shrink_model(replace(FAMILIES["llama"], tie_word_embeddings=True))


@dataclass(frozen=True)
class Case:
    method: Any = "ring"
    cp_heads: int = 1
    window: int | None = None
    documents: bool = True
    recompute: Any = "none"
    compiled: bool = False
    fault: Callable[[LocalBatch], LocalBatch] | None = None
    """What the rank takes for its share of the batch."""


class OneGroup:
    """In place of a mesh: all ranks are one group of cp."""

    device = torch.device("cpu")

    def group(self, axis: str) -> dist.ProcessGroup | None:
        return dist.group.WORLD if axis == "cp" else None


def made_batch(documents: bool) -> LocalBatch:
    """Whole sequences, [B, S]; some targets do not count."""
    made = np.random.default_rng(0)
    tokens = made.integers(LLAMA.vocab_size, size=(BATCH, LENGTH))
    targets = np.where(made.random((BATCH, LENGTH)) < 0.1, -100, np.roll(tokens, -1, axis=1))
    breaks = (made.random((BATCH, LENGTH)) < 0.15) & documents
    breaks[:, 0] = False
    at = np.broadcast_to(np.arange(LENGTH), (BATCH, LENGTH))
    starts = np.maximum.accumulate(np.where(breaks, at, 0), axis=1)
    ids = np.cumsum(breaks.astype(np.int64), axis=1) if documents else None
    return LocalBatch(tokens, targets, at - starts, ids, at)


def gradients(decoder: Decoder, batch: LocalBatch) -> dict[str, Tensor]:
    """Of the summed loss, which is there as well."""
    tokens, targets, positions = (torch.from_numpy(array) for array in batch[:3])
    ids = None if batch.document_ids is None else torch.from_numpy(batch.document_ids)
    loss = decoder(tokens, targets=targets, positions=positions, document_ids=ids)
    loss.backward()
    named = {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}
    return {"loss": loss.detach(), **named}


def made_decoder(case: Case) -> Decoder:
    decoder = Decoder(replace(LLAMA, sliding_window=case.window)).double()
    initialise(decoder, decoder.spec, 0)
    return decoder


def errors(rank: int, case: Case) -> float:
    """The largest error of the sums over ranks, relative to the largest element of each gradient."""
    whole = made_batch(case.documents)
    expected = gradients(made_decoder(case), whole)
    layout = Layout(cp=dist.get_world_size(), cp_method=case.method, cp_heads=case.cp_heads, recompute=case.recompute)
    decoder = made_decoder(case)
    apply_context_parallel(decoder, layout, OneGroup(), compiled=case.compiled)  # pyright: ignore[reportArgumentType]
    apply_recompute(decoder, layout)
    if case.compiled:
        _, block = next(decoder.blocks())
        block.forward = torch.compile(block.forward, backend="eager")  # the graph is cut as usual, kernels are not made
    own = shard_batch(*whole[:4], layout=layout, cp_rank=rank)
    found = gradients(decoder, own if case.fault is None else case.fault(own))
    assert found.keys() == expected.keys()
    for gradient in found.values():
        dist.all_reduce(gradient)
    return max(float((found[name] - x).abs().max() / x.abs().max()) for name, x in expected.items())


@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, Case()), (2, Case(documents=False)), (3, Case("all-gather", window=5)), (2, Case("all-to-all", documents=False)),
        (4, Case("ring+all-to-all", 2)), (2, Case(recompute="full")), (2, Case(recompute="selective")),
        (2, Case("all-to-all", recompute="selective")), (4, Case(recompute="every-k", window=7)),
    ],
    ids=str,
)  # fmt: skip
def test_loss_and_gradients_add_up_to_those_of_one_process(world, case):
    assert max(run_ranks(world, errors, case)) < 1e-13


@pytest.mark.parametrize("length", [3, 4])
def test_attention_that_is_computed_again_sends_the_same_on_a_rank_with_one_slot(length):
    """A rank of one slot and one head has in place what others copy: of three tokens one rank has two, the other one."""
    model = replace(LLAMA, num_attention_heads=2, num_key_value_heads=1)
    layout = Layout(cp=2, cp_method="all-to-all", recompute="core_attn", precision="fp64")
    assert worst({"core_attn": layout}, model, length=length) < EXACT


def test_a_compiled_block_computes_the_same():
    assert max(run_ranks(2, errors, Case(compiled=True))) < 1e-13


def restarted(batch: LocalBatch) -> LocalBatch:
    return batch._replace(positions=np.broadcast_to(np.arange(batch.tokens.shape[1]), batch.tokens.shape))


def without_last_target(batch: LocalBatch) -> LocalBatch:
    """As if each rank had shifted its own tokens instead of those of the sequence: verl#4250, Megatron #673."""
    targets = batch.targets.copy()
    targets[:, -1] = -100
    return batch._replace(targets=targets)


@pytest.mark.parametrize("fault", [restarted, without_last_target])
@pytest.mark.parametrize("documents", [False, True])
def test_a_wrong_share_of_the_batch_is_seen(fault, documents):
    assert max(run_ranks(2, errors, Case(documents=documents, fault=fault))) > 1e-3


def next_targets(rank: int, layout: Layout, documents: bool) -> tuple[Tensor, Tensor]:
    whole = made_batch(documents)
    own = shard_batch(*whole[:4], layout=layout, cp_rank=rank)
    assert dist.group.WORLD is not None
    cp = ContextParallel(layout, dist.group.WORLD)
    length, ids = own.tokens.shape[1], None if own.document_ids is None else torch.from_numpy(own.document_ids)
    cp.make_mask(length, length, document_ids=ids, window=None, dtype=torch.float64, device=torch.device("cpu"))
    expected = shift_targets(torch.from_numpy(whole.targets)).numpy()
    return cp.shift_targets(torch.from_numpy(own.targets)), torch.from_numpy(
        shard_batch(whole.tokens, expected, whole.positions, whole.document_ids, layout=layout, cp_rank=rank).targets
    )


@pytest.mark.parametrize(
    "layout", [Layout(cp=3), Layout(cp=4, cp_method="ring+all-to-all", cp_heads=2), Layout(cp=2, cp_method="all-to-all")]
)
@pytest.mark.parametrize("documents", [False, True])
def test_the_target_after_next_is_that_of_the_sequence_whoever_holds_it(layout, documents):
    for found, expected in run_ranks(layout.cp, next_targets, layout, documents):
        assert torch.equal(found, expected)
        assert (expected != -100).any()


def test_positions_are_those_of_tokens_in_their_documents():
    whole = made_batch(True)
    assert whole.document_ids is not None
    for rank in range(3):
        own = shard_batch(*whole[:4], layout=Layout(cp=3), cp_rank=rank)
        for row in range(BATCH):
            seen = {(token, position) for token, position in zip(own.tokens[row], own.positions[row], strict=True)}
            assert seen <= set(zip(whole.tokens[row], whole.positions[row], strict=True))
        assert own.document_ids is whole.document_ids
    assert sum((shard_batch(*whole[:4], layout=Layout(cp=3), cp_rank=r).positions == 0).sum() for r in range(3)) == sum(
        ids.max() + 1 for ids in whole.document_ids
    )
