"""The global gradient norm, clipping, and the search for a parameter that has gone bad."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from ultrascale.models.decoder import Decoder
from ultrascale.train.optimizer import local, local_gradients


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or infinite; nothing has been updated."""


def gradient_norm(decoder: nn.Module) -> torch.Tensor:
    """The 2-norm of the whole gradient, 0-d, on the device, equal on every rank.

    Each element counts once: squares are summed over this rank's parts, then, in fp64, over the ranks that share one copy.
    """
    parameters = list(decoder.parameters())
    nothing = torch.zeros(1, device=local(parameters[0]).device)  # a rank may hold no element of any gradient
    norms = torch._foreach_norm([g for g in local_gradients(parameters) if g.numel()] or [nothing])  # pyright: ignore
    squares = torch.stack(list(norms)).double().square().sum()
    mesh = next((p.device_mesh for p in parameters if isinstance(p, DTensor)), None)
    if mesh is not None and mesh["dp_shard"].size() > 1:
        dist.all_reduce(squares, group=mesh.get_group("dp_shard"))
    return squares.sqrt()


def clip_gradients(decoder: nn.Module, norm: float, limit: float | None) -> None:
    """Scale all gradients by limit / norm if norm is above limit."""
    if limit is not None and norm > limit:
        torch._foreach_mul_(local_gradients(decoder.parameters()), limit / (norm + 1e-6))  # pyright: ignore


@contextmanager
def watched_gradients(decoder: Decoder, see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """While inside, `see` is told each parameter's name and gradient of each backward pass, whole and of this rank alone:
    before it is added to others or reduced."""
    hooks: dict[nn.Parameter, RemovableHandle] = {}

    def hook_parameters(prefix: str, module: nn.Module, inputs: object) -> None:
        for name, parameter in module.named_parameters():
            is_here = bool(prefix) or not name.startswith("layers.")
            if is_here and parameter not in hooks and torch.is_grad_enabled():
                full = f"{prefix}{name}"
                hooks[parameter] = parameter.register_hook(lambda gradient, full=full: see(full, gradient))

    # Gathered parameters exist only once the forward pass of their bucket has begun: a block's with it, the others' with the
    # decoder's (the head is never called by itself, its loss takes the weight).
    places = {f"layers.{number}.": block for number, block in decoder.blocks()} | {"": decoder}
    handles = [module.register_forward_pre_hook(partial(hook_parameters, prefix)) for prefix, module in places.items()]
    try:
        yield
    finally:
        for handle in [*handles, *hooks.values()]:
            handle.remove()


def name_bad_gradients(decoder: nn.Module) -> list[str]:
    """Parameters whose part on this rank has a gradient that is not finite."""
    return [name for name, p in decoder.named_parameters() if p.grad is not None and not torch.isfinite(local(p.grad)).all()]
