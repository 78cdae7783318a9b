"""FLOPs of a model by their conventions.

model FLOPs     6 N per token, N the weights of GEMMs (including the head, without the input embedding and norms),
                plus 12 x (heads x head dim) x context per token and layer for attention
context         causal: the positions that a token sees, (S+1)/2 on average or less with a sliding window; full: S, as the
                playbook, nanotron and FlopCounterMode count
hardware FLOPs  all FLOPs that are computed: with recomputation, multi-token prediction (not in MFU), attention's scores
                again in its backward pass (a factor of 7/6), logits again if the loss runs by slabs of the vocabulary, and
                the full square of scores if attention needs a mask, for documents or a window: SDPA then skips nothing
MFU, HFU        model or hardware FLOPs over the *peak*; both conventions of context are given, and each says which
"""

from __future__ import annotations

from collections import Counter

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.work.recompute import recomputed_ops, resolved
from ultrascale.work.work import Op, Shape, block_work, first_alike, head_work, mask_elements, prediction_work

CONVENTION = "6N + attention, causal; hardware FLOPs with the full square under a mask; peak is dense, without sparsity"


def model_flops_per_token(model: Model, sequence_length: int, *, full_attention: bool = False) -> float:
    """Model FLOPs per token, forward and backward, a multiply-add as two; the module docstring has the convention."""
    shape = Shape(1, sequence_length)
    products = sum(op.flops / 3 for op in head_work(model, shape))  # the fused loss runs its backward pass in its forward pass
    for layer, count in Counter(first_alike(model)[: model.num_hidden_layers]).items():
        share = 1.0 if full_attention else _causal_share(model, layer, shape)
        products += count * sum(_flops(op, share) for op in block_work(model, layer, shape))
    return 3 * products / sequence_length


def hardware_flops_per_token(model: Model, layout: Layout, rank: Shape) -> float:
    """FLOPs computed per token: with recomputation, multi-token prediction, and scores that are computed but masked.

    `rank`: shape of a rank's micro-batch. It decides whether documents and windows are masks, so that nothing is skipped, and
    whether the loss computes its logits twice.
    """
    return sum(hardware_flops(model, layout, rank).values())


def hardware_flops(model: Model, layout: Layout, rank: Shape) -> dict[str, float]:
    """Hardware FLOPs per token by kind: GEMMs, attention, and the recomputation of both; with the loss's second product."""
    sequence_length, masks = rank.sequence_length, not rank.masks_in_kernel
    shape = Shape(1, sequence_length, documents=rank.documents, mlp_chunks=layout.mlp_chunks)
    more = model.num_nextn_predict_layers
    heads = float(sum(op.flops for op in head_work(model, shape))) * (1 + more)  # three GEMMs each
    products = heads + 3.0 * more * sum(op.flops for op in prediction_work(model, shape))
    recomputed = heads / 3 * (max(op.forward_products for op in head_work(model, rank)) - 1)
    attention = 0.0
    alike = Counter(
        (first, resolved(layout.block_recompute(layer), model, layer, layout)) for layer, first in enumerate(first_alike(model))
    )
    for (layer, recomputation), count in alike.items():
        share = 1.0 if masks and mask_elements(model.window(layer), shape) else _causal_share(model, layer, shape)
        ops = block_work(model, layer, shape)
        products += 3 * count * sum(op.flops for op in ops if op.kind != "attention")
        recomputed += count * sum(op.backward_flops - 2 * op.flops for op in ops if op.inside)
        attention += 3.5 * count * sum(_flops(op, share) for op in ops if op.kind == "attention")
        recomputed += count * sum(_flops(op, share) for op in recomputed_ops(recomputation, ops, reruns_last=False))
    by_kind = {"matrix products": products, "attention": attention, "recomputation": recomputed}
    return {name: flops / sequence_length for name, flops in by_kind.items()}


def mean_context(sequence_length: int, window: int | None) -> float:
    """Positions a token attends to on average, itself included, under a causal mask and a sliding window."""
    w = min(window or sequence_length, sequence_length)
    return (w * (w + 1) / 2 + (sequence_length - w) * w) / sequence_length


def _flops(op: Op, share: float) -> float:
    """FLOPs of an operation's forward pass, if `share` of the square of scores is computed."""
    return op.flops * (share if op.kind == "attention" else 1.0)


def _causal_share(model: Model, layer: int, shape: Shape) -> float:
    """Fraction of the square of scores that a layer's tokens may see."""
    return mean_context(shape.sequence_length, model.window(layer)) / shape.sequence_length
