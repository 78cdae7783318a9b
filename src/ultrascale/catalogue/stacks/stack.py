"""Stacks: the tensors that a framework keeps in memory, and the communication it overlaps. One layout costs differently in
different frameworks.

    state        bytes per parameter, by who keeps what in which dtype, and what its ZeRO cuts
    kernels      what is fused, which decides what is saved for the backward pass
    overlap      which collectives run beside computation

This says what there is to say; what each trainer does is said by its file in `catalogue/stacks`, with where it was read
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
    """Kernels that are fused on one device."""

    cross_entropy: Literal["chunked", "fused", "compiled", "unfused", "eager"] = "chunked"
    """chunked: logits never exist whole, gradients are kept instead. fused: one kernel leaves the gradient in their place.
    compiled: logits are kept, their gradient is made beside them. unfused: an fp32 copy becomes softmax, then gradient. eager:
    `F.cross_entropy` of an fp32 copy, three of them at the peak."""
    swiglu: bool = True
    """The product is made by one kernel which saves only its two inputs."""
    rotary: bool = True
    """Turning queries and keys saves nothing and keeps no second copy."""
    norm: bool = True
    """One kernel which saves its input and a number per row."""
    attention: Literal["flash", "math"] = "flash"
    """math: scores exist, S x S per head, and are saved with their probabilities."""
    dropout: bool = False
    """Masks of one byte per element are saved after attention and MLP."""
    compiled: bool = False
    """A compiler fuses element-wise work between products and recomputes what is cheap: results of norms and activation
    functions are not saved."""
    joins_projections: bool = False
    """One product makes queries, keys and values, one makes gate and up."""
    value_is_view: bool = False
    """Values stay in that product's result, which is kept whole beside the queries and keys made from it. Read only if
    joins_projections."""
    gathers_again: bool = True
    """True if with sequence parallelism the input of a column-parallel GEMM is saved sharded, and all-gathered again for the
    weight's gradient (Megatron); else it is saved unsharded (DTensor)."""
    gathers_logits: bool = False
    """The loss sees the whole vocabulary in fp32 on every rank of tp, and it is kept; else each rank sees its part."""
    copies_attended: bool = False
    """Attention's result is copied into another order before its output projection, and both are kept."""
    spans: bool = False
    """True if in 16 bits on CUDA, without cp, the attention kernel is given document ends and the window's width (ours)."""
    own_fp8: bool = False
    """True if in fp8 ranks of tp agree on the scales of sharded tensors, and factors are rounded in operations of their own
    (ours)."""
    fp8_scaling: Literal["delayed", "tensor", "row"] = "delayed"
    """Scales of fp8 in other trainers (ours: `layout.fp8_scaling`). delayed: one for a tensor, of steps before (Transformer
    Engine). tensor: its own largest magnitude, for which it is read once more. row: one for each row of each product's factors
    (torchao's rowwise), so that a tensor is scaled and cast twice, by its rows and by its columns, and ranks of tp gather it
    before that, in 16 bits. In MXFP8 and NVFP4 row counts as tensor."""
    masks_in_kernel: bool = False
    """The attention kernel knows documents and windows by itself; else they take a mask, and the full square is computed."""
    rounds_again: bool = False
    """In 8 bits and fewer the output projection keeps attention's result as the kernel does, and rounds it once more backward
    (Transformer Engine's save_original_input); else both forms are kept."""
    keeps_narrow_gates: bool = False
    """In 8 bits and fewer SwiGLU keeps its inputs rounded, and its result is made again from them (DeepSeek-V3)."""
    drops_unseen_keys: bool = True
    """A ring of keys and values sends on only what a rank further on will look at (ours); else all of it, all the way round."""
    repeats_keys: bool = False
    """Keys and values are repeated to as many heads as queries have before attention, and so travel over cp."""
    widens_key_gradients: bool = True
    """Gradients of keys and values are fp32 between ranks of cp, which all add to them; else as wide as activations."""
    sorts_own_rows: bool = True
    """Rows of tokens are sorted by expert once more before the products, and back behind them, also where none came from
    another rank; else (ours) only where some did."""
    fuses_permutation: bool = False
    """Tokens are put into the order of their experts by few kernels (Megatron's --moe-permute-fusion, DeepEP's)."""
    weighs_before_combining: bool = False
    """Experts' outputs are weighed by their scores on the rank of the expert: what comes back is summed, and not saved."""


@dataclass(frozen=True)
class Overheads:
    """Time that belongs to a program and not to the mathematics, found in its published runs."""

    op_seconds: float = 1e-5
    """Python and the dispatcher need this long to launch one operation of the table; a device that is faster waits."""
    expert_op_seconds: float = 0.0
    """Least seconds per operation in models with experts: permutations are many kernels, and the host waits for how many tokens
    each expert got."""
    fused_permutation: float = 1.0
    """Fraction of those seconds that is left where `kernels.fuses_permutation`."""
    collective_seconds: float = 3e-5
    """Seconds of the host per collective inside a block."""
    hops_per_rank: float = 0.0
    """Network hops per rank of tp that a collective of tp takes the host where a pipeline spans nodes, instead of
    `collective_seconds`; the device computes meanwhile."""
    hop_growth: float = 0.0
    """Growth of such a hop: it is longer by this fraction of itself, times tp squared."""
    stall_seconds: float = 0.0
    """A stop on `stall_nodes` nodes or more: of every micro-batch for each neighbour that a rank has in the pipeline, of every
    step twice without a pipeline."""
    stall_nodes: int = 0
    products: float = 1.0
    """Time of products and attention over that of the same in Megatron: what clocks, streams and copies between them cost."""
    attention: float = 1.0
    """Time of attention over that of the kernel named by `attention_kernel`: older versions, biases, copies around it."""
    elementwise: float = 1.0
    """Time of element-wise work over that of its bytes: what is not fused as `kernels` says, or reads with strides."""
    expert_elementwise: float = 1.0
    """Further factor in models with experts: for a dispatch that is made of single operations."""


@dataclass(frozen=True)
class Stack:
    """One trainer."""

    name: str
    weight_bytes: int = 0
    """Bytes per element of the weights that passes read, where they stay between steps beside the master weights; 0: cast from
    the master weights when needed."""
    gradient_bytes: int = 4
    """Bytes per element of the gradient in which micro-batches are accumulated."""
    autograd_gradient_bytes: int = 0
    """Bytes per element of a second gradient that autograd keeps for the whole model beside it; 0: none."""
    master_bytes: int = 4
    moment_bytes: float = 8
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    shards_gradients_from: int = 2
    """Lowest ZeRO stage that cuts gradients between micro-batches; 4: they stay whole until the last."""
    gathers: Literal["buckets", "whole"] = "buckets"
    """buckets: parameters are gathered from shards bucket by bucket (FSDP); whole: they are there, gathered after updates."""
    kernels: Kernels = Kernels()
    reduce_bytes: int = 4
    """Bytes per element of gradients on the network."""
    optimizer_temporary_bytes: int = 0
    """Per parameter it updates, what the optimizer makes and drops: 4 for a multi-tensor Adam that is not one kernel."""
    fuses_gradient_accumulation: bool = False
    """Products add to the summed gradient themselves: no gradient of a micro-batch exists but those of embedding and head, for
    a moment. Read only if gathers = "whole"."""
    keeps_dummy_gradients: bool = False
    """A gradient that nobody reads stays for every distinct shape of a linear layer (Transformer Engine from 2.3 on)."""
    stage_cut: StageCut = "even"
    """Blocks of the stages of a pipeline. even: as many in each. balanced: so that the slowest is as fast as can be, the head
    counted (`plan.time.stage_cut`). by-share: blocks and head in a row, cut where a stage's share of the FLOPs is used up."""
    overlaps_data_parallel: bool = True
    """Gathers and reductions of data parallelism run beside computation."""
    shards_lone_experts: bool = True
    """FSDP wraps experts that no other rank has a copy of too, which copies them when they are gathered."""
    keeps_reduced: bool = True
    """A gradient is summed over micro-batches in the dtype of its reduction, and the buffer of its sum over copies stays to the
    end of the backward pass (FSDP2); else it is cast as soon as it is reduced (FSDP1). Read only if gathers = "buckets"."""
    sums_whole_gradients: bool = False
    """True if with ZeRO 1 gradients are all-reduced, not reduce-scattered, after the last backward pass and without overlap;
    all-gathered parameters are copied to their places piece by piece (`plan.time.data_traffic`). Read only if gathers =
    "whole"."""
    overlaps_tensor_parallel: bool = False
    sends_beside_gradients: bool = False
    """True if tp communication in the backward pass of a column-parallel GEMM overlaps with its own two GEMMs
    (`plan.time.blocks.PartSeconds.tp_beside`), also where nothing else is overlapped."""
    overlaps_expert_parallel: bool = False
    """A forward pass runs beside the backward pass of another micro-batch, and each computes while the other's tokens travel to
    experts and back (Megatron's overlap_moe_expert_parallel_comm, for pipelines of several stages a rank)."""
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """Dispatcher of tokens to experts. alltoall: one copy for each of a token's experts. deepep (nodes), hybridep (racks): a
    token goes once to each node that has some of its experts, and spreads inside; in a node once to each rank."""
    sends_tokens_in_fp8: bool = False
    """True if in fp8 tokens travel to their experts in fp8; results return in bf16. Read only if dispatcher is not alltoall."""
    token_nodes: int = 0
    """Nodes that a token's experts lie on, where a benchmark's gate decides it; 0: as uniform draws find them."""
    cuda_graphs: bool = False
    """A step is launched as one graph: no operation waits for its launch."""
    overlaps_sends: bool = True
    selective: Selective = "elementwise"
    """Recomputation of recompute = "selective": modules that save most per second (ours, `work.recompute`); all but GEMMs and
    attention; attention's core (Megatron); every second GEMM and what is element-wise (torchtitan's per-op policy); or all but
    attention's GEMMs (MaxText's save_dot_except_mlpwi: the result of the MLP's second GEMM is in its list too, but no gradient
    reads it)."""
    offloads_parameters: bool = True
    """True if with the optimizer on the host no parameter stays on the device between steps; else the all-gathered ones do.
    Read only if gathers = "buckets"."""
    overlaps_offloaded_update: bool = False
    """An optimizer on the host updates a block while gradients of the next come down and parameters of the last go up."""
    stops_early: bool = False
    """A block that is run again is left once all is there that its backward pass reads: before a last product that only keeps
    its input (torch.utils.checkpoint without re-entrance)."""
    attention_kernel: Literal["flash", "cudnn", "flash-2", "contest"] = "flash-2"
    """Fused attention kernel where several can run: `plan.laws.compute.attention_seconds`. On Ampere they are one. contest: the
    fastest that supports the run (`plan.time.attention_choice`)."""
    overheads: Overheads = Overheads()
    bucket_bytes: int = 0
    """Bytes of one gradient reduction; 0: a block at a time, or as `bucket_parameters` says."""
    bucket_parameters: int = 0
    """Parameters whose gradients are reduced together, where reductions run beside computation; else all of a rank's are."""
    bucket_parameters_per_rank: int = 0
    """Least parameters of a bucket per rank that reduces, so that rings stay bound by bandwidth."""
    pads_vocab_to: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    keeps_outputs: bool = False
    """True if in a pipeline the last stage keeps the logits of all micro-batches to the end of a step, for its caller (torch's
    runtime, unless given `return_outputs=False`, as ours is)."""
    joins_segments: bool = True
    """Freed memory of torch's allocator is one range, whatever was asked of CUDA first: expandable segments, which torchtitan's
    launcher sets. Else what is larger than any free segment is taken anew. Read only if gathers = "buckets": where gradients
    have their place from the start, nothing large is made late."""

    @property
    def reduces_from(self) -> int:
        """Lowest ZeRO stage that reduces gradients after every micro-batch where parameters are gathered in buckets."""
        return max(2, self.shards_gradients_from)


UPDATED_TOGETHER = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements whose narrow moments we widen at once: in cache, or enough for few launches."""
WIDENED_BYTES = {"adamw-bf16": 44, "adamw-8bit": 65}
"""Bytes per widened element, beside its own moments: moments widened, random numbers, their hashes. Measured
(tests/agree)."""
SCALED_TOGETHER = 256
"""Moments in 8 bits that have one scale, in fp32 (torchao, bitsandbytes)."""
OPTIMIZERS = {
    "adamw": 8.0,  # two moments in fp32
    "adamw-bf16": 4.0,  # two moments in bf16
    "adamw-8bit": 2.0 + 2 * 4 / SCALED_TOGETHER,  # of one byte, a scale for each 256 (Dettmers et al. 2022; torchao)
    "muon": 4.0,  # one momentum in fp32 (Jordan et al. 2024) of matrices; embedding and head have two, counted where they are
}
"""Bytes of optimizer state per parameter beside the master weight."""


ORTHOGONALISED_BYTES = 7
"""Bytes per element of a matrix while ours has all of them together, about: input and result, in bf16, and the buffers of
messages. `plan.memory.muon_update` has it to the byte."""


KERNEL_OF_CORE: dict[AttentionCore, Literal["flash", "cudnn", "flash-2"]] = {
    "flex": "flash-2", "flash-2": "flash-2", "cudnn": "cudnn", "flash-3": "flash", "flash-4": "flash",
}  # fmt: skip
"""Kernel that runs under the name of a core; the others leave it open: `auto` and `fastest` to a contest, `sdpa`, and `varlen`
where nothing is masked, to torch, which on Hopper takes cuDNN's where that can (2.11), elsewhere flash attention 2."""
FLEX_OVER_FLASH = 1.16
"""Time of FlexAttention over that of flash attention 2: 0.9 of its rate forward, 0.85 backward, which is 2.5 times the work
(He et al., "FlexAttention", PyTorch 2024)."""


def program_overheads(stack: Stack, num_experts: int) -> Overheads:
    """Overheads that the framework adds to a model with so many experts."""
    overheads = stack.overheads
    if num_experts:
        fuses = stack.kernels.fuses_permutation
        left, share = (overheads.fused_permutation, 1.0) if fuses else (1.0, overheads.expert_elementwise)
        seconds = max(overheads.op_seconds, left * overheads.expert_op_seconds)
        overheads = replace(overheads, op_seconds=seconds, elementwise=overheads.elementwise * share)
    return replace(overheads, op_seconds=0.0) if stack.cuda_graphs else overheads


def with_attention(stack: Stack, core: AttentionCore, *, deterministic: bool = False) -> Stack:
    """The stack with `layout.attention`, if it is ours: others have their own. `deterministic`: without cuDNN's."""
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
    """The stack with another optimizer. Raises SpecError if there is no such one."""
    if name not in OPTIMIZERS:
        rule = f"there is no optimizer called {name!r}"
        raise mistake("optimizer", rule, f"Choose one of {', '.join(OPTIMIZERS)}.")
    is_our_muon = stack.name == "ultrascale" and name == "muon"
    temporary = ORTHOGONALISED_BYTES if is_our_muon else stack.optimizer_temporary_bytes
    return replace(stack, optimizer=name, moment_bytes=OPTIMIZERS[name], optimizer_temporary_bytes=temporary)
