"""Applies fp8 to a model: the GEMMs of its blocks, through their seams.

In fp8: projections to queries, keys and values, attention's output projection, gate, up and down, of experts too. In bf16 stay
the embedding, the head and its loss, norms, attention itself, latent attention's narrow projections, routers, multi-token
prediction, and the first and last `fp8_keep_blocks` blocks, which are the most sensitive. Parameters, their gradients and
FSDP2's collectives are as with bf16: fp8 affects GEMMs only, unless weights are all-gathered in fp8
(`parallel.precision.fp8_gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.description.layout import Layout
from ultrascale.kernels.fp8.fp8_grouped import fp8_grouped_linear
from ultrascale.kernels.fp8.fp8_linear import NO_DELAYED_SCALES, DeferGradients, Wires, fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import Narrow, Scaling, product
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import GroupedLinear
from ultrascale.parallel.groups import Groups
from ultrascale.parallel.precision.fp8_gather import gathered_weights
from ultrascale.parallel.precision.fp8_history import attach, delayed_scales_of
from ultrascale.parallel.precision.fp8_wires import Agreed, ColumnWires, RowWires, gather_later
from ultrascale.parallel.tensor.tensor_ops import Factor, TensorParallel
from ultrascale.parallel.tensor.tensor_parallel import tensor_parallel_of
from ultrascale.work.fp8_slots import fp8_layers

SEAMS = ("column_linear", "row_linear", "grouped_column_linear", "grouped_row_linear")
_OWNED = "fp8_seams"
"""Attribute of the decoder that lists its fp8 seams, even if they are wrapped later."""


class Fp8Seams:
    """Functions that a block's seams call. `tp`: the tp group, if tp shards its products; `expert_tp`: the group that shards
    its experts."""

    def __init__(self, scaling: Scaling, tp: TensorParallel | None = None, expert_tp: dist.ProcessGroup | None = None):
        self.scaling: Scaling = scaling
        self.tp, self.expert_tp = tp, expert_tp
        self.defer: Callable[..., Tensor | None] | None = None
        """Function that defers weight gradients, as `TensorParallel.defer`."""

    def column_linear(self, hidden: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
        """Several projections of one input, which is quantised once."""
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        assert len(biases) in (0, len(projections)), "projections of one input all have a bias, or none"
        weights = [projection.weight for projection in projections]
        delayed = delayed_scales_of(projections) or NO_DELAYED_SCALES
        wires = self._wires(is_row=False)
        return fp8_linear(hidden, weights, biases, self.scaling, wires, delayed, gathered_weights(projections, delayed))

    def row_linear(self, inner: Tensor, projection: nn.Linear) -> Tensor:
        """Projection back to the residual stream. Over tp the bias, replicated on every rank, is added once, to the sum."""
        delayed = delayed_scales_of((projection,)) or NO_DELAYED_SCALES
        gathered, wires = gathered_weights((projection,), delayed), self._wires(is_row=True)
        (out,) = fp8_linear(inner, [projection.weight], [], self.scaling, wires, delayed, gathered)
        return out if projection.bias is None else out + projection.bias

    def grouped_column_linear(self, rows: Tensor, counts: Tensor, *projections: GroupedLinear) -> tuple[Tensor, ...]:
        """Several projections of rows grouped by expert, which are quantised once."""
        return self._grouped(rows, counts, projections, columns=True)

    def grouped_row_linear(self, rows: Tensor, counts: Tensor, projection: GroupedLinear) -> Tensor:
        """Projection of rows grouped by expert back to the residual width."""
        return self._grouped(rows, counts, (projection,), columns=False)[0]

    def _grouped(
        self, rows: Tensor, counts: Tensor, projections: Sequence[GroupedLinear], *, columns: bool
    ) -> tuple[Tensor, ...]:
        weights: list[Tensor] = [projection.matrices for projection in projections]
        biases = [bias for projection in projections if (bias := projection.local_bias) is not None]
        wires = Wires() if self.expert_tp is None else Agreed(self.expert_tp.group_name, columns=columns)
        delayed = delayed_scales_of(tuple(projections)) or NO_DELAYED_SCALES
        return fp8_grouped_linear(
            rows, weights, counts, biases, self.scaling, wires, delayed, gathered_weights(projections, delayed)
        )

    def _wires(self, *, is_row: bool) -> Wires:
        wires = Wires() if self.tp is None else (RowWires if is_row else ColumnWires)(self.tp)
        wires.deferred = partial(self._deferred, is_row and self.tp is not None)
        return wires

    def _deferred(self, is_row: bool) -> DeferGradients | None:
        """Function that defers the weight gradients, if this backward pass is split; else None."""
        return None if self.defer is None else partial(self._defer, is_row)

    def _defer(
        self, is_row: bool, weights: Sequence[Tensor], grads: Sequence[Narrow], waited: Narrow, dtype: torch.dtype
    ) -> list[Tensor | None]:
        """dW of each weight, or None where it is deferred to W: only this rank's positions are kept if others have theirs. W
        gathers the input, shared by all products, once."""
        assert self.defer is not None
        gather = None if self.tp is None else gather_later(self.tp.group.group_name, self.tp.length)
        input_factor, weight_grads = Factor(waited.values, None if is_row else gather), []
        for weight, grad in zip(weights, grads, strict=True):
            values_t = grad.values.t()  # [N, F]
            factor = Factor(values_t)
            if is_row and self.tp is not None and gather is not None:
                whole = values_t.view(len(waited.values), -1, values_t.shape[-1])
                factor = Factor(self.tp.sequence_shard(whole).contiguous(), gather, whole)
            weight_grads.append(self.defer(weight, factor, input_factor, partial(_multiply, grad.scale, waited.scale, dtype)))
        return weight_grads


def _multiply(grad_scale: Tensor, input_scale: Tensor, dtype: torch.dtype, grads: Tensor, inputs: Tensor) -> Tensor:
    """Scaled product g^T x of [N, F] and [N, D]."""
    return product(Narrow(grads.t(), grad_scale), Narrow(inputs.t(), input_scale), dtype)


def apply_fp8(decoder: Decoder, layout: Layout, mesh: Groups) -> None:
    """Make the blocks of `decoder` compute in fp8 as `layout` says, in place, after they are sharded. Does nothing for other
    precisions."""
    if layout.precision != "fp8":
        return
    delayed = layout.fp8_scaling == "delayed"
    seams = Fp8Seams("row" if layout.fp8_scaling == "row" else "tensor", tensor_parallel_of(decoder), mesh.group("expert_tp"))
    vars(decoder)[_OWNED] = seams
    layers = fp8_layers(decoder.spec, layout)
    for number, block in decoder.blocks():
        if number in layers:
            if delayed:
                first_expert = mesh.coordinates.ep * (decoder.spec.num_experts // layout.ep)
                attach(block, decoder.spec, number, layout, first_expert=first_expert)
            for module in block.modules():
                for seam in SEAMS:
                    if hasattr(module, seam):
                        setattr(module, seam, getattr(seams, seam))


def fp8_seams_of(decoder: Decoder) -> Fp8Seams | None:
    """fp8 seams of the blocks, if there are any: a schedule with W sets their `defer`."""
    return vars(decoder).get(_OWNED)
