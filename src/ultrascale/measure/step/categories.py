"""Maps names in a profiler's trace to the planner's categories: a kind of compute, or the axis that is waited for."""

from __future__ import annotations

import re
from collections.abc import Sequence

from ultrascale.measure.step.spans import MARK, Kernel, TimeSpan
from ultrascale.parallel.lost import AWAITED
from ultrascale.parallel.pipeline.pipeline_messages import BETWEEN_STAGES
from ultrascale.parallel.tags import Tag

PRODUCTS, ATTENTION, ELEMENTWISE, AGAIN = "matrix products", "attention", "element-wise", "recomputation"
OPTIMIZER, DATA, HOST, IDLE, EVERYBODY = "optimizer", "data wait", "launch gaps", "idle", "all ranks"
COMPUTE = (PRODUCTS, ATTENTION, AGAIN, OPTIMIZER, ELEMENTWISE)
"""Kinds of compute; if several run at once, the first counts."""
AXES = ("dp", "tp", "cp", "pp", "ep")
CATEGORIES = (PRODUCTS, ATTENTION, ELEMENTWISE, AGAIN, OPTIMIZER, *AXES, EVERYBODY, DATA, HOST, IDLE)
"""Categories in the order of the report."""

READING, CORE, RECOMPUTED = f"{MARK}data", f"{MARK}attention", f"{MARK}block"
"""Ranges that `train.observers.profile` adds to a trace. A block's range in a backward pass is recomputation."""
PHASE = f"{MARK}phase "
UPDATE, BACKWARD = f"{PHASE}optimizer", f"{PHASE}backward"

AXIS_OF = {
    "matrices gathered for the optimizer": "dp",
    Tag.PARAMETERS.what: "dp", Tag.GRADIENTS.what: "dp", Tag.MIRROR.what: "dp", "the sum of experts' loads": "dp",
    Tag.SEQUENCE_PARTS.what: "tp", Tag.SEQUENCE_SUMS.what: "tp", "a collective over tp": "tp",
    "the sum of copies along tp": "tp", "a sum of rows of tokens": "tp", "a gather of rows of tokens": "tp",
    Tag.KEYS.what: "cp", Tag.KEY_GRADIENTS.what: "cp", Tag.SWAP.what: "cp", Tag.TARGETS.what: "cp",
    BETWEEN_STAGES: "pp", Tag.TIED_EMBEDDING.what: "pp",
    "an exchange of tokens between experts": "ep",
    "a sum over all ranks": EVERYBODY, "a barrier of all ranks": EVERYBODY, "the norm of the gradient": EVERYBODY,
    Tag.WARM_UP.what: EVERYBODY, "a gather of words from all ranks": EVERYBODY,
}  # fmt: skip
"""Axis by the text in which `parallel.lost.waiting` describes a wait. Rows of tokens are gathered and summed only over
expert_tp and tp; the planner counts both as tp."""
_GROUPS = (
    (re.compile(r"(expert )?data |dp\b"), "dp"), (re.compile(r"tp\b|expert_tp\b|\d+ copies"), "tp"),
    (re.compile(r"cp\b"), "cp"), (re.compile(r"pp\b"), "pp"), (re.compile(r"ep\b"), "ep"),
)  # fmt: skip
"""Axis by the names of `parallel.groups`."""

_PRODUCT_OPS = re.compile(
    r"aten::(_?(add)?b?mm|baddbmm|addmv|mv|_scaled_mm|_?grouped_mm|_scaled_grouped_mm|mkldnn_.*linear)_?$|mkldnn::"
)
_ATTENTION_OPS = re.compile(
    r"aten::(_?scaled_dot_product|_flash_attention|_efficient_attention|_cudnn_attention)|flex_attention"
)
_COMPILED = re.compile(r"CompiledFxGraph|CompiledFunction|triton_|cpp_fused")
_NOT_COMPUTING = ("autograd::", "ultrascale::", "c10d::", "_c10d_functional::")
"""Prefixes of operations whose own time is Python's: the operations inside them compute."""
_ATTENTION_KERNELS = re.compile(r"flash|fmha|attention|attn|sdpa|cudnn", re.IGNORECASE)
"""Names of attention kernels. All cuDNN kernels here belong to attention, also `cudnn::fusion::compute_dot_do_o` and
`convert_dq_to_16bits` of its backward pass."""
_PRODUCT_KERNELS = re.compile(r"gemm|nvjet|cublas|xmma|cutlass|matmul|splitk|triton_tem|_mm_", re.IGNORECASE)


def axis_of(what: str) -> str:
    """Axis of a wait described by `parallel.lost.waiting`: from `AXIS_OF`, or named in the text, or all ranks."""
    named = re.search(r"\b(dp|tp|cp|pp|ep)\b", what)
    return AXIS_OF.get(what) or (named[0] if named else EVERYBODY)


def axis_of_group(group: str) -> str:
    """The axis of a process group with this description."""
    return next((axis for pattern, axis in _GROUPS if pattern.match(group)), EVERYBODY)


def awaited_axis(stack: Sequence[TimeSpan]) -> str | None:
    """Axis over which the host starts or awaits messages, from the ranges in `stack`; None if it does neither."""
    for span in reversed(stack):
        if span.name.startswith(AWAITED):
            return axis_of(span.name.removeprefix(AWAITED))
    if _in_fsdp(stack) and stack[-1].name.startswith(("FSDP::", "c10d::")):
        return "dp"  # torch's own collectives, outside our ranges
    return None


def computing(stack: Sequence[TimeSpan], phase: str, attention_links: frozenset[int]) -> str:
    """Category of a thread of the host that runs the operations in `stack` itself (a CPU), outermost first.

    `attention_links`: links of forward operations inside attention, which their backward passes share.
    """
    names = [span.name for span in stack]
    if (axis := awaited_axis(stack)) is not None:
        return axis
    if READING in names:
        return DATA
    if phase == UPDATE:
        return OPTIMIZER
    if not names or not _computes(names[-1]):
        return HOST
    if RECOMPUTED in names and phase == BACKWARD:
        return AGAIN
    if CORE in names or any(map(_ATTENTION_OPS.match, names)) or any(span.link in attention_links for span in stack):
        return ATTENTION
    return PRODUCTS if any(map(_PRODUCT_OPS.match, names)) else ELEMENTWISE


def kind_of_kernel(kernel: Kernel, stack: Sequence[TimeSpan], phase: str, attention_links: frozenset[int]) -> str:
    """Category of a kernel: an axis for NCCL's, else a kind of computing. `stack`, `phase`: where the host launched it."""
    if "nccl" in kernel.name.lower():
        return awaited_axis(stack) or (axis_of_group(kernel.group) if kernel.group else "dp" if _in_fsdp(stack) else EVERYBODY)
    if phase == UPDATE:
        return OPTIMIZER
    names = [span.name for span in stack]
    if RECOMPUTED in names and phase == BACKWARD:
        return AGAIN
    if _ATTENTION_KERNELS.search(kernel.name) or CORE in names or any(span.link in attention_links for span in stack):
        return ATTENTION
    return PRODUCTS if _PRODUCT_KERNELS.search(kernel.name) else ELEMENTWISE


def _in_fsdp(stack: Sequence[TimeSpan]) -> bool:
    return any(span.name.startswith("FSDP::") for span in stack)


def _computes(name: str) -> bool:
    return ("::" in name and not name.startswith((*_NOT_COMPUTING, "FSDP::"))) or bool(_COMPILED.search(name))
