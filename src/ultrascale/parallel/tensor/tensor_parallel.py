"""Applies tensor parallelism to a decoder: every rank holds its shard of the weights, and `tensor_ops` replace the model's
seams.

    weight                            sharded dimension          seam
    q k v, gate and up, MLA's b       rows: heads, features      column_linear
    o, down                           columns                    row_linear
    embedding, head                   rows: the vocabulary       look_up, loss
    norms, positions, narrow ones     replicated                 with sequence parallelism each rank its own positions

Shards are plain tensors of the sizes in `work.sharding.places`; FSDP2 shards them further. DTensor would compute the same, but
dispatches every operation of a block anew, which on CPU costs a fifth of a small model's speed (docs/speed.md).

Gradients of replicated weights are partial sums on each rank where `work.sharding.places.shard_of` says `is_partial`: the
caller must sum them over tp once a step.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder, PredictionBlock
from ultrascale.parallel.groups import Groups
from ultrascale.parallel.tensor.tensor_loss import look_up, vocabulary_cross_entropy
from ultrascale.parallel.tensor.tensor_ops import TensorParallel
from ultrascale.parallel.tensor.tensor_overlap import overlap_in
from ultrascale.work.sharding.places import Coordinates, shard_of


def apply_tensor_parallel(decoder: Decoder, layout: Layout, mesh: Groups) -> TensorParallel | None:
    """Shard `decoder`, whose weights are still on the meta device, over tp, in place. Does nothing if tp is 1.

    Returns the state that the seams share. Weights of experts are left to `expert_tp`. The forward pass then raises ValueError
    if asked for logits, or if a stage other than the first gets no positions: with sequence parallelism it could not know the
    sequence length.
    """
    group = mesh.group("tp")
    if group is None:
        return None
    if layout.tp_overlap:
        overlap_in(group)
    tp = TensorParallel(group, layout.sequence_parallel)
    shard_parameters(decoder, layout, mesh.coordinates)
    for module in decoder.modules():
        for seam in ("column_linear", "row_linear", "gather_sequence"):
            if hasattr(module, seam):
                setattr(module, seam, getattr(tp, seam))
        if getattr(module, "norms_whole", False):  # a norm over all heads needs those of all ranks
            for norm in (module.q_norm, module.k_norm):
                setattr(norm, "forward", partial(_rms_norm, norm, tp))  # noqa: B010
        if isinstance(module, PredictionBlock):
            setattr(module.eh_proj, "forward", partial(tp.column_linear_to_sequence_shard, module.eh_proj))  # noqa: B010
    vocab_size = decoder.spec.vocab_size
    decoder.look_up = partial(look_up, vocab_size=vocab_size, tp=tp)  # pyright: ignore[reportAttributeAccessIssue]
    decoder.loss = partial(vocabulary_cross_entropy, vocab_size=vocab_size, tp=tp)
    decoder.sequence_shard = tp.sequence_shard
    decoder.register_forward_pre_hook(partial(_measure, tp), with_kwargs=True)
    return tp


def tensor_parallel_of(decoder: Decoder) -> TensorParallel | None:
    """State that the seams of `decoder` share, if tp has sharded it: a schedule with W sets its `defer`."""
    owner = getattr(decoder.sequence_shard, "__self__", None)
    return owner if isinstance(owner, TensorParallel) else None


def shard_parameters(decoder: nn.Module, layout: Layout, coordinates: Coordinates) -> None:
    """Replace every weight that tp shards by an empty one of this rank's shape."""
    table = {weight.name: weight for weight in weights(decoder.spec)}  # pyright: ignore
    for name, parameter in list(decoder.named_parameters()):
        weight = table[name]
        if weight.tp_dim is None or weight.is_expert:
            continue
        owner, _, leaf = name.rpartition(".")
        shape = shard_of(weight, layout, coordinates).shape
        setattr(decoder.get_submodule(owner), leaf, nn.Parameter(parameter.new_empty(shape)))


def _rms_norm(norm: Any, tp: TensorParallel, x: Tensor) -> Tensor:
    return tp.rms_norm(x, norm.scale, norm.eps)


def _measure(tp: TensorParallel, decoder: Decoder, inputs: tuple[Tensor, ...], options: dict[str, Any]) -> None:
    """Record the length of the sequences of this forward pass."""
    if decoder.is_last and options.get("targets") is None:
        raise ValueError("over several ranks of tp a decoder computes losses; give it targets, or generate in one process")
    if not tp.sequence_parallel:
        return
    if decoder.is_first:
        tp.length = inputs[0].shape[1]
        return
    positions = options.get("positions")
    if positions is None:
        raise ValueError("with sequence parallelism a stage that is not the first must be given positions")
    tp.length = positions.shape[-1]
