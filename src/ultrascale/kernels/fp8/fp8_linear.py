"""Linear layers whose three GEMMs are in fp8.

    y  = x W^T           x, W in e4m3
    dx = g W             g in e5m2 (one scale per tensor) or e4m3 (one per row), W as in the forward pass
    dW = g^T x           g again, x as in the forward pass: saved for the backward pass, 1 byte an element

Scales that vary along the summed dimension cannot be factored out of the sum. With row scales they are multiplied *into* the
other factor before that is quantised: dx = (g s_W) W_q and dW = (g s_x)^T x_q. So x and W are quantised once, x once for all
projections that read it.

Where ranks shard these GEMMs, `Wires` do the communication and agree on scales (`parallel.precision.fp8_wires`). A schedule
that defers dW keeps both its factors in fp8. Weights that were all-gathered in fp8 (`parallel.precision.fp8_gather`) arrive
quantised, with tensors without data that their gradients belong to.

Scales come from the tensor itself (current scaling), or from the amaxes of earlier steps (delayed scaling; Micikevicius et al.
2022, Transformer Engine):

    current    amax of x, then its scale, then x is quantised     over ranks a message in between
    delayed    x is quantised with the known scale, and its amax is recorded for later steps; no message

With delayed scaling, values beyond the history's amax saturate at the format's largest number; from the next step on the scale
covers them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op

from ultrascale.kernels.fp8.fp8_matrices import (
    FORWARD,
    GRADIENT,
    Narrow,
    ReduceAmax,
    Scaling,
    largest_of,
    narrow_all,
    product,
    rounded,
    transposed,
    transposed_scale,
)


class AmaxSlots(NamedTuple):
    """Amax slots of one call: of its input, of its weights, and of the gradients of their results."""

    input: int
    weights: tuple[int, ...]
    gradients: tuple[int, ...]
    count: int = 1
    """Number of slots of each: the number of experts."""


class DelayedScales(NamedTuple):
    """Scales of a block, and the table in which its amaxes of this step are recorded."""

    places: AmaxSlots
    scales: Tensor | None
    """[slots] fp32; None without a history: scales are those of the current tensors."""
    largest: Tensor | None
    """[slots] fp32; None: nothing is recorded, as in evaluations."""


def scale_of(scales: Tensor, place: int, count: int = 1) -> Tensor:
    """Scale of a slot, [1, 1], or of experts [X, 1, 1]."""
    return scales[place : place + 1].view(1, 1) if count == 1 else scales[place : place + count].view(-1, 1, 1)


def round_by(scales: Tensor, wides: Sequence[Tensor], places: Sequence[int], dtype: torch.dtype) -> list[Narrow]:
    """Matrices quantised with the known scales."""
    return [rounded(wide, scale_of(scales, place), dtype) for wide, place in zip(wides, places, strict=True)]


def with_recorded_amaxes(
    narrowed: list[Narrow], largest: Tensor | None, wides: Sequence[Tensor], places: Sequence[int]
) -> list[Narrow]:
    """`narrowed`, after recording the amax of each of `wides` if required."""
    if largest is None:
        return narrowed
    magnitudes = [largest_of(wide, "tensor").view(1).float() for wide in wides]
    scales = record_amaxes([narrow.scale for narrow in narrowed], largest, magnitudes, list(places))
    return [Narrow(narrow.values, scale) for narrow, scale in zip(narrowed, scales, strict=True)]


@custom_op("ultrascale::record_amaxes", mutates_args=())
def record_amaxes(scales: list[Tensor], largest: Tensor, magnitudes: list[Tensor], places: list[int]) -> list[Tensor]:
    """Record amaxes: `largest` becomes the maximum of itself and of each of `magnitudes`, [n] at its place. Returns copies of
    `scales`.

    The compiler is not told that `largest` is modified: it would check its version against the forward pass, and other
    micro-batches modify it before the backward pass. Recording twice, or in another order, changes nothing, no graph reads it,
    and the use of the copies keeps the call from being eliminated.
    """
    for amax, place in zip(magnitudes, places, strict=True):
        slot = largest.data[place : place + len(amax)]  # through .data: the version counter does not change
        torch.maximum(slot, amax, out=slot)
    return [scale.clone() for scale in scales]


@record_amaxes.register_fake
def _(scales: list[Tensor], largest: Tensor, magnitudes: list[Tensor], places: list[int]) -> list[Tensor]:
    return [torch.empty_like(scale) for scale in scales]


DeferGradients = Callable[[Sequence[Tensor], Sequence[Narrow], Narrow, torch.dtype], Sequence[Tensor | None]]
"""Function from the weights, g^T [F, N] of each, x as saved ([..., D] with the scale of its transpose) and a dtype, to dW of
each, or None to compute it later."""


class Wires:
    """Communication of ranks that shard GEMMs. This base class is for a single process, and sends nothing."""

    def deferred(self) -> DeferGradients | None:
        """Function that defers this backward pass's weight gradients; None if they are computed at once."""
        return None

    def reduce_input_amax(self, scaling: Scaling) -> ReduceAmax | None:
        """Reduction over ranks for the scales of x and W, if other ranks hold parts of a tensor with one scale."""
        return None

    def reduce_grad_amax(self) -> ReduceAmax | None:
        """Reduction over ranks for the scales of the gradient."""
        return None

    def scales(self, local_scale: Tensor) -> Tensor:
        """Scales of all rows of x, [N, 1], from this rank's [..., 1]."""
        return local_scale.view(-1, 1)

    def forward(self, values: Tensor, scale: Tensor, matrices: list[Narrow], dtype: torch.dtype) -> list[Tensor]:
        """Products of x, given this rank's values [..., D] and all rows' scale, with each matrix: [..., F]."""
        narrow_input = Narrow(values.flatten(0, -2), scale)
        return [product(narrow_input, matrix, dtype).view(*values.shape[:-1], -1) for matrix in matrices]

    def gather_grad(self, grad: Tensor) -> Tensor:
        """Gradient of all rows, all-gathered if sharded."""
        return grad

    def backward(
        self, along: list[Narrow], matrices: list[Narrow], across: list[Narrow], waited: Narrow, dtype: torch.dtype
    ) -> list[Tensor]:
        """dx [..., D], and dW of each of `across` (empty if deferred). `waited`: the values of x, [..., D], and the scale of
        their transpose."""
        narrow_input = Narrow(waited.values.flatten(0, -2).t(), waited.scale)
        of_weights = [product(grad, narrow_input, dtype) for grad in across]
        return [sum_of_products(along, matrices, dtype).view(waited.values.shape), *of_weights]


ALONE = Wires()


NO_DELAYED_SCALES = DelayedScales(AmaxSlots(0, (), ()), None, None)


def fp8_linear(
    hidden: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    scaling: Scaling,
    wires: Wires = ALONE,
    delayed: DelayedScales = NO_DELAYED_SCALES,
    gathered: Sequence[Narrow] = (),
) -> tuple[Tensor, ...]:
    """[..., D] and weights [F, D] to [..., F] each; biases [F] for all or for none. `delayed`: scales of a history. `gathered`:
    the weights already in fp8; of `weights` only the shapes are read then."""
    places, scales, largest = delayed
    values = [matrix.values for matrix in gathered] + [matrix.scale for matrix in gathered]
    return _Fp8Linear.apply(  # pyright: ignore[reportReturnType]
        hidden, scaling, wires, len(weights), len(biases), places, scales, largest, *weights, *biases, *values
    )


def sum_of_products(along: Sequence[Narrow], matrices: Sequence[Narrow], dtype: torch.dtype) -> Tensor:
    """Sum of g W, [N, D], of g [N, F] and W^T [D, F] each."""
    total = None
    for grad, matrix in zip(along, matrices, strict=True):
        term = product(grad, matrix, dtype)
        total = term if total is None else total + term
    assert total is not None
    return total


class _Fp8Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, scaling: Scaling, wires: Wires, count: int, num_biases: int,
        places: AmaxSlots, delayed_scales: Tensor | None, largest: Tensor | None, *parameters: Tensor,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        weights, biases, gathered = parameters[:count], parameters[count : count + num_biases], parameters[count + num_biases :]
        reduce_amax, factors = wires.reduce_input_amax(scaling), [hidden.flatten(0, -2), *(() if gathered else weights)]
        slots = (places.input, *(() if gathered else places.weights))
        if delayed_scales is None:
            narrowed = narrow_all(factors, scaling, reduce_amax=reduce_amax)
        else:
            narrowed = round_by(delayed_scales, factors, slots, FORWARD)
        narrow_input, *matrices = with_recorded_amaxes(narrowed, largest, factors, slots)
        matrices = narrow_pairs(gathered) or matrices
        values, scale = narrow_input.values.view(hidden.shape), narrow_input.scale
        if scaling == "row":
            scale = wires.scales(scale.view(*hidden.shape[:-1], 1))
        # Weights are held as an attribute, not saved: recomputation would return a copy, and FSDP2 gathers them in place.
        ctx.weights, ctx.scaling, ctx.wires, ctx.has_bias, ctx.dtype = weights, scaling, wires, bool(biases), hidden.dtype
        ctx.places, ctx.delayed_scales, ctx.largest, ctx.gathered = places, delayed_scales, largest, gathered
        known_again = bool(gathered) or (reduce_amax is None and delayed_scales is None)
        ctx.save_for_backward(values, scale, *([] if known_again else [matrix.scale for matrix in matrices]))
        outputs = wires.forward(values, scale, matrices, hidden.dtype)
        return tuple([output + bias for output, bias in zip(outputs, biases, strict=True)] if biases else outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (values, scale, *scales), scaling, wires = ctx.saved_tensors, ctx.scaling, ctx.wires
        matrices = narrow_pairs(ctx.gathered) or narrow_again(ctx.weights, scaling, scales)
        whole_grads = [wires.gather_grad(grad).flatten(0, -2) for grad in grads]
        slots = ctx.places.gradients
        if ctx.delayed_scales is None:
            along, across = _narrow_grads(whole_grads, matrices, scale, scaling, wires)
        else:
            along, across = round_by(ctx.delayed_scales, whole_grads, slots, GRADIENT), []
        if slots:  # one scale a tensor
            along = with_recorded_amaxes(along, ctx.largest, whole_grads, slots)
            across = [transposed(grad, "tensor") for grad in along]
        waited = Narrow(values, transposed_scale(Narrow(values, scale), scaling))
        deferred = None if torch.compiler.is_compiling() else wires.deferred()
        of_input, *of_weights = wires.backward(
            along,
            [transposed(matrix, scaling) for matrix in matrices],
            [] if deferred is not None else across,
            waited,
            ctx.dtype,
        )
        if deferred is not None:
            of_weights = [*deferred(ctx.weights, across, waited, ctx.dtype)]
        of_biases = [grad.flatten(0, -2).sum(0) for grad in grads] if ctx.has_bias else []
        nothing = [None] * len(ctx.gathered)
        return of_input, None, None, None, None, None, None, None, *of_weights, *of_biases, *nothing


def narrow_pairs(gathered: Sequence[Tensor]) -> list[Narrow]:
    """Matrices from a list of all values followed by all scales."""
    count = len(gathered) // 2
    return [Narrow(values, scale) for values, scale in zip(gathered[:count], gathered[count:], strict=True)]


def narrow_again(weights: Sequence[Tensor], scaling: Scaling, scales: Sequence[Tensor]) -> list[Narrow]:
    """Weights quantised again as in the forward pass; `scales`: of that pass, if they were reduced over ranks."""
    if not scales:
        return narrow_all(weights, scaling)
    return [rounded(weight, scale) for weight, scale in zip(weights, scales, strict=True)]


def _narrow_grads(
    grads: Sequence[Tensor], matrices: Sequence[Narrow], scale: Tensor, scaling: Scaling, wires: Wires
) -> tuple[list[Narrow], list[Narrow]]:
    """g [N, F] in fp8 for dx, and g^T [F, N] for dW. `scale`: of x."""
    if scaling == "row":
        weighed = (grad * matrix.scale.t() for grad, matrix in zip(grads, matrices, strict=True))
        along = narrow_all(weighed, "row", reduce_amax=wires.reduce_grad_amax())
        return along, narrow_all(((grad * scale).t() for grad in grads), "row")
    along = narrow_all(grads, "tensor", GRADIENT, wires.reduce_grad_amax())
    return along, [transposed(grad, "tensor") for grad in along]
