"""One fp8 GEMM per expert over rows grouped by expert (`grouped_matmul` with the numerics of `kernels.fp8.fp8_linear`).

Each expert is scaled separately: "tensor" is one scale for an expert's matrix and one for its rows, "row" one for each row of
either. So an expert's result does not depend on the other experts of its rank, and ep needs no communication for scales.

torch's single call for all groups supports only row scales, gradients in e4m3 and groups of multiples of 16 rows. Here groups
run one after the other, zero-padded where the GEMM requires it, and the host waits for the counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_linear import (
    ALONE,
    NO_DELAYED_SCALES,
    DelayedScales,
    Wires,
    narrow_again,
    narrow_pairs,
    record_amaxes,
    scale_of,
)
from ultrascale.kernels.fp8.fp8_matrices import (
    FORWARD,
    GRADIENT,
    Narrow,
    ReduceAmax,
    Scaling,
    largest_of,
    multiplied,
    rounded,
    scales_of,
)
from ultrascale.kernels.grouped_matmul import row_groups, sums_of_groups


def fp8_grouped_linear(
    rows: Tensor,
    weights: list[Tensor],
    counts: Tensor,
    biases: list[Tensor],
    scaling: Scaling,
    wires: Wires = ALONE,
    delayed: DelayedScales = NO_DELAYED_SCALES,
    gathered: Sequence[Narrow] = (),
) -> tuple[Tensor, ...]:
    """[M, F] for each of `weights` [X, F, D], from rows [M, D] grouped by expert; biases [X, F] for all or for none.

    counts [X] int64: rows of each expert. `wires`: communication of scales only. `delayed`: delayed scaling. `gathered`: the
    weights already in fp8, as in `fp8_linear`.
    """
    values = [matrix.values for matrix in gathered] + [matrix.scale for matrix in gathered]
    return _Grouped.apply(  # pyright: ignore[reportReturnType]
        rows, counts, scaling, wires, len(weights), len(biases), delayed, *weights, *biases, *values
    )


@custom_op("ultrascale::scaled_groups", mutates_args=())
def scaled_groups(rows: Tensor, scale: Tensor, matrices: Tensor, scales: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [M, P] times each expert's matrix [X, Q, P]: [M, Q]; scales [M, 1] and [X, Q, 1], or both [X, 1, 1]."""
    out, of_experts = rows.new_zeros(len(rows), matrices.shape[1], dtype=dtype), scale.dim() > 2
    for expert, part in row_groups(counts):
        part_scale = scale[expert] if of_experts else scale[part]
        out[part] = multiplied(rows[part], part_scale, matrices[expert], scales[expert], dtype)
    return out


@custom_op("ultrascale::scaled_outer_groups", mutates_args=())
def scaled_outer_groups(
    left: Tensor, left_scale: Tensor, right: Tensor, right_scale: Tensor, counts: Tensor, dtype: torch.dtype
) -> Tensor:
    """left^T right over each expert's rows of [M, P] and [M, Q]: [X, P, Q]; scales [X, P, 1] and [X, Q, 1], or both [X, 1,
    1]."""
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
        ctx: Any, rows: Tensor, counts: Tensor, scaling: Scaling, wires: Wires, count: int, num_biases: int,
        delayed: DelayedScales, *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, gathered = parameters[:count], parameters[count : count + num_biases], parameters[count + num_biases :]
        expert = _expert_of_row(counts, len(rows))
        largest, slots = [_largest(rows, expert, len(counts), scaling)], [delayed.places.input]
        if not gathered:
            largest, slots = [*largest, *(_largest_of_matrix(w, scaling) for w in weights)], [*slots, *delayed.places.weights]
        scale, *scales = _scales_of(delayed, largest, slots, wires.reduce_input_amax(scaling), FORWARD)
        values = _rounded_rows(rows, scale, expert, FORWARD)
        # Weights are held as an attribute, not saved, as in `fp8_linear`.
        ctx.weights, ctx.scaling, ctx.wires, ctx.has_bias, ctx.dtype = weights, scaling, wires, bool(biases), rows.dtype
        ctx.delayed, ctx.gathered = delayed, gathered
        ctx.save_for_backward(values, scale, counts, *scales)
        matrices = narrow_pairs(gathered) or narrow_again(weights, scaling, scales)
        outputs = [scaled_groups(values, scale, *matrix, counts, rows.dtype) for matrix in matrices]
        return tuple([out + bias[expert] for out, bias in zip(outputs, biases, strict=True)] if biases else outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (values, scale, counts, *scales), by_row = ctx.saved_tensors, ctx.scaling == "row"
        expert, reduce_amax, dtype = _expert_of_row(counts, len(values)), ctx.wires.reduce_grad_amax(), ctx.dtype
        matrices = narrow_pairs(ctx.gathered) or narrow_again(ctx.weights, ctx.scaling, scales)
        scales = [matrix.scale for matrix in matrices]
        format = FORWARD if by_row else GRADIENT
        pairs = zip(grads, scales, strict=True)
        wide = (grad * weight_scale.squeeze(2)[expert] for grad, weight_scale in pairs) if by_row else iter(grads)
        if ctx.delayed.largest is None and ctx.delayed.scales is None:
            along = _narrow_along(wide, expert, len(counts), ctx.scaling, format, reduce_amax)
        else:
            along = _narrow_delayed(grads, expert, len(counts), ctx.delayed, reduce_amax)
        ones = values.new_ones((), dtype=scale.dtype)
        total, of_weights = None, []
        for grad, rounded_grad, matrix in zip(grads, along, matrices, strict=True):
            turned = ones.expand(len(counts), matrix.values.shape[2], 1) if by_row else matrix.scale
            of_input = scaled_groups(*rounded_grad, matrix.values.transpose(1, 2), turned, counts, dtype)
            total = of_input if total is None else total + of_input
            across = _by_feature(grad * scale, expert, len(counts)) if by_row else rounded_grad
            narrow_input = Narrow(values, ones.expand(len(counts), values.shape[1], 1) if by_row else scale)
            of_weights.append(scaled_outer_groups(*across, *narrow_input, counts, dtype))
        of_biases = [sums_of_groups(grad.contiguous(), counts) for grad in grads] if ctx.has_bias else []
        nothing = [None] * len(ctx.gathered)
        return total, None, None, None, None, None, None, *of_weights, *of_biases, *nothing


def _expert_of_row(counts: Tensor, num_rows: int) -> Tensor:
    """Expert of each row, [M] int64."""
    return torch.arange(len(counts), device=counts.device).repeat_interleave(counts, output_size=num_rows)


def _largest(rows: Tensor, expert: Tensor, num_experts: int, scaling: Scaling) -> Tensor:
    """Amax of each row, [M, 1], or of all rows of an expert, [X, 1, 1]."""
    of_rows = largest_of(rows, "row")
    if scaling == "row":
        return of_rows
    return of_rows.new_zeros(num_experts).scatter_reduce_(0, expert, of_rows.squeeze(1), "amax").view(-1, 1, 1)


def _narrow_along(
    wide: Iterable[Tensor],
    expert: Tensor,
    num_experts: int,
    scaling: Scaling,
    dtype: torch.dtype,
    reduce_amax: ReduceAmax | None,
) -> list[Narrow]:
    """Gradients of rows in fp8, quantised one after the other unless ranks agree on all scales at once."""
    if reduce_amax is None:
        return [_narrow_along([grad], expert, num_experts, scaling, dtype, lambda largest: largest)[0] for grad in wide]
    wide = list(wide)
    scales = scales_of([_largest(grad, expert, num_experts, scaling) for grad in wide], dtype, reduce_amax)
    return [Narrow(_rounded_rows(grad, scale, expert, dtype), scale) for grad, scale in zip(wide, scales, strict=True)]


def _scales_of(
    delayed: DelayedScales, largest: Sequence[Tensor], slots: Sequence[int], reduce_amax: ReduceAmax | None, dtype: torch.dtype
) -> list[Tensor]:
    """Scales of the history, if there is one, else those of `largest`; records the amaxes if required."""
    if delayed.scales is None:
        scales = scales_of(largest, dtype, reduce_amax)
    else:
        scales = [scale_of(delayed.scales, slot, delayed.places.count).view(-1, 1, 1) for slot in slots]
    if delayed.largest is None:
        return scales
    return record_amaxes(scales, delayed.largest, [amax.flatten().float() for amax in largest], list(slots))


def _narrow_delayed(
    grads: Sequence[Tensor], expert: Tensor, num_experts: int, delayed: DelayedScales, reduce_amax: ReduceAmax | None
) -> list[Narrow]:
    """Gradients of rows in fp8 under delayed scaling."""
    largest = [_largest(grad, expert, num_experts, "tensor") for grad in grads]
    scales = _scales_of(delayed, largest, delayed.places.gradients, reduce_amax, GRADIENT)
    return [Narrow(_rounded_rows(grad, scale, expert, GRADIENT), scale) for grad, scale in zip(grads, scales, strict=True)]


def _largest_of_matrix(weight: Tensor, scaling: Scaling) -> Tensor:
    """Amaxes of weights, [X, F, 1] or [X, 1, 1]."""
    rows = weight.flatten(0, 1) if scaling == "row" else weight.flatten(1)
    return largest_of(rows, "row").view(len(weight), -1, 1)


def _rounded_rows(rows: Tensor, scale: Tensor, expert: Tensor, dtype: torch.dtype) -> Tensor:
    return rounded(rows, scale if scale.dim() == 2 else scale.view(-1, 1)[expert], dtype).values


def _by_feature(wide: Tensor, expert: Tensor, num_experts: int) -> Narrow:
    """Rows [M, F] in fp8 with a scale for each expert's features, [X, F, 1]."""
    index = expert.unsqueeze(1).expand_as(wide)
    largest = wide.new_zeros(num_experts, wide.shape[1]).scatter_reduce_(0, index, wide.abs(), "amax")
    (scale,) = scales_of([largest], FORWARD)
    return Narrow(rounded(wide, scale[expert]).values, scale.unsqueeze(2))
