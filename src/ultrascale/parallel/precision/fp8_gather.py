"""fp8 all-gather: FSDP2 gathers the weights of fp8 GEMMs as fp8, with half the traffic of bf16 and half the memory while they
are unsharded.

    once an update   amaxes of this rank's shards  --one message over shards, one over tp-->  scales of all weights
    every gather     shard --to bf16, to fp8 by its scale-->  bytes, together with bf16 norms  --all-gather-->  [F, D] in fp8
    GEMMs            read them (`kernels.fp8.fp8_linear`); gradients belong to a tensor of the same shape without data

So a rank rounds only its shard, once per gather; without this every rank rounds every whole weight in every pass. The bits are
the same: a scale covers the whole weight, and rounding to bf16 is monotonic, so the amax of the bf16 values is the rounded
amax. Over tp, weights have their scales before the products agree on scales of their inputs. With delayed scaling the scales
come from the history, and cost no communication once there is one.

A bucket of fp8 and bf16 tensors is sent as bytes. FSDP2 asks each fp8 weight for its bytes one after the other, where it casts
all others in one kernel. Master weights, gradients, checkpoints and the optimizer are unaffected.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, layer_weights
from ultrascale.description.layout import Layout
from ultrascale.kernels.fp8.fp8_linear import DelayedScales, scale_of
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, SMALLEST, Narrow, Scaling, largest_of, rounded
from ultrascale.models.decoder import Decoder
from ultrascale.models.experts import GroupedLinear
from ultrascale.parallel.data.data_parallel import sharded_modules
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.mesh import Mesh
from ultrascale.parallel.precision.fp8_history import ProjectionHistory, product_of
from ultrascale.torch_private import Hook, fsdp_shard, gather_through, pad_shards, shape_only
from ultrascale.work.fp8_slots import gathers_fp8, weights_gathered_in_fp8
from ultrascale.work.sharding.places import row_boxes

_GATHERED = "fp8_gathered"
"""Attribute of a projection that holds its `GatheredWeight`."""


class GatheredWeight:
    """Weight of a projection, [F, D], or of experts, [X, F, D], of which this rank holds some rows (some experts, or rows of
    them: `work.sharding.places.zero_shape`)."""

    def __init__(
        self, weight: nn.Parameter, shape: tuple[int, ...], shards: DeviceMesh, scaling: Scaling, dtype: torch.dtype,
        product: ProjectionHistory | None,
    ):  # fmt: skip
        """`weight`: sharded and padded by FSDP2 over `shards`. `shape`: the shape that products read. `dtype`: of forward and
        backward passes. `product`: its slots under delayed scaling, else None."""
        self.scaling, self.dtype, self.product = scaling, dtype, product
        self.shape, self.shard = torch.Size(shape), fsdp_shard(weight)
        self.cut_rows, self.padded_rows = len(weight), -(-len(weight) // shards.size())
        first = min(shards.get_local_rank() * self.padded_rows, len(weight))
        self.rows = slice(first, first + len(self.shard))
        self.is_scaled_per_tensor = scaling == "tensor" and len(self.shape) == 2
        scales = (1,) * len(self.shape) if self.is_scaled_per_tensor else self.shape[:1]
        self.scale_shape = (*self.shape[:-1], 1) if scaling == "row" else (*scales, *(1,) * (len(self.shape) - len(scales)))
        self.parts = list(row_boxes(shape, tuple(weight.shape), first, len(self.shard)))
        self.has_scales_of_experts = scaling == "tensor" and len(self.shape) == 3
        self.scale = self.shard.new_empty(0)
        """Scale under current scaling, in the form that products take: a view of the table of all scales."""
        self.values: Tensor | None = None
        """fp8 values of the whole weight; its memory is freed while the weight is sharded."""

    @property
    def local_scales(self) -> slice:
        """Index range of this rank's rows among all scales of the weight, flattened."""
        if self.has_scales_of_experts:
            (_, first), (_, last) = self.parts[0], self.parts[-1]
            return slice(first.offsets[0], last.offsets[0] + last.shape[0])
        per_row = 1 if self.shard.dim() == 2 else prod(self.scale_shape[1:])
        return slice(0, 1) if self.is_scaled_per_tensor else slice(self.rows.start * per_row, self.rows.stop * per_row)

    @property
    def history_scale(self) -> Tensor | None:
        """Scale under delayed scaling; None until there is a history."""
        if self.product is None or not self.product.amaxes.is_known:
            return None
        assert self.product.amaxes.scales is not None
        return self.product.amaxes.scales[self.product.weights].view(self.scale_shape)

    def largest(self) -> Tensor:
        """Amaxes of this rank's rows in the compute dtype, for the scales `local_scales`."""
        if not self.shard.numel():
            return self.shard.new_zeros(self.local_scales.stop - self.local_scales.start)
        if self.has_scales_of_experts:
            amax = torch.cat([largest_of(self.shard[rows].view(box.shape).flatten(1), "row") for rows, box in self.parts])
        else:
            amax = largest_of(self.shard.flatten(0, -2), "tensor" if self.is_scaled_per_tensor else "row")
        return amax.to(self.dtype).to(amax.dtype).flatten()

    def _of_local_rows(self, scale: Tensor) -> Tensor:
        """Scale reshaped to broadcast over the shard's rows."""
        if self.is_scaled_per_tensor or self.shard.dim() == len(self.shape):
            return scale if self.is_scaled_per_tensor else scale[self.rows]
        return scale.expand(*self.shape[:-1], 1).flatten(0, 1)[self.rows]

    def before_gather(
        self, mesh: DeviceMesh, size: torch.Size, stride: tuple[int, ...], module: nn.Module, policy: object
    ) -> tuple[tuple[Tensor], None]:
        """FSDP2's `fsdp_pre_all_gather`: returns the bytes that this rank sends, equally many on every rank."""
        known = self.history_scale
        scale = self.scale if known is None else known
        sent = rounded(self.shard.to(self.dtype), self._of_local_rows(scale)).values.view(torch.uint8)
        missing = self.padded_rows - len(sent)
        return (F.pad(sent, [0, 0] * (sent.dim() - 1) + [0, missing]) if missing else sent,), None

    def after_gather(
        self, gathered: Sequence[Tensor], nothing: None, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> tuple[object, tuple[()]] | None:
        """FSDP2's `fsdp_post_all_gather`: puts the values into the same memory after every gather."""
        if out is not None:
            return None
        self.values = gathered[0].view(FORWARD)[: self.cut_rows].view(self.shape)
        return shape_only(dtype, self.values.device), ()


class GatheredScales:
    """Scales of all weights that are sharded over one group of ranks, in one tensor."""

    def __init__(
        self, weights: Sequence[GatheredWeight], shards: dist.ProcessGroup, shared: int, sharing: dist.ProcessGroup | None
    ):
        """`sharing`: tp ranks that hold other parts of the first `shared` weights, whose scales are common to all of them."""
        self.weights, self.shards, self.sharing = weights, shards, sharing
        sizes = [prod(weight.scale_shape) for weight in weights]
        self.num_shared = sum(sizes[:shared])
        like = largest_of(weights[0].shard.new_zeros(1, 1), "tensor")
        self.scales = like.new_ones(sum(sizes))
        self.largest = like.new_empty(0)
        self.places = [slice(end - size, end) for size, end in zip(sizes, accumulate(sizes), strict=True)]
        for weight, place in zip(weights, self.places, strict=True):
            weight.scale = self.scales[place].view(weight.scale_shape)

    def compute_scales(self) -> None:
        """Compute the scales from the current weights. Collective, unless a history provides them."""
        largest = torch.zeros_like(self.scales)
        for weight, place in zip(self.weights, self.places, strict=True):
            largest[place][weight.local_scales] = weight.largest()
        if any(weight.history_scale is None for weight in self.weights):
            self._agree(largest, self.shards)
            if self.num_shared and self.sharing is not None:
                self._agree(largest[: self.num_shared], self.sharing)
            torch.div(largest.clamp_min(SMALLEST), torch.finfo(FORWARD).max, out=self.scales)
        if any(weight.product is not None for weight in self.weights):
            self.largest = largest

    def record_amaxes(self) -> None:
        """Record the amaxes of the weights that a step reads in the history."""
        for weight, place in zip(self.weights, self.places, strict=True):
            if weight.product is not None and weight.product.amaxes.largest is not None:
                seen = weight.product.amaxes.largest[weight.product.weights]
                torch.maximum(seen, self.largest[place].to(seen.dtype), out=seen)

    def _agree(self, largest: Tensor, ranks: dist.ProcessGroup) -> None:
        if ranks.size() > 1:
            with waiting("the largest magnitudes of weights, for scales of fp8", ranks, tensor=largest):
                dist.all_reduce(largest, dist.ReduceOp.MAX, group=ranks)


class GatheredWeights:
    """All weights of a rank that are all-gathered in fp8."""

    def __init__(self, tables: list[GatheredScales]):
        self.tables = tables
        self.forget()

    def forget(self) -> None:
        """Mark the scales stale, as weights may have changed. All ranks must call it: the recomputation that follows is
        collective."""
        self.are_known = self.are_recorded = False

    @torch.no_grad()
    def _compute_scales(self) -> None:
        for table in self.tables:
            table.compute_scales()
        self.are_known = True

    @torch.no_grad()
    def _record_amaxes(self) -> None:
        for table in self.tables:
            table.record_amaxes()
        self.are_recorded = True

    def begin_pass(self, *unused: object) -> None:
        """Prepare a stage's forward pass: compute the scales if stale, and record amaxes in the first pass of a step."""
        if not self.are_known:
            self._compute_scales()
        if torch.is_grad_enabled() and not self.are_recorded:
            self._record_amaxes()


def gathered_weights(projections: Iterable[nn.Module], delayed: DelayedScales) -> list[Narrow]:
    """Weights of `projections` as gathered, if that was in fp8. `delayed`: the history slots that their call reads."""
    gathered: list[Narrow] = []
    for number, weight in enumerate(vars(p)[_GATHERED] for p in projections if _GATHERED in vars(p)):
        scale = weight.scale
        if delayed.scales is not None:
            scale = scale_of(delayed.scales, delayed.places.weights[number], delayed.places.count).view(weight.scale_shape)
        gathered.append(Narrow(weight.values, scale))
    return gathered


def gather_in_fp8(
    model: Model, stages: Mapping[int, Decoder], layout: Layout, mesh: Mesh, dtype: torch.dtype
) -> GatheredWeights | None:
    """Make FSDP2 all-gather the weights of the fp8 GEMMs of all `stages`, which it manages, in fp8 as `layout` says, in place.
    Returns None if they are gathered like all others. `dtype`: of tensors that are not in fp8."""
    if not gathers_fp8(layout):
        return None
    assert mesh.data is not None, "whoever cuts weights between ranks has a mesh of them"
    scaling: Scaling = "row" if layout.fp8_scaling == "row" else "tensor"
    modules = [module for stage in stages.values() for module in sharded_modules(stage)]
    for module in modules:  # initialise now, so that the hooks attach to the final objects
        pad_shards(module)
    is_shared = weights_gathered_in_fp8(model, layout)
    pairs = [pair for stage in stages.values() for pair in _products(model, stage, is_shared)]
    hooks: dict[Tensor, tuple[Hook, Hook]] = {}
    tables: list[GatheredScales] = []
    for of_experts, shards, sharing in (
        (False, mesh.data, mesh.group("tp")),
        (True, mesh.expert_data or mesh.data, mesh.group("expert_tp")),
    ):
        some = [pair for pair in pairs if pair[0].is_expert is of_experts]
        some.sort(key=lambda pair: not is_shared[pair[0].name])
        gathered: list[GatheredWeight] = []
        for _, projection in some:
            parameter = projection.get_parameter("weight")
            shape = projection.shape if isinstance(projection, GroupedLinear) else tuple(parameter.shape)
            gathered_weight = GatheredWeight(parameter, shape, shards["dp_shard"], scaling, dtype, product_of(projection))
            vars(projection)[_GATHERED] = gathered_weight
            hooks[parameter] = gathered_weight.before_gather, gathered_weight.after_gather
            gathered.append(gathered_weight)
        if some:
            shared = sum(is_shared[weight.name] for weight, _ in some)
            tables.append(GatheredScales(gathered, shards["dp_shard"].get_group(), shared, sharing))
    for module in modules:
        gather_through(module, hooks)
    weights = GatheredWeights(tables)
    for stage in stages.values():
        stage.register_forward_pre_hook(weights.begin_pass, prepend=True)  # before FSDP2's, which all-gathers
    return weights


def _products(model: Model, stage: Decoder, names: Container[str]) -> Iterator[tuple[Weight, nn.Module]]:
    """Weights with these names that `stage` has, each with the module that reads it."""
    for number, block in stage.blocks():
        for weight in layer_weights(model, number):
            if weight.name in names:
                projection = weight.name.removeprefix(f"layers.{number}.").removesuffix(".weight")
                yield weight, block.get_submodule(projection)
