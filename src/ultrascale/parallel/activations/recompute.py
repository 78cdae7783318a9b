"""Activation recomputation: save less in the forward pass, and compute it again in the backward pass.

    none        save what autograd saves
    MODULES     save it except for the results of named modules, such as `norm+moe_act` (`parallel.activations.regions`)
    selective   the modules that save most memory per second in this model (`work.recompute.selective_modules`)
    sel...+KIND save results of GEMMs and attention except those of a kind, such as `selective+mlp`; recompute all else
    full        save each block's input; run the block again
    every-k     full, for one block of every k
    blocks      one of these per block; "auto" resolves to it (`plan.search.recompute_choice`)

Full costs one extra forward pass (a third of the step's FLOPs) and leaves 2 S B D bytes a block in bf16; selective costs up to
5 percent. `description.recomputed` has the names, `work.recompute` what each saves. Inside a compiled block autograd sees one
operation whose parts cannot be named: there, selective saves the results of GEMMs and attention. Source: Chen et al. 2016;
Korthikanti et al. 2022; playbook, "Activation recomputation". The block's `forward` is wrapped, not the module, so that
parameter names do not change. An operation's kind follows from where in the block it runs: the model's seams report it as they
are entered.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ultrascale.description.layout import Layout
from ultrascale.description.recomputed import ELEMENTWISE, SELECTIVE, BlockRecompute
from ultrascale.kernels.attention import flash_packages
from ultrascale.kernels.fp8 import fp8_grouped
from ultrascale.kernels.fp8 import fp8_matrices as fp8
from ultrascale.models.attention import Attention, LatentAttention
from ultrascale.models.decoder import Block, Decoder
from ultrascale.models.experts import Experts, LocalDispatch, MoE
from ultrascale.models.feed_forward import MLP
from ultrascale.parallel import all_to_all
from ultrascale.parallel.activations.partitioned_checkpoints import keep_local_part
from ultrascale.parallel.activations.regions import RecomputedRegions
from ultrascale.parallel.context import context_operation
from ultrascale.parallel.expert.expert_sequences import WholeSequences
from ultrascale.parallel.precision import fp8_wires
from ultrascale.parallel.tensor import tensor_ops
from ultrascale.parallel.tensor.tensor_parallel import tensor_parallel_of
from ultrascale.torch_private import CachedTorchDispatchMode
from ultrascale.work.recompute import resolved

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
"""Operations whose results selective recomputation saves: computing them again costs GEMMs or communication."""


def apply_recompute(decoder: Decoder, layout: Layout, *, compiled: bool = False) -> None:
    """Wrap the forward passes of the blocks as `layout` says, in place; call it after their seams have been replaced.
    `compiled`: blocks will be compiled."""
    tp = tensor_parallel_of(decoder) if layout.partition_checkpoints else None
    for place, (index, block) in enumerate(decoder.blocks()):
        recompute = layout.block_recompute(index)
        recompute = ELEMENTWISE if compiled and recompute == SELECTIVE else resolved(recompute, decoder.spec, index, layout)
        if recompute is None:
            continue
        if recompute.modules:
            recompute_regions(block, recompute.modules)
            continue
        if recompute.whole:
            block.forward = _recomputed(block.forward)
            if tp is not None and (place or decoder.is_first):  # a pipeline holds a stage's input anyway
                setattr(block, "forward", partial(keep_local_part, tp.group, block.forward))  # noqa: B010
        else:
            block.forward = _recomputed(block.forward, context_fn=partial(_selective, _policy(block, recompute)))


def recompute_regions(block: Block, modules: frozenset[str]) -> None:
    """Make `block` free the results of these `modules` (`description.recomputed.MODULES`) after the forward pass and recompute
    them, in place."""
    regions, mlp = RecomputedRegions(), block.mlp
    dense = mlp.shared_experts if isinstance(mlp, MoE) else mlp
    if "norm" in modules:
        for name in filter(None, (block.norm_names.before_attention, block.norm_names.before_mlp)):
            _wrap(regions, block.get_submodule(name), "forward")
    if "core_attn" in modules:
        _wrap(regions, block.self_attn, "core")
    if "mla_up_proj" in modules and isinstance(block.self_attn, LatentAttention):
        _wrap(regions, block.self_attn, "widen_queries")
        _wrap(regions, block.self_attn, "widen_keys")
    if isinstance(mlp, MoE) and "moe" in modules:
        keep = getattr(mlp.router.keep, "__self__", None)
        compute = partial(_placed, keep, mlp.compute) if isinstance(keep, WholeSequences) else mlp.compute
        setattr(mlp, "compute", partial(_with_places, keep, regions.region(compute)))  # noqa: B010
    elif isinstance(mlp, MoE):
        if "moe_act" in modules:
            _wrap(regions, mlp.experts, "activate")
        if "moe_permute" in modules and isinstance(mlp.dispatch, LocalDispatch):
            mlp.dispatch = replace(mlp.dispatch, spread=regions.region(mlp.dispatch.spread))
    if isinstance(dense, MLP) and "forward" not in vars(dense):  # pieces of tokens keep nothing
        if ("shared_experts" if isinstance(mlp, MoE) else "mlp") in modules:
            setattr(dense, "forward", partial(_fed_forward, dense, regions.region(partial(_widened, dense))))  # noqa: B010
        elif "mlp_act" in modules:
            _wrap(regions, dense, "activate")
    block.forward = regions.block(block.forward)


def _wrap(regions: RecomputedRegions, module: nn.Module, seam: str) -> None:
    setattr(module, seam, regions.region(getattr(module, seam)))


def _widened(mlp: MLP, hidden: Tensor) -> Tensor:
    """[B, S, D] to the input of `down`, [B, S, F]."""
    return mlp.activate(mlp.activation, *mlp.column_linear(hidden, *mlp.projections))


def _fed_forward(mlp: MLP, widened: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
    return mlp.row_linear(widened(hidden), mlp.down_proj)


def _with_places(sequences: Any, compute: Callable[..., Any], hidden: Tensor) -> Any:
    """Compute with the token positions of this micro-batch, which experts of limited capacity need, whenever it is
    (re)computed."""
    return compute(hidden, sequences.positions) if isinstance(sequences, WholeSequences) else compute(hidden)


def _placed(sequences: WholeSequences, compute: Callable[..., Any], hidden: Tensor, positions: list[Tensor]) -> Any:
    sequences.positions = positions
    return compute(hidden)


def _recomputed(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    # Nothing random happens inside a block, so no random state is kept for the second pass.
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **options)


def _policy(block: Block, recompute: BlockRecompute) -> Callable[..., CheckpointPolicy]:
    """Policy of selective recomputation: which results are saved, and which recomputed."""
    if not recompute.kinds:
        return _keep_products
    tracker = KindTracker()
    tracker.watch(block)
    return partial(_keep_some_products, tracker, recompute.kinds)


def _keep_products(context: Any, op: Any, *arguments: Any, **options: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in KEPT_OPS else CheckpointPolicy.PREFER_RECOMPUTE


def _keep_some_products(
    tracker: KindTracker, kinds: frozenset[str], context: Any, op: Any, *arguments: Any, **options: Any
) -> CheckpointPolicy:
    return CheckpointPolicy.PREFER_RECOMPUTE if tracker.kind in kinds else _keep_products(context, op)


class KindTracker:
    """The kind of `description.recomputed.KINDS` that is being computed now; empty if none."""

    def __init__(self) -> None:
        self.kind = ""

    def watch(self, block: Block) -> None:
        """Track the seams of `block` from now on, in place."""
        for module in block.modules():
            if isinstance(module, Attention | LatentAttention):
                self._wrap(module, column_linear="qkv", core="attention", row_linear="output")
            elif isinstance(module, MLP):
                self._wrap(module, column_linear="mlp", row_linear="down")
        for module in block.modules():
            if isinstance(module, LatentAttention):  # narrow projections go through no seam
                for child in (module.kv_a_proj_with_mqa, *((module.q_a_proj,) if module.is_q_narrow else ())):
                    self._wrap(child, forward="qkv")
            elif isinstance(module, Experts):
                self._wrap(module, grouped_column_linear="experts")

    def _wrap(self, module: nn.Module, **seams: str) -> None:
        for seam, kind in seams.items():
            setattr(module, seam, partial(self._inside, kind, getattr(module, seam)))

    def _inside(self, kind: str, seam: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.kind = kind
        try:
            return seam(*arguments, **options)
        finally:
            self.kind = ""  # also if torch stops the recomputation early


def _selective(policy: Callable[..., CheckpointPolicy]) -> tuple[Any, Any]:
    """Torch's pair of contexts for selective checkpointing, the second replaced by `_Rerun`."""
    keeping, cached = create_selective_checkpoint_contexts(policy)
    return keeping, _Rerun(policy, cached.storage, False)  # pyright: ignore[reportAttributeAccessIssue]


class _Rerun(CachedTorchDispatchMode):
    """Recomputation mode that matches only saved results. Torch's own requires the second pass to make exactly the calls of the
    first; FSDP2 of experts, inside a block, makes others: in the backward pass it all-gathers parameters that the forward pass
    still had, or the reverse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in KEPT_OPS:
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)
