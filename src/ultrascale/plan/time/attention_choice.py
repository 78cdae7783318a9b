"""Predicts the attention kernel that our trainer's benchmark (`kernels.attention.attention_contest`) chooses on a device.

The candidates are torch's kernels; `description.attention_cores` says, for trainer and planner, which support a run: cuDNN's
supports no documents, sliding windows, sinks or ring attention, torch's flash attention 2 supports the rest. The faster one by
`plan.laws.compute` is chosen: cuDNN's on Hopper and Blackwell, where flash attention 2 reaches half its rate; on Ampere there
is no choice. FlashAttention's own packages, which the trainer tries where they are installed, are planned only if the layout
names one.
"""

from __future__ import annotations

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.description.attention_cores import CoreRequirements, unsupported_reason, windows_of
from ultrascale.description.layout import NARROW, AttentionCore
from ultrascale.plan.laws.compute import Kernel, attention_seconds
from ultrascale.plan.laws.devices import FAMILIES, relative_of
from ultrascale.plan.workload import Workload
from ultrascale.work.ops import Scores, Shape

TORCH_CORES: tuple[tuple[Kernel, AttentionCore], ...] = (("flash-2", "sdpa"), ("cudnn", "cudnn"))
"""Kernels with their attention core; the first wins ties. `varlen` is flash attention 2 with document boundaries."""


def attention_kernel(workload: Workload, shape: Shape, scores: Scores) -> Kernel:
    """Kernel of an attention with these `scores` on one rank: the stack's, or if it sets none, the predicted fastest."""
    named = workload.stack.attention_kernel
    if named != "contest":
        return named
    wanted = wanted_of(workload, shape)
    able: list[Kernel] = [kernel for kernel, core in TORCH_CORES if not unsupported_reason(core, wanted)]
    return able[0] if len(able) == 1 else min(able, key=lambda kernel: _both_ways(workload, shape, scores, kernel))


PACKAGES: dict[str, AttentionCore] = {"hopper": "flash-3", "blackwell": "flash-4"}
"""FlashAttention's package that is faster than torch's kernels, by family of NVIDIA's devices."""


def package_of(accelerator: Accelerator) -> AttentionCore | None:
    """FlashAttention's package for a device where it is faster than torch's kernels; None elsewhere."""
    is_amd = accelerator.kind.startswith("mi")
    return None if is_amd or accelerator.name == "cpu" else PACKAGES.get(FAMILIES[relative_of(accelerator)])


def wanted_of(workload: Workload, shape: Shape) -> CoreRequirements:
    """Requirements of a run of `shape` on its attention kernel (`description.attention_cores.core_requirements`)."""
    model = workload.model
    return CoreRequirements(
        "cpu" if shape.device == "cpu" or workload.accelerator.name == "cpu" else "cuda", shape.precision,
        windows_of(model, workload.sequence_length), workload.documents, model.head_dim, model.attention_sinks, shape.cp,
    )  # fmt: skip


def _both_ways(workload: Workload, shape: Shape, scores: Scores, kernel: Kernel) -> float:
    dtype = "bf16" if shape.precision in NARROW else shape.precision
    return sum(
        attention_seconds(
            workload.accelerator, **scores._asdict(), dtype=dtype, backward=backward, kernel=kernel
        )
        for backward in (False, True)
    )  # fmt: skip
