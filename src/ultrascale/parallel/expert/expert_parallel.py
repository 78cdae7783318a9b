"""Applies expert parallelism to a decoder: which experts a rank holds, and how tokens reach them.

    weight of the experts    sharding                          seam
    gate, up [X, F, D]       dim 0 over ep, F over expert_tp   MoE.dispatch (`parallel.expert.expert_dispatch`)
    down [X, D, F]           dim 0 over ep, F over expert_tp   the same
    down's bias [X, D]       dim 0 over ep                     added by the first rank of expert_tp only
    router, shared experts   by tp, not by ep                  router.sum_counts, router.keep
                             (`parallel.expert.expert_sequences`)

The ranks of ep and expert_tp are any of the tp x cp x dp plane of a pipeline stage, expert_tp fastest. The rest of the plane
replicates the experts; FSDP2 shards and sums them over these ranks only (`expert_modules` says which modules). A gradient needs
no sum over ep: tokens of all its ranks have visited the expert. tp ranks without sequence parallelism hold the same tokens and
split them first, so that each token still visits an expert once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.description.architecture.weights import weights
from ultrascale.description.layout import Layout
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import Experts, GroupedLinear, moe_layers
from ultrascale.parallel.expert.expert_dispatch import ExpertDispatch
from ultrascale.parallel.expert.expert_sequences import WholeSequences, apply_whole_sequences
from ultrascale.parallel.groups import Groups
from ultrascale.parallel.lost import waiting
from ultrascale.work.sharding.places import Coordinates, shard_of


def apply_expert_parallel(decoder: Decoder, layout: Layout, mesh: Groups) -> None:
    """Shard the experts of `decoder`, whose weights are still on the meta device, and install token dispatch, in place.

    Apply after tensor and context parallelism, before recomputation.
    """
    spec, tp = decoder.spec, mesh.group("tp")
    if not spec.num_experts:
        return
    _shard_parameters(decoder, layout, mesh.coordinates)
    same_tokens, split_tokens = (None, tp) if layout.sequence_parallel else (tp, None)
    groups = {"ep": mesh.group("ep"), "expert_tp": mesh.group("expert_tp"), "same_tokens": same_tokens}
    sums = partial(sum_counts, groups=count_groups(layout, mesh, spec.router_aux_loss_scope))
    for _, layer in moe_layers(decoder):
        layer.router.sum_counts = sums
        if any(group is not None for group in groups.values()):
            layer.dispatch = ExpertDispatch(spec.num_experts, **groups)
    if spec.expert_capacity_factor is not None and (split_tokens or mesh.group("cp")):
        apply_whole_sequences(decoder, WholeSequences(layout, cp=mesh.group("cp"), tp=split_tokens))


def expert_modules(decoder: nn.Module) -> list[Experts]:
    """The expert modules that FSDP2 must shard over expert data parallelism, apart from the block around them."""
    return [layer.experts for _, layer in moe_layers(decoder)]


def count_groups(layout: Layout, mesh: Groups, scope: str) -> list[dist.ProcessGroup]:
    """Groups over which, one after the other, the router's expert counts are summed for a balance loss of this scope.

    "sequence", "micro-batch": the ranks that hold the rest of the same sequences; "global": all ranks with distinct tokens.
    """
    groups = [mesh.group("tp") if layout.sequence_parallel else None, mesh.group("cp")]
    groups += [mesh.group("dp")] if scope == "global" else []
    return [group for group in groups if group is not None]


def sum_counts(counts: Tensor, *, groups: Sequence[dist.ProcessGroup]) -> Tensor:
    """Counts summed over each of `groups` in turn, out of place. They are integers, so the order does not matter."""
    total = counts.clone() if groups else counts
    for group in groups:
        with waiting("the sum of experts' loads", group):
            dist.all_reduce(total, group=group)
    return total


def _shard_parameters(decoder: Decoder, layout: Layout, coordinates: Coordinates) -> None:
    table = {weight.name: weight for weight in weights(decoder.spec)}
    for name, parameter in list(decoder.named_parameters()):
        if not table[name].is_expert:
            continue
        owner, _, leaf = name.rpartition(".")
        module, part = decoder.get_submodule(owner), shard_of(table[name], layout, coordinates)
        setattr(module, leaf, nn.Parameter(parameter.new_empty(part.shape)))
        if leaf == "bias" and part.tp_copy > 0:
            assert isinstance(module, GroupedLinear)
            module.adds_bias = False  # partial products are added up over expert_tp, and the bias must be among them once
