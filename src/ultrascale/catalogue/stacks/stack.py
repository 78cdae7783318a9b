"""Stacks: the tensors that a framework keeps in memory, and the communication that it overlaps. The same layout has different
costs in different frameworks.

    state        bytes per parameter of each tensor and its dtype, and which of them ZeRO shards
    kernels      fused kernels, which determine the tensors that are saved for the backward pass
    overlap      collectives that overlap with computation

This file defines the settings; the values of each framework are in its file in `catalogue/stacks`, with their sources
(`catalogue.stacks.stack_files`). Every field is a setting: `ultrascale plan --stack megatron --stack.dispatcher deepep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ultrascale.description.attention_cores import FLASH_PACKAGES
from ultrascale.description.layout import AttentionCore
from ultrascale.description.problems import mistake

StageCut = Literal["even", "balanced", "by-share"]
Selective = Literal["modules", "elementwise", "attention", "alternate-products", "wide-products"]


@dataclass(frozen=True)
class Kernels:
    """Fused kernels on one device."""

    cross_entropy: Literal["chunked", "by-rows", "fused", "compiled", "unfused", "eager"] = "chunked"
    """chunked: the logits never exist as a whole, gradients are kept instead. by-rows: the same by chunks of rows alone, whose
    logits are computed once. fused: one kernel overwrites them with their gradient. compiled: logits are kept, and their
    gradient is allocated beside them. unfused: an fp32 copy becomes softmax, then gradient. eager: `F.cross_entropy` of an fp32
    copy, three of them at the peak."""
    swiglu: bool = True
    """The product of gate and up is computed by one kernel, which saves only its two inputs."""
    rotary: bool = True
    """RoPE saves nothing and keeps no second copy of queries and keys."""
    norm: bool = True
    """One kernel, which saves its input and one number per row (LayerNorm two); LayerNorm is one in torch, always."""
    attention: Literal["flash", "math"] = "flash"
    """math: the scores, S x S per head, exist and are saved with the probabilities."""
    dropout: bool = False
    """Dropout masks of one byte per element are saved after attention and MLP."""
    compiled: bool = False
    """A compiler fuses element-wise operations between GEMMs; what GEMMs read is saved as without it."""
    joins_projections: bool = False
    """One GEMM computes queries, keys and values, one computes gate and up."""
    value_is_view: bool = False
    """Values are a view of that GEMM's result, which is kept as a whole beside the queries and keys made from it. Read only if
    joins_projections."""
    gathers_again: bool = True
    """True if with sequence parallelism the input of a column-parallel GEMM is saved sharded, and all-gathered again for the
    weight's gradient (Megatron); else it is saved unsharded (DTensor)."""
    gathers_logits: bool = False
    """The loss reads the logits of the whole vocabulary in fp32 on every rank of tp, and they are kept; else each rank has its
    shard."""
    copies_attended: bool = False
    """The result of attention is copied into another order before its output projection, and both are kept."""
    spans: bool = False
    """True if in 16 bits on CUDA, without cp, the attention kernel is given document boundaries and the window size (this
    package)."""
    own_fp8: bool = False
    """True if in fp8 ranks of tp agree on the scales of sharded tensors, and operands are quantized by separate operations
    (this package)."""
    fp8_scaling: Literal["delayed", "tensor", "row"] = "delayed"
    """Scales of fp8 in other frameworks (in this package: `layout.fp8_scaling`). delayed: one per tensor, from earlier steps
    (Transformer Engine). tensor: from its own amax, for which it is read once more. row: one per row of each GEMM's operands
    (torchao's rowwise), so that a tensor is scaled and cast twice, by rows and by columns, and ranks of tp all-gather it before
    that, in 16 bits. In MXFP8 and NVFP4 row counts as tensor."""
    masks_in_kernel: bool = False
    """The attention kernel supports documents and windows itself; else they need a mask, and the full square is computed."""
    rounds_again: bool = False
    """In 8 bits or fewer the output projection keeps attention's result as the kernel computes it, and quantizes it again in
    the backward pass (Transformer Engine's save_original_input); else both forms are kept."""
    keeps_narrow_gates: bool = False
    """In 8 bits or fewer SwiGLU keeps its inputs quantized, and its result is recomputed from them (DeepSeek-V3)."""
    drops_unseen_keys: bool = True
    """A ring of keys and values forwards only what later ranks attend to (this package); else all of it, all the way round."""
    repeats_keys: bool = False
    """Keys and values are repeated to the number of query heads before attention, and are sent over cp in that form."""
    widens_key_gradients: bool = True
    """Gradients of keys and values are fp32 between ranks of cp, which all accumulate into them; else as wide as
    activations."""
    sorts_own_rows: bool = True
    """Rows of tokens are always sorted by expert before the GEMMs, and sorted back after them, even if none came from another
    rank; else (this package) only if some did."""
    fuses_permutation: bool = False
    """Few kernels permute tokens into the order of their experts (Megatron's --moe-permute-fusion, DeepEP's)."""
    weighs_before_combining: bool = False
    """Outputs of experts are weighted by their scores on the expert's rank: the returned rows are summed, and not saved."""
    widens_before_weighing: bool = False
    """Returned rows are cast to fp32 by an operation of its own before they are weighted, and the copy is saved; else the rows
    as they came."""


@dataclass(frozen=True)
class Overheads:
    """Time of a program beyond the modelled operations, fitted to its published runs."""

    op_seconds: float = 1e-5
    """Host time of one operation in seconds, in Python and the dispatcher; a device that is faster waits."""
    expert_op_seconds: float = 0.0
    """Least seconds per operation in models with experts: permutations are many kernels, and the host waits for the number of
    tokens of each expert."""
    fused_permutation: float = 1.0
    """Fraction of those seconds that remains with `kernels.fuses_permutation`."""
    collective_seconds: float = 3e-5
    """Host seconds per collective inside a block."""
    hops_per_rank: float = 0.0
    """Host time of a tp collective if a pipeline spans nodes, in network hops per rank of tp, in place of `collective_seconds`;
    the device computes meanwhile."""
    hop_growth: float = 0.0
    """Growth of such a hop: longer by this fraction of itself, times tp squared."""
    stall_seconds: float = 0.0
    """Seconds of a stall on `stall_nodes` nodes or more: in a pipeline, per micro-batch and neighbour of the rank; without one,
    twice per step."""
    stall_nodes: int = 0
    products: float = 1.0
    """Time of GEMMs and attention relative to Megatron's: the cost of clocks, streams and copies between them."""
    attention: float = 1.0
    """Time of attention relative to the kernel in `attention_kernel`: older versions, biases, copies around it."""
    elementwise: float = 1.0
    """Time of element-wise operations relative to that of their bytes: operations not fused as `kernels` says, or strided
    reads."""
    expert_elementwise: float = 1.0
    """Further factor in models with experts: for a dispatch made of single operations."""


@dataclass(frozen=True)
class Stack:
    """One training framework."""

    name: str
    weight_bytes: int = 0
    """Bytes per element of the weights that passes read, if they are kept between steps beside the master weights; 0: cast from
    the master weights when needed."""
    gradient_bytes: int = 4
    """Bytes per element of the gradient in which micro-batches are accumulated."""
    autograd_gradient_bytes: int = 0
    """Bytes per element of a second gradient that autograd keeps for the whole model beside it, unless ZeRO shards gradients;
    0: none."""
    master_bytes: int = 4
    moment_bytes: float = 8
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    shards_gradients_from: int = 2
    """Lowest ZeRO stage that shards gradients between micro-batches; 4: they stay unsharded until the last."""
    gathers: Literal["buckets", "whole"] = "buckets"
    """buckets: parameters are all-gathered from shards bucket by bucket (FSDP); whole: they stay unsharded, all-gathered after
    updates."""
    kernels: Kernels = Kernels()
    reduce_bytes: int = 4
    """Bytes per element of gradients on the network."""
    optimizer_temporary_bytes: int = 0
    """Bytes of temporaries per updated parameter in the optimizer: 4 for a multi-tensor Adam that is not one kernel."""
    updated_together: int = 0
    """Most parameters that have such temporaries at once with ZeRO 3; 0: all that the rank updates."""
    fuses_gradient_accumulation: bool = False
    """GEMMs accumulate into the summed gradient directly: no gradient of a single micro-batch exists but, briefly, those of
    embedding and head. Read only if gathers = "whole"."""
    keeps_dummy_gradients: bool = False
    """An unused gradient is kept for every distinct shape of a linear layer (Transformer Engine from 2.3 on)."""
    stage_cut: StageCut = "even"
    """Distribution of blocks over pipeline stages. even: the same number in each. balanced: such that the slowest stage is as
    fast as possible, the head counted (`plan.time.stage_cut`). by-share: blocks and head in order, split where a stage's share
    of the FLOPs is used up."""
    overlaps_data_parallel: bool = True
    """All-gathers and reductions of data parallelism overlap with computation."""
    shards_lone_experts: bool = True
    """FSDP also wraps experts that no other rank replicates, and copies them when they are all-gathered."""
    keeps_reduced: bool = True
    """A gradient is accumulated over micro-batches in the dtype of its reduction, and the buffer of its sum over replicas is
    kept until the end of the backward pass (FSDP2); else it is cast as soon as it is reduced (FSDP1). Read only if gathers =
    "buckets"."""
    sums_whole_gradients: bool = False
    """True if with ZeRO 1 gradients are all-reduced, not reduce-scattered, after the last backward pass and without overlap;
    all-gathered parameters are copied to their places piece by piece (`plan.time.data_traffic`). Read only if gathers =
    "whole"."""
    overlaps_tensor_parallel: bool = False
    sends_beside_gradients: bool = False
    """True if tp communication in the backward pass of a column-parallel GEMM overlaps with its own two GEMMs
    (`plan.time.blocks.PartSeconds.tp_beside`), also where nothing else is overlapped."""
    overlaps_expert_parallel: bool = False
    """A forward pass runs beside the backward pass of another micro-batch, and each computes during the other's expert
    all-to-all (Megatron's overlap_moe_expert_parallel_comm: without a pipeline, or with several stages per rank)."""
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """Dispatcher of tokens to experts. alltoall: one copy per expert of a token. deepep (nodes), hybridep (racks): a token is
    sent once to each node with some of its experts, and distributed there; within a node, once to each rank."""
    sends_tokens_in_fp8: bool = False
    """True if in fp8 tokens are sent to their experts in fp8; results return in bf16. Read only if dispatcher is not
    alltoall."""
    token_nodes: int = 0
    """Number of nodes with a token's experts, if a benchmark's gate fixes it; 0: as for uniform random routing."""
    cuda_graphs: bool = False
    """A step is launched as one CUDA graph: no operation waits for its launch."""
    overlaps_sends: bool = True
    selective: Selective = "elementwise"
    """Recomputation of recompute = "selective": modules that save most bytes per second (this package, `work.recompute`); all
    but GEMMs and attention; core attention (Megatron); every second GEMM and element-wise operations (torchtitan's per-op
    policy); or all but attention's GEMMs (MaxText's save_dot_except_mlpwi: the result of the MLP's second GEMM is in its list
    too, but no gradient reads it)."""
    offloads_parameters: bool = True
    """True if with the optimizer on the host no parameter stays on the device between steps; else the all-gathered ones do.
    Read only if gathers = "buckets"."""
    overlaps_offloaded_update: bool = False
    """An optimizer on the host updates a block while gradients of the next are copied to the host and parameters of the last to
    the device."""
    stops_early: bool = False
    """Recomputation of a block stops once everything that its backward pass reads is available: before a last GEMM of which
    only the input is saved (torch.utils.checkpoint with use_reentrant=False)."""
    attention_kernel: Literal["flash", "cudnn", "flash-2", "contest"] = "flash-2"
    """Fused attention kernel, if several can run: `plan.laws.compute.attention_seconds`. On Ampere they are the same. contest:
    the fastest that supports the run (`plan.time.attention_choice`)."""
    overheads: Overheads = Overheads()
    bucket_bytes: int = 0
    """Bytes of one gradient reduction; 0: one block at a time, or as in `bucket_parameters`."""
    bucket_parameters: int = 0
    """Parameters whose gradients are reduced together, if reductions overlap with computation; else all of a rank's are."""
    bucket_parameters_per_rank: int = 0
    """Least parameters of a bucket per reducing rank, so that rings stay bandwidth-bound."""
    pads_vocab_to: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    keeps_outputs: bool = False
    """True if in a pipeline the last stage keeps the logits of all micro-batches to the end of a step, for its caller (torch's
    runtime, unless given `return_outputs=False`, as in this package)."""
    joins_segments: bool = True
    """Freed memory of torch's allocator is one range, in whatever pieces it was allocated: expandable segments, which
    torchtitan's launcher enables. Else an allocation larger than any free segment takes a new one. Read only if gathers =
    "buckets": where gradients are allocated at the start, no large allocation comes late."""

    @property
    def reduces_from(self) -> int:
        """Lowest ZeRO stage that reduces gradients after every micro-batch if parameters are all-gathered in buckets."""
        return max(2, self.shards_gradients_from)


UPDATED_TOGETHER = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements whose narrow moments this package widens at once: few enough for the cache, or enough for few launches."""
WIDENED_BYTES = {"adamw-bf16": 44, "adamw-8bit": 65}
"""Bytes per widened element, in addition to its own moments: widened moments, random numbers, their hashes. Measured
(tests/agree)."""
SCALED_TOGETHER = 256
"""Elements of 8-bit moments that share one scale, in fp32 (torchao, bitsandbytes)."""
OPTIMIZERS = {
    "adamw": 8.0,  # two moments in fp32
    "adamw-bf16": 4.0,  # two moments in bf16
    "adamw-8bit": 2.0 + 2 * 4 / SCALED_TOGETHER,  # two of one byte, one scale per 256 (Dettmers et al. 2022; torchao)
    "muon": 4.0,  # one momentum in fp32 (Jordan et al. 2024) for matrices; embedding and head have two moments, counted there
}
"""Bytes of optimizer state per parameter, in addition to the master weight."""


ORTHOGONALISED_BYTES = 7
"""Approximate bytes per element of a matrix in this package while a rank has all of them together: input and result, in bf16,
and message buffers. `plan.memory.muon_update` has the exact number."""


KERNEL_OF_CORE: dict[AttentionCore, Literal["flash", "cudnn", "flash-2"]] = {
    "flex": "flash-2", "flash-2": "flash-2", "cudnn": "cudnn", "flash-3": "flash", "flash-4": "flash",
}  # fmt: skip
"""Kernel behind the name of an attention core; the others leave it open: `auto` and `fastest` to a contest, `sdpa`, and
`varlen` without masks, to torch, which on Hopper uses cuDNN's where it can (2.11), elsewhere flash attention 2."""
FLEX_OVER_FLASH = 1.16
"""Time of FlexAttention relative to flash attention 2: 0.9 of its rate forward, 0.85 backward, which is 2.5 times the work (He
et al., "FlexAttention", PyTorch 2024)."""


def program_overheads(stack: Stack, num_experts: int) -> Overheads:
    """Overheads that the framework adds for a model with this many experts."""
    overheads = stack.overheads
    if num_experts:
        fuses = stack.kernels.fuses_permutation
        left, share = (overheads.fused_permutation, 1.0) if fuses else (1.0, overheads.expert_elementwise)
        seconds = max(overheads.op_seconds, left * overheads.expert_op_seconds)
        overheads = replace(overheads, op_seconds=seconds, elementwise=overheads.elementwise * share)
    return replace(overheads, op_seconds=0.0) if stack.cuda_graphs else overheads


def with_attention(stack: Stack, core: AttentionCore, *, deterministic: bool = False) -> Stack:
    """The stack with `layout.attention`, if it is this package's: others have their own. `deterministic`: without cuDNN's
    kernel."""
    if stack.name != "ultrascale":
        return stack
    kernels = replace(stack.kernels, spans=core != "sdpa", masks_in_kernel=core in ("varlen", "flex", *FLASH_PACKAGES))
    open_to = "flash-2" if deterministic else "contest"
    over = FLEX_OVER_FLASH if core == "flex" else 1.0
    return replace(
        stack, kernels=kernels, attention_kernel=KERNEL_OF_CORE.get(core, open_to),
        overheads=replace(stack.overheads, attention=over),
    )  # fmt: skip


def with_optimizer(stack: Stack, name: str) -> Stack:
    """The stack with another optimizer. Raises SpecError if it does not exist."""
    if name not in OPTIMIZERS:
        rule = f"there is no optimizer called {name!r}"
        raise mistake("optimizer", rule, f"Choose one of {', '.join(OPTIMIZERS)}.")
    is_our_muon = stack.name == "ultrascale" and name == "muon"
    temporary = ORTHOGONALISED_BYTES if is_our_muon else stack.optimizer_temporary_bytes
    return replace(stack, optimizer=name, moment_bytes=OPTIMIZERS[name], optimizer_temporary_bytes=temporary)
