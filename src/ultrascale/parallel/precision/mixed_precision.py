"""Mixed precision on one rank: fp32 parameters, and bf16 copies of them for computation.

    parameters   p (fp32, updated by the optimizer)     --cast, when they have changed-->  c (bf16, read by modules)
    gradients    dc (bf16, of one micro-batch)          --cast, block by block--------->   summed in p.grad (fp32)

The cast is an autograd operation whose gradient is a cast, so no other code needs to know of it: `decoder.parameters()` are the
fp32 ones, with fp32 gradients. The copies are allocated once and refilled after an update; they cost 2 bytes a parameter, as
all-gathered parameters do on several ranks. The numerics are those of FSDP2's mixed precision: each micro-batch's gradient is
rounded to bf16, and the rounded ones are summed in fp32.

Why not FSDP2 on one rank too: it allocates the copies anew in every step, copies each gradient once more into a buffer that is
never reduced, and needs a process group: some 5 percent of a compiled step of a small model on CPU. Why not `torch.autocast`:
it chooses dtypes operation by operation, casts in every micro-batch, and does not support our kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ultrascale.description.layout import Precision
from ultrascale.kernels.choice.device_kind import is_cuda
from ultrascale.models.decoder import Decoder
from ultrascale.torch_private import copy_all

TORCH_DTYPE: dict[Precision, torch.dtype] = {
    "fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16,
    "fp8": torch.bfloat16,  # dtype outside the fp8 GEMMs (`parallel.precision.fp8_products`)
}  # fmt: skip


def apply_mixed_precision(decoder: Decoder, dtype: torch.dtype) -> None:
    """Make the modules of `decoder` compute with copies of their parameters in `dtype`. Its parameters stay in place."""
    copies = Copies(
        [Replaced(m, name, p, torch.empty_like(p, dtype=dtype)) for m in decoder.modules() for name, p in _local_parameters(m)]
    )
    decoder.register_forward_pre_hook(lambda module, inputs: copies.refresh())
    # Autograd runs last-recorded nodes first: casts recorded as a block begins run after all its other backward nodes.
    blocks = {block: set(block.modules()) for _, block in decoder.blocks()}
    outside = set(decoder.modules()).difference(*blocks.values())
    for owner, members in {decoder: outside, **blocks}.items():
        owner.register_forward_pre_hook(partial(_record, [place for place in copies.places if place.module in members]))


def computing_copies(decoder: nn.Module) -> list[Tensor]:
    """Copies of the parameters in the compute dtype; empty if the parameters are used directly."""
    return [
        module.__dict__[name]
        for module in decoder.modules()
        for name, _ in _local_parameters(module)
        if name in module.__dict__
    ]


def _local_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


def _record(places: list[Replaced], *unused: object) -> None:
    """Make modules read the copies, whose gradients flow to the parameters."""
    for place in places:
        place.use(_Cast.apply(place.parameter, place.copy))  # pyright: ignore[reportArgumentType]


@dataclass
class Replaced:
    """Parameter, the module and attribute name that read it, and the copy read instead."""

    module: nn.Module
    name: str
    parameter: nn.Parameter
    copy: Tensor

    def __post_init__(self) -> None:
        self.use(self.copy)

    def use(self, tensor: Tensor) -> None:
        """Set `tensor` as an instance attribute, which hides the parameter of that name from the module's own code only."""
        self.module.__dict__[self.name] = tensor


class Copies:
    """Compute-dtype copies of all parameters of a model."""

    def __init__(self, places: list[Replaced]):
        self.places = places
        self.versions: list[int] = []
        """Parameter versions at the last refill: every in-place operation increments a tensor's version."""

    def refresh(self) -> None:
        """Refill the copies if a parameter has changed."""
        versions = [place.parameter._version for place in self.places]
        if versions != self.versions:
            self.versions = versions
            with torch.no_grad():
                copies, parameters = zip(*((place.copy, place.parameter) for place in self.places), strict=True)
                copy_all(copies, parameters)


class _Cast(torch.autograd.Function):
    """`copy`, presented to autograd as the parameter cast to another dtype."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        ctx.set_materialize_grads(False)  # a pipeline's I has no gradient here: W adds it later
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None if grads[0] is None else _widened(grads[0], ctx.dtype)), None


def _widened(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` cast to `dtype`. On CUDA by the foreach kernel: an H200 narrows at 3.7 TB/s with it; `Tensor.to` widens at 1.8."""
    if not is_cuda(grad):
        return grad.to(dtype)
    wide = torch.empty_like(grad, dtype=dtype)
    copy_all([wide], [grad])
    return wide
