"""Words beside the training state in a plan: dtype of each part, what it consists of, and over how many ranks ZeRO shards it.

parameters       fp32 master weights, sharded over 64 ranks        bf16, replicated            (Megatron, ZeRO 1)
gathered         bf16 copy, unsharded while in use
gradients                                                          fp32, replicated
optimizer        two moments, fp32, sharded over 64 ranks          fp32 master weights, two moments, ...
"""

from __future__ import annotations

from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import DTYPE_BYTES, NARROW, Layout
from ultrascale.plan.memory.sharding import stays_whole

MOMENTS = {
    "adamw": "two moments, {master}",
    "adamw-bf16": "two moments, bf16",
    "adamw-8bit": "two moments, 8 bits",
    "muon": "momentum of matrices, two moments of the rest, {master}",
}


def state_words(model: Model, layout: Layout, stack: Stack) -> dict[str, str]:
    """Words for the categories parameters, gathered, gradients and optimizer, of a rank of this layout under this trainer."""
    compute, master = _compute(layout), layout.master_dtype
    is_wide, shared = DTYPE_BYTES[layout.precision] >= DTYPE_BYTES[master], _shards(model, layout)
    masters = f"{_dtype(stack.master_bytes, layout)} master weights"
    beside = "" if stack.gathers == "buckets" or is_wide else f"{masters}, "
    if stays_whole(stack, layout):
        parameters, gradients = _joined(compute, _copies(model, layout)), _whole_gradients(model, layout, stack)
    else:
        parameters, gradients = _joined(compute if is_wide or beside else masters, shared), ""
    gathered = f"{compute} and fp8" if layout.precision in NARROW and layout.fp8_all_gather else compute
    copy = "" if is_wide or beside else " copy"
    unsharded = "unsharded while in use" if layout.dp * layout.cp > 1 else "while in use"
    return {
        "parameters": parameters,
        "gathered": f"{gathered}{copy}, {unsharded}",
        "gradients": gradients,
        "optimizer": _joined(beside + _moments(layout, stack), shared),
    }


def _shards(model: Model, layout: Layout) -> str:
    """Ranks of dp and cp that share what ZeRO shards from stage 1 on; empty for a single rank."""
    size, experts = layout.group("shard")[0], layout.expert_shard_size
    if size == 1:
        return _copies(model, layout)
    words = f"sharded over {size} ranks"
    if not model.num_experts or experts == size:
        return words
    return f"{words}, experts {f'over {experts}' if experts > 1 else 'not'}"


def _copies(model: Model, layout: Layout) -> str:
    replicas, of_experts = layout.dp * layout.cp, layout.expert_dp if model.num_experts else layout.dp * layout.cp
    if replicas == 1 or of_experts == replicas:
        return "replicated" if replicas > 1 else ""
    return f"replicated, experts {f'on {of_experts} ranks each' if of_experts > 1 else 'not'}"


def _whole_gradients(model: Model, layout: Layout, stack: Stack) -> str:
    """Gradients of a trainer that allocates them once, unsharded below stage `shards_gradients_from`."""
    if DTYPE_BYTES[layout.precision] >= DTYPE_BYTES[layout.master_dtype]:
        dtypes = _compute(layout)
    else:
        second = stack.autograd_gradient_bytes if layout.zero_stage < stack.shards_gradients_from else 0
        dtypes = _dtype(stack.gradient_bytes, layout) + (f", and {_dtype(second, layout)} of autograd" if second else "")
    cut = layout.zero_stage >= stack.shards_gradients_from
    return _joined(dtypes, _shards(model, layout) if cut else _copies(model, layout))


def _moments(layout: Layout, stack: Stack) -> str:
    if stack.name == "ultrascale" or stack.optimizer != "adamw":
        return MOMENTS[stack.optimizer].format(master=layout.master_dtype)
    width = stack.moment_bytes / 2
    return f"two moments, {_dtype(round(width), layout) if width >= 2 else '8 bits'}"


def _compute(layout: Layout) -> str:
    """Dtype in which passes read weights; products in 8 bits or fewer round them again."""
    return "bf16" if layout.precision in NARROW else layout.precision


def _dtype(width: int, layout: Layout) -> str:
    """Dtype of a number of bytes, which are those of runs with fp32 masters: of fp64 all are twice as wide."""
    if width >= 4:
        return layout.master_dtype
    return "fp16" if layout.precision == "fp16" else "bf16"


def _joined(*words: str) -> str:
    return ", ".join(filter(None, words))
