"""What a trainer keeps in memory and hides behind computation: the same layout costs differently in different programs.

    state        bytes per parameter, by who keeps what in which dtype, and what its ZeRO cuts
    kernels      what is fused, which decides what is saved for the backward pass
    overlap      which collectives run beside computation

This says what there is to say; what each trainer does is said by its file in `spec/stacks`, with where it was read
(`spec.stack_files`). Every field is a setting: `ultrascale plan --stack megatron --stack.dispatcher deepep`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from ultrascale.spec.attention_cores import PACKAGED
from ultrascale.spec.layout import AttentionCore
from ultrascale.spec.problems import Problem, SpecError

Selective = Literal["modules", "elementwise", "attention", "alternate-products", "wide-products"]


@dataclass(frozen=True)
class Kernels:
    """What is fused on one device."""

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
    """With sequence parallelism the input of a column-parallel product is kept cut, and gathered again for the gradient of the
    weight (Megatron); else it is kept whole (DTensor)."""
    gathers_logits: bool = False
    """The loss sees the whole vocabulary in fp32 on every rank of tp, and it is kept; else each rank sees its part."""
    copies_attended: bool = False
    """Attention's result is copied into another order before its output projection, and both are kept."""
    spans: bool = False
    """In 16 bits on CUDA, without cp, the attention kernel is told where documents end and how wide a window is (ours)."""
    own_fp8: bool = False
    """In fp8 ranks of tp agree on the scales of what they cut, and factors are rounded in operations of their own (ours)."""
    masks_in_kernel: bool = False
    """The attention kernel knows documents and windows by itself; else they take a mask, and the full square is computed."""
    drops_unseen_keys: bool = True
    """A ring of keys and values sends on only what a rank further on will look at (ours); else all of it, all the way round."""
    widens_key_gradients: bool = True
    """Gradients of keys and values are fp32 between ranks of cp, which all add to them; else as wide as activations."""
    sorts_own_rows: bool = True
    """Rows of tokens are sorted by expert once more before the products, and back behind them, also where none came from
    another rank; else (ours) only where some did."""
    weighs_before_combining: bool = False
    """Experts' outputs are weighed by their scores on the rank of the expert: what comes back is summed, and not saved."""


@dataclass(frozen=True)
class Overheads:
    """Time that belongs to a program and not to the mathematics, found in its published runs."""

    op_seconds: float = 1e-5
    """Python and the dispatcher need this long to launch one operation of the table; a device that is faster waits."""
    expert_op_seconds: float = 0.0
    """The same, at least, in models with experts: permutations are many kernels, and the host waits for how many tokens each
    expert got."""
    collective_seconds: float = 3e-5
    """The same for a collective inside a block."""
    hops_per_rank: float = 0.0
    """Where a pipeline spans nodes, a collective of tp takes the host so many hops of the network for every rank of tp, instead
    of `collective_seconds`; the device computes meanwhile."""
    hop_growth: float = 0.0
    """Of those hops, by how much of itself one is longer, times tp squared."""
    stall_seconds: float = 0.0
    """A stop on `stall_nodes` nodes or more: of every micro-batch for each neighbour that a rank has in the pipeline, of every
    step twice without a pipeline."""
    stall_nodes: int = 0
    products: float = 1.0
    """Time of products over that of the same products in Megatron: what clocks, streams and copies between them cost."""
    attention: float = 1.0
    """Time of attention over that of the kernel named by `attention_kernel`: older versions, biases, copies around it."""
    elementwise: float = 1.0
    """Time of element-wise work over that of its bytes: what is not fused as `kernels` says, or reads with strides."""
    expert_elementwise: float = 1.0
    """The same, on top, in models with experts: of a dispatch that is made of single operations."""


@dataclass(frozen=True)
class Stack:
    """One trainer."""

    name: str
    weight_bytes: int = 0
    """Of the copy that passes read, where it stays between steps beside the master; 0: made from the master when needed."""
    gradient_bytes: int = 4
    """Of the gradient that micro-batches are summed in."""
    autograd_gradient_bytes: int = 0
    """Of a second gradient that autograd keeps for the whole model beside it; 0: none."""
    master_bytes: int = 4
    moment_bytes: float = 8
    optimizer: str = "adamw"
    """One of `OPTIMIZERS`."""
    shards_gradients_from: int = 2
    """Lowest ZeRO stage that cuts gradients between micro-batches."""
    gathers: Literal["buckets", "whole"] = "buckets"
    """buckets: parameters are gathered from shards bucket by bucket (FSDP); whole: they are there, gathered after updates."""
    kernels: Kernels = Kernels()
    reduce_bytes: int = 4
    """Of one gradient element on the network."""
    optimizer_temporary_bytes: int = 0
    """Per parameter it updates, what the optimizer makes and drops: 4 for a multi-tensor Adam that is not one kernel."""
    fuses_gradient_accumulation: bool = False
    """Products add to the summed gradient themselves: no gradient of a micro-batch exists but those of embedding and head, for
    a moment. Read only if gathers = "whole"."""
    keeps_dummy_gradients: bool = False
    """A gradient that nobody reads stays for every distinct shape of a linear layer (Transformer Engine from 2.3 on)."""
    stage_cut: Literal["even", "balanced", "by-share"] = "even"
    """Blocks of the stages of a pipeline. even: as many in each. balanced: so that the slowest is as fast as can be, the head
    counted (`plan.time.stage_cut`). by-share: blocks and head in a row, cut where a stage's share of the FLOPs is used up."""
    overlaps_data_parallel: bool = True
    """Gathers and reductions of data parallelism run beside computation."""
    sums_whole_gradients: bool = False
    """With ZeRO 1 gradients are all-reduced, not reduce-scattered, after the last backward pass and beside nothing; gathered
    parameters are copied to their places piece by piece (`plan.time.data_traffic`). Read only if gathers = "whole"."""
    scales_at_once: bool = False
    """In fp8 a tensor's scale is its own largest magnitude: it is read once more before it is cast (torchao's dynamic scaling);
    else that of steps before (Transformer Engine's delayed scaling)."""
    overlaps_tensor_parallel: bool = False
    sends_beside_gradients: bool = False
    """What the backward pass of a column-parallel product sends over tp travels beside its own two products
    (`plan.time.blocks.PartSeconds.tp_beside`), also where nothing else is overlapped."""
    overlaps_expert_parallel: bool = False
    """A forward pass runs beside the backward pass of another micro-batch, and each computes while the other's tokens travel to
    experts and back (Megatron's overlap_moe_expert_parallel_comm, for pipelines of several stages a rank)."""
    dispatcher: Literal["alltoall", "deepep", "hybridep"] = "alltoall"
    """How tokens get to their experts. alltoall: one copy for each of a token's experts. deepep (nodes), hybridep (racks): a
    token goes once to each node that has some of its experts, and spreads inside; in a node once to each rank."""
    cuda_graphs: bool = False
    """A step is launched as one graph: no operation waits for its launch."""
    overlaps_sends: bool = True
    selective: Selective = "elementwise"
    """What recompute = "selective" computes again: the modules that save most a second (ours, `spec.kept`); all but products
    and attention; attention's core (Megatron); every second product and what is element-wise (torchtitan's per-op policy); or
    all but attention's products (MaxText's save_dot_except_mlpwi: the result of the MLP's second product is in its list too,
    but no gradient reads it)."""
    offloads_parameters: bool = True
    """With the optimizer on the host no parameter stays on the device between steps; else what is gathered does. Read only if
    gathers = "buckets"."""
    overlaps_offloaded_update: bool = False
    """An optimizer on the host updates a block while gradients of the next come down and parameters of the last go up."""
    stops_early: bool = False
    """A block that is run again is left once all is there that its backward pass reads: before a last product that only keeps
    its input (torch.utils.checkpoint without re-entrance)."""
    attention_kernel: Literal["flash", "cudnn", "flash-2", "contest"] = "flash-2"
    """Which fused attention runs where several can: `plan.laws.compute.attention_seconds`. On Ampere they are one. contest: the
    fastest that can do what a run wants (`plan.time.attention_choice`)."""
    overheads: Overheads = Overheads()
    bucket_bytes: int = 0
    """Of one gradient reduction; 0: a block at a time, or as `bucket_parameters` says."""
    bucket_parameters: int = 0
    """Parameters whose gradients are reduced together, where reductions run beside computation; else all of a rank's are."""
    bucket_parameters_per_rank: int = 0
    """As many at least for every rank that reduces, so that rings stay bound by bandwidth."""
    pads_vocab_to: int = 1
    """The vocabulary is padded to a multiple of this times tp."""
    keeps_outputs: bool = False
    """In a pipeline the last stage keeps the logits of all micro-batches to the end of a step, for its caller (torch's runtime,
    unless told `return_outputs=False`, which ours is)."""
    joins_segments: bool = True
    """Freed memory of torch's allocator is one range, whatever was asked of CUDA first: expandable segments, which torchtitan's
    launcher sets. Else what is larger than any free segment is taken anew. Read only if gathers = "buckets": where gradients
    have their place from the start, nothing large is made late."""


UPDATED_TOGETHER = {"cpu": 1 << 16, "cuda": 1 << 23}
"""Elements whose narrow moments we widen at once: in cache, or enough for few launches."""
WIDENED_BYTES = {"adamw-bf16": 44, "adamw-8bit": 65}
"""For each of them, beside their moments: moments widened, random numbers, their hashes. Measured (tests/agree)."""
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
"""Of a matrix's element, while ours has all of them together, about: what goes in and what comes out, in bf16, and the buffers
of messages. `plan.memory.muon_update` has it to the byte."""


KERNEL_OF_CORE: dict[AttentionCore, Literal["flash", "cudnn", "flash-2"]] = {
    "flex": "flash-2", "flash-2": "flash-2", "cudnn": "cudnn", "flash-3": "flash", "flash-4": "flash",
}  # fmt: skip
"""What runs under the name of a core; the others leave it open: `auto` and `fastest` to a contest, `sdpa`, and `varlen` where
nothing is masked, to torch, which on Hopper takes cuDNN's where that can (2.11), elsewhere flash attention 2."""
FLEX_OVER_FLASH = 1.16
"""Time of FlexAttention over that of flash attention 2: 0.9 of its rate forward, 0.85 backward, which is 2.5 times the work
(He et al., "FlexAttention", PyTorch 2024)."""


def program_overheads(stack: Stack, num_experts: int) -> Overheads:
    """What the program adds to a model with so many experts."""
    overheads = stack.overheads
    if num_experts:
        seconds, share = max(overheads.op_seconds, overheads.expert_op_seconds), overheads.expert_elementwise
        overheads = replace(overheads, op_seconds=seconds, elementwise=overheads.elementwise * share)
    return replace(overheads, op_seconds=0.0) if stack.cuda_graphs else overheads


def with_attention(stack: Stack, core: AttentionCore, *, deterministic: bool = False) -> Stack:
    """The stack with `layout.attention`, if it is ours: others have their own. `deterministic`: without cuDNN's."""
    if stack.name != "ultrascale":
        return stack
    kernels = replace(stack.kernels, spans=core != "sdpa", masks_in_kernel=core in ("varlen", "flex", *PACKAGED))
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
        raise SpecError([Problem("optimizer", rule, f"Choose one of {', '.join(OPTIMIZERS)}.")])
    ours = stack.name == "ultrascale" and name == "muon"
    temporary = ORTHOGONALISED_BYTES if ours else stack.optimizer_temporary_bytes
    return replace(stack, optimizer=name, moment_bytes=OPTIMIZERS[name], optimizer_temporary_bytes=temporary)
