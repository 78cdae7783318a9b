"""Mixture-of-experts feed-forward layer (Shazeer et al. 2017): each token visits k of X experts, and a shared one if there is
one.

    hidden [B, S, D] -- router --> routing            each token's experts, and the weights of their results
        |-- dispatch.start ---> rows in flight
        |-- shared_experts ---> [B, S, D]             computed meanwhile
        '-- dispatch.finish --> experts, combine      [N, D]

Seams that parallelism and fp8 replace: `dispatch` (rows travel between ranks), `router.sum_counts` and `router.keep`, the
experts' `grouped_column_linear` and `grouped_row_linear` (the dtype of their products), and the seams of the shared experts.

An identity function does two things in its backward pass, which each micro-batch runs exactly once, recomputed or not: it gives
the load-balancing losses their gradient, and counts the choices. So neither has to be passed out of a pipeline stage.
`auxiliary_scale` is the factor of the loss before its backward pass: one over the step's number of valid targets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ultrascale.description.architecture.model import Model
from ultrascale.kernels.expert_rows import spread, weighted_sum
from ultrascale.kernels.grouped_matmul import grouped_linear
from ultrascale.models.feed_forward import MLP, activate
from ultrascale.models.router import Router, Routing, count_choices
from ultrascale.torch_private import never_compiled


def num_kept(counts: Tensor, pairs: Tensor) -> int:
    """Number of `pairs` that were not dropped, copied from `counts` to the host. A trace, which has no values, uses the
    shape."""
    return int(counts.sum())


class Dispatch(Protocol):
    """Sends tokens to experts and returns the results, in two halves."""

    def start(self, tokens: Tensor, routing: Routing) -> Any:
        """Start sending tokens [N, D]."""
        ...

    def finish(self, under_way: Any, experts: Experts) -> Tensor:
        """Compute the experts, and sum each token's results with their weights: [N, D]."""
        ...


@dataclass
class GroupedTokens:
    """Token rows grouped by expert, with their metadata."""

    rows: list[Tensor]
    """[R, D], in a list from which the caller takes the only reference: the rows can be freed while their results are
    summed."""
    pairs: Tensor
    """Index of each row's (token, choice) pair, [R] int64."""
    counts: Tensor
    """Number of rows of each expert, [X] int64."""
    weights: Tensor
    """Routing weights, [N, k]."""


@dataclass(frozen=True)
class LocalDispatch:
    """Dispatch for a rank that has all experts."""

    num_experts: int
    drops: bool = False
    """True if a choice may have been dropped; then the host copies the number of kept ones from the device."""
    spread: Callable[[Tensor, Tensor, int], Tensor] = spread

    def start(self, tokens: Tensor, routing: Routing) -> GroupedTokens:
        """One row for each (token, chosen expert) pair of tokens [N, D]."""
        flat = routing.experts.flatten()
        counts = count_choices(routing.experts[None], self.num_experts + 1)[0, : self.num_experts]
        pairs = flat.argsort(stable=True)
        if self.drops:
            pairs = pairs[: num_kept(counts, pairs)]
        return GroupedTokens([self.spread(tokens, pairs, routing.experts.shape[1])], pairs, counts, routing.weights)

    def finish(self, under_way: GroupedTokens, experts: Experts) -> Tensor:
        outputs = experts(under_way.rows.pop(), under_way.counts)
        return weighted_sum(outputs, under_way.pairs, under_way.weights)


class GroupedLinear(nn.Module):
    """Linear layer with one matrix per expert."""

    def __init__(self, num_experts: int, columns: int, rows: int, *, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, rows, columns))
        self.matrix_rows: int | None = None
        """F, if `weight` is stored as all experts' rows, [X F, D], for sharding by rows; else None."""
        self.bias = nn.Parameter(torch.empty(num_experts, rows)) if bias else None
        self.adds_bias = True
        """True if this rank adds the bias, where several ranks compute partial sums."""

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] grouped by expert to [M, F]; counts [X] int64."""
        return grouped_linear(rows, self.matrices, counts, self.local_bias)

    @property
    def matrices(self) -> Tensor:
        """The weight as [X, F, D]."""
        return self.weight if self.matrix_rows is None else self.weight.view(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """(X, F, D) of the weight."""
        shape, rows = tuple(self.weight.shape), self.matrix_rows
        return shape if rows is None else (shape[0] // rows, rows, shape[1])

    @property
    def local_bias(self) -> Tensor | None:
        """Bias that this rank adds: zeros, with a zero gradient, if another rank adds it."""
        return self.bias if self.bias is None or self.adds_bias else self.bias * 0.0


def grouped_column_linear(rows: Tensor, counts: Tensor, *projections: GroupedLinear) -> tuple[Tensor, ...]:
    """Several projections of rows grouped by expert: [M, D] to [M, F] each."""
    return tuple(projection(rows, counts) for projection in projections)


def grouped_row_linear(rows: Tensor, counts: Tensor, projection: GroupedLinear) -> Tensor:
    """Projection back to the residual width: [M, F] to [M, D]."""
    return projection(rows, counts)


class Experts(nn.Module):
    """X feed-forward layers, one per expert."""

    def __init__(self, model: Model):
        super().__init__()
        count, d, f, bias = model.num_experts, model.hidden_size, model.moe_intermediate_size, model.mlp_bias
        self.activation = model.activation
        self.gate_proj = GroupedLinear(count, d, f, bias=bias) if model.gated_mlp else None
        self.up_proj = GroupedLinear(count, d, f, bias=bias)
        self.down_proj = GroupedLinear(count, f, d, bias=bias)
        self.grouped_column_linear, self.grouped_row_linear, self.activate = grouped_column_linear, grouped_row_linear, activate

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Rows [M, D] grouped by expert to [M, D]; counts [X] int64: rows of each expert."""
        projections = (self.up_proj,) if self.gate_proj is None else (self.gate_proj, self.up_proj)
        inner = self.grouped_column_linear(rows, counts, *projections)
        return self.grouped_row_linear(self.activate(self.activation, *inner), counts, self.down_proj)


class MoE(nn.Module):
    """Router, experts, and a shared expert if there is one."""

    def __init__(self, model: Model):
        super().__init__()
        self.router = Router(model)
        self.experts = Experts(model)
        shared = model.shared_expert_intermediate_size
        self.shared_experts = MLP(model, shared) if shared else None
        self.dispatch: Dispatch = LocalDispatch(model.num_experts, drops=model.expert_capacity_factor is not None)
        self.auxiliary_scale = 1.0
        self.statistics = RoutingStatistics()

    # Sorting and counting are not worth compiling, and the backward pass's statistics must not be recorded while tracing.
    @never_compiled
    def forward(self, hidden: Tensor) -> Tensor:
        """[B, S, D] to [B, S, D]."""
        out, auxiliary, counts = self.compute(hidden)
        return _Note.apply(out, auxiliary, counts, self.statistics, self.auxiliary_scale) if torch.is_grad_enabled() else out

    def compute(self, hidden: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """The result, the weighted auxiliary losses, and how often each expert was chosen, [X]."""
        routing, counts, auxiliary = self.router(hidden)
        under_way = self.dispatch.start(hidden.flatten(0, 1), routing)
        shared = None if self.shared_experts is None else self.shared_experts(hidden)
        out = self.dispatch.finish(under_way, self.experts).view_as(hidden)
        return out if shared is None else out + shared, auxiliary, counts


class RoutingStatistics:
    """Routing statistics of a layer's backward passes since they were last taken."""

    def __init__(self) -> None:
        self.counts: Tensor | None = None
        self.auxiliary: Tensor | None = None

    def add(self, counts: Tensor, auxiliary: Tensor | None) -> None:
        """Add counts [X] int64 and the sum of the auxiliary losses, 0-d."""
        self.counts = counts if self.counts is None else self.counts + counts
        if auxiliary is not None:
            self.auxiliary = auxiliary if self.auxiliary is None else self.auxiliary + auxiliary

    def take(self) -> tuple[Tensor | None, Tensor | None]:
        """Return both sums and reset them."""
        taken = self.counts, self.auxiliary
        self.counts = self.auxiliary = None
        return taken


class _Note(torch.autograd.Function):
    """Identity; in the backward pass the auxiliary losses get their gradient and the choices are counted."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, auxiliary: Tensor | None, counts: Tensor, statistics: RoutingStatistics, scale: float
    ) -> Tensor:
        ctx.noted, ctx.statistics, ctx.scale = (counts, None if auxiliary is None else auxiliary.detach()), statistics, scale
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        counts, auxiliary = ctx.noted
        ctx.statistics.add(counts, auxiliary)
        of_auxiliary = None if auxiliary is None else torch.full_like(auxiliary, ctx.scale)
        return grads[0], of_auxiliary, None, None, None


def moe_layers(decoder: nn.Module) -> Iterator[tuple[int, MoE]]:
    """Every MoE layer in `decoder`, with its block's number in the whole model."""
    for name, module in decoder.named_modules():
        if isinstance(module, MoE):
            yield int(name.split(".")[1]), module


def scale_auxiliary_losses(decoder: nn.Module, scale: float) -> None:
    """Set the factor by which the loss will be multiplied before its backward pass; call it before the forward passes of a
    step."""
    for _, layer in moe_layers(decoder):
        layer.auxiliary_scale = scale


def take_load(decoder: nn.Module) -> tuple[dict[int, Tensor], Tensor]:
    """Expert load of this rank's backward passes since the last call: by block, how often each expert was chosen, [X] int64;
    and the sum over tokens and layers of weighted auxiliary losses, 0-d. Blocks without a backward pass have zeros."""
    load: dict[int, Tensor] = {}
    total = torch.zeros((), dtype=torch.float64)
    for number, layer in moe_layers(decoder):
        counts, auxiliary = layer.statistics.take()
        weight = layer.router.weight
        load[number] = torch.zeros(weight.shape[0], dtype=torch.int64, device=weight.device) if counts is None else counts
        if auxiliary is not None:
            total = total.to(auxiliary.device) + auxiliary.double()
    return load, total


@torch.no_grad()
def update_expert_bias(decoder: nn.Module, load: Mapping[int, Tensor]) -> None:
    """Update the routing bias after a step: lower it for experts chosen more often than the mean, raise it for the others.

    `load`: of the global batch, by block, [X], equal on every rank.
    """
    for number, layer in moe_layers(decoder):
        bias = layer.router.e_score_correction_bias
        if bias is not None:
            counts = load[number].double()
            bias += layer.router.spec.router_bias_update_rate * (counts.mean() - counts).sign().to(bias)
