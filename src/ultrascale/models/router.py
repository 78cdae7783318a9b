"""Router: chooses the experts of each token, and keeps their load balanced.

    logits = hidden W^T (+ b), in fp32        scores = softmax or sigmoid of them
    chosen = the k best by score              greedy
             ... of the best groups           group_limited_greedy: a group scores as its best expert (DeepSeek-V2)
             by score + bias, of the groups   noaux_tc: a group scores as the sum of its two best (DeepSeek-V3)
    weights = scores of the chosen, optionally normalised to sum 1, times a factor. The bias affects only the choice.

A softmax after the choice (GPT-OSS) equals a softmax before it, normalised to sum 1.

Three mechanisms balance the load. All are sums over tokens like the loss itself, so that their scale does not depend on the
layout:

    balance loss   c X sum_t sum_i p_i(t) n_i / sum(n)      p: normalised scores of token t; n: number of tokens that chose i in
                                                           the sequence, micro-batch or all ranks' micro-batches. c per token
                                                           for balanced choices; no gradient through n (Fedus et al. 2022)
    z-loss         c sum_t logsumexp(logits(t))^2          (Zoph et al. 2022)
    bias           b_i += rate * sign(mean(n) - n_i)       after a step, from the global batch's counts (Wang et al. 2024)

transformers' own balance loss is k times ours and pools all layers, which hides one layer's imbalance behind another's. It is
not offered, and a coefficient meant for it is not applied (`router_aux_loss_scope = "none"`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.choice.wide import wide_dtype

EQUAL = 2.0**-15
TINY = 1e-20
"""Keeps a sum of sigmoids above zero (DeepSeek-V3)."""


class Routing(NamedTuple):
    """Experts to which tokens are routed."""

    experts: Tensor
    """Expert numbers, [N, k] int64; X, one past the last expert, marks a dropped choice."""
    weights: Tensor
    """Weights of their results, [N, k] in fp32 or wider."""


def same_counts(counts: Tensor) -> Tensor:
    """Identity: without parallelism there are no other ranks' counts."""
    return counts


def drop_over_capacity(chosen: Tensor, weights: Tensor, num_experts: int, factor: float) -> Tensor:
    """Mask of the choices [B, S, k] that are kept under a capacity limit: from each sequence an expert takes at most `factor`
    times an even share, highest weights first and earlier tokens first among equal ones. Needs whole sequences.

    Weights are compared in multiples of `EQUAL`: those of equal tokens differ by rounding, which depends on a token's position
    in the matrix, and so on layout and processor.
    """
    batch, length, choices = chosen.shape
    capacity = ceil(factor * length * choices / num_experts)
    wanted = weights.new_full((batch, length, num_experts), -torch.inf).scatter_(2, chosen, (weights.detach() / EQUAL).round_())
    order = wanted.argsort(dim=1, descending=True, stable=True)
    places = torch.arange(length, device=chosen.device)[:, None].expand_as(order)
    ranks = torch.empty_like(order).scatter_(1, order, places)  # [B, S, X]
    return ranks.gather(2, chosen) < capacity


class Router(nn.Module):
    """Scores every expert for every token.

    `sum_counts` and `keep` are seams: counts of choices [1 or B, X] are summed over the ranks that hold the other tokens of the
    same sequence, micro-batch or batch; `keep` needs whole sequences.
    """

    e_score_correction_bias: Tensor | None

    def __init__(self, model: Model):
        super().__init__()
        self.spec = model
        self.weight = nn.Parameter(torch.empty(model.num_experts, model.hidden_size))
        self.bias = nn.Parameter(torch.empty(model.num_experts)) if model.mlp_bias else None
        balances = model.topk_method == "noaux_tc"
        self.register_buffer(
            "e_score_correction_bias", torch.zeros(model.num_experts, dtype=torch.float32) if balances else None
        )
        self.sum_counts: Callable[[Tensor], Tensor] = same_counts
        self.keep = drop_over_capacity

    def forward(self, hidden: Tensor) -> tuple[Routing, Tensor, Tensor | None]:
        """Routes [B, S, D]: returns the routing; how many chose each expert, [X] int64, dropped ones included; and the sum over
        tokens of weighted auxiliary losses, 0-d; None without gradients."""
        spec, logits = self.spec, _RouterLogits.apply(hidden, self.weight, self.bias)  # [B, S, X]
        scores = logits.sigmoid() if spec.scoring_func == "sigmoid" else logits.softmax(-1)
        chosen = choose(scores.detach(), spec, self.e_score_correction_bias)  # [B, S, k]
        weights: Tensor = _Weights.apply(scores, chosen, spec.norm_topk_prob, spec.routed_scaling_factor)  # pyright: ignore
        counts = count_choices(chosen, spec.num_experts)  # [B, X]
        # Useless without a backward pass, and it would wait for other ranks' counts.
        auxiliary = self._auxiliary(logits, scores, counts) if torch.is_grad_enabled() else None
        if spec.expert_capacity_factor is not None:
            kept = self.keep(chosen, weights, spec.num_experts, spec.expert_capacity_factor)
            chosen, weights = chosen.masked_fill(~kept, spec.num_experts), weights.masked_fill(~kept, 0)
        return Routing(chosen.flatten(0, 1), weights.flatten(0, 1)), counts.sum(0), auxiliary

    def _auxiliary(self, logits: Tensor, scores: Tensor, counts: Tensor) -> Tensor | None:
        spec, total = self.spec, None
        if spec.balance_loss_coef:
            shares = scores / _total(scores) if spec.scoring_func == "sigmoid" else scores
            counts = counts if spec.router_aux_loss_scope == "sequence" else counts.sum(0, keepdim=True)
            counts = self.sum_counts(counts).to(scores.dtype)
            load = counts / counts.sum(1, keepdim=True)  # [1 or B, X]
            total = spec.balance_loss_coef * spec.num_experts * (shares.sum(1) * load).sum()
        if spec.router_z_loss_coef:
            z_loss = spec.router_z_loss_coef * logits.logsumexp(-1).square().sum()
            total = z_loss if total is None else total + z_loss
        return total

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        """Keep the bias in its dtype: its updates are thousandths, which bf16 would lose. It moves to other devices, but is not
        cast to narrow dtypes."""
        before = self.e_score_correction_bias
        super()._apply(fn, recurse)  # pyright: ignore[reportPrivateUsage]
        after = self.e_score_correction_bias
        if before is not None and after is not None and after.itemsize < before.itemsize:
            self.e_score_correction_bias = before.to(after.device)
        return self


def choose(scores: Tensor, model: Model, bias: Tensor | None) -> Tensor:
    """Choose the experts of each token, [..., k] int64, by scores [..., X]."""
    if bias is not None:
        scores = scores + bias
    if model.n_group > 1:
        groups = scores.unflatten(-1, (model.n_group, -1))
        best = 2 if model.topk_method == "noaux_tc" else 1
        worth = groups.topk(min(best, groups.shape[-1]), -1).values.sum(-1)  # [..., groups]
        visited = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(model.topk_group, -1).indices, True)
        scores = groups.masked_fill(~visited.unsqueeze(-1), -torch.inf).flatten(-2)
    return scores.topk(model.num_experts_per_tok, -1).indices


def count_choices(chosen: Tensor, num_experts: int) -> Tensor:
    """Number of choices of each expert in each sequence: [B, S, k] to [B, X] int64."""
    rows = chosen.flatten(1)
    counts = torch.zeros(len(rows), num_experts, dtype=torch.int64, device=chosen.device)
    return counts.scatter_add_(1, rows, torch.ones_like(rows))


class _RouterLogits(torch.autograd.Function):
    """hidden W^T + b in fp32 or wider. Saves hidden in its own dtype: an fp32 copy would be twice as large."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        wide = wide_dtype(hidden)
        ctx.save_for_backward(hidden, weight)
        ctx.has_bias = bias is not None
        rows = hidden.flatten(0, -2).to(wide)
        logits = torch.mm(rows, weight.to(wide).t()) if bias is None else torch.addmm(bias.to(wide), rows, weight.to(wide).t())
        return logits.unflatten(0, hidden.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        grad = grad.flatten(0, -2)
        grad_hidden = torch.mm(grad, weight.to(grad.dtype)).to(hidden.dtype).view_as(hidden)
        grad_weight = torch.mm(grad.t(), hidden.flatten(0, -2).to(grad.dtype)).to(weight.dtype)
        return grad_hidden, grad_weight, grad.sum(0).to(weight.dtype) if ctx.has_bias else None


class _Weights(torch.autograd.Function):
    """Scores of the chosen experts, optionally normalised to sum 1, times a factor. Saves the choices and the scores, which
    their own backward pass needs anyway."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, chosen: Tensor, normalises: bool, factor: float) -> Tensor:
        ctx.save_for_backward(scores, chosen)
        ctx.normalises, ctx.factor = normalises, factor
        chosen_scores = scores.gather(-1, chosen)
        return (chosen_scores / _total(chosen_scores) if normalises else chosen_scores) * factor

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        scores, chosen = ctx.saved_tensors
        grad = grad * ctx.factor
        if ctx.normalises:
            chosen_scores = scores.gather(-1, chosen)
            total = _total(chosen_scores)
            grad = (grad - (grad * chosen_scores).sum(-1, keepdim=True) / total) / total
        return torch.zeros_like(scores).scatter_(-1, chosen, grad), None, None, None


def _total(scores: Tensor) -> Tensor:
    return scores.sum(-1, keepdim=True) + TINY
