"""The trainer of a measured run: which of the known stacks is closest to the framework it names, and how its row changes that.

The first word found decides. Where the match is a likeness and not the trainer itself, the prediction says so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from ultrascale.plan.constants import CONSTANTS, Constants
from ultrascale.plan.devices import NVFP4_OVER_FP8
from ultrascale.plan.measured_rows import Asked
from ultrascale.spec.stack import STACKS, Kernels, Overheads, Stack, with_optimizer


@dataclass(frozen=True)
class Vintage:
    """What programs of another kind or year than a stack's own add to its time."""

    nvfp4_over_fp8: float = NVFP4_OVER_FP8
    eager_op_seconds: float = 1.1e-4
    """`Overheads.op_seconds` of programs without fused kernels and CUDA graphs (Megatron's first years, nanotron): an operation
    of the table is several kernels, each launched by Python, autograd and the dispatcher."""
    expert_op_seconds: float = 2.1e-4
    """The same with experts: permutations are many kernels, and the host waits for how many tokens each expert got."""
    flash_1_over_2: float = 1.6
    """Time of flash attention's first version, and of its Triton twin, over the second's (Dao 2023, figures 4 to 6)."""
    stop_seconds: float = 0.5
    """`Overheads.stall_seconds` of the playbook's scan, which nothing explains and no other source shows."""
    scan_hops: float = 0.9
    """`Overheads.hops_per_rank` of the playbook's scan, the only source whose pipelines show it; 1 where it is left out."""
    scan_hop_growth: float = 7e-4
    """`Overheads.hop_growth` of the same: a block takes 25 ms at least at tp 8, 52 at 16, 138 at 32."""
    eager_over_bytes: float = 2.5
    """Time of element-wise work in eager PyTorch over that of the bytes in the operations' table: casts and copies between."""


VINTAGE = Vintage()


@dataclass(frozen=True)
class Tuning:
    """All numbers of the time model that come from whole runs, to try others than those in the code."""

    constants: Constants = CONSTANTS
    overheads: Mapping[str, Overheads] = field(default_factory=dict)
    """By name of the stack; those not named keep their own."""
    vintage: Vintage = VINTAGE


TUNING = Tuning()


@dataclass(frozen=True)
class _Likeness:
    """What a word in a framework's name means."""

    pattern: str
    stack: str
    is_exact: bool
    changes: dict


_NO_OVERLAP = {"overlaps_data_parallel": False, "overlaps_tensor_parallel": False}
_EAGER = {"norm": False, "rotary": False, "swiglu": False}
"""Norms, rotary positions and SwiGLU as torch's own operations, one kernel for each: neither compiled nor hand-written."""
STOPS_FROM_NODES = 64
"""Of the playbook's pipelines on so many, nine of ten stopped for about `Vintage.stop_seconds` for each neighbour of a rank in
every micro-batch; of those on 32 a half, on fewer one in five."""
_NARROW_GRADIENTS = {"gradient_bytes": 2, "reduce_bytes": 2}
"""NeMo's and Megatron-Bridge's performance recipes sum and reduce gradients in bf16 (grad_reduce_in_fp32 = False)."""
_NARROW_MOMENTS = r"megatron-bridge|hai-llm"
"""Programs that keep both moments in bf16 for models of the DeepSeek family: as its report says (arXiv 2412.19437, section
3.3.2), and as Megatron-Bridge's recipes for DeepSeek, Moonlight and Kimi do (exp_avg_dtype)."""
_PLAIN_MEGATRON = {"overlaps_tensor_parallel": False}
"""Megatron-LM overlaps TP only through Transformer Engine's user buffers, which NeMo's recipes switch on."""
_OVERLAPPED_TABLE = r"megatron-lm.*readme"
"""Megatron-LM's own table of scaling was made with --tp-comm-overlap, as the text beside it says, and with its pipelines' sends
overlapped, which Megatron does in its interleaved schedule only (arguments.py: overlap_p2p_comm is off without one)."""
_BASELINE = r"megascale|2402\.15627"
"""MegaScale's paper measures Megatron-LM before its traffic of data parallelism ran beside passes: of what it adds to this
baseline, step by step, "DP overlap" is one (its table 3)."""
_AUTOMODEL = r"automodel"
_LIKENESSES = (
    _Likeness(r"torchtitan", "torchtitan", True, {}),
    _Likeness(r"nanotron|picotron", "nanotron", True, {}),
    _Likeness(r"llm-foundry|composer|mosaic", "llm-foundry", True, {}),
    _Likeness(r"megatron-deepspeed|bigscience", "deepspeed", False, _NO_OVERLAP),
    _Likeness(r"vtrain", "megatron", False, _NO_OVERLAP),  # its paper: gradients are reduced after the backward pass
    # Its recipes of mixtures of experts: attn: te, dispatcher: deepep (examples/llm_pretrain, BackendConfig).
    _Likeness(_AUTOMODEL, "torchtitan", False, {"attention_kernel": "cudnn"}),
    _Likeness(r"nemo|megatron-bridge", "megatron", True, _NARROW_GRADIENTS),
    _Likeness(r"megatron|mcore", "megatron", True, _PLAIN_MEGATRON),
    _Likeness(r"deepspeed", "deepspeed", True, {}),
    # cudnn_flash_te; XLA has none of its own. Its fp8 has delayed scales (flax.linen.fp8_ops: amax_history).
    _Likeness(r"maxtext|paxml|jax|xla", "torchtitan", False, {"attention_kernel": "cudnn", "scales_at_once": False}),
    _Likeness(r"fms", "torchtitan", False, {"reduce_bytes": 2}),  # its policies: MixedPrecision(reduce_dtype=torch.bfloat16)
    _Likeness(r"fsdp|kempner|olmo|lingua|accelerate", "torchtitan", False, {}),
    _Likeness(r"nanogpt|nanochat|lit-?gpt", "torchtitan", False, {}),
    _Likeness(r"aleph|aa-scaling", "aleph-alpha", True, {}),
    _Likeness(r"neox|internevo|internlm|colossal", "megatron", False, _PLAIN_MEGATRON),
    _Likeness(r"hai-llm|megascale", "megatron", False, {}),
)  # fmt: skip
LIMITED_POWER = 0.75
"""Of a device's power, where it is said to be limited and not to what: an assumption, told with the prediction. Clocks follow
its third root, as for an H100 of 500 W (`constants.DEVICE_DERATES`)."""
SOME_FUSED = 1.0
"""Time of element-wise work where some of a source's runs fuse their norms, over that of its bytes when unfused."""
LAST_YEAR_WITHOUT_FLASH = 2022
"""Megatron-LM took flash attention, and overlapped gradient reduction, in 2023; blank cells of older rows mean neither."""


LAST_YEAR_OF_WHOLE_INPUTS = 2024
"""nanotron kept gathered inputs, and no second gradient, until then. In the playbook's scan of 2025 the runs without a pipeline
still kept them, by what memory they took (medians of 2 to 5 percent, against 16 to 28 if they had not)."""
FIRST_RELEASE_IN_GRAPHS = (26, 6)
"""Of NVIDIA's NeMo container, whose recipes of mixtures of experts in MXFP8 on Blackwell capture full iterations; measured
steps fell by a third. With that they overlap the experts' traffic in pipelines of several stages a rank, and on B300 and GB300
attend in fp8 (Megatron-Bridge's performance configurations: full_iteration, moe_a2a_overlap, fp8_dot_product_attention)."""
FIRST_RELEASE_SENDING_ONCE = (26, 2)
"""From here recipes dispatch with HybridEP on racks and DeepEP on nodes (moe_flex_dispatcher_backend); those of DeepSeek's
models did from the first."""
FP8_ATTENTION = 1 / 1.4
"""Time of attention in fp8 over that in bf16 on Blackwell (docs/compute-model.md)."""
LAST_YEAR_OF_KEPT_OUTPUTS = 2024
"""torchtitan asks torch's pipelines for no outputs since the end of 2025, when they can be told (pytorch's pull request 165822,
October 2025); a row of 2025 may be of either time, and is taken for the later."""
LAST_YEAR_OF_EAGER_LOSS = 2024
"""torchtitan compiles its loss since 2025."""


def stack_of(asked: Asked, tuning: Tuning = TUNING) -> tuple[Stack, tuple[str, ...]]:
    """The row's stack and what had to be assumed."""
    assumed: list[str] = []
    if _is_limited(asked):
        assumed.append("three quarters of its power, as the GPU is said to be limited")
    stack = _refined(_closest(asked, assumed, tuning.overheads), asked)
    return replace(stack, kernels=_kernels(stack, asked, assumed), overheads=_overheads(stack, asked, tuning.vintage)), tuple(
        assumed
    )


def _closest(asked: Asked, assumed: list[str], overheads: Mapping[str, Overheads]) -> Stack:
    text = asked.framework or f"{asked.source_key} {asked.source}"
    for likeness in _LIKENESSES:
        if re.search(likeness.pattern, text, re.IGNORECASE):
            if not likeness.is_exact:
                assumed.append(f"stack {likeness.stack}, the closest to {asked.framework or 'this source'}")
            return replace(_stack(likeness.stack, overheads), **likeness.changes)
    cut = (asked.tp or 1) > 1 or (asked.pp or 1) > 1
    name = "megatron" if cut else "torchtitan"
    assumed.append(f"stack {name}, as {'tp or pp is used' if cut else 'only data parallelism is used'}")
    return replace(_stack(name, overheads), **(_PLAIN_MEGATRON if cut else {}))


def is_overlapped_table(asked: Asked) -> bool:
    """Whether a row is of Megatron-LM's own table of scaling."""
    return re.search(_OVERLAPPED_TABLE, asked.source, re.IGNORECASE) is not None


def _stack(name: str, overheads: Mapping[str, Overheads]) -> Stack:
    return replace(STACKS[name], overheads=overheads[name]) if name in overheads else STACKS[name]


def _refined(stack: Stack, asked: Asked) -> Stack:
    if stack.name == "megatron" and (asked.year or 9999) <= LAST_YEAR_WITHOUT_FLASH:
        stack = replace(stack, **_NO_OVERLAP)
    if stack.name == "nanotron" and (asked.year or 9999) <= LAST_YEAR_OF_WHOLE_INPUTS:
        stack = replace(stack, autograd_gradient_bytes=0)
    if stack.name == "torchtitan" and (asked.year or 9999) <= LAST_YEAR_OF_KEPT_OUTPUTS:
        stack = replace(stack, keeps_outputs=True)
    if is_overlapped_table(asked):
        stack = replace(stack, overlaps_tensor_parallel=True)
    if re.search(_BASELINE, asked.source, re.IGNORECASE) and re.search("megatron", asked.framework, re.IGNORECASE):
        stack = replace(stack, **_NO_OVERLAP)
    if _in_graphs(asked) and "fp4" not in asked.precision.lower():
        stack = replace(stack, overlaps_expert_parallel=True)
    if _sends_once(asked):
        stack = replace(stack, sends_tokens_once=True)
    if asked.attn_kind.lower().startswith("mla") and re.search(_NARROW_MOMENTS, asked.framework, re.IGNORECASE):
        stack = with_optimizer(stack, "adamw-bf16")
    detail = asked.recompute_detail.lower()
    if re.search(r"maxtext|save_dot", detail):
        return replace(stack, selective="wide-products")
    if re.search(r"layernorm|moe_act|mla_up_proj|rmsnorm", detail):
        return replace(stack, selective="elementwise")
    if "core" in detail:
        return replace(stack, selective="attention")
    return stack


def _kernels(stack: Stack, asked: Asked, assumed: list[str]) -> Kernels:
    kernels, old = stack.kernels, (asked.year or 9999) <= LAST_YEAR_WITHOUT_FLASH
    if asked.compile is not None:
        kernels = replace(kernels, compiled=asked.compile)
    if asked.compile is False and stack.name == "torchtitan":
        kernels = replace(kernels, **_EAGER)
    if asked.flash_attention is False or (asked.flash_attention is None and old):
        kernels = replace(kernels, attention="math")
        if asked.flash_attention is None:
            assumed.append(f"no flash attention in {asked.year}")
    if stack.name == "nanotron" and ((asked.pp or 1) == 1 or (asked.year or 9999) <= LAST_YEAR_OF_WHOLE_INPUTS):
        kernels = replace(kernels, gathers_again=False)
    if stack.name == "megatron" and re.search(r"megatron-lm(?!.*transformerengine)", asked.framework, re.IGNORECASE):
        kernels = replace(kernels, cross_entropy="unfused")  # its default; recipes and benchmarks fuse it
    if stack.name == "torchtitan" and ((asked.year or 9999) <= LAST_YEAR_OF_EAGER_LOSS or asked.compile is False):
        kernels = replace(kernels, cross_entropy="eager")
    if old and stack.name in ("megatron", "deepspeed"):  # GPT of those years trained with dropout
        kernels = replace(kernels, dropout=True)
    return kernels


def _in_graphs(asked: Asked) -> bool:
    """Whether a step is launched as one CUDA graph: Megatron-Bridge's recipes in 8 bits on Blackwell, from a release on.

    On Hopper, and in bf16, they launch operations one by one.
    """
    narrow, blackwell = "8" in asked.precision or "4" in asked.precision, re.search(r"B[23]00", asked.gpu or asked.gpu_family)
    return bool(_release(asked) >= FIRST_RELEASE_IN_GRAPHS and narrow and blackwell)


def _sends_once(asked: Asked) -> bool:
    """Whether a mixture of experts is run with DeepEP or HybridEP: DeepSeek's own program, NVIDIA's recipes and AutoModel's."""
    if not asked.experts or re.search(f"hai-llm|{_AUTOMODEL}", asked.framework, re.IGNORECASE):
        return bool(asked.experts)
    since = (0, 1) if asked.attn_kind.lower().startswith("mla") else FIRST_RELEASE_SENDING_ONCE
    return _release(asked) >= since


def _release(asked: Asked) -> tuple[int, int]:
    """Year and month of the NeMo container that a table was made with; zeros if there is none."""
    found = re.search(r"(\d\d)\.(\d\d)(?:\.\d+)? NeMo container", asked.source)
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _is_limited(asked: Asked) -> bool:
    return re.search(r"power.?(?:limited|capped)", asked.gpu, re.IGNORECASE) is not None


def _overheads(stack: Stack, asked: Asked, vintage: Vintage) -> Overheads:
    """What the row's year, precision and framework change in the time a program adds."""
    overheads, words = stack.overheads, asked.framework.lower()
    products, attention, elementwise, op_seconds = 1.0, 1.0, 1.0, overheads.op_seconds
    if _is_limited(asked):
        products = attention = LIMITED_POWER ** (-1 / 3)
    if "nvfp4" in asked.precision.lower():
        products *= vintage.nvfp4_over_fp8
    if stack.name == "nanotron":
        op_seconds, overheads = vintage.eager_op_seconds, replace(overheads, elementwise=1.0)
        if (asked.year or 9999) <= LAST_YEAR_OF_WHOLE_INPUTS:  # its pipelines over nodes do not show it
            overheads = replace(overheads, hops_per_rank=0.0)
        if asked.is_playbook:
            overheads = replace(
                overheads, stall_seconds=vintage.stop_seconds, stall_nodes=STOPS_FROM_NODES,
                hops_per_rank=vintage.scan_hops, hop_growth=vintage.scan_hop_growth,
            )  # fmt: skip
    elif "vtrain" in words or (asked.year or 9999) <= LAST_YEAR_WITHOUT_FLASH:
        op_seconds = max(op_seconds, vintage.eager_op_seconds)
    if _in_graphs(asked):
        op_seconds = 0.0
        if asked.experts and re.search(r"B300", asked.gpu or asked.gpu_family) and "fp4" not in asked.precision.lower():
            attention *= FP8_ATTENTION
    elif asked.experts:
        op_seconds = max(op_seconds, vintage.expert_op_seconds)
    if stack.name == "llm-foundry":  # its biases of positions (ALiBi) kept it on the first version's kernels
        attention *= vintage.flash_1_over_2
    if stack.name == "aleph-alpha" and asked.recompute != "none":  # a half of those runs
        attention *= (1 + vintage.flash_1_over_2) / 2
    is_eager_moe = stack.name == "torchtitan" and bool(asked.experts)  # its dispatch is torch's own operations
    # Aleph Alpha's own RMSNorm kernel ran in some runs, all without checkpointing (arXiv 2311.05610, section 4.1). Which, a row
    # does not say: memory is that of runs without it, which need more, time lies between.
    some_fused = stack.name == "aleph-alpha" and asked.recompute == "none" and asked.flash_attention is not False
    if stack.name in ("llm-foundry", "aleph-alpha", "nanotron") or "vtrain" in words or is_eager_moe:
        elementwise = SOME_FUSED if some_fused else vintage.eager_over_bytes
    return replace(
        overheads, op_seconds=op_seconds, products=overheads.products * products,
        attention=overheads.attention * attention, elementwise=overheads.elementwise * elementwise,
    )  # fmt: skip
