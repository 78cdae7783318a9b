"""Activation recomputation: keep less in the forward pass, compute it again in the backward pass.

    none        keep what autograd saves
    selective   keep results of matrix products and attention; compute norms, rotary and activation functions again
    +KIND       of which those of a kind too, such as `selective+mlp`: see `spec.recomputed`
    full        keep each block's input; run the block again
    every-k     full, for one block of every k
    blocks      each block its own of these; what "auto" comes down to (`plan.recompute_choice`)

Full costs one forward pass more (a third of the step's FLOPs) and leaves 2 S B D bytes a block in bf16; selective costs only
element-wise work. Source: Chen et al. 2016; Korthikanti et al. 2022; playbook, "Activation recomputation".
The block's `forward` is wrapped, not the module, so that parameter names stay as they are. Kinds are told apart by where in the
block an operation runs: the model's seams say so on their way in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrascale.kernels import flash_packages, fp8, fp8_grouped
from ultrascale.models.attention import Attention, LatentAttention
from ultrascale.models.decoder import Block, Decoder
from ultrascale.models.experts import Experts
from ultrascale.models.feed_forward import MLP, GatedMLP
from ultrascale.parallel import all_to_all, context_operation, fp8_wires, tensor_ops
from ultrascale.parallel.cut_checkpoints import keep_own_part
from ultrascale.parallel.tensor import cut_of
from ultrascale.parallel.torch_private import CachedTorchDispatchMode
from ultrascale.spec.layout import Layout
from ultrascale.spec.recomputed import Again

_aten = torch.ops.aten
KEPT_OPS = {
    fp8.PRODUCT,
    flash_packages.FORWARD,
    fp8_grouped.PRODUCT,
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten._grouped_mm.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
    _aten._flash_attention_forward.default,
    torch.ops.higher_order.flex_attention,
    *tensor_ops.PRODUCTS,
    *fp8_wires.KEPT_OPS,
    *all_to_all.KEPT_OPS,
    *context_operation.KEPT_OPS,
}
"""Results worth their memory: computing them again costs matrix products, or messages."""


def apply_recompute(decoder: Decoder, layout: Layout) -> None:
    """Wrap the forward passes of the blocks as `layout` says, in place; after whatever replaces seams of theirs."""
    cut = cut_of(decoder) if layout.partition_checkpoints else None
    for place, (index, block) in enumerate(decoder.blocks()):
        again = layout.again(index)
        if again is None:
            continue
        if again.whole:
            block.forward = _recomputed(block.forward)
            if cut is not None and (place or decoder.is_first):  # a pipeline holds a stage's input anyway
                setattr(block, "forward", partial(keep_own_part, cut.group, block.forward))  # noqa: B010
        else:
            block.forward = _recomputed(block.forward, context_fn=partial(_selective, _policy(block, again)))


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Nothing random happens inside a block, so no random state is kept for the second pass.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(block: Block, again: Again) -> Callable[..., CheckpointPolicy]:
    """What to do with a result: keep it, or make it again."""
    if not again.kinds:
        return _keep_products
    where = Where()
    where.watch(block)
    return partial(_keep_some_products, where, again.kinds)


def _keep_products(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_some_products(
    where: Where, kinds: frozenset[str], context: Any, op: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if where.kind in kinds else _keep_products(context, op)


class Where:
    """Which kind of `spec.recomputed.KINDS` is being computed; empty: none of them."""

    def __init__(self) -> None:
        self.kind = ""

    def watch(self, block: Block) -> None:
        """Be told by the seams of `block` from now on, in place."""
        for module in block.modules():
            if isinstance(module, Attention | LatentAttention):
                self._wrap(module, fan_out="qkv", core="attention", fan_in="output")
            elif isinstance(module, GatedMLP | MLP):
                self._wrap(module, fan_out="mlp", fan_in="down")
        for module in block.modules():
            if isinstance(module, LatentAttention):  # narrow projections go through no seam
                for child in (module.kv_a_proj_with_mqa, *((module.q_a_proj,) if module.is_q_narrow else ())):
                    self._hook(child, "qkv")
            elif isinstance(module, Experts):
                self._wrap(module, grouped_out="experts")

    def _wrap(self, module: nn.Module, **seams: str) -> None:
        for seam, kind in seams.items():
            setattr(module, seam, partial(self._inside, kind, getattr(module, seam)))

    def _hook(self, module: nn.Module, kind: str) -> None:
        def leave(*unused: Any) -> None:
            self.kind = ""

        def enter(*unused: Any) -> None:
            self.kind = kind

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave, always_call=True)

    def _inside(self, kind: str, seam: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.kind = kind
        try:
            return seam(*arguments, **options)
        finally:
            self.kind = ""  # also where torch has seen enough, and stops in the middle


def _selective(policy: Callable[..., CheckpointPolicy]) -> tuple[Any, Any]:
    """Torch's own pair of contexts, the second with eyes for kept results only."""
    keeping, kept = create_selective_checkpoint_contexts(policy)
    return keeping, _Again(policy, kept.storage, False)  # pyright: ignore[reportAttributeAccessIssue]


class _Again(CachedTorchDispatchMode):
    """Torch's wants the second pass to make the very calls of the first. FSDP2 of experts, inside a block, makes others: in the
    backward pass it gathers parameters that were there in the forward pass, or finds there what it had to gather."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT_OPS:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
