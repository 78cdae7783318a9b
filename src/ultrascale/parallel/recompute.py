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
from ultrascale.parallel import tensor_ops
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
}
"""Results worth their memory: computing them again costs matrix products, or messages."""


def apply_recompute(decoder: Decoder, layout: Layout) -> None:
    """Wrap the forward passes of the blocks as `layout.recompute` says, in place."""
    for index, block in decoder.blocks():
        if layout.recomputes(index):
            block.forward = _recomputed(block.forward)
        elif layout.recompute == "selective":
            contexts = partial(create_selective_checkpoint_contexts, _keep_products)
            block.forward = _recomputed(block.forward, context_fn=contexts)


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Nothing random happens inside a block, so no random state is kept for the second pass.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _keep_products(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE
