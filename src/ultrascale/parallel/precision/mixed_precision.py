"""Mixed precision on one rank: fp32 parameters, and copies of them in bf16 that compute.

    parameters   p (fp32, what the optimizer updates)  --cast, when they have changed-->  c (bf16, what modules read)
    gradients    dc (bf16, of one micro-batch)         --cast, block by block--------->   summed in p.grad (fp32)

The cast is an operation of autograd whose derivative is a cast, so nobody else knows of it: `decoder.parameters()` are the fp32
ones, with gradients of their own. The copies are made once and filled again after an update; they cost 2 bytes a parameter, as
gathered parameters do on several ranks. The numbers are those of FSDP2's mixed precision: each micro-batch's gradient is
rounded to bf16, and the rounded ones are summed in fp32.

Why not FSDP2 on one rank too: it makes the copies and their memory anew in every step, copies each gradient once more on its
way into a buffer that nobody reduces, and wants a process group: some 5 percent of a compiled step of a small model on CPU. Why
not `torch.autocast`: it chooses dtypes operation by operation, casts in every micro-batch, and knows none of our kernels.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    "fp8": torch.bfloat16,  # between products (`parallel.precision.fp8_products`)
}  # fmt: skip


def apply_mixed_precision(decoder: Decoder, dtype: torch.dtype) -> None:
    """Let the modules of `decoder` compute with copies of their parameters in `dtype`. Its parameters are where they stay."""
    copies = Copies(
        [Replaced(m, name, p, torch.empty_like(p, dtype=dtype)) for m in decoder.modules() for name, p in _local_parameters(m)]
    )
    decoder.register_forward_pre_hook(lambda module, inputs: copies.refresh())
    # Autograd does first what it recorded last, so casts recorded as a block begins follow all else of it on the way back.
    blocks = {block: set(block.modules()) for _, block in decoder.blocks()}
    outside = set(decoder.modules()).difference(*blocks.values())
    for owner, members in {decoder: outside, **blocks}.items():
        owner.register_forward_pre_hook(partial(_record, [place for place in copies.places if place.module in members]))


def computing_copies(decoder: nn.Module) -> list[Tensor]:
    """The copies that compute; none if the parameters do it themselves."""
    return [
        module.__dict__[name]
        for module in decoder.modules()
        for name, _ in _local_parameters(module)
        if name in module.__dict__
    ]


def _local_parameters(module: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return module.named_parameters(recurse=False)


def _record(places: list[Replaced], *unused: object) -> None:
    """Let modules read copies whose gradients reach the parameters."""
    for place in places:
        place.use(_Cast.apply(place.parameter, place.copy))  # pyright: ignore[reportArgumentType]


class Replaced:
    """A parameter, the module and name by which it is read, and the copy that is read instead."""

    def __init__(self, module: nn.Module, name: str, parameter: nn.Parameter, copy: Tensor):
        self.module, self.name, self.parameter, self.copy = module, name, parameter, copy
        self.use(copy)

    def use(self, tensor: Tensor) -> None:
        """An attribute of the instance hides the parameter of that name from the module's own code, and from nothing else."""
        self.module.__dict__[self.name] = tensor


class Copies:
    """The copies of all parameters of a model."""

    def __init__(self, places: list[Replaced]):
        self.places = places
        self.versions: list[int] = []
        """Versions of the parameters when the copies were filled: every operation in place counts one on."""

    def refresh(self) -> None:
        """Fill the copies if a parameter has changed."""
        versions = [place.parameter._version for place in self.places]
        if versions != self.versions:
            self.versions = versions
            with torch.no_grad():
                copies, parameters = zip(*((place.copy, place.parameter) for place in self.places), strict=True)
                copy_all(copies, parameters)


class _Cast(torch.autograd.Function):
    """`copy`, as what it is: the parameter in another dtype."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        ctx.set_materialize_grads(False)  # a pipeline's I leaves the gradient to its W
        return copy.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        return (None if grads[0] is None else _widened(grads[0], ctx.dtype)), None


def _widened(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """`grad` in `dtype`. On CUDA by the kernel for lists: an H200 narrows 3.7 TB/s with it; `Tensor.to` widened 1.8."""
    if not is_cuda(grad):
        return grad.to(dtype)
    wide = torch.empty_like(grad, dtype=dtype)
    copy_all([wide], [grad])
    return wide
