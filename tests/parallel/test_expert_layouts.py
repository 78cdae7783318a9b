"""A whole decoder with experts, cut over every axis of a pipeline stage, against one process, in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models.families import LLAMA
from parallel.tensor_cases import decoder_of, fill, grad_of, slice_of
from ranks import run_ranks
from torch import Tensor

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import moe_layers, scale_auxiliary_losses, take_load, update_expert_bias
from ultrascale.models.router import drop_over_capacity
from ultrascale.parallel import all_to_all
from ultrascale.parallel.activations.recompute import KEPT_OPS, apply_recompute
from ultrascale.parallel.context.context_parallel import apply_context_parallel, local_positions, shard_batch
from ultrascale.parallel.expert import expert_sequences
from ultrascale.parallel.expert.expert_parallel import apply_expert_parallel
from ultrascale.parallel.groups import AxisGroups
from ultrascale.parallel.mesh import Mesh, Ranks
from ultrascale.parallel.share import Share
from ultrascale.parallel.tensor.tensor_parallel import apply_tensor_parallel
from ultrascale.train.observers.expert_balance import balance_experts
from ultrascale.work.sharding.places import shard_of

BATCH, LENGTH = 2, 13
TARGETS = 7.0
"""What the loss is divided by."""
EXACT = 1e-11
MIXTRAL = replace(
    LLAMA, model_type="mixtral", num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=20,
    router_aux_loss_coef=0.3, router_z_loss_coef=0.1,
)  # fmt: skip
DEEPSEEK = replace(
    MIXTRAL, model_type="deepseek_v3", first_k_dense_replace=1, shared_expert_intermediate_size=24, scoring_func="sigmoid",
    topk_method="noaux_tc", n_group=4, topk_group=2, routed_scaling_factor=2.5, num_key_value_heads=4, head_dim=12,
    q_lora_rank=16, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
)  # fmt: skip
BIASED = replace(MIXTRAL, model_type="gpt_oss", mlp_bias=True, hidden_act="swigluoai", qkv_bias=True)
DROPPING = replace(MIXTRAL, expert_capacity_factor=0.8)


@dataclass(frozen=True)
class Case:
    layout: Layout
    model: Model = MIXTRAL
    documents: bool = False
    """Several in a sequence, which begin with the same token: equal scores."""
    accumulate: bool = False
    """One sequence after the other, instead of all at once; backward passes follow when all forward passes are done."""
    fault: str = ""


def errors_of(rank: int, case: Case) -> dict[str, float]:
    """Of the loss, each gradient, the load and the bias after an update, relative to the whole's largest element."""
    layout, ranks = case.layout, Ranks(rank, case.layout.world_size, torch.device("cpu"), dist.group.WORLD)
    mesh = Mesh(case.model, layout, ranks)
    whole = one_process(case)
    decoder = cut_decoder(case, mesh)
    plant(case.fault, decoder)
    loss = backward(decoder, case, mesh.coordinates.dp, mesh.coordinates.cp)
    table = {weight.name: weight for weight in weights(case.model)}
    expected = {name: grad_of(parameter) for name, parameter in whole.decoder.named_parameters()}
    errors = {"loss": relative(over(loss, layout.group("dp")), whole.loss)}
    for name, parameter in decoder.named_parameters():
        part = shard_of(table[name], layout, mesh.coordinates)
        gradient = summed_gradient(grad_of(parameter), table[name].is_expert, part, mesh)
        errors[name] = relative(gradient, slice_of(expected[name], part), float(expected[name].abs().max()))
    told = replace(layout, sequence_parallel=True) if case.fault == "load of tp counted twice" else layout
    balance = balance_experts(Share(case.model, told, mesh, {0: decoder}), ranks, num_targets=1)
    assert balance is not None
    errors["auxiliary"] = relative(torch.tensor(balance.auxiliary_loss, dtype=torch.float64), whole.auxiliary)
    for (number, layer), (_, other) in zip(moe_layers(decoder), moe_layers(whole.decoder), strict=True):
        errors[f"load {number}"] = float((balance.load[number] - whole.load[number]).abs().max())
        bias, expected_bias = layer.router.e_score_correction_bias, other.router.e_score_correction_bias
        if bias is not None and expected_bias is not None:
            errors[f"bias {number}"] = float((bias - expected_bias).abs().max())
    return errors


@dataclass
class Whole:
    decoder: Decoder
    loss: Tensor
    auxiliary: Tensor
    load: dict[int, Tensor]


def one_process(case: Case) -> Whole:
    """All micro-batches of dp, one after the other; all at once where counts are taken over all of them."""
    decoder, losses = decoder_of(case.model), []
    together = case.model.router_aux_loss_scope == "global"
    for dp in [slice(None)] if together else [slice(i * BATCH, (i + 1) * BATCH) for i in range(case.layout.dp)]:
        tokens, targets, positions, ids = (array[dp] for array in batch(case))
        options = {"document_ids": torch.from_numpy(ids)} if case.documents else {}
        scale_auxiliary_losses(decoder, 1 / TARGETS)
        loss = decoder(
            torch.from_numpy(tokens), targets=torch.from_numpy(targets), positions=torch.from_numpy(positions), **options
        )
        (loss / TARGETS).backward()
        losses.append(loss.detach())
    load, auxiliary = take_load(decoder)
    update_expert_bias(decoder, load)
    return Whole(decoder, torch.stack(losses).sum(), auxiliary, load)


def batch(case: Case) -> tuple[Any, Any, Any, Any]:
    """Tokens, targets, positions and document ids [dp B, S] as arrays. The first tokens of documents are the same."""
    generator, shape = torch.Generator().manual_seed(3), (case.layout.dp * BATCH, LENGTH)
    tokens = torch.randint(case.model.vocab_size, shape, generator=generator)
    targets = torch.randint(case.model.vocab_size, shape, generator=generator)
    targets[:, 4:6] = -100
    ids, positions = torch.zeros(shape, dtype=torch.int64), torch.arange(LENGTH).repeat(shape[0], 1)
    if case.documents:
        tokens[:, 0] = 1
        for row in range(shape[0]):
            for start in (3 + row, 8, 10):
                ids[row, start:] += 1
                positions[row, start:] = torch.arange(LENGTH - start)
                tokens[row, start] = 1
    return tokens.numpy(), targets.numpy(), positions.numpy(), ids.numpy()


def cut_decoder(case: Case, mesh: Mesh) -> Decoder:
    layout = case.layout
    with torch.device("meta"):
        decoder = Decoder(case.model).double()
    apply_tensor_parallel(decoder, layout, mesh)
    apply_context_parallel(decoder, layout, mesh)
    apply_expert_parallel(decoder, layout, mesh)
    apply_recompute(decoder, layout)
    decoder.to_empty(device="cpu")
    fill(decoder, {weight.name: shard_of(weight, layout, mesh.coordinates) for weight in weights(case.model)})
    for _, layer in moe_layers(decoder):
        if layer.router.e_score_correction_bias is not None:
            layer.router.e_score_correction_bias.zero_()
    return decoder


def backward(decoder: Decoder, case: Case, dp: int, cp: int) -> Tensor:
    """The loss of this rank's sequences."""
    first, last = dp * BATCH, (dp + 1) * BATCH
    parts = [slice(i, i + 1) for i in range(first, last)] if case.accumulate else [slice(first, last)]
    scale_auxiliary_losses(decoder, 1 / TARGETS)
    losses = []
    for part in parts:
        options = local_batch([array[part] for array in batch(case)], case, cp)
        losses.append(decoder(options.pop("tokens"), **options))
    for loss in losses:
        (loss / TARGETS).backward()
    return torch.stack(losses).detach().sum()


def local_batch(arrays: list[Any], case: Case, cp: int) -> dict[str, Tensor]:
    """This rank's tokens; whole sequences' document ids where there are several, or cp does not divide the sequence."""
    tokens, targets, positions, ids = arrays
    given = ids if case.documents or LENGTH % case.layout.cp else None
    if case.layout.cp > 1:
        local = shard_batch(tokens, targets, positions, given, layout=case.layout, cp_rank=cp)
        tokens, targets, positions, given = local[:4]
    named = {"tokens": tokens, "targets": targets, "positions": positions, "document_ids": given}
    return {name: torch.from_numpy(array) for name, array in named.items() if array is not None}


def summed_gradient(gradient: Tensor, is_expert: bool, part: Any, mesh: Mesh) -> Tensor:
    gradient = over(gradient, mesh.layout.group("expert_dp" if is_expert else "dp"))
    if part.is_partial:
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=mesh.neighbours(part.num_tp_copies))
    return gradient


def over(value: Tensor, ranks: tuple[int, int]) -> Tensor:
    """The sum over so many ranks, so far apart."""
    value = value.clone()
    dist.all_reduce(value, group=group_of(*ranks))
    return value


@cache
def group_of(size: int, stride: int) -> Any:
    """This rank's; all ranks ask for the same ones in the same order."""
    ranks = AxisGroups("sums of the test", size, stride, "blocks").ranks_with(dist.get_rank())
    return dist.new_group(list(ranks), use_local_synchronization=True)


def relative(got: Tensor, expected: Tensor, scale: float = 0.0) -> float:
    if not expected.numel():
        return 0.0
    return float((got - expected).abs().max() / max(scale, float(expected.abs().max()), 1e-3))


def plant(fault: str, decoder: Decoder) -> None:
    """Break this rank's process, which ends with the test."""
    for _, layer in moe_layers(decoder):
        router, statistics, down = layer.router, layer.statistics, layer.experts.down_proj
        if fault == "counts not summed":
            router.sum_counts = lambda counts: counts
        if fault == "load overwritten":  # as Megatron#7452 did
            statistics.add = partial(overwrite, statistics)  # type: ignore[method-assign]
        if fault == "bias on every rank":
            down.adds_bias = True
        if fault == "capacity of local tokens":
            router.keep = drop_over_capacity
        if fault == "equal weights in another order":
            expert_sequences.local_positions = from_the_end


def overwrite(statistics: Any, counts: Tensor, auxiliary: Tensor | None) -> None:
    statistics.counts, statistics.auxiliary = counts, auxiliary


def from_the_end(rows: Any, layout: Layout, rank: int) -> Any:
    """Positions counted the other way round."""
    return LENGTH - 1 - local_positions(rows, layout, rank)


LAYOUTS = {
    "dp2 ep2": Layout(dp=2, ep=2),
    "cp2 ep2": Layout(cp=2, ep=2),
    "tp2": Layout(tp=2),
    "tp2 whole": Layout(tp=2, sequence_parallel=False),
    "tp2 ep2": Layout(tp=2, ep=2),
    "tp2 ep2 whole": Layout(tp=2, ep=2, sequence_parallel=False),
    "tp2 expert_tp2": Layout(tp=2, expert_tp=2),
    "tp2 expert_tp2 whole": Layout(tp=2, expert_tp=2, sequence_parallel=False),
    "dp2 tp2 ep2": Layout(dp=2, tp=2, ep=2),
    "dp2 tp2 ep4 whole": Layout(dp=2, tp=2, ep=4, sequence_parallel=False),
    "dp2 tp2 ep2 expert_tp2": Layout(dp=2, tp=2, ep=2, expert_tp=2),
    "dp2 cp2 ep4": Layout(dp=2, cp=2, ep=4),
    "cp2 tp2 ep2": Layout(cp=2, tp=2, ep=2),
}


def worst(case: Case) -> tuple[float, str]:
    found = run_ranks(case.layout.world_size, errors_of, case)
    return max((error, f"rank {rank}: {name}") for rank, errors in enumerate(found) for name, error in errors.items())


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_loss_gradients_and_load_are_those_of_one_process(layout):
    assert worst(Case(layout)) < (EXACT, "")


def of(layout: str, model: Model = MIXTRAL, *, documents: bool = False, accumulate: bool = False, **changes: Any) -> Case:
    """A case of one of `LAYOUTS`, with changes to the layout."""
    return Case(replace(LAYOUTS[layout], **changes), model, documents, accumulate)


CASES = {
    "shared experts, sigmoid, bias": of("dp2 tp2 ep2", DEEPSEEK),
    "the same without sequence parallelism": of("tp2 expert_tp2 whole", DEEPSEEK),
    "biases": of("dp2 tp2 ep2 expert_tp2", BIASED),
    "biases without sequence parallelism": of("tp2 expert_tp2 whole", BIASED),
    "predicted later tokens": of("tp2 ep2", replace(DEEPSEEK, num_nextn_predict_layers=1)),
    "documents over cp and tp": of("cp2 tp2 ep2", documents=True),
    "dropped over tp": of("tp2 ep2", DROPPING, documents=True),
    "dropped where all tp ranks have the same": of("tp2 ep2 whole", DROPPING, documents=True),
    "dropped over cp and tp": of("cp2 tp2 ep2", DROPPING, documents=True),
    "dropped over heads": of("cp2 ep2", DROPPING, documents=True, cp_method="all-to-all"),
    "dropped again in recomputation, micro-batches under way": of(
        "cp2 ep2", DROPPING, documents=True, accumulate=True, recompute="full"
    ),
    "balance of micro-batches": of("cp2 tp2 ep2", replace(MIXTRAL, router_aux_loss_scope="micro-batch")),
    "balance of all ranks": of("dp2 tp2 ep2", replace(MIXTRAL, router_aux_loss_scope="global")),
    "recomputed": of("dp2 cp2 ep4", DEEPSEEK, accumulate=True, recompute="full"),
    "recomputed in part": of("tp2 ep2", DEEPSEEK, accumulate=True, recompute="selective"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_every_kind_of_experts_is_exact(case):
    assert worst(case) < (EXACT, "")


FAULTS = {
    "counts not summed": of("cp2 ep2"),
    "load overwritten": of("dp2 ep2", accumulate=True),
    "load of tp counted twice": of("tp2 ep2 whole"),
    "bias on every rank": of("tp2 expert_tp2", BIASED),
    "capacity of local tokens": of("tp2 ep2", DROPPING),
    "equal weights in another order": of("cp2 ep2", DROPPING, documents=True),
}


@pytest.mark.parametrize(("fault", "case"), FAULTS.items(), ids=FAULTS)
def test_a_planted_fault_is_seen(fault, case):
    assert worst(replace(case, fault=fault)) > (1e-3, "")


def messages(rank: int, recompute: str) -> tuple[int, float]:
    """All-to-alls of a step, and the largest error."""
    calls, send = [], dist.all_to_all_single

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return send(*arguments, **options)

    dist.all_to_all_single = counted  # type: ignore[assignment]
    KEPT_OPS.update(all_to_all.KEPT_OPS)
    errors = errors_of(rank, of("dp2 ep2", recompute=recompute))
    return len(calls), max(errors.values())


@pytest.mark.parametrize(("recompute", "again"), [("none", 0), ("selective", 0), ("full", 3)])
def test_selective_recomputation_sends_nothing_again(recompute, again):
    """A layer sends counts, tokens, results and two gradients; computed again, counts, tokens and results."""
    expected = MIXTRAL.num_hidden_layers * (5 + again)
    found = run_ranks(2, messages, recompute)
    assert [calls for calls, _ in found] == [expected] * 2
    assert max(error for _, error in found) < EXACT
