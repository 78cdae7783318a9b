"""fp8 put on a model: the products of its blocks, through the seams around them.

In fp8: queries, keys, values and attention's output, gate, up and down, of experts too. In bf16 stay the embedding, the head
and its loss, norms, attention itself, latent attention's narrow projections, routers, multi-token prediction, and the first and
last `fp8_keep_blocks` blocks, which are the most sensitive. Parameters, their gradients and what FSDP2 gathers and reduces are
as with bf16: fp8 is a matter of products alone, unless weights are gathered as products read them
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
from ultrascale.kernels.fp8.fp8_linear import NOTHING_KEPT, Later, Wires, fp8_linear
from ultrascale.kernels.fp8.fp8_matrices import Narrow, Scaling, product
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import GroupedLinear
from ultrascale.parallel.groups import Groups
from ultrascale.parallel.precision.fp8_gather import came
from ultrascale.parallel.precision.fp8_history import attach, kept_for
from ultrascale.parallel.precision.fp8_wires import Agreed, Columns, Row, gather_later
from ultrascale.parallel.tensor.tensor_ops import Cut, Factor
from ultrascale.parallel.tensor.tensor_parallel import cut_of
from ultrascale.work.fp8_slots import fp8_layers

SEAMS = ("fan_out", "fan_in", "grouped_out", "grouped_in")
_OWNED = "fp8_seams"
"""The decoder's attribute that says which they are, whoever wraps them later."""


class Fp8Seams:
    """Functions that the seams of a block call. `cut`: the ranks of tp, if they shard its products; `expert_tp`: those of its
    experts'."""

    def __init__(self, scaling: Scaling, cut: Cut | None = None, expert_tp: dist.ProcessGroup | None = None):
        self.scaling: Scaling = scaling
        self.cut, self.expert_tp = cut, expert_tp
        self.put_off: Callable[..., Tensor | None] | None = None
        """Function as `Cut.put_off`."""

    def fan_out(self, hidden: Tensor, *projections: nn.Linear) -> tuple[Tensor, ...]:
        """Several projections of one input, which is rounded once."""
        biases: list[Tensor] = [projection.bias for projection in projections if projection.bias is not None]
        assert len(biases) in (0, len(projections)), "projections of one input all have a bias, or none"
        weights = [projection.weight for projection in projections]
        kept = kept_for(projections) or NOTHING_KEPT
        wires = self._wires(is_row=False)
        return fp8_linear(hidden, weights, biases, self.scaling, wires, kept, came(projections, kept))

    def fan_in(self, inner: Tensor, projection: nn.Linear) -> Tensor:
        """The projection back to the residual stream. Over tp the bias, whole on every rank, is added once, to the sum."""
        kept = kept_for((projection,)) or NOTHING_KEPT
        given, wires = came((projection,), kept), self._wires(is_row=True)
        (out,) = fp8_linear(inner, [projection.weight], [], self.scaling, wires, kept, given)
        return out if projection.bias is None else out + projection.bias

    def grouped_out(self, rows: Tensor, counts: Tensor, *projections: GroupedLinear) -> tuple[Tensor, ...]:
        """Several projections of rows in the order of experts, which are rounded once."""
        return self._grouped(rows, counts, projections, columns=True)

    def grouped_in(self, rows: Tensor, counts: Tensor, projection: GroupedLinear) -> Tensor:
        """The projection back."""
        return self._grouped(rows, counts, (projection,), columns=False)[0]

    def _grouped(
        self, rows: Tensor, counts: Tensor, projections: Sequence[GroupedLinear], *, columns: bool
    ) -> tuple[Tensor, ...]:
        weights: list[Tensor] = [projection.matrices for projection in projections]
        biases = [bias for projection in projections if (bias := projection.own_bias) is not None]
        wires = Wires() if self.expert_tp is None else Agreed(self.expert_tp.group_name, columns=columns)
        kept = kept_for(tuple(projections)) or NOTHING_KEPT
        return fp8_grouped_linear(rows, weights, counts, biases, self.scaling, wires, kept, came(projections, kept))

    def _wires(self, *, is_row: bool) -> Wires:
        wires = Wires() if self.cut is None else (Row if is_row else Columns)(self.cut)
        wires.later = partial(self._later, is_row and self.cut is not None)
        return wires

    def _later(self, is_row: bool) -> Later | None:
        """The function that defers the weights' gradients of one backward pass, if that pass is split."""
        return None if self.put_off is None else partial(self._put_off, is_row)

    def _put_off(
        self, is_row: bool, weights: Sequence[Tensor], grads: Sequence[Narrow], waited: Narrow, dtype: torch.dtype
    ) -> list[Tensor | None]:
        """dW of each, or None where it waits for W: with the positions of this rank alone, where others have theirs. The input,
        which all products have in common, W gathers once."""
        assert self.put_off is not None
        gather = None if self.cut is None else gather_later(self.cut.group.group_name, self.cut.length)
        given, found = Factor(waited.values, None if is_row else gather), []
        for weight, grad in zip(weights, grads, strict=True):
            own = grad.values.t()  # [N, F]
            factor = Factor(own)
            if is_row and self.cut is not None and gather is not None:
                whole = own.view(len(waited.values), -1, own.shape[-1])
                factor = Factor(self.cut.own_share(whole).contiguous(), gather, whole)
            found.append(self.put_off(weight, factor, given, partial(_multiply, grad.scale, waited.scale, dtype)))
        return found


def _multiply(grad_scale: Tensor, given_scale: Tensor, dtype: torch.dtype, grads: Tensor, given: Tensor) -> Tensor:
    """g^T x of [N, F] and [N, D]."""
    return product(Narrow(grads.t(), grad_scale), Narrow(given.t(), given_scale), dtype)


def apply_fp8(decoder: Decoder, layout: Layout, mesh: Groups) -> None:
    """Let the blocks of `decoder` compute in fp8 as `layout` says, in place, after they are cut. Does nothing for other
    precisions."""
    if layout.precision != "fp8":
        return
    delayed = layout.fp8_scaling == "delayed"
    seams = Fp8Seams("row" if layout.fp8_scaling == "row" else "tensor", cut_of(decoder), mesh.group("expert_tp"))
    vars(decoder)[_OWNED] = seams
    layers = fp8_layers(decoder.spec, layout)
    for number, block in decoder.blocks():
        if number in layers:
            if delayed:
                first_expert = mesh.at.ep * (decoder.spec.num_experts // layout.ep)
                attach(block, decoder.spec, number, layout, first_expert=first_expert)
            for module in block.modules():
                for seam in SEAMS:
                    if hasattr(module, seam):
                        setattr(module, seam, getattr(seams, seam))


def fp8_seams_of(decoder: Decoder) -> Fp8Seams | None:
    """The seams of blocks in fp8, if there are any: a schedule with W sets its `put_off`."""
    return vars(decoder).get(_OWNED)
