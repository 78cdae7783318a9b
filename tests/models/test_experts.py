"""Routing, what keeps the load even, capacity, multi-token prediction; equality with transformers is in test_huggingface."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import pytest
import torch
from grads import grad_of
from models.families import DEEPSEEK_V3, LLAMA, MIXTRAL, QWEN3_MOE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ultrascale.description.architecture.model import Model
from ultrascale.models.decoder import Decoder, PredictionBlock
from ultrascale.models.experts import MoE, moe_layers, scale_auxiliary_losses, take_load, update_expert_bias
from ultrascale.models.initialise import initialise
from ultrascale.models.router import Router, choose, drop_over_capacity

BALANCED = replace(MIXTRAL, router_aux_loss_coef=0.7, num_hidden_layers=2)


def build(model: Model) -> Decoder:
    decoder = Decoder(model).double()
    initialise(decoder, model, seed=1)
    for name, parameter in decoder.named_parameters():
        if "router" in name:  # far from even
            parameter.data *= 10
    return decoder


def tokens_of(model: Model, batch: int = 2, length: int = 20, seed: int = 0) -> Tensor:
    return torch.randint(model.vocab_size, (batch, length), generator=torch.Generator().manual_seed(seed))


def gradients(decoder: Decoder) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in decoder.named_parameters() if parameter.grad is not None}


def bias_of(router: Router) -> Tensor:
    """[experts]"""
    assert router.e_score_correction_bias is not None
    return router.e_score_correction_bias


def expect_equal(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-11) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=tolerance, atol=tolerance, msg=name)


def router_inputs(decoder: Decoder) -> dict[int, Tensor]:
    """Filled by the next forward pass: what each router sees, with its graph."""
    seen: dict[int, Tensor] = {}
    for number, layer in moe_layers(decoder):

        def keep(module: nn.Module, inputs: tuple[Tensor], number: int = number) -> None:
            seen[number] = inputs[0]

        layer.router.register_forward_pre_hook(keep)
    return seen


def written_out(decoder: Decoder, seen: dict[int, Tensor]) -> Tensor:
    """All auxiliary losses by their definitions, expert by expert."""
    spec, total = decoder.spec, torch.zeros((), dtype=torch.float64)
    for number, layer in moe_layers(decoder):
        logits = seen[number] @ layer.router.weight.t()  # [B, S, X]
        scores = logits.sigmoid() if spec.scoring_func == "sigmoid" else logits.softmax(-1)
        chosen = choose(scores, spec, layer.router.e_score_correction_bias)
        shares = scores / scores.sum(-1, keepdim=True)
        units = [(shares[row], chosen[row]) for row in range(len(chosen))]
        if spec.router_aux_loss_scope != "sequence":
            units = [(shares.flatten(0, 1), chosen.flatten(0, 1))]
        for share, choice in units:
            for expert in range(spec.num_experts):
                frequency = (choice == expert).double().mean()
                total = total + spec.router_aux_loss_coef * spec.num_experts * len(share) * frequency * share[:, expert].mean()
        total = total + spec.router_z_loss_coef * logits.logsumexp(-1).square().sum()
    return total


@pytest.mark.parametrize("scope", ["sequence", "micro-batch", "global"])
@pytest.mark.parametrize("family", [BALANCED, replace(DEEPSEEK_V3, router_aux_loss_coef=0.7)], ids=["softmax", "sigmoid"])
def test_the_backward_pass_of_the_loss_is_that_of_loss_and_auxiliary_losses(family, scope):
    model = replace(family, router_aux_loss_scope=scope, router_z_loss_coef=0.03)
    tokens, ours, plain = tokens_of(model), build(model), build(replace(model, router_aux_loss_coef=0.0))
    plain.spec = model
    for _, layer in moe_layers(plain):
        layer.router.spec = replace(model, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    scale_auxiliary_losses(ours, 0.25)
    loss = ours(tokens, targets=tokens)
    (loss * 0.25).backward()
    seen = router_inputs(plain)
    expected = plain(tokens, targets=tokens)
    auxiliary = written_out(plain, seen)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-14)  # the loss that is told has no part of them
    ((expected + auxiliary) * 0.25).backward()
    expect_equal(gradients(ours), gradients(plain))
    assert take_load(ours)[1].item() == pytest.approx(auxiliary.item(), rel=1e-12)


def test_even_choices_cost_the_coefficient_for_every_token_and_layer():
    model = replace(BALANCED, num_experts_per_tok=MIXTRAL.num_experts)  # everyone visits everyone
    decoder, tokens = build(model), tokens_of(model)
    decoder(tokens, targets=tokens).backward()
    assert take_load(decoder)[1].item() == pytest.approx(0.7 * tokens.numel() * model.num_hidden_layers, rel=1e-12)


def test_a_batch_in_two_halves_has_the_gradient_of_the_whole_by_sequence_and_another_by_micro_batch():
    def found(scope: str, sizes: list[int]) -> dict[str, Tensor]:
        model = replace(BALANCED, router_aux_loss_scope=scope)
        decoder, tokens = build(model), tokens_of(BALANCED, batch=4)
        for part in tokens.split(sizes):
            decoder(part, targets=part).backward()
        return gradients(decoder)

    expect_equal(found("sequence", [4]), found("sequence", [1, 3]))
    with pytest.raises(AssertionError, match="weight"):
        expect_equal(found("micro-batch", [4]), found("micro-batch", [1, 3]))


@pytest.mark.parametrize("family", [MIXTRAL, QWEN3_MOE, DEEPSEEK_V3], ids=["mixtral", "qwen3-moe", "deepseek-v3"])
def test_load_is_counted_once_in_each_backward_pass_recomputed_or_not_and_never_without_one(family):
    model = replace(family, router_aux_loss_coef=0.5, router_z_loss_coef=0.01)
    tokens, found = tokens_of(model), []
    for recompute in (False, True):
        decoder = build(model)
        for _, block in decoder.blocks():
            forward = block.forward
            if recompute:
                block.forward = partial(checkpoint, forward, use_reentrant=False)
        with torch.no_grad():
            decoder(tokens, targets=tokens)
        seen = router_inputs(decoder)
        for _ in range(2):
            decoder(tokens, targets=tokens).backward()
        load, auxiliary = take_load(decoder)
        again, nothing = take_load(decoder)
        assert all(counts.eq(0).all() for counts in again.values()) and nothing == 0
        for number, layer in moe_layers(decoder):
            logits = seen[number].detach() @ layer.router.weight.t()
            scores = logits.sigmoid() if model.scoring_func == "sigmoid" else logits.softmax(-1)
            chosen = choose(scores, model, layer.router.e_score_correction_bias)
            assert torch.equal(load[number], 2 * chosen.flatten().bincount(minlength=model.num_experts))
        found.append((load, auxiliary, gradients(decoder)))
    assert found[0][1] == found[1][1] > 0
    expect_equal(found[1][2], found[0][2], tolerance=0)


def test_the_bias_rises_for_experts_below_the_mean_falls_for_those_above_and_changes_whom_tokens_visit_not_how_they_weigh():
    model = replace(DEEPSEEK_V3, router_bias_update_rate=0.5, n_group=1, topk_group=1)
    decoder = build(model)
    load = {number: torch.tensor([4, 0, 9, 1, 1, 1, 1, 7]) for number, _ in moe_layers(decoder)}  # mean 3
    update_expert_bias(decoder, load)
    for _, layer in moe_layers(decoder):
        assert bias_of(layer.router).tolist() == [-0.5, 0.5, -0.5, 0.5, 0.5, 0.5, 0.5, -0.5]
    router = next(moe_layers(decoder))[1].router
    hidden = torch.randn(1, 12, model.hidden_size, dtype=torch.float64)
    routing = router(hidden)[0]
    scores = (hidden[0] @ router.weight.t()).sigmoid()
    best = (scores + bias_of(router)).topk(3).indices
    assert torch.equal(routing.experts.sort(-1).values, best.sort(-1).values)
    weights = scores.gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, 2.5 * weights / weights.sum(1, keepdim=True), rtol=1e-12, atol=0)


def test_the_bias_stays_wide_when_the_model_is_made_narrow():
    decoder = Decoder(DEEPSEEK_V3)
    biases = [bias_of(layer.router) for _, layer in moe_layers(decoder)]
    for bias in biases:
        bias += 1e-3
    narrow = decoder.to(torch.bfloat16)
    assert all(parameter.dtype == torch.bfloat16 for parameter in narrow.parameters())
    for (_, layer), bias in zip(moe_layers(narrow), biases, strict=True):
        assert bias_of(layer.router).dtype == torch.float32
        assert torch.equal(bias_of(layer.router), bias)


def test_routers_compute_in_fp32_though_the_model_is_narrow():
    router = Router(MIXTRAL).bfloat16()
    torch.nn.init.normal_(router.weight, generator=torch.Generator().manual_seed(0))
    hidden = torch.randn(2, 8, MIXTRAL.hidden_size, generator=torch.Generator().manual_seed(1)).bfloat16()
    routing, _, _ = router(hidden)
    assert routing.weights.dtype == torch.float32
    scores = (hidden.float() @ router.weight.float().t()).softmax(-1).flatten(0, 1).gather(1, routing.experts)
    torch.testing.assert_close(routing.weights, scores / scores.sum(1, keepdim=True), rtol=1e-5, atol=0)


def test_a_token_visits_experts_of_so_many_groups_only():
    model = replace(DEEPSEEK_V3, num_experts=16, n_group=8, topk_group=2, num_experts_per_tok=4)
    scores = torch.rand(50, 16, generator=torch.Generator().manual_seed(0))
    groups = choose(scores, model, torch.zeros(16)) // 2
    assert {len(set(row)) for row in groups.tolist()} == {2}


def test_an_expert_over_capacity_drops_its_lowest_scores_and_of_equal_ones_the_later():
    chosen = torch.tensor([[[0], [0], [0], [1]], [[1], [1], [1], [1]]])  # [B=2, S=4, k=1]
    weights = torch.tensor([[[0.2], [0.9], [0.5], [0.1]], [[0.3], [0.3], [0.3], [0.4]]])
    kept = drop_over_capacity(chosen, weights, 2, 1.0)  # two places in each sequence
    assert kept.squeeze(-1).tolist() == [[False, True, True, True], [True, False, False, True]]
    assert drop_over_capacity(chosen, weights, 2, 0.75).equal(kept)  # one and a half
    assert drop_over_capacity(chosen, weights, 2, 2.0).all()
    rounded = weights + torch.tensor(
        [[[0], [0], [0], [0]], [[0], [1e-7], [2e-7], [0]]]
    )  # equal tokens in other rows of a product
    assert drop_over_capacity(chosen, rounded, 2, 1.0).equal(kept)


def test_with_capacity_a_layer_is_the_sum_over_choices_that_are_kept():
    model = replace(MIXTRAL, expert_capacity_factor=0.75, router_aux_loss_coef=0.1)
    layer = MoE(model).double()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(2))
    hidden = torch.randn(2, 10, model.hidden_size, dtype=torch.float64, requires_grad=True)
    out = layer(hidden)
    routing, counts, _ = layer.router(hidden)
    expected, experts, gated = torch.zeros(20, model.hidden_size, dtype=torch.float64), layer.experts, layer.experts.gate_proj
    assert gated is not None
    for token, (chosen, weights) in enumerate(zip(routing.experts.tolist(), routing.weights, strict=True)):
        for expert, weight in zip(chosen, weights, strict=True):
            if expert < model.num_experts:
                gate, up = (p.weight[expert] @ hidden.flatten(0, 1)[token] for p in (gated, experts.up_proj))
                expected[token] += weight * (experts.down_proj.weight[expert] @ (F.silu(gate) * up))
    dropped = int((routing.experts == model.num_experts).sum())
    assert dropped > 0 and counts.sum() == 40
    per_sequence = routing.experts.view(2, -1)
    assert max(int((row == e).sum()) for row in per_sequence for e in range(model.num_experts)) == 4  # ceil(0.75 * 10 * 2 / 4)
    torch.testing.assert_close(out.flatten(0, 1), expected, rtol=1e-12, atol=1e-12)
    ours, theirs = (torch.autograd.grad(x.square().sum(), hidden, retain_graph=True)[0] for x in (out, expected))
    layer.auxiliary_scale = 0.0
    ours = torch.autograd.grad(layer(hidden).square().sum(), hidden)[0]
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


def test_experts_that_nobody_visits_have_gradients_of_zeros():
    model = replace(MIXTRAL, num_hidden_layers=1)
    decoder, tokens = build(model), tokens_of(model)
    router = next(moe_layers(decoder))[1].router
    router.forward = lambda hidden, forward=router.forward: _all_to(forward(hidden), 2)
    decoder(tokens, targets=tokens).backward()
    for name, gradient in gradients(decoder).items():
        if ".experts." in name:
            assert gradient[:2].eq(0).all() and gradient[3].eq(0).all() and gradient[2].abs().sum() > 0


def _all_to(found, expert: int):
    routing, counts, auxiliary = found
    return routing._replace(experts=torch.full_like(routing.experts, expert)), counts, auxiliary


def prediction_model(count: int, family: Model = DEEPSEEK_V3) -> Model:
    return replace(family, num_nextn_predict_layers=count, mtp_loss_coef=0.4)


@pytest.mark.parametrize(
    "model", [prediction_model(1), prediction_model(2), prediction_model(1, LLAMA)], ids=["one", "two", "dense"]
)
def test_prediction_blocks_read_tokens_to_come_and_add_their_gradient_but_nothing_to_the_loss(model):
    decoder, alone, sequence = build(model), build(model), tokens_of(model, length=21)
    tokens, targets = sequence[:, :-1], sequence[:, 1:].clone()
    targets[0, 6] = targets[1, -3:] = -100
    loss = decoder(tokens, targets=targets)
    loss.backward()

    hidden: list[Tensor] = []
    assert alone.norm is not None and alone.embed_tokens is not None
    alone.norm.register_forward_hook(lambda module, inputs, out: hidden.append(cast(Tensor, out)))
    with torch.no_grad():
        quiet = alone(tokens, targets=targets)
    expected = F.cross_entropy(alone(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-13) == quiet.item()
    view, before = alone._view(hidden[-1], torch.arange(20), None, None), hidden[-1]
    count = model.num_nextn_predict_layers
    for depth in range(1, count + 1):
        block = alone.layers[str(model.num_hidden_layers + depth - 1)]
        assert isinstance(block, PredictionBlock)
        # Position i reads token i + depth, and predicts token i + depth + 1, unless a target on the way does not count.
        coming, goals = torch.zeros_like(tokens), torch.full_like(tokens, -100)
        for row in range(len(tokens)):
            for i in range(tokens.shape[1]):
                way = targets[row, i : i + depth + 1]
                reads = len(way) >= depth and (way[:depth] >= 0).all()
                coming[row, i] = way[depth - 1] if reads else 0
                goals[row, i] = way[depth] if reads and len(way) > depth else -100
        joined = torch.cat((block.enorm(alone.embed_tokens(coming)), block.hnorm(before)), -1)
        before = super(PredictionBlock, block).forward(block.eh_proj(joined), *view.of(model.num_hidden_layers + depth - 1))
        logits = F.linear(block.shared_head.norm(before), alone.head_weight)
        expected = expected + 0.4 / count * F.cross_entropy(logits.flatten(0, 1), goals.flatten(), reduction="sum")
    expected.backward()
    expect_equal(gradients(decoder), gradients(alone))
    assert set(gradients(decoder)) == {name for name, _ in decoder.named_parameters()}


def test_the_last_stage_predicts_without_tokens_and_stages_together_are_the_model():
    model = prediction_model(1)
    whole, tokens = build(model), tokens_of(model)
    targets = tokens.roll(-1, 1)
    whole(tokens, targets=targets).backward()
    first, last = Decoder(model, layers=range(2), is_last=False), Decoder(model, layers=range(2, 3), is_first=False)
    for stage in (first, last):
        stage.double().load_state_dict(whole.state_dict(), strict=False)
    assert [number for number, _ in last.blocks()] == [2, 3]
    last(first(tokens), targets=targets).backward()
    assert first.embed_tokens is not None and last.embed_tokens is not None
    found = gradients(first) | {name: g for name, g in gradients(last).items() if name != "embed_tokens.weight"}
    found["embed_tokens.weight"] = grad_of(first.embed_tokens.weight) + grad_of(last.embed_tokens.weight)
    expect_equal(found, gradients(whole))


def test_compiled_blocks_with_experts_give_the_same_gradients_and_counts():
    model = replace(BALANCED, num_hidden_layers=1)
    tokens, plain, compiled = tokens_of(model), build(model), build(model)
    for _, block in compiled.blocks():
        block.forward = torch.compile(block.forward, backend="aot_eager")
    for decoder in (plain, compiled):
        for _ in range(2):
            decoder(tokens, targets=tokens).backward()
    expect_equal(gradients(compiled), gradients(plain))
    assert torch.equal(take_load(compiled)[0][0], take_load(plain)[0][0])
