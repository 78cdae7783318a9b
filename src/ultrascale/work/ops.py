"""Operation type of the decoder's work: the terms in which `work.work` describes the model.

reads, makes    named activations; views are left out, since they share memory
saves           activations that autograd saves; two operations that save the same one save it once
scratch         bytes that exist only while the operation runs; they matter at the memory peak
flops           one multiply-add is two. Attention counts the full square of scores, as FlopCounterMode does
product, scores shapes for the cost model (`plan.laws.compute`); `scores.share` is the fraction of the square computed
moved_bytes     bytes that any other operation reads from and writes to memory
collectives     communication with the other ranks of an axis
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ultrascale.catalogue.stacks.stack import Kernels
from ultrascale.catalogue.stacks.stack_files import STACKS
from ultrascale.description.layout import DTYPE_BYTES, CpMethod, Fp8Scaling, Precision, cp_grid
from ultrascale.work.sharding.places import Coordinates, even_part

OpKind = Literal["matmul", "attention", "norm", "elementwise", "embedding", "loss", "gather", "exchange", "router", "permute"]
When = Literal["forward", "backward"]
Axis = Literal["tp", "cp", "ep", "expert_tp"]
Hideable = Literal["", "product", "attention"]


class Product(NamedTuple):
    """A number (`count`) of GEMMs [m, k] x [k, n] in the forward pass; the backward pass has the two transposed ones for
    each."""

    m: int
    n: int
    k: int
    count: int = 1


HEAD_DIM_MULTIPLE = 8
"""Elements in 16 bytes of bf16: the smallest load of CUDA's attention kernels."""


class Scores(NamedTuple):
    """One fused attention call on one rank; field names are the arguments of `plan.laws.compute.attention_seconds`."""

    batch: int
    heads: int
    key_value_heads: int
    head_dim: int
    value_head_dim: int
    queries: int
    keys: int
    share: float
    """Fraction of queries x keys that is computed: about a half if causal, 1 under an explicit mask."""

    def kernel_width(self, device: str) -> int:
        """Head dimension in the kernels of a ring: the wider of queries and values, padded on CUDA."""
        width = max(self.head_dim, self.value_head_dim)
        return width if device == "cpu" else -(-width // HEAD_DIM_MULTIPLE) * HEAD_DIM_MULTIPLE


class Collective(NamedTuple):
    """A rank's communication over one axis in one pass."""

    kind: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    axis: Axis
    num_bytes: int
    """Bytes of the whole gathered or reduced buffer; for all_to_all, the bytes that one rank holds, including its own part."""
    when: When
    hideable: Hideable = ""
    """Computation that it can overlap with: attention for a ring of keys and values, GEMMs for Megatron's tp communication."""
    sent_share: float = 1.0
    """Bytes that a rank sends, as a mean over ranks, relative to sending the whole buffer. The rank that waits longest receives
    all of it, so the time is that of the whole buffer."""
    window: int | None = None
    """Sliding window of attention, if it is shorter than the sequence: keys that no query can see are not sent."""
    num_messages: int = 1
    """Number of messages to each other rank; 0: it is part of another message."""
    leaving_bytes: int | None = None
    """Bytes that leave the rank in an all_to_all over cp with uneven parts; None: all but one even part."""


class Activation(NamedTuple):
    """A tensor that an operation produces."""

    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of the forward pass, with its backward pass."""

    name: str
    kind: OpKind
    reads: tuple[str, ...]
    makes: tuple[Activation, ...]
    """The result first; then further tensors saved for itself (mean, logsumexp)."""
    saves: tuple[str, ...] = ()
    weights: tuple[str, ...] = ()
    """Weights whose gradients its backward pass computes."""
    flops: int = 0
    backward_flops: int = 0
    hands_on_saved: bool = False
    """True if it already saved the gradients of its input and weights: its backward pass scales them in place."""
    scratch_bytes: int = 0
    backward_scratch_bytes: int = 0
    product: Product | None = None
    forward_products: int = 1
    """Number of times the forward GEMM runs."""
    scores: Scores | None = None
    moved_bytes: int = 0
    backward_moved_bytes: int = 0
    collectives: tuple[Collective, ...] = ()
    pieces: int = 1
    inside: tuple[Op, ...] = ()
    """Operations inside it for each of `pieces`: in the forward pass, and again before their backward passes for all but the
    last."""
    keeps_alive: tuple[str, ...] = ()
    """Activations that local variables of our trainer keep alive while it runs, even if they are not saved."""
    in_fp8: bool = False
    """True for a GEMM that quantises its input to 8 bits or fewer, and saves that."""

    @property
    def passes_gradient(self) -> bool:
        """True if its input's gradient is its result's, in the same memory: a sum."""
        return len(self.reads) == 2 and self.kind == "elementwise" and not self.saves

    @property
    def saved_by_selective(self) -> bool:
        """True if selective recomputation saves its result: `parallel.activations.recompute.KEPT_OPS`, and communicated
        results.

        Not partial sums: the reduce-scattered sum is saved instead, and the two are one operation there. Nor results of cp's
        all-to-all, which is repeated.
        """
        swaps = any(collective.axis == "cp" for collective in self.collectives) and self.kind == "exchange"
        return self.kind in ("matmul", "attention", "exchange") and not self.makes_partial_sums and not swaps

    @property
    def recompute_kind(self) -> str:
        """Kind, one of `description.recomputed.KINDS`; empty: never recomputed separately."""
        if self.kind == "attention":
            return "attention"
        if self.name.startswith("mlp.experts."):
            return "experts" if "down" not in self.name else ""
        if self.kind not in ("matmul", "exchange") or self.makes_partial_sums or self.name == "mlp.router":
            return ""
        if self.name.startswith("self_attn."):
            return "output" if self.name.startswith("self_attn.o_proj") else "qkv"
        is_product = self.name.endswith("_proj") or self.name.endswith("_proj.scatter")
        return ("down" if "down_proj" in self.name else "mlp") if is_product else ""

    def is_saved(self, kinds: Collection[str]) -> bool:
        """True if selective recomputation that also recomputes `kinds` saves its result."""
        return self.saved_by_selective and self.recompute_kind not in kinds

    @property
    def makes_partial_sums(self) -> bool:
        """True if its result must still be summed over tp, and sharded."""
        return self.makes[0].name.endswith("_partial")


@dataclass(frozen=True)
class Shape:
    """One micro-batch on one rank."""

    micro_batch_size: int
    sequence_length: int
    """Length of the whole sequence, before `cp` shards it."""
    precision: Precision = "fp32"
    documents: bool = False
    """True for packed documents, with their own mask and positions."""
    device: Literal["cpu", "cuda"] = "cpu"
    tp: int = 1
    sequence_parallel: bool = True
    """Used only if tp > 1: norms, residuals and all else outside tensor-parallel regions is sharded along the sequence."""
    cp: int = 1
    cp_method: CpMethod = "ring"
    cp_heads: int = 1
    """Number of ranks at each place of the ring that swap sequence shards for heads, for cp_method = "ring+all-to-all"."""
    ep: int = 1
    expert_tp: int = 1
    mlp_chunks: int = 1
    """Number of pieces of the tokens that a dense feed-forward layer processes one after the other."""
    partition_checkpoints: bool = False
    """True if each tp rank saves a shard of the input of a recomputed block."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts, relative to the mean."""
    coordinates: Coordinates | None = None
    """Rank whose exact share it is, where ranks do not divide sequence, vocabulary or widths; None: a mean share of the
    sequence and the largest share of the others, for comparing layouts."""
    fp8_scaling: Fp8Scaling = "row"
    fp8_gathered: bool = False
    """True if fp8 GEMMs read weights already in fp8 (`work.fp8_slots.gathers_fp8`)."""
    kernels: Kernels = STACKS["ultrascale"].kernels

    @property
    def cp_grid(self) -> tuple[int, int]:
        """(places of the ring, ranks at each place that swap sequence shards for heads)."""
        return cp_grid(self.cp, self.cp_method, self.cp_heads)

    @property
    def masks_in_kernel(self) -> bool:
        """True if the attention kernel takes documents and windows, so that no mask exists."""
        by_spans = self.kernels.spans and self.device == "cuda" and self.itemsize == 2 and self.cp == 1
        return by_spans or (self.kernels.masks_in_kernel and not (self.kernels.spans and self.cp > 1))

    @property
    def rings(self) -> bool:
        """True if keys and values travel hop by hop, overlapped with attention."""
        return self.cp_grid[0] > 1 and self.cp_method != "all-gather"

    @property
    def swapped_length(self) -> int:
        """Tokens of each sequence at this rank's place of the ring, on which attention runs: those of all ranks that swap
        heads."""
        places, heads = self.cp_grid
        if self.coordinates is None:
            return self.sequence_length // self.cp * heads
        return even_part(self.sequence_length, places, self.coordinates.cp // heads)[1]

    @property
    def swapped_tokens(self) -> int:
        """Tokens of all sequences after the swap, for which this rank has some of the heads."""
        return self.num_tokens * self.cp_grid[1] if self.coordinates is None else self.micro_batch_size * self.swapped_length

    @property
    def local_length(self) -> int:
        """Tokens of a sequence on this rank, S/cp."""
        if self.coordinates is None:
            return self.sequence_length // self.cp
        heads = self.cp_grid[1]
        return even_part(self.swapped_length, heads, self.coordinates.cp % heads)[1]

    @property
    def num_tokens(self) -> int:
        """B*S/cp, N below: tokens of one rank inside tensor-parallel regions."""
        if self.coordinates is None:
            return self.micro_batch_size * self.sequence_length // self.cp
        return self.micro_batch_size * self.local_length

    @property
    def shards_sequence(self) -> bool:
        """True if sequence parallelism is on."""
        return self.tp > 1 and self.sequence_parallel

    @property
    def outer_length(self) -> int:
        """Tokens of a sequence, of `local_length`, that a rank has outside tensor-parallel regions."""
        return self.tp_part(self.local_length) if self.shards_sequence else self.local_length

    @property
    def outer_tokens(self) -> int:
        """Tokens of one rank outside tensor-parallel regions, M below: N/tp with sequence parallelism, else N."""
        if self.coordinates is None:
            return -(-self.num_tokens // self.tp) if self.shards_sequence else self.num_tokens
        return self.micro_batch_size * self.outer_length

    def tp_part(self, size: int) -> int:
        """This rank's part of `size`, sharded over tp as evenly as possible; the largest part if no rank is given."""
        return even_part(size, self.tp, 0 if self.coordinates is None else self.coordinates.tp)[1]

    def expert_tp_part(self, size: int) -> int:
        """This rank's part of `size` over expert_tp."""
        return even_part(size, self.expert_tp, 0 if self.coordinates is None else self.coordinates.expert_tp)[1]

    def local_experts(self, num_experts: int) -> range:
        """Experts of this ep rank; of the first if no rank is given."""
        first, count = even_part(num_experts, self.ep, 0 if self.coordinates is None else self.coordinates.ep)
        return range(first, first + count)

    @property
    def itemsize(self) -> int:
        """Bytes of one activation element."""
        return DTYPE_BYTES[self.precision]

    @property
    def wide_itemsize(self) -> int:
        """Bytes of an element in computations in fp32 or wider."""
        return max(4, self.itemsize)
