"""Gradient clipping, and the search for a parameter whose gradient is not finite."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ultrascale.models.decoder import Decoder
from ultrascale.parallel.share import local_gradient
from ultrascale.torch_private import multiply_all


def clip_gradients(parameters: Iterable[nn.Parameter], norm: float, limit: float | None) -> None:
    """Scale all gradients by limit / norm if norm is above limit."""
    gradients = [g for p in parameters if (g := local_gradient(p)) is not None]
    if limit is not None and norm > limit and gradients:
        multiply_all(gradients, limit / (norm + 1e-6))


@contextmanager
def watched_gradients(stages: Collection[Decoder], see: Callable[[str, torch.Tensor], None]) -> Iterator[None]:
    """Context in which `see` is called with each parameter's name and unsharded local gradient in each backward pass, before
    the gradient is accumulated or reduced. Not called for deferred weight gradients (`W`)."""

    def see_gradient(name: str, gradient: torch.Tensor | None) -> None:
        if gradient is not None:
            see(name, gradient)

    hooks: dict[nn.Parameter, RemovableHandle] = {}

    def hook_parameters(prefix: str, module: nn.Module, inputs: object) -> None:
        for name, parameter in module.named_parameters():
            is_here = bool(prefix) or not name.startswith("layers.")
            if is_here and parameter not in hooks and torch.is_grad_enabled():
                full = f"{prefix}{name}"
                hooks[parameter] = parameter.register_hook(lambda gradient, full=full: see_gradient(full, gradient))

    # All-gathered parameters exist only once the forward pass of their bucket has begun: a block's with the block, others with
    # the decoder (the head is never called by itself; the loss reads its weight).
    places = [(f"layers.{number}.", block) for stage in stages for number, block in stage.blocks()]
    places += [("", stage) for stage in stages]
    handles = [module.register_forward_pre_hook(partial(hook_parameters, prefix)) for prefix, module in places]
    try:
        yield
    finally:
        for handle in [*handles, *hooks.values()]:
            handle.remove()


def name_bad_gradients(named: Iterable[tuple[str, nn.Parameter]]) -> list[str]:
    """Parameters whose local shard has a gradient that is not finite."""
    return [name for name, p in named if (g := local_gradient(p)) is not None and not torch.isfinite(g).all()]
