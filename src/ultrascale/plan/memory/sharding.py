"""Memory of FSDP2: repeats torch's allocations and frees of all-gathered parameters and gradients on a ledger.

For one bucket of U elements (its parameters, each padded to a multiple of n rows, see `places.zero_shape`), sharded over n
ranks:

    forward     all-gather into a flat buffer U, copy it out to U parameters; on CUDA the flat buffer stays until the next
                bucket is unsharded; ZeRO stage 3 frees the parameters after the bucket's last block
    backward    stage 3 gathers again and prefetches one bucket: its flat U is held while the bucket after it computes
                gradients U  ->  allocate flat U in the reduction's dtype, free the gradients, allocate U/n: gradient shard
                the flat input stays until the next bucket's, the last one until the end of the backward pass
    n = 1       nothing is gathered, but FSDP2 still copies every parameter

The bucket outside the blocks (embedding, final norm, head) is gathered first, and freed and reduced last. Weights gathered in
fp8 (`layout.fp8_all_gather`) take one byte per element in the bucket; their gradients are as wide as those of other weights.
A single process does not use FSDP2. In mixed precision (`parallel.precision.mixed_precision`) it keeps U elements of
low-precision copies to compute with, and casts a block's gradients one by one after its backward pass, last weight first.
Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py and _fsdp_collectives.py, torch 2.11 to 2.14.

Also here: scales of weights gathered in fp8 (`parallel.precision.fp8_gather`), their bytes and their all-reduces per update.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import compress
from math import prod
from operator import mul
from typing import Any, NamedTuple, cast

from ultrascale.catalogue.stacks.stack import OPTIMIZERS, SCALED_TOGETHER, UPDATED_TOGETHER, WIDENED_BYTES, Stack
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import Weight, is_hidden_matrix
from ultrascale.description.layout import DTYPE_BYTES, NARROW, Layout
from ultrascale.plan.memory.ledger import Allocation, Ledger
from ultrascale.plan.memory.tally import Tally
from ultrascale.schedules.actions import Action
from ultrascale.work.fp8_slots import SLOT_BYTES, is_delayed, num_weight_scales, weights_gathered_in_fp8
from ultrascale.work.sharding.owners import chunk
from ultrascale.work.sharding.places import Coordinates, zero_shape


@dataclass(eq=False)
class Bucket:
    """Parameters that FSDP2 all-gathers together, and whose gradients it reduces together. Compared by identity."""

    weights: list[Weight]
    """Weights, with the shapes of a rank before data parallelism shards them."""
    label: str
    ranks: int | None = None
    """Number of ranks that shard the bucket; None: those of the layout's shard group."""
    in_fp8: Container[str] = ()
    """Names of weights that are gathered in 8 bits (`parallel.precision.fp8_gather`)."""
    parameters: Allocation | None = None
    """Unsharded parameters, while gathered."""
    flat: Allocation | None = None
    """Output of an all-gather, not yet copied out to parameters."""
    partial: Allocation | None = None
    """Gradient shards of earlier micro-batches, not yet summed over replicas."""
    replica_buffer: Allocation | None = None
    whole_gradients: dict[str, Allocation] = field(default_factory=dict)
    """Unsharded gradients by weight, from autograd or summed over micro-batches."""
    cast: set[str] = field(default_factory=set)
    """Weights whose gradients are already in the accumulation dtype, where autograd produces another (of any width)."""
    narrow_gradients: dict[str, Allocation] = field(default_factory=dict)
    """Low-precision gradients that wait for their cast; in a single process only."""
    sharded_gradient: Allocation | None = None

    @cached_property
    def names(self) -> list[str]:
        """Names of its weights, in order."""
        return [weight.name for weight in self.weights]


SINGLE = ("parameters", "flat", "partial", "replica_buffer", "sharded_gradient")
"""Fields of a bucket that hold one tensor or None."""
AllocationFields = tuple[str, str, int] | None
"""Category, label and bytes of an allocation."""


class BucketSnapshot(NamedTuple):
    """State of the buckets after a pass; weights are given by position, not by name."""

    buckets: tuple[tuple[Any, ...] | None, ...]
    """For each bucket: the fields of `SINGLE`, unsharded and narrow gradients, and which are cast; None: unchanged."""
    buffers: tuple[AllocationFields, ...]


def _fields_of(allocation: Allocation | None) -> AllocationFields:
    return None if allocation is None else (allocation.category, allocation.label, allocation.num_bytes)


def _allocation_from(fields: AllocationFields) -> Allocation | None:
    return None if fields is None else Allocation(*fields)


class Shards:
    """Parameters and gradients of one rank as FSDP2 gathers, reduces and frees them; unsharded in a single process."""

    def __init__(
        self,
        ledger: Ledger,
        tally: Tally,
        buckets: list[Bucket],
        coordinates: Coordinates,
        *,
        over_gloo: bool = False,
        has_experts: bool = False,
        stack: Stack = STACKS["ultrascale"],
    ):
        """`buckets`: in the order in which their forward passes end, the bucket outside the blocks first.

        `over_gloo`: collectives are those of `parallel.data.collectives`. `has_experts`: the model has experts; FSDP2 is then
        used wherever those have replicas. `stack`: the trainer, with its dtypes.
        """
        self.over_gloo, self.stack = over_gloo, stack
        layout = tally.layout
        self.ledger, self.tally, self.layout, self.buckets = ledger, tally, layout, buckets
        experts_differ = has_experts and layout.tp * layout.ep * layout.expert_tp > 1
        self.sharded = layout.dp * layout.cp > 1 or (experts_differ and layout.expert_dp > 1)
        self._default_groups = layout.group("shard"), layout.group("replicate")
        self.ranks, self.coordinates = self._default_groups[0][0], coordinates
        compute, master = DTYPE_BYTES[layout.precision], DTYPE_BYTES[layout.master_dtype]
        self.compute_itemsize = compute
        self.is_wide, masters_are_gathered = compute >= master, stack.gathers == "buckets"
        widths = master // 4  # a stack's bytes are those of runs with fp32 masters; of fp64 all are twice as wide
        keeps_masters = masters_are_gathered or self.is_wide
        self.master_itemsize = min(master, widths * stack.master_bytes) if keeps_masters else stack.weight_bytes
        self.separate_master_itemsize = 0 if keeps_masters else stack.master_bytes
        gradient_itemsize = compute if self.is_wide else stack.gradient_bytes
        self.sum_itemsize = min(master, widths * stack.gradient_bytes) if masters_are_gathered else gradient_itemsize
        self.casts_alone = not self.sharded and compute != self.master_itemsize
        self.narrow_itemsize = int(NARROW.get(layout.precision, 0))
        reduced = DTYPE_BYTES[layout.gradient_reduce_dtype]
        self.reduce_itemsize = compute if self.is_wide else min(reduced, stack.reduce_bytes)
        gradient_dtype = "bf16" if layout.precision in NARROW else layout.precision
        narrower = self.reduce_itemsize < reduced
        self.casts_sums = self.reduce_itemsize != compute if narrower else layout.gradient_reduce_dtype != gradient_dtype
        self.last_flat: Allocation | None = None
        self.reduce_input: Allocation | None = None
        self.sizes = {bucket: self._sizes_of(bucket) for bucket in buckets}
        """Padded elements of each bucket, and their bytes in the all-gather."""
        self._take_state()

    def _take_state(self) -> None:
        """Allocate the parameters that stay between steps; optimizer state is allocated elsewhere."""
        leaves = self.layout.offload_optimizer and self.stack.offloads_parameters
        for bucket in self.buckets:
            shard = 0 if leaves else self.padded_elements(bucket) // self.ranks_of(bucket)
            self.ledger.take("parameters", bucket.label, shard * self.master_itemsize)
            if self.casts_alone:
                self._finish_gather(bucket)

    def state(self, buckets: Sequence[Bucket] | None = None) -> tuple[Hashable, Hashable]:
        """Flags for the tensors that all buckets hold, or some `buckets`, with weights by position: stages with equal blocks
        have equal states."""
        flags = tuple(
            (
                bucket.parameters is None, bucket.flat is None, bucket.partial is None, bucket.replica_buffer is None,
                bucket.sharded_gradient is None, len(bucket.whole_gradients),
                *(
                    tuple(map(by_name.__contains__, bucket.names)) if by_name else ()
                    for by_name in (bucket.whole_gradients, bucket.cast, bucket.narrow_gradients)
                ),
            )
            for bucket in (self.buckets if buckets is None else buckets)
        )  # fmt: skip
        sizes = tuple(allocation and allocation.num_bytes for allocation in (self.last_flat, self.reduce_input))
        return flags, sizes

    def snapshot(self, before: Hashable, buckets: Sequence[Bucket] | None = None) -> BucketSnapshot | None:
        """Tensors that all buckets hold, or some `buckets`, for `restore` on buckets with the same weights; None if a tensor
        has another holder. `before`: their state before the pass; buckets still in that state are skipped."""
        buckets = self.buckets if buckets is None else buckets
        parts, then, now = [], cast(tuple[Any, Any], before)[0], cast(tuple[Any, Any], self.state(buckets))[0]
        for bucket, old, new in zip(buckets, then, now, strict=True):
            single = [getattr(bucket, name) for name in SINGLE]
            several = [list(map(by_name.get, bucket.names)) for by_name in (bucket.whole_gradients, bucket.narrow_gradients)]
            every = [allocation for group in (single, *several) for allocation in group if allocation is not None]
            num_held = sum(allocation is not None for group in several for allocation in group)
            if num_held < len(bucket.whole_gradients) + len(bucket.narrow_gradients) or any(
                allocation.holders != 1 for allocation in every
            ):
                return None
            is_cast = [name in bucket.cast for name in bucket.names]
            parts.append(None if old == new else (*(tuple(map(_fields_of, group)) for group in (single, *several)), is_cast))
        sizes = [self.last_flat, self.reduce_input]
        if any(allocation is not None and allocation.holders != 1 for allocation in sizes):
            return None
        return BucketSnapshot(tuple(parts), tuple(map(_fields_of, sizes)))

    def restore(self, snapshot: BucketSnapshot, buckets: Sequence[Bucket] | None = None) -> None:
        """Set the buckets to `snapshot` without changing the ledger, which already counts these bytes."""
        for bucket, parts in zip(self.buckets if buckets is None else buckets, snapshot.buckets, strict=True):
            if parts is None:
                continue
            (single, whole, narrow, is_cast), names = parts, bucket.names
            for name, part in zip(SINGLE, single, strict=True):
                setattr(bucket, name, _allocation_from(part))
            bucket.whole_gradients = {
                name: Allocation(*part) for name, part in zip(names, whole, strict=True) if part is not None
            }
            bucket.narrow_gradients = {
                name: Allocation(*part) for name, part in zip(names, narrow, strict=True) if part is not None
            }
            bucket.cast = set(compress(names, is_cast))
        self.last_flat, self.reduce_input = map(_allocation_from, snapshot.buffers)

    @property
    def root(self) -> Bucket:
        """The bucket outside the blocks."""
        return self.buckets[0]

    def is_sharded(self, bucket: Bucket) -> bool:
        """True if FSDP shards the bucket. Some trainers keep experts that have no replica as plain parameters."""
        return self.sharded and not (bucket.ranks == 1 and not self.stack.shards_lone_experts)

    def ranks_of(self, bucket: Bucket) -> int:
        """Number of ranks that shard a bucket."""
        return self.ranks if bucket.ranks is None else bucket.ranks

    def padded_elements(self, bucket: Bucket) -> int:
        """Elements of a bucket with every weight's rows padded to a multiple of the ranks that shard it."""
        return self.sizes[bucket][0]

    def gathered_bytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's unsharded parameters in the dtype of the all-gather."""
        return self.sizes[bucket][1]

    def _sizes_of(self, bucket: Bucket) -> tuple[int, int]:
        elements = [_padded_elements(weight.shape, self.ranks_of(bucket)) for weight in bucket.weights]
        narrow, whole = self.narrow_itemsize, self.compute_itemsize
        sizes = [narrow if weight.name in bucket.in_fp8 else whole for weight in bucket.weights]
        return sum(elements), sum(map(mul, elements, sizes))

    def local_elements(self, bucket: Bucket, weight: Weight) -> int:
        """Elements of this rank's shard of a weight, without padding: the last ranks may have fewer, or none."""
        ranks = self.ranks_of(bucket)
        this_rank = (
            self.coordinates.dp * self.layout.cp + self.coordinates.cp if bucket.ranks is None else self.coordinates.expert_dp
        )
        return _chunk_elements(weight.shape, ranks, this_rank % ranks)

    def shard_elements(self, bucket: Bucket) -> int:
        """Elements of this rank's shard of a bucket, without padding."""
        return sum(self.local_elements(bucket, weight) for weight in bucket.weights)

    def optimizer_bytes(self, bucket: Bucket, optimizer: str) -> int:
        """Bytes of optimizer state in this rank's shard: moments, and master weights where those are not what is gathered."""
        elements = self.shard_elements(bucket)
        masters, stack_moment_bytes, wide = (
            elements * self.separate_master_itemsize,
            self.stack.moment_bytes,
            DTYPE_BYTES[self.layout.master_dtype],
        )
        if self.stack.name != "ultrascale" and optimizer != "muon":
            return masters + round(elements * stack_moment_bytes * wide / 4)
        if optimizer == "adamw":  # as `moment_bytes` of each
            return masters + 2 * elements * wide
        return masters + sum(
            moment_bytes(weight, self.local_elements(bucket, weight), optimizer, wide) for weight in bucket.weights
        )

    def update_bytes(self, optimizer: str, device: str) -> int:
        """Peak of temporary bytes in an update; Muon's are in `plan.memory.muon_update`."""
        if self.stack.name != "ultrascale":
            if self.layout.offload_optimizer:
                return 0
            updated = sum(map(self.shard_elements, self.buckets))
            if self.layout.zero_stage == 3 and self.stack.updated_together:
                updated = min(updated, self.stack.updated_together)
            return self.stack.optimizer_temporary_bytes * updated
        if optimizer not in WIDENED_BYTES:
            return 0
        matrices = [(bucket, weight) for bucket in self.buckets for weight in bucket.weights if len(weight.shape) > 1]
        largest = max((self.local_elements(*matrix) for matrix in matrices), default=0)
        return WIDENED_BYTES[optimizer] * min(largest, UPDATED_TOGETHER[device])

    def fuses(self, bucket: Bucket) -> bool:
        """True if weight-gradient GEMMs accumulate directly into the summed gradient, whatever its dtype."""
        return False

    def adds_in_place(self, bucket: Bucket, weight: Weight) -> bool:
        """True if a weight-gradient GEMM can accumulate into the existing gradient, which has autograd's dtype."""
        return weight.name in bucket.whole_gradients and not self._is_cast(bucket, weight) and not self.casts_alone

    def before_forward(self, bucket: Bucket) -> None:
        """All-gather the parameters, unless they are still unsharded."""
        if self.is_sharded(bucket) and bucket.parameters is None:
            self._start_gather(bucket)
            self._finish_gather(bucket)
            self._drop(self, "last_flat")  # a local variable in FSDP2's wait_for_unshard holds it until the copy-out is done
            self.last_flat, bucket.flat = bucket.flat, None
            if self.over_gloo:  # FSDP2 keeps it only while a stream may still read it
                self._drop(self, "last_flat")

    def after_forward(self, bucket: Bucket) -> None:
        """Free the gathered parameters in ZeRO stage 3, except those outside the blocks."""
        if self.is_sharded(bucket) and self.layout.zero_stage == 3 and bucket is not self.buckets[0]:
            self._drop(bucket, "parameters")

    def end_forward(self) -> None:
        self._drop(self, "last_flat")

    def before_backward(self, bucket: Bucket) -> None:
        """All-gather the parameters if needed, and prefetch the bucket whose backward pass comes next."""
        if not self.sharded:
            return
        if bucket.parameters is None and self.is_sharded(bucket):
            self._start_gather(bucket)
            self._finish_gather(bucket)
            self._drop(bucket, "flat")
        index = self.buckets.index(bucket)
        ahead = self.buckets[index - 1]  # of the one outside the blocks, whose backward pass is first: the last
        if index != 1 and ahead.parameters is None and self.is_sharded(ahead):
            self._start_gather(ahead)

    def add_gradient(self, bucket: Bucket, weight: Weight, gradient: Allocation) -> None:
        """Keep an unsharded gradient of `weight` from autograd, or add it to the existing one."""
        existing = bucket.whole_gradients.get(weight.name)
        if self.casts_alone:
            bucket.narrow_gradients[weight.name] = gradient
        elif existing is None:
            bucket.whole_gradients[weight.name] = self.ledger.move(gradient, "gradients", bucket.label)
        elif not self._is_cast(bucket, weight):
            self.ledger.release(gradient)
        else:  # summed in the dtype of the reduction, when the bucket is done
            bucket.whole_gradients[f"{weight.name} new"] = self.ledger.move(gradient, "gradients", bucket.label)

    def after_backward(self, bucket: Bucket, action: Action) -> None:
        """Reduce-scatter the gradients, or keep them unsharded for the next micro-batch; free the parameters."""
        if self.casts_alone:
            self._cast_gradients(bucket)
        if not self.is_sharded(bucket):
            return
        for name in [name for name in bucket.whole_gradients if name.endswith(" new")] if bucket.cast else ():
            self.ledger.release(bucket.whole_gradients.pop(name))
        if not action.keep_parameters:
            self._drop(bucket, "parameters")
        if action.reduce_gradients:
            self._reduce(bucket, action)
        else:
            self._cast_to_sums(bucket)

    def complete_gradients(self, bucket: Bucket) -> None:
        """Give every weight a gradient in the accumulation dtype, zeros where there was none
        (`parallel.pipeline.pipeline_data`): a bucket is reduced in one dtype."""
        for weight in bucket.weights if self.is_sharded(bucket) else ():
            if weight.name not in bucket.whole_gradients:
                size = weight.numel * self.compute_itemsize
                bucket.whole_gradients[weight.name] = self.ledger.take("gradients", bucket.label, size)
            self._cast_gradient(bucket, weight)

    def complete_pending(self) -> None:
        """`complete_gradients` of buckets with any gradient in the accumulation dtype, before a backward pass that reduces."""
        for bucket in filter(self.is_sharded, self.buckets):
            if any(self._is_cast(bucket, weight) for weight in bucket.weights):
                self.complete_gradients(bucket)

    def end_backward(self) -> None:
        self._drop(self, "reduce_input")
        for bucket in self.buckets:
            self._drop(bucket, "replica_buffer")

    def forget_gradients(self) -> None:
        """zero_grad(set_to_none=True)."""
        for bucket in self.buckets:
            self.ledger.release_all(bucket.whole_gradients.values())
            self._drop(bucket, "sharded_gradient")
            bucket.whole_gradients.clear()
            bucket.cast.clear()

    def _start_gather(self, bucket: Bucket) -> None:
        ranks = self.ranks_of(bucket)
        if ranks == 1 or bucket.flat is not None:
            return
        whole = self.gathered_bytes(bucket)
        if bucket.parameters is None and bucket.weights:
            self.tally.send("all_gather", self._groups(bucket)[0], whole)
        narrow = self.compute_itemsize != self.master_itemsize
        gather_input = self.ledger.take("communication", "all-gather input", whole // ranks if narrow else 0)
        bucket.flat = self.ledger.take("communication", "all-gather output", whole)
        self.ledger.release(gather_input)

    def _groups(self, bucket: Bucket) -> tuple[tuple[int, int], tuple[int, int]]:
        """Groups (size, stride) of the ranks that shard a bucket, and of those that replicate it."""
        if bucket.ranks is None:
            return self._default_groups
        size, stride = bucket.ranks, self.layout.group("expert_dp")[1]
        return (size, stride), (self.layout.expert_dp // size, stride * size)

    def _finish_gather(self, bucket: Bucket) -> None:
        whole = self.gathered_bytes(bucket)
        bucket.parameters = self.ledger.take("gathered", bucket.label, whole)

    def _cast_gradients(self, bucket: Bucket) -> None:
        for weight in reversed([w for w in bucket.weights if w.name in bucket.narrow_gradients]):
            narrow = bucket.narrow_gradients.pop(weight.name)
            wide = self.ledger.take("temporary", "gradients of weights", weight.numel * self.sum_itemsize)
            self.ledger.release(narrow)
            if weight.name in bucket.whole_gradients:  # autograd adds to the existing gradient
                self.ledger.release(wide)
            else:
                bucket.whole_gradients[weight.name] = self.ledger.move(wide, "gradients", bucket.label)

    def _cast_to_sums(self, bucket: Bucket) -> None:
        """Cast gradients to the reduction's dtype, wider or narrower, one at a time."""
        for weight in bucket.weights:
            if weight.name in bucket.whole_gradients:
                self._cast_gradient(bucket, weight)

    def _cast_gradient(self, bucket: Bucket, weight: Weight) -> None:
        if self.casts_sums and not self._is_cast(bucket, weight):
            cast = self.ledger.take("gradients", bucket.label, weight.numel * self.reduce_itemsize)
            self.ledger.release(bucket.whole_gradients[weight.name])
            bucket.whole_gradients[weight.name] = cast
            bucket.cast.add(weight.name)

    def _is_cast(self, bucket: Bucket, weight: Weight) -> bool:
        """True if the weight's gradient is in the accumulation dtype, where autograd produces another."""
        return weight.name in bucket.cast

    def _reduce(self, bucket: Bucket, action: Action) -> None:
        self._drop(self, "reduce_input")
        if not bucket.weights:
            return
        elements, ranks = self.padded_elements(bucket), self.ranks_of(bucket)
        sharded_over, copies = self._groups(bucket)
        self.tally.send("reduce_scatter", sharded_over, elements * self.reduce_itemsize)
        if action.sum_replicas:
            self.tally.send("all_reduce", copies, elements * self.reduce_itemsize // ranks)
        self.reduce_input = self.ledger.take("communication", "reduce-scatter input", elements * self.reduce_itemsize)
        # On several ranks a loop variable of torch's foreach_reduce holds the last parameter's gradient until it returns.
        lingering = bucket.whole_gradients.pop(bucket.weights[-1].name) if ranks > 1 else None
        self.ledger.release_all(bucket.whole_gradients.values())
        bucket.whole_gradients.clear()
        bucket.cast.clear()
        if ranks == 1:  # the result is the input (`parallel.data.data_parallel.NothingToScatter`)
            shard, self.reduce_input = self.reduce_input, None
        else:
            shard = self.ledger.take("communication", "reduce-scatter output", elements // ranks * self.reduce_itemsize)
        if ranks == 1:  # FSDP2 divides gradients (by one) on their way into the result, through a copy
            self.ledger.touch("communication", "copy of reduce-scatter input", elements * self.reduce_itemsize)
        elif self.over_gloo:
            received = elements // ranks * (ranks - 1)
            self.ledger.touch("communication", "parts of other ranks", received * self.reduce_itemsize)
        self._keep_shard(bucket, shard, action)
        if lingering is not None:
            self.ledger.release(lingering)

    def _keep_shard(self, bucket: Bucket, shard: Allocation, action: Action) -> None:
        """Keep the gradient shard: as partial until it is summed over replicas."""
        if not self.stack.keeps_reduced:
            size = shard.num_bytes // self.reduce_itemsize * self.sum_itemsize
            wide = self.ledger.take("gradients", bucket.label, 0 if bucket.sharded_gradient else size)
            bucket.sharded_gradient = bucket.sharded_gradient or wide
            self.ledger.release(shard)
            return
        if not action.sum_replicas:
            if bucket.partial is None:
                bucket.partial = shard
            else:
                self.ledger.release(shard)
            return
        if self.reduce_itemsize == self.sum_itemsize:
            bucket.sharded_gradient = self.ledger.move(shard, "gradients", bucket.label)
        else:
            bucket.replica_buffer = shard  # the all-reduce over replicas ran in it, and FSDP2 keeps it until the end
            size = shard.num_bytes // self.reduce_itemsize * self.sum_itemsize
            bucket.sharded_gradient = self.ledger.take("gradients", bucket.label, size)
        self._drop(bucket, "partial")

    def _drop(self, holder: Bucket | Shards, name: str) -> None:
        """Release the tensor, if any, in the field `name` of a bucket or of this object."""
        if (allocation := getattr(holder, name)) is not None:
            self.ledger.release(allocation)
            setattr(holder, name, None)


class WholeState(Shards):
    """Parameters and gradient buffers allocated once and unsharded through all passes: Megatron, nanotron, DeepSpeed's ZeRO
    stages 1 and 2, plain DDP. Only optimizer state is sharded, and gradients from stage `shards_gradients_from` on."""

    def _take_state(self) -> None:
        self.sharded = self.casts_alone = False
        stack, compute = self.stack, self.compute_itemsize
        shards_gradients = self.layout.zero_stage >= stack.shards_gradients_from
        for bucket in self.buckets:
            whole, local = sum(weight.numel for weight in bucket.weights), self.shard_elements(bucket)
            self.ledger.take("parameters", bucket.label, whole * (compute if self.is_wide else stack.weight_bytes))
            beside = 0 if self.is_wide or shards_gradients else stack.autograd_gradient_bytes * whole
            self.ledger.take("gradients", bucket.label, self.sum_itemsize * (local if shards_gradients else whole) + beside)

    def local_elements(self, bucket: Bucket, weight: Weight) -> int:
        """Elements of a weight in this rank's shard: the flat buffer of all weights is sharded evenly."""
        return -(-weight.numel // self.ranks_of(bucket))

    def fuses(self, bucket: Bucket) -> bool:
        return self.stack.fuses_gradient_accumulation and bucket is not self.root

    def adds_in_place(self, bucket: Bucket, weight: Weight) -> bool:
        return self.fuses(bucket)

    def add_gradient(self, bucket: Bucket, weight: Weight, gradient: Allocation) -> None:
        """Free `gradient`, which is added to the existing buffer."""
        self.ledger.release(gradient)


def stays_whole(stack: Stack, layout: Layout) -> bool:
    """True if this trainer keeps parameters and gradients unsharded throughout: `WholeState`."""
    return stack.gathers == "whole" and not (layout.zero_stage == 3 and layout.group("shard")[0] > 1)


def moment_bytes(weight: Weight, elements: int, optimizer: str, master_itemsize: int) -> int:
    """Bytes of our trainer's optimizer state for `elements` (whole rows) of a weight."""
    is_narrow = optimizer in WIDENED_BYTES
    if (is_narrow and len(weight.shape) == 1) or (optimizer == "muon" and not is_hidden_matrix(weight)):
        optimizer, is_narrow = "adamw", False
    if not is_narrow:  # as wide as the master weights
        return round(elements * OPTIMIZERS[optimizer] / 4) * master_itemsize
    if optimizer == "adamw-bf16":
        return 2 * elements * 2
    blocks = elements // weight.shape[-1] * -(-(weight.first_column % SCALED_TOGETHER + weight.shape[-1]) // SCALED_TOGETHER)
    return 2 * (elements + 4 * blocks)


@lru_cache(maxsize=4096)
def _chunk_elements(shape: tuple[int, ...], ranks: int, rank: int) -> int:
    rows = zero_shape(shape, ranks)[0]
    return chunk(rows, ranks, rank).length * (prod(shape) // rows)


@lru_cache(maxsize=4096)
def _padded_elements(shape: tuple[int, ...], ranks: int) -> int:
    rows = zero_shape(shape, ranks)[0]
    return -(-rows // ranks) * ranks * (prod(shape) // rows)


class ScaleTable(NamedTuple):
    """Scales of the fp8 weights of a rank that one group shards. Groups are (size, stride)."""

    shards: tuple[int, int]
    sharing: tuple[int, int]
    """Group of tp, or expert_tp, whose ranks hold parts of a weight that has one scale."""
    num_bytes: int
    shared_bytes: int
    """Bytes of the scales that the group `sharing` has in common."""


def scale_tables(model: Model, layout: Layout, weights: Iterable[Weight]) -> Iterator[ScaleTable]:
    """Scales of the fp8 weights of a rank, dense and experts apart. `weights`: those of the rank's stages, with their shapes
    before data parallelism shards them."""
    is_shared = weights_gathered_in_fp8(model, layout)
    gathered = [weight for weight in weights if weight.name in is_shared]
    of_experts = layout.group("expert_shard"), layout.group("expert_tp")
    for experts, groups in ((False, (layout.group("shard"), layout.group("tp"))), (True, of_experts)):
        sizes = {w.name: SLOT_BYTES * num_weight_scales(w.shape, layout) for w in gathered if w.is_expert is experts}
        if sizes:
            yield ScaleTable(*groups, sum(sizes.values()), sum(size for name, size in sizes.items() if is_shared[name]))


def scale_bytes(tables: Iterable[ScaleTable], layout: Layout) -> int:
    """Bytes kept between steps: scales, and with delayed scaling the largest magnitudes (amax) that they are computed from."""
    return (2 if is_delayed(layout) else 1) * sum(table.num_bytes for table in tables)


def scale_messages(tables: Iterable[ScaleTable], layout: Layout) -> Iterator[tuple[tuple[int, int], int]]:
    """All-reduces of scales in an update, as (group, bytes); none with delayed scaling."""
    for table in () if is_delayed(layout) else tables:
        yield table.shards, table.num_bytes
        yield table.sharing, table.shared_bytes
