"""Attention kernel that our trainer's contest (`kernels.attention.attention_contest`) will choose on a device, predicted.

What comes with torch takes part, and `description.attention_cores` says to both, trainer and plan, what can do what is wanted:
cuDNN's no documents, sliding windows or sinks, and no piece of a ring. The rest is flash attention 2 in torch's own form. The
faster by the laws of `plan.laws.compute` is the one: cuDNN's on Hopper and Blackwell, where flash attention 2 reaches half of
its rate; on Ampere there is nothing to choose. FlashAttention's own packages, which a contest takes where they are installed,
a plan takes only where the layout names one.
"""

from __future__ import annotations

from ultrascale.description.attention_cores import CoreRequirements, unsupported_reason, windows_of
from ultrascale.description.layout import NARROW, AttentionCore
from ultrascale.plan.laws.compute import Kernel, attention_seconds
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Scores, Shape

TORCH_CORES: tuple[tuple[Kernel, AttentionCore], ...] = (("flash-2", "sdpa"), ("cudnn", "cudnn"))
"""By kernel, a core that is it, in the order in which ties are decided. `varlen` is flash attention 2 told of documents."""


def attention_kernel(workload: Workload, shape: Shape, scores: Scores) -> Kernel:
    """The kernel of an attention with these `scores` on one rank: the stack's, or where it leaves that open, the winner."""
    named = workload.stack.attention_kernel
    if named != "contest":
        return named
    wanted = wanted_of(workload, shape)
    able: list[Kernel] = [kernel for kernel, core in TORCH_CORES if not unsupported_reason(core, wanted)]
    return able[0] if len(able) == 1 else min(able, key=lambda kernel: _both_ways(workload, shape, scores, kernel))


def wanted_of(workload: Workload, shape: Shape) -> CoreRequirements:
    """Requirements of a run of `shape` on its attention, as `description.attention_cores.core_requirements` gives them."""
    model = workload.model
    return CoreRequirements(
        "cpu" if shape.device == "cpu" or workload.cluster.accelerator.name == "cpu" else "cuda", shape.precision,
        windows_of(model, workload.sequence_length), workload.documents, model.head_dim, model.attention_sinks, shape.cp,
    )  # fmt: skip


def _both_ways(workload: Workload, shape: Shape, scores: Scores, kernel: Kernel) -> float:
    dtype = "bf16" if shape.precision in NARROW else shape.precision
    return sum(
        attention_seconds(
            workload.cluster.accelerator, **scores._asdict(), dtype=dtype, backward=backward, kernel=kernel
        )
        for backward in (False, True)
    )  # fmt: skip
