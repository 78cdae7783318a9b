"""Words and numbers of a measured run that are read as something else, or not read at all: reported with its prediction.

Rows come from anywhere. A number out of range makes a row that cannot be described; a word nobody knows is priced as the usual
thing, and the prediction says as what.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import RANGES, Layout
from ultrascale.description.schedules import SCHEDULES
from ultrascale.validation.cells.flops_conventions import CONVENTIONS
from ultrascale.validation.rows import Asked

LARGEST_COUNT = RANGES["dp"][1]
"""GPUs and ranks: far above any run, as for a layout of one's own."""
LARGEST_NUMBER = 2**31 - 1
"""Sizes and batches: what a model's dimensions may be."""
_COUNTS = ("n_gpus", "nodes", "gpus_per_node", "micro_batch", "dp", "tp", "cp", "pp")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "global_batch", "grad_accum")
_MAY_BE_ZERO = (
    "vpp", "ep", "etp", "experts", "topk", "ffn_hidden", "expert_ffn", "shared_expert_ffn", "dense_layers",
)  # fmt: skip
"""Zero is how some tables write that there are none."""
RECOMPUTE_WORDS = {
    "none": "none", "false": "none", "no": "none", "0": "none", "full": "full", "true": "full", "yes": "full", "1": "full",
    "selective": "selective", "op": "selective", "partial": "selective",
}  # fmt: skip
"""Recomputation mode by the word in the column `recompute`; any other word is priced as selective."""
MODULES_IN_PROSE = {"rmsnorm": "norm", "up-projection": "mla_up_proj", "swiglu": "moe_act"}
"""Modules as papers write them in `recompute_detail`."""

_ZERO_WORDS = (
    (r"(?:deepspeed|zero|stage|[-_ ])*([0-3])(?:[-_ +(].*)?", ""), (r"full_?shard|fsdp2?|fully.?shard(?:ed|ing)?", "3"),
    (r"shard_?grad_?op", "2"), (r"(?:distributed|dist|sharded)[-_ ]*opt\w*", "1"),
    (r"no_?shard|ddp|replicated?|off|false", "0"), (r"hsdp|hybrid(?:_?shard)?", "hsdp"),
)  # fmt: skip


def zero_stage_of(text: str, node: int) -> str | None:
    """ZeRO stage of a cell, as `0 1 2 3` or `hsdpK`; None if unknown. `node`: GPUs, over which hybrid sharding shards."""
    for pattern, stage in _ZERO_WORDS:
        if match := re.fullmatch(pattern, text.lower().removesuffix(".0")):
            return f"hsdp{node}" if stage == "hsdp" else stage or match[1]
    return None


def out_of_range(asked: Asked) -> str:
    """Numbers that no run can have, or nothing."""
    limits = dict.fromkeys(_COUNTS, (1, LARGEST_COUNT)) | dict.fromkeys(_SIZES, (1, LARGEST_NUMBER))
    limits |= dict.fromkeys(_MAY_BE_ZERO, (0, LARGEST_NUMBER))
    found = []
    for name, (low, high) in limits.items():
        value = getattr(asked, name)
        if value is not None and value < low:
            found.append(f"{name} must be at least {low}, found {value}")
        elif value is not None and value > high:
            found.append(f"{name} must be at most {high:,}, found {_short(value)}")
    return "; ".join(found)


def read_otherwise(asked: Asked, model: Model, layout: Layout) -> Iterator[str]:
    """Cells of the row that are read as something else than they say, or by nobody."""
    if (asked.ep or 1) > 1 and not model.num_experts:
        yield f"ep = {asked.ep} is not read: the model has no experts"
    if (asked.vpp or 1) > 1 and layout.pp == 1:
        yield f"vpp = {asked.vpp} is not read: there is no pipeline"
    if asked.grad_accum and asked.micro_batch and asked.global_batch:
        rounds = asked.global_batch / (layout.dp * asked.micro_batch)
        if rounds != asked.grad_accum:
            told = f"global_batch = {asked.global_batch} over dp x micro_batch is {rounds:g}"
            yield f"grad_accum = {asked.grad_accum} is not read: {told}"
    if asked.recompute and asked.recompute.lower() not in RECOMPUTE_WORDS:
        yield f"recompute {asked.recompute!r} is read as {layout.recompute}"
    if asked.pp_schedule and not re.search(_SCHEDULES, asked.pp_schedule.lower()):
        yield f"pp_schedule {asked.pp_schedule!r} is read as {layout.schedule}"
    if asked.attn_kind and not re.search("mha|mqa|gqa|mla|swa", asked.attn_kind.lower()):
        yield f"attn_kind {asked.attn_kind!r} is not read: heads and kv_heads say what attention it is"
    if asked.offload and not (layout.offload_activations or layout.offload_optimizer) and asked.offload.lower() not in _NOTHING:
        yield f"offload {asked.offload!r} is not read: it names neither activations nor the optimizer"
    if asked.flops_def and asked.flops_def not in (*CONVENTIONS, "unstated"):
        yield f"flops_def {asked.flops_def!r} is not read: it is none of {', '.join(CONVENTIONS)}"
    if (match := re.fullmatch(r"hsdp\s*-?(\d+)", asked.zero_stage.lower())) and layout.shard_size != int(match[1]):
        yield f"zero_stage {asked.zero_stage!r} is read as shards of {layout.shard_size}"


_SCHEDULES = "|".join(one.words for one in SCHEDULES.values() if one.words)
_NOTHING = ("0", "no", "false", "off")


def _short(value: int) -> str:
    """A number that may have hundreds of figures."""
    return f"{value:,}" if value < 10**15 else f"about 10^{len(str(value)) - 1}"
