"""Ranks of tensor parallelism compute what one process does: loss and every gradient, in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.families import EXPERT_FAMILIES, FAMILIES
from parallel.tensor_cases import Case, WholeWorld, divisible, errors_of, tensor_parallel_decoder
from ranks import run_ranks
from torch import Tensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.pipeline.pipeline_weights import WeightGradients, make_gradients
from ultrascale.parallel.precision.mixed_precision import apply_mixed_precision
from ultrascale.parallel.tensor import tensor_loss, tensor_ops, tensor_traffic
from ultrascale.parallel.tensor.tensor_ops import TensorParallel
from ultrascale.parallel.tensor.tensor_parallel import apply_tensor_parallel, shard_parameters
from ultrascale.work.sharding.places import Coordinates, even_part

LIMIT = 1e-12


def worst(world: int, cases: dict[str, Case]) -> dict[str, tuple[float, str]]:
    """Of every case the largest error on any rank, and of what."""
    of_ranks = run_ranks(world, errors_of, cases, timeout_seconds=120)
    return {name: max((error, what) for found in of_ranks for what, error in found[name].items()) for name in cases}


def expect_equal(world: int, cases: dict[str, Case]) -> None:
    assert {name: found for name, found in worst(world, cases).items() if not found[0] <= LIMIT} == {}


@pytest.mark.parametrize("tp, sequence_parallel", [(2, True), (2, False), (3, True), (4, True), (4, False)])
def test_every_family_computes_what_one_process_does(tp, sequence_parallel):
    cases = {name: Case(divisible(model, tp), sequence_parallel) for name, model in FAMILIES.items()}
    assert any(case.model.num_key_value_heads < tp for case in cases.values())
    expect_equal(tp, cases)


@pytest.mark.parametrize("tp", [2, 4])
def test_every_family_with_experts_computes_what_one_process_does(tp):
    """Experts are whole on every rank, which sends them its own positions; their gradients are summed."""
    cases = {name: Case(without_balance(model)) for name, model in EXPERT_FAMILIES.items()}
    cases["two tokens ahead"] = Case(replace(cases["deepseek-v3"].model, num_nextn_predict_layers=1), length=19)
    expect_equal(tp, cases)


def without_balance(model: Model) -> Model:
    return replace(model, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)


@pytest.mark.parametrize("tp", [3, 4])
def test_sequences_and_vocabularies_need_not_divide(tp):
    llama, tied = (divisible(FAMILIES[name], tp) for name in ("llama", "smollm3"))
    cases = {f"length {length}": Case(tied, length=length) for length in (19, 5, 3)}
    for vocab_size in (211, 10):
        cases[f"vocabulary {vocab_size}"] = Case(replace(llama, vocab_size=vocab_size), length=13)
        cases[f"vocabulary {vocab_size}, tied"] = Case(replace(tied, vocab_size=vocab_size), sequence_parallel=False)
    expect_equal(tp, cases)


def test_recomputation_and_packed_documents_change_nothing():
    cases = {
        f"{name}, {recompute}, documents {documents}, {sequence_parallel}": Case(
            FAMILIES[name], sequence_parallel, length=19, recompute=recompute, documents=documents
        )
        for name in ("llama-biases", "smollm3")
        for recompute, documents in (("none", True), ("selective", False), ("full", True), ("every-k", False))
        for sequence_parallel in (True, False)
    }
    normed = replace(FAMILIES["llama"], qk_norm=True, qk_norm_whole=True)
    cases["norms that ranks sum"] = Case(normed, length=19, recompute="selective+attention")
    expect_equal(2, cases)


def test_a_compiled_block_is_one_graph_and_computes_the_same():
    """Traced and differentiated as the compiler would; its code generator has nothing to do with ranks."""
    cases = {
        f"{recompute}, {sequence_parallel}": Case(
            FAMILIES["llama-biases"], sequence_parallel, length=19, recompute=recompute, compiled=True
        )
        for recompute, sequence_parallel in (("full", True), ("selective", False))
    }
    expect_equal(2, cases)


def narrow_loss(rank: int, compiled: bool) -> tuple[float, float, float]:
    """Of copies in bf16: the loss, and the norms of the gradients of a cut weight's slice and of a norm's share."""
    decoder = tensor_parallel_decoder(FAMILIES["llama"], Layout(tp=dist.get_world_size()), rank).float()
    apply_mixed_precision(decoder, torch.bfloat16)
    if compiled:
        decoder.loss = partial(decoder.loss, compiled=True)
    loss = decoder(TOKENS, targets=TOKENS.roll(-1, 1))
    loss.backward()
    parameters = dict(decoder.named_parameters())
    head, norm = parameters["lm_head.weight"].grad, parameters["norm.weight"].grad
    assert head is not None and norm is not None and head.dtype == norm.dtype == torch.float32
    dist.all_reduce(norm)
    square = head.square().sum()
    dist.all_reduce(square)
    return float(loss), float(square.sqrt()), float(norm.norm())


def test_bf16_is_near_one_process_in_bf16():
    (one,) = run_ranks(1, narrow_loss, False)
    for found in run_ranks(2, narrow_loss, False):
        assert found == pytest.approx(one, rel=1e-2) and found != one


def forget_other_ranks() -> None:
    tensor_ops.sum_sequence = lambda whole, length, group: lambda: part_of(whole, group)


def part_of(whole: Tensor, group: dist.ProcessGroup) -> Tensor:
    return whole.tensor_split(group.size(), dim=1)[group.rank()].contiguous()


def add_bias_on_every_rank() -> None:
    TensorParallel.row_linear = lambda tp, inner, projection: plain_row_linear(tp, inner, projection) + projection.bias  # pyright: ignore


def count_vocabulary_from_the_second_row() -> None:
    def one_later(length: int, parts: int, part: int) -> tuple[int, int]:
        first, count = even_part(length, parts, part)
        return first + part, count

    tensor_loss.even_part = one_later


def forget_a_part_of_the_normalizer() -> None:
    tensor_loss.all_gather_stacked = lambda own, group: own.unsqueeze(0)


plain_row_linear = TensorParallel.row_linear
FAULTS = {
    "sums forget other ranks": (Case(FAMILIES["llama"], fault=forget_other_ranks), "loss"),
    "bias added by every rank": (Case(FAMILIES["llama-biases"], fault=add_bias_on_every_rank), "loss"),
    "vocabulary off by one": (Case(FAMILIES["llama"], fault=count_vocabulary_from_the_second_row), "loss"),
    "loss over one part of the vocabulary": (Case(FAMILIES["llama"], fault=forget_a_part_of_the_normalizer), "loss"),
    "norm not summed": (Case(FAMILIES["llama"], sum_copies=False), "layers.1.input_layernorm.weight"),
    "head norm not summed": (Case(FAMILIES["qwen3"], False, sum_copies=False), "layers.1.self_attn.q_norm.weight"),
    "key heads not summed": (Case(FAMILIES["llama-wide-heads"], False, sum_copies=False), "layers.2.self_attn.k_proj.weight"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_seen(fault):
    case, seen_in = FAULTS[fault]
    for found in run_ranks(2, errors_of, {fault: case}):
        assert found[fault][seen_in] > 1e-4
        assert case.sum_copies or found[fault]["loss"] <= LIMIT


def raised(rank: int, run: Callable[[Any], object]) -> str:
    """What the whole decoder of a rank says to `run`."""
    decoder = tensor_parallel_decoder(FAMILIES["llama"], Layout(tp=2), rank)
    with pytest.raises((IndexError, ValueError)) as caught:
        run(decoder)
    return str(caught.value)


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.catalogue(57)
@pytest.mark.parametrize(
    "tokens, targets, message",
    [
        (TOKENS + 86, TOKENS, "a token is 97, outside the vocabulary of 97"),
        (TOKENS - 1, TOKENS, "a token is -1, outside the vocabulary of 97"),
        (TOKENS, TOKENS + 86, "a target is 97, outside the vocabulary of 97"),
        (TOKENS, TOKENS - 7, "a target is -7, outside the vocabulary of 97"),
        (TOKENS, None, "over several ranks of tp a decoder computes losses"),
    ],
)
def test_an_id_of_no_rank_is_refused_and_so_are_logits(tokens, targets, message):
    for said in run_ranks(2, raised, lambda decoder: decoder(tokens, targets=targets)):
        assert message in said


def middle_stage_without_positions(rank: int) -> str:
    model, layout = FAMILIES["llama"], Layout(tp=2)
    with torch.device("meta"):
        decoder = Decoder(model, layers=range(1, 2), is_first=False, is_last=False)
    apply_tensor_parallel(decoder, layout, WholeWorld(Coordinates.of(layout, rank)))
    with pytest.raises(ValueError) as caught:
        decoder(torch.zeros(2, 3, 32))
    return str(caught.value)


def test_a_later_stage_must_be_told_positions():
    for said in run_ranks(2, middle_stage_without_positions):
        assert "a stage that is not the first must be given positions" in said


def shapes(rank: int, model: Model, tp: int) -> dict[str, tuple[int, ...]]:
    layout = Layout(tp=tp)
    with torch.device("meta"):
        decoder = Decoder(model)
    shard_parameters(decoder, layout, Coordinates.of(layout, rank))
    assert decoder.head_weight is decoder.get_parameter("embed_tokens.weight" if decoder.lm_head is None else "lm_head.weight")
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def test_a_rank_holds_its_slices_and_a_tied_embedding_once():
    found = shapes(2, replace(FAMILIES["llama-biases"], tie_word_embeddings=True), 4)
    assert "lm_head.weight" not in found
    assert found["embed_tokens.weight"] == (24, 32) and shapes(0, FAMILIES["llama"], 4)["lm_head.weight"] == (25, 32)
    block = {name.removeprefix("layers.1."): shape for name, shape in found.items()}
    assert block["self_attn.q_proj.weight"] == (8, 32) and block["self_attn.k_proj.bias"] == (8,)  # 2 heads for 4 ranks
    assert block["mlp.up_proj.weight"] == (12, 32) and block["mlp.down_proj.weight"] == (32, 12)
    assert block["mlp.down_proj.bias"] == block["input_layernorm.weight"] == (32,)


class Traffic:
    """Counts what tensor parallelism starts to send, by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        for module, kind in ((tensor_ops, GATHERS), (tensor_traffic, SUMS), (tensor_traffic, WHOLE)):
            setattr(module, kind, partial(self._note, kind, getattr(module, kind)))

    def _note(self, kind: str, send: Callable[..., Any], *arguments: Any) -> Any:
        self.counts[kind] += 1
        return send(*arguments)

    def take(self) -> dict[str, int]:
        taken, self.counts = dict(self.counts), Counter()
        return taken


def block_traffic(rank: int, recompute: str, sequence_parallel: bool) -> tuple[dict[str, int], dict[str, int]]:
    """What one more block sends, forward and backward."""
    traffic, found = Traffic(), []
    for layers in (1, 2):
        model = replace(FAMILIES["llama"], num_hidden_layers=layers)
        layout = Layout(tp=2, sequence_parallel=sequence_parallel, recompute=recompute)  # pyright: ignore
        decoder = tensor_parallel_decoder(model, layout, rank)
        loss = decoder(TOKENS, targets=TOKENS)
        forward = traffic.take()
        loss.backward()
        found.append((forward, traffic.take()))
    return tuple({kind: more[kind] - less.get(kind, 0) for kind in more} for less, more in zip(*found, strict=True))  # pyright: ignore


GATHERS, SUMS, WHOLE = "all_gather_sequence", "reduce_scatter_sequence", "all_reduce"


@pytest.mark.parametrize(
    "recompute, sequence_parallel, forward, backward",
    [
        ("none", True, {GATHERS: 2, SUMS: 2}, {GATHERS: 4, SUMS: 2}),
        ("selective", True, {GATHERS: 2, SUMS: 2}, {GATHERS: 4, SUMS: 2}),
        ("full", True, {GATHERS: 2, SUMS: 2}, {GATHERS: 6, SUMS: 4}),
        ("none", False, {WHOLE: 2}, {WHOLE: 2}),
        ("selective", False, {WHOLE: 2}, {WHOLE: 2}),
    ],
)
def test_a_block_sends_as_little_as_it_can(recompute, sequence_parallel, forward, backward):
    for found in run_ranks(2, block_traffic, recompute, sequence_parallel):
        assert found == (forward, backward)


def deferred_backward(rank: int) -> tuple[int, list[float]]:
    """How many weights' gradients wait, and how far those made later are from those made at once."""
    decoder = tensor_parallel_decoder(FAMILIES["llama-biases"], Layout(tp=2), rank)
    parameters = list(decoder.parameters())
    expected = torch.autograd.grad(decoder(TOKENS, targets=TOKENS), parameters)
    weights = WeightGradients()
    decoder.layers["0"].mlp.row_linear.__self__.defer = weights.add  # pyright: ignore
    with weights.defer() as waiting:
        decoder(TOKENS, targets=TOKENS).backward()
    count = len(waiting)
    make_gradients(waiting)
    return count, [float((p.grad - e).abs().max()) for p, e in zip(parameters, expected, strict=True)]  # pyright: ignore


def test_gradients_of_weights_can_wait():
    for count, errors in run_ranks(2, deferred_backward):
        assert count == 3 * 7 and max(errors) < 1e-14


def kept_by_a_block(rank: int, sequence_parallel: bool) -> int:
    """Bytes that one more block keeps for the backward pass, weights left aside."""
    found = []
    for layers in (1, 2):
        model = replace(FAMILIES["llama"], num_hidden_layers=layers)
        layout = Layout(tp=dist.get_world_size(), sequence_parallel=sequence_parallel)
        decoder = tensor_parallel_decoder(model, layout, rank)
        weights, kept = {parameter.data_ptr() for parameter in decoder.parameters()}, {}

        def keep(tensor: Tensor, weights: set[int] = weights, kept: dict[int, Tensor] = kept) -> Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                kept[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            decoder(TOKENS, targets=TOKENS)
        found.append(sum(tensor.untyped_storage().nbytes() for tensor in kept.values()))
    return found[1] - found[0]


def test_with_sequence_parallelism_a_block_keeps_its_share_and_no_byte_more():
    (whole,) = run_ranks(1, kept_by_a_block, True)
    assert run_ranks(2, kept_by_a_block, True) == [whole // 2] * 2
    assert min(run_ranks(2, kept_by_a_block, False)) > whole // 2
