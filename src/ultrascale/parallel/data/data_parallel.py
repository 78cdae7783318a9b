"""Data parallelism and ZeRO: FSDP2, configured by `description.layout`.

    parameters   p0 p1 p2 ... are sharded over the dp_shard ranks, bucket by bucket; a forward pass all-gathers a bucket
                 before its first block; stage 3 frees it after the last and gathers it again in the backward pass
    gradients    when a bucket's backward pass is done its gradients are reduce-scattered over dp_shard and all-reduced over
                 dp_replicate, while the backward pass goes on (on CUDA, on separate streams)

Stage 0 is the same with dp_shard = 1: nothing is sharded and only the all-reduce is left. Per step and rank a bucket of P
elements costs P (n-1)/n to all-gather, as much to reduce-scatter, and twice that to all-reduce (`schedules.accumulate` says how
often). Why not DDP for stage 0 and FSDP2 for the rest: two mechanisms mean two numerics, two checkpoint formats and two sets of
bugs.

Experts' weights [X, F, D] are sharded by expert, or, where the number of ranks does not divide the experts, by rows of all of
them (`work.sharding.places.zero_shape`): gathered rows [X F, D] already have the layout of [X, F, D]. Sharding F or D
(`Shard(1)`) would need ranks that divide it, and FSDP2 then copies weights and gradients once more.

Gradients are *summed*, never averaged: the loss is already divided by the step's global count of valid tokens.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ultrascale.description.layout import Layout
from ultrascale.kernels.choice.device_kind import kind_of
from ultrascale.models.decoder import Decoder, PredictionBlock
from ultrascale.models.experts import Experts, GroupedLinear
from ultrascale.parallel.data.collectives import MOST_RANKS, DirectAllGather, DirectReduceScatter, NothingToScatter
from ultrascale.parallel.data.reduced_buckets import release_reduced_buckets
from ultrascale.parallel.expert.expert_parallel import expert_modules
from ultrascale.parallel.precision.mixed_precision import TORCH_DTYPE
from ultrascale.schedules.actions import Action
from ultrascale.torch_private import gather_beside_computation
from ultrascale.work.sharding.places import zero_shape


def apply_data_parallel(decoder: Decoder, layout: Layout, mesh: DeviceMesh, expert_mesh: DeviceMesh | None = None) -> None:
    """Shard the parameters of `decoder` over `mesh`, and those of its experts over `expert_mesh` if that differs, in place."""
    policy = MixedPrecisionPolicy(
        param_dtype=TORCH_DTYPE[layout.precision], reduce_dtype=TORCH_DTYPE[layout.gradient_reduce_dtype]
    )
    for experts in expert_modules(decoder):
        _lay_out(experts, (expert_mesh or mesh)["dp_shard"].size())
    for experts in expert_modules(decoder) if expert_mesh is not None else ():
        fully_shard(experts, mesh=expert_mesh, mp_policy=policy, reshard_after_forward=layout.zero_stage == 3)
    blocks: list[nn.Module] = [block for _, block in decoder.blocks()]
    for block in blocks:
        if isinstance(block, PredictionBlock):  # the head reads this norm after the block's parameters are freed
            fully_shard(block.shared_head.norm, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for first in range(0, len(blocks), layout.layers_per_bucket):
        bucket = blocks[first : first + layout.layers_per_bucket]
        fully_shard(bucket, mesh=mesh, mp_policy=policy, reshard_after_forward=layout.zero_stage == 3)
    # The head is used last in the forward and first in the backward pass: freeing it in between would gather it twice.
    fully_shard(decoder, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    for module in sharded_modules(decoder):
        module.set_force_sum_reduction_for_comms(True)
        module.set_gradient_divide_factor(1.0)
        module_mesh = expert_mesh if isinstance(module, Experts) and expert_mesh is not None else mesh
        if module_mesh["dp_shard"].size() == 1:
            module.set_custom_reduce_scatter(NothingToScatter())
        elif kind_of(torch.device(mesh.device_type)) == "cpu":
            gather_beside_computation(module)  # the CPU has no streams: else FSDP2 waits where it starts
            if module_mesh["dp_shard"].size() <= MOST_RANKS:
                module.set_custom_all_gather(DirectAllGather())
                module.set_custom_reduce_scatter(DirectReduceScatter())
    release_reduced_buckets(sharded_modules(decoder))


def _lay_out(experts: Experts, ranks: int) -> None:
    """Reshape experts' weights on the meta device to the form in which they are sharded over `ranks`, in place."""
    for projection in experts.modules():
        if isinstance(projection, GroupedLinear):
            weight = projection.weight
            shape = zero_shape(tuple(weight.shape), ranks)
            if shape != weight.shape:
                projection.weight, projection.matrix_rows = nn.Parameter(weight.new_empty(shape)), weight.shape[1]


def prepare_action(decoder: nn.Module, action: Action) -> None:
    """Tell FSDP2 what `action`, about to run, does with gradients and gathered parameters."""
    if not isinstance(decoder, FSDPModule):
        return
    decoder.set_requires_gradient_sync(action.reduce_gradients)
    decoder.set_requires_all_reduce(action.sum_replicas)
    decoder.set_reshard_after_backward(not action.keep_parameters)


def release_parameters(decoder: nn.Module) -> None:
    """Free all-gathered parameters, so that `decoder.parameters()` are the sharded ones again (after an evaluation)."""
    for module in sharded_modules(decoder):
        module.reshard()


def sharded_modules(decoder: nn.Module) -> list[FSDPModule]:
    """Modules that FSDP2 manages; empty if it was not applied."""
    return [module for module in decoder.modules() if isinstance(module, FSDPModule)]
