"""Activation recomputation: keep less in the forward pass, compute it again in the backward pass.

    none        keep what autograd saves
    selective   keep results of matrix products and attention; compute norms, rotary and activation functions again
    full        keep each block's input; run the block again
    every-k     full, for one block of every k

Full costs one forward pass more (a third of the step's FLOPs) and leaves 2 S B D bytes a block in bf16; selective costs only
element-wise work. Source: Chen et al. 2016; Korthikanti et al. 2022; playbook, "Activation recomputation".
The block's `forward` is wrapped, not the module, so that parameter names stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrascale.models.decoder import Decoder
from ultrascale.parallel import all_to_all, tensor_ops
from ultrascale.parallel.torch_private import CachedTorchDispatchMode
from ultrascale.spec.layout import Layout

_aten = torch.ops.aten
KEPT_OPS = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    *tensor_ops.PRODUCTS,
    *all_to_all.KEPT_OPS,
}
"""Results worth their memory: computing them again costs matrix products, or messages."""


def apply_recompute(decoder: Decoder, layout: Layout) -> None:
    """Wrap the forward passes of the blocks as `layout.recompute` says, in place."""
    for index, block in decoder.blocks():
        if layout.recomputes(index):
            block.forward = _recomputed(block.forward)
        elif layout.recompute == "selective":
            block.forward = _recomputed(block.forward, context_fn=_selective)


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Nothing random happens inside a block, so no random state is kept for the second pass.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_products(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _selective() -> tuple[Any, Any]:
    """Torch's own pair of contexts, the second with eyes for kept results only."""
    keeping, kept = create_selective_checkpoint_contexts(_keep_products)
    return keeping, _Again(_keep_products, kept.storage, False)  # pyright: ignore[reportAttributeAccessIssue]


class _Again(CachedTorchDispatchMode):
    """Torch's wants the second pass to make the very calls of the first. FSDP2 of experts, inside a block, makes others: in the
    backward pass it gathers parameters that were there in the forward pass, or finds there what it had to gather."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT_OPS:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
