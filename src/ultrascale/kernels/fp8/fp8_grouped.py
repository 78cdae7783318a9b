"""One fp8 product per expert over rows that lie in the order of experts (`grouped_matmul` in `kernels.fp8.fp8_linear`'s
numbers).

Each expert's product is one of its own: "tensor" is a scale for an expert's matrix and one for its rows, "row" a scale for a
row of either. So what an expert computes does not depend on which others its rank holds, and ep sends nothing for scales.

torch's one call for all groups takes scales of rows alone, gradients in e4m3 and groups of whole multiples of 16; here groups
go one after the other, filled up with zeros where products want it, and the host waits for the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_linear import ALONE, NOTHING_KEPT, Kept, Wires, noted, paired, scale_of
from ultrascale.kernels.fp8.fp8_matrices import (
    FORWARD,
    GRADIENT,
    SMALLEST,
    Narrow,
    Over,
    Scaling,
    largest_of,
    multiplied,
    rounded,
)
from ultrascale.kernels.grouped_matmul import row_groups, sums_of_groups


def fp8_grouped_linear(
    rows: Tensor,
    weights: list[Tensor],
    counts: Tensor,
    biases: list[Tensor],
    scaling: Scaling,
    wires: Wires = ALONE,
    kept: Kept = NOTHING_KEPT,
    came: Sequence[Narrow] = (),
) -> tuple[Tensor, ...]:
    """[M, F] for each of weights [X, F, D], from rows [M, D] in the order of experts; biases [X, F] of all or of none.

    counts [X] int64: rows of each expert. `wires`: of its scales alone. `kept`: of delayed scaling. `came`: the weights,
    rounded already, as in `fp8_linear`.
    """
    values = [one.values for one in came] + [one.scale for one in came]
    return _Grouped.apply(  # pyright: ignore[reportReturnType]
        rows, counts, scaling, wires, len(weights), len(biases), kept, *weights, *biases, *values
    )


@custom_op("ultrascale::scaled_groups", mutates_args=())
def scaled_groups(rows: Tensor, scale: Tensor, matrices: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """[M, Q] of rows [M, P] and each expert's matrix [X, Q, P]; scales [M, 1] and [X, Q, 1], or both [X, 1, 1]."""
    out, of_experts = rows.new_zeros(len(rows), matrices.shape[1], dtype=dtype), scale.dim() > 2
    for expert, part in row_groups(counts):
        own = scale[expert] if of_experts else scale[part]
        out[part] = multiplied(rows[part], own, matrices[expert], scales[expert], dtype)
    return out


@custom_op("ultrascale::scaled_outer_groups", mutates_args=())
def scaled_outer_groups(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """[X, P, Q]: of each expert's rows of [M, P] and [M, Q] left^T right; scales [X, P, 1] and [X, Q, 1], or both [X, 1, 1]."""
    out = left.new_zeros(len(counts), left.shape[1], right.shape[1], dtype=dtype)
    for expert, part in row_groups(counts):
        out[expert] = multiplied(left[part].t(), left_scale[expert], right[part].t(), right_scale[expert], dtype)
    return out


@scaled_groups.register_fake
def _(rows: Tensor, scale: Tensor, matrices: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return rows.new_empty(len(rows), matrices.shape[1], dtype=dtype)


@scaled_outer_groups.register_fake
def _(left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    return left.new_empty(len(counts), left.shape[1], right.shape[1], dtype=dtype)


PRODUCT = torch.ops.ultrascale.scaled_groups.default


class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, counts: Tensor, scaling: Scaling, wires: Wires, count: int, num_biases: int, kept: Kept,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, came = parameters[:count], parameters[count : count + num_biases], parameters[count + num_biases :]
        expert = _expert_of_row(counts, len(rows))
        largest, slots = [_largest(rows, expert, len(counts), scaling)], [kept.places.input]
        if not came:
            largest, slots = [*largest, *(_largest_of_matrix(one, scaling) for one in weights)], [*slots, *kept.places.weights]
        scale, *scales = _kept_or_found(kept, largest, slots, wires.over_inputs(scaling), FORWARD)
        values = _rounded_rows(rows, scale, expert, FORWARD)
        # Weights are held, not saved, as in `fp8_linear`.
        ctx.weights, ctx.scaling, ctx.wires, ctx.has_bias, ctx.dtype = weights, scaling, wires, bool(biases), rows.dtype
        ctx.kept, ctx.came = kept, came
        ctx.save_for_backward(values, scale, counts, *scales)
        matrices = paired(came) or [rounded(weight, one) for weight, one in zip(weights, scales, strict=True)]
        found = [scaled_groups(values, scale, *matrix, counts, rows.dtype) for matrix in matrices]
        return tuple([out + bias[expert] for out, bias in zip(found, biases, strict=True)] if biases else found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (values, scale, counts, *scales), by_row = ctx.saved_tensors, ctx.scaling == "row"
        expert, over, dtype = _expert_of_row(counts, len(values)), ctx.wires.over_grads(), ctx.dtype
        matrices = paired(ctx.came) or [rounded(weight, one) for weight, one in zip(ctx.weights, scales, strict=True)]
        scales = [matrix.scale for matrix in matrices]
        format = FORWARD if by_row else GRADIENT
        pairs = zip(grads, scales, strict=True)
        wide = (grad * one.squeeze(2)[expert] for grad, one in pairs) if by_row else iter(grads)
        if ctx.kept.largest is None and ctx.kept.scales is None:
            along = _narrow_along(wide, expert, len(counts), ctx.scaling, format, over)
        else:
            along = _narrow_kept(grads, expert, len(counts), ctx.kept, over)
        ones = values.new_ones((), dtype=scale.dtype)
        total, of_weights = None, []
        for grad, rounded_grad, matrix in zip(grads, along, matrices, strict=True):
            turned = ones.expand(len(counts), matrix.values.shape[2], 1) if by_row else matrix.scale
            one = scaled_groups(*rounded_grad, matrix.values.transpose(1, 2), turned, counts, dtype)
            total = one if total is None else total + one
            across = _by_feature(grad * scale, expert, len(counts)) if by_row else rounded_grad
            given = Narrow(values, ones.expand(len(counts), values.shape[1], 1) if by_row else scale)
            of_weights.append(scaled_outer_groups(*across, *given, counts, dtype))
        of_biases = [sums_of_groups(grad.contiguous(), counts) for grad in grads] if ctx.has_bias else []
        nothing = [None] * len(ctx.came)
        return total, None, None, None, None, None, None, *of_weights, *of_biases, *nothing


def _expert_of_row(counts: Tensor, num_rows: int) -> Tensor:
    """[M] int64."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_rows)


def _largest(rows: Tensor, expert: Tensor, num_experts: int, scaling: Scaling) -> Tensor:
    """Largest magnitude of each row, [M, 1], or of all rows of an expert, [X, 1, 1]."""
    of_rows = largest_of(rows, "row")
    if scaling == "row":
        return of_rows
    return of_rows.new_zeros(num_experts).scatter_reduce_(0, expert, of_rows.squeeze(1), "amax").view(-1, 1, 1)


def _narrow_along(
    wide: Iterable[Tensor], expert: Tensor, num_experts: int, scaling: Scaling, dtype: torch.dtype, over: Over | None
) -> list[Narrow]:
    """Gradients of rows, rounded; one after the other, unless ranks agree on all scales at once."""
    if over is None:
        return [_narrow_along([one], expert, num_experts, scaling, dtype, lambda found: found)[0] for one in wide]
    wide = list(wide)
    scales = _scales([_largest(one, expert, num_experts, scaling) for one in wide], over, dtype)
    return [Narrow(_rounded_rows(one, own, expert, dtype), own) for one, own in zip(wide, scales, strict=True)]


def _kept_or_found(
    kept: Kept, largest: Sequence[Tensor], slots: Sequence[int], over: Over | None, dtype: torch.dtype
) -> list[Tensor]:
    """The scales of a history, if there is one, else those of `largest`; which are noted if somebody asks for them."""
    if kept.scales is None:
        scales = _scales(largest, over, dtype)
    else:
        scales = [scale_of(kept.scales, slot, kept.places.count).view(-1, 1, 1) for slot in slots]
    if kept.largest is None:
        return scales
    return noted(scales, kept.largest, [one.flatten().float() for one in largest], list(slots))


def _narrow_kept(grads: Sequence[Tensor], expert: Tensor, num_experts: int, kept: Kept, over: Over | None) -> list[Narrow]:
    """Gradients of rows, rounded as delayed scaling has it."""
    largest = [_largest(one, expert, num_experts, "tensor") for one in grads]
    scales = _kept_or_found(kept, largest, kept.places.gradients, over, GRADIENT)
    return [Narrow(_rounded_rows(one, own, expert, GRADIENT), own) for one, own in zip(grads, scales, strict=True)]


def _largest_of_matrix(weight: Tensor, scaling: Scaling) -> Tensor:
    """[X, F, 1] or [X, 1, 1]."""
    rows = weight.flatten(0, 1) if scaling == "row" else weight.flatten(1)
    return largest_of(rows, "row").view(len(weight), -1, 1)


def _scales(largest: Sequence[Tensor], over: Over | None, dtype: torch.dtype) -> list[Tensor]:
    if over is not None:
        parts = over(torch.cat([one.flatten() for one in largest])).split([one.numel() for one in largest])
        largest = [part.view_as(one) for part, one in zip(parts, largest, strict=True)]
    return [one.clamp_min(SMALLEST) / torch.finfo(dtype).max for one in largest]


def _rounded_rows(rows: Tensor, scale: Tensor, expert: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded(rows, scale if scale.dim() == 2 else scale.view(-1, 1)[expert], dtype).values


def _by_feature(wide: Tensor, expert: Tensor, num_experts: int) -> Narrow:
    """[M, F] with a scale for each expert's features, [X, F, 1]."""
    index = expert.unsqueeze(1).expand_as(wide)
    largest = wide.new_zeros(num_experts, wide.shape[1]).scatter_reduce_(0, index, wide.abs(), "amax")
    scale = largest.clamp_min(SMALLEST) / torch.finfo(FORWARD).max
    return Narrow(rounded(wide, scale[expert]).values, scale.unsqueeze(2))
