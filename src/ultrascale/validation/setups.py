"""Converts a measured run to a workload and the layouts that the row may refer to.

Unspecified settings become several layouts: micro-batch sizes of every power of two that divides the batch, recomputation from
none to full, virtual stages of a pipeline. `validation.predict` predicts all of them and takes the fastest that fits, because
published runs were tuned, and widens the interval to the others. Values filled in by a rule are reported with the prediction.

    blank             value by rule
    dp                n_gpus / (tp pp cp)
    zero_stage, sp    default of its program (`catalogue.stacks.stack_files.Usual`)
    micro_batch       with neither batch nor pipeline 1 to 8 sequences, of a global batch of 8 a rank
    grad_accum        global_batch / (dp micro_batch); in a pipeline without both, one micro-batch per stage
    global_batch      dp micro_batch grad_accum
    precision         bf16; fp16 on devices without bf16
    seq_len           4096
    tp, pp, cp        remaining factor of n_gpus / dp: tp within a node, then pp
    etp               default of its program, but experts narrower than the model stay whole beside ep

Rows come from many sources. A row with a number out of range cannot be represented; an unknown word is predicted as the default
setting, and the prediction reports which.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.catalogue.stacks.stack import Stack
from ultrascale.catalogue.stacks.stack_files import Usual, abilities
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW, RANGES, Layout, Precision
from ultrascale.description.recomputed import SPELLINGS, modules_name
from ultrascale.description.schedules import SCHEDULES, USUAL, schedule_for
from ultrascale.plan.time.stage_cut import cannot_run
from ultrascale.plan.workload import Workload
from ultrascale.schedules.build import DEFAULT_VIRTUAL_STAGES
from ultrascale.validation.cells.flops_conventions import CONVENTIONS
from ultrascale.validation.cells.models import UnrepresentableError, UnrunnableError, fill_playbook, model_of
from ultrascale.validation.cells.networks import cluster_of
from ultrascale.validation.cells.programs import TUNING, RowProgram, Tuning, program_of_row
from ultrascale.validation.cells.stated import with_stated
from ultrascale.validation.rows import RunConfig
from ultrascale.work.recompute import available_modules

ZeroStage = Literal[0, 1, 2, 3]
MOST_CANDIDATES = 96
"""Most layouts tried for one row."""
LARGEST_MICRO_BATCH = 64
UNSTATED_MICRO_BATCHES = (1, 2, 4, 8)
"""Micro-batch sizes of a row without any batch or pipeline; the global batch is the largest of them on each rank."""
USUAL_NODE_GPUS = 8
USUAL_SEQUENCE = 4096
"""Sequence length in tokens of most rows that state it."""
_PRECISIONS: dict[str, Precision] = {
    "bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "float16": "fp16", "fp32": "fp32", "tf32": "fp32", "mxfp8": "mxfp8",
    "mx-fp8": "mxfp8", "fp4": "nvfp4", "fp8": "fp8", "float8": "fp8", "e4m3": "fp8", "float32": "fp32", "half": "fp16",
}  # fmt: skip
"""Words for precisions, and the precision used; of several, a narrow one is that of the products (`bf16+fp8`)."""
_VAGUE = re.compile("mixed|amp|16")
"""Words for an unspecified 16-bit dtype: bf16, the usual one since 2022."""
_OFFLOADED_STATE = re.compile("optim|param|weight|zero.?(?:offload|infinity)", re.IGNORECASE)
"""Words for state that the host keeps and updates: FSDP's CPUOffload moves parameters, gradients and the update together,
ZeRO-Offload the optimizer, ZeRO-Infinity both."""
_NEGATED = re.compile(r"\b(?:no|not|without)\b(?:(?!\b(?:with|but)\b)[^,;+()])*", re.IGNORECASE)
"""Words for what a run does not do: `bf16 (not fp8)`, `activations, not the optimizer`."""
_NO_OFFLOAD = re.compile(r"\(?\b(?:no|not|without)\b[^,;+()]*offload\w*\)?", re.IGNORECASE)
_NO_PRODUCT = re.compile("gather|reduc|commun|optim|state|moment|master|grad|cache|checkpoint|sum|accum|attention")
"""Words for tensors whose precision is not that of the products of weights."""
_EVERY = re.compile(
    r"every (second|other|third|fourth|[1-9]\d?)(?:st|nd|rd|th)? (?:transformer )?(?:block|layer)", re.IGNORECASE
)
"""Words for full recomputation of every second, third, ... block."""
_ORDINALS = {"second": 2, "other": 2, "third": 3, "fourth": 4}
_ENDS = 2
"""Embedding and head, which may be separate pipeline stages (Megatron: 128 stages for 126 layers)."""
_PLAIN = (schedule_for(1), schedule_for(2))
"""Schedules that rows name without the number of stages per rank."""


@dataclass(frozen=True)
class Setup:
    """Workloads and layouts that a row asks to be predicted."""

    workloads: tuple[Workload, ...]
    """One workload; several that differ only in their stacks, if settings of the program are open."""
    layouts: tuple[Layout, ...]
    """All layouts that the row may refer to; one if it specifies everything."""
    open_cells: tuple[str, ...]
    """Columns that are blank and could not be inferred."""
    assumed: tuple[str, ...]
    flops: str
    """Convention by which its program counts FLOPs."""
    config: RunConfig
    """The row, with values filled in first: those that its source states, and the playbook's dimensions."""

    @property
    def workload(self) -> Workload:
        return self.workloads[0]


def setup_of(config: RunConfig, tuning: Tuning = TUNING) -> Setup:
    """The workload and layouts of a row. Raises UnrepresentableError, whose text gives the reason, if there are none."""
    if wrong := out_of_range(config):
        raise UnrepresentableError(wrong)
    config, stated = with_stated(config, tuning)
    config, filled = fill_playbook(config)
    assumed = [*stated, *filled]
    program = program_of_row(config, tuning)
    model, of_model = model_of(config, predicts_further=program.usual.predicts_further)
    stack = program.stacks[0]
    base = _base_layout(config, model, program, assumed)
    cluster, of_machines = cluster_of(config, base.world_size)
    base = replace(base, precision=_precision(config, cluster.accelerator, assumed))
    if config.seq_len is None:
        config = replace(config, seq_len=USUAL_SEQUENCE)
        assumed.append(f"seq_len = {config.seq_len}")
    assert config.seq_len is not None
    choices = _choices(config, model, program, base, assumed)
    sequences = _sequences(config, base, choices, assumed)
    layouts = tuple(_layouts(base, choices, model, sequences))[:MOST_CANDIDATES]
    if not layouts:
        rule = f"no micro-batch of {choices['micro_batch_size']} divides a global batch of {sequences} over dp = {base.dp}"
        raise UnrepresentableError(rule)
    if stack.stage_cut == "by-share":
        counts = [sequences // (base.dp * layout.micro_batch_size) for layout in layouts]
        if wrong := cannot_run(model, base.pp, counts):
            raise UnrunnableError(wrong)
    open_cells = tuple(_COLUMN_OF.get(key, key) for key, values in choices.items() if len(values) > 1) + program.open_settings
    workloads = tuple(Workload(model, cluster, config.seq_len, sequences, variant) for variant in program.stacks)
    otherwise = read_differently(config, model, layouts[0])
    notes = (*assumed, *of_model, *program.assumed, *of_machines, *otherwise)
    return Setup(workloads, layouts, open_cells, notes, program.usual.flops, config)


_COLUMN_OF = {"micro_batch_size": "micro_batch", "pipeline": "vpp"}


def _base_layout(config: RunConfig, model: Model, program: RowProgram, assumed: list[str]) -> Layout:
    """The layout with all settings that a row never leaves open."""
    gpus = config.n_gpus or (config.nodes * (config.gpus_per_node or 8) if config.nodes else None)
    tp, cp, pp = _blank_axes(config, gpus, assumed)
    dp = _data_parallel(config, gpus, tp * cp * pp, assumed)
    zero, shard = _zero(config, program.usual, dp, pp, assumed)
    ep, expert_tp = _experts(config, model, program.usual, tp * cp * dp, assumed)
    return Layout(
        dp=dp, zero_stage=zero, dp_shard=shard, tp=tp, cp=cp, pp=pp, ep=ep, expert_tp=expert_tp,
        cp_method=program.usual.cp_method, recompute_every=_recompute_every(config),
        sequence_parallel=_sequence_parallel(config, program.usual, tp, assumed),
        offload_activations=bool(re.search("activation", _NEGATED.sub("", config.offload), re.IGNORECASE)),
        offload_optimizer=bool(_OFFLOADED_STATE.search(_NEGATED.sub("", config.offload)))
        or "offload" in _NO_OFFLOAD.sub("", config.zero_stage).lower(),
    )  # fmt: skip


def _blank_axes(config: RunConfig, gpus: int | None, assumed: list[str]) -> tuple[int, int, int]:
    """tp, cp and pp; if some are blank, GPUs that dp and the others leave are assigned to tp within a node, then to pp."""
    tp, cp, pp = config.tp or 1, config.cp or 1, config.pp or 1
    spare, remainder = divmod(gpus or 0, (config.dp or 0) * tp * cp * pp or 1)
    if gpus is None or config.dp is None or remainder or spare == 1 or config.experts:
        return tp, cp, pp
    if config.tp is None:
        tp = spare if config.pp is not None else min(spare, config.gpus_per_node or 8)
    if config.pp is None:
        pp = gpus // (config.dp * tp * cp)
    elif config.tp is not None and config.cp is None:
        cp = spare
    if None in (config.tp, config.cp, config.pp):
        assumed.append(f"tp = {tp}, cp = {cp}, pp = {pp}, from n_gpus / dp")
    return tp, cp, pp


def _data_parallel(config: RunConfig, gpus: int | None, model_ranks: int, assumed: list[str]) -> int:
    if gpus is None:
        if config.dp is not None:
            return config.dp
        if not (config.global_batch and config.micro_batch and config.grad_accum):
            raise UnrepresentableError("n_gpus and dp are blank")
        dp = max(1, config.global_batch // (config.micro_batch * config.grad_accum))
        assumed.append(f"dp = {dp}")
        return dp
    if gpus % model_ranks:
        raise UnrepresentableError(f"tp x cp x pp = {model_ranks} does not divide n_gpus = {gpus}")
    dp = gpus // model_ranks
    if config.dp is not None and config.dp != dp:
        if config.dp * (config.ep or 1) != dp:
            raise UnrepresentableError(f"n_gpus = {gpus} is not dp x tp x cp x pp = {config.dp * model_ranks}")
        assumed.append(f"dp = {dp}: ep is an axis of its own in this row")
    return dp


def _zero(config: RunConfig, usual: Usual, dp: int, pp: int, assumed: list[str]) -> tuple[ZeroStage, int | None]:
    text = _NO_OFFLOAD.sub("", config.zero_stage.lower()).strip(" ,;+").removesuffix(".0")
    if text and not re.fullmatch(r"[0-3]|hsdp\s*-?\d+", text):
        parsed = zero_stage_of(text, config.gpus_per_node or USUAL_NODE_GPUS)
        if parsed is None:
            raise UnrepresentableError(f"zero_stage {config.zero_stage!r} is not 0, 1, 2, 3 or hsdpK")
        assumed.append(f"zero_stage {config.zero_stage!r} is {parsed}")
        text = parsed
    if match := re.fullmatch(r"hsdp\s*-?(\d+)", text):
        shard = min(int(match[1]), dp) or dp
        return 3, shard if dp % shard == 0 else None
    stages: dict[str, ZeroStage] = {"0": 0, "1": 1, "2": 2, "3": 3}
    in_pipelines = str(usual.zero_stage if usual.zero_stage_with_pipeline is None else usual.zero_stage_with_pipeline)
    if text == str(usual.zero_stage) and pp > 1 and text != in_pipelines:
        assumed.append(f"ZeRO stage {in_pipelines}, which its stage {text} is in a pipeline")
        return stages[in_pipelines], None
    if text:
        return stages[text], None
    stage = in_pipelines if pp > 1 else str(usual.zero_stage)
    assumed.append(f"ZeRO stage {stage}")
    return stages[stage], None


def _experts(config: RunConfig, model: Model, usual: Usual, ranks: int, assumed: list[str]) -> tuple[int, int]:
    """ep, and the degree of tp within each expert: recipes set 1 for fine-grained experts, whose GEMMs would be too narrow."""
    if not model.num_experts:
        return 1, 1
    ep = config.ep or 1
    is_fine = model.moe_intermediate_size < model.hidden_size and ep > 1
    preferred = config.etp or (config.tp or 1 if usual.expert_tp == "tp" and not is_fine else 1)
    for expert_tp in (preferred, 1):
        if ranks % (ep * expert_tp) == 0 and model.num_experts % ep == 0:
            if config.etp is None and (config.tp or 1) > 1:
                assumed.append(f"experts cut by tp = {expert_tp}" if expert_tp > 1 else "experts not cut by tp")
            return ep, expert_tp
    raise UnrepresentableError(f"ep = {ep} does not divide {model.num_experts} experts and tp x cp x dp = {ranks}")


def _sequence_parallel(config: RunConfig, usual: Usual, tp: int, assumed: list[str]) -> bool:
    if config.sp is not None or tp == 1:
        return bool(config.sp)
    assumed.append(f"{'with' if usual.sequence_parallel else 'without'} sequence parallelism")
    return usual.sequence_parallel


def _precision(config: RunConfig, accelerator: Accelerator, assumed: list[str]) -> Precision:
    text = config.precision.lower()
    half: Precision = "bf16" if "bf16" in accelerator.peak_flops else "fp16"
    if not text:
        assumed.append(f"precision {half}")
        return half
    named = _precisions_named(text)
    name = next((name for name in named if _PRECISIONS[name] in NARROW), named[0] if named else None)
    if name is None and _VAGUE.search(text):
        name = half
        assumed.append(f"precision {config.precision!r} is {name}")
    if name is None:
        raise UnrepresentableError(f"precision {config.precision!r} is not one of {', '.join(_PRECISIONS)}")
    if _PRECISIONS[name] in NARROW and _PRECISIONS[name] not in accelerator.peak_flops and "fp8" in accelerator.peak_flops:
        assumed.append(f"fp8 stands for {config.precision}")
        return "fp8"
    return _PRECISIONS[name]


def _precisions_named(text: str) -> list[str]:
    """Words for precisions of products in a cell, one of each part; of other tensors if it has none."""
    parts = re.split(r"[,;+/()]|\b(?:and|with)\b", _NEGATED.sub("", text))
    products = [part for part in parts if not _NO_PRODUCT.search(part)]
    for of_products in (products, parts):
        named = {_first_named(part) for part in of_products} - {None}
        if named:
            return [name for name in _PRECISIONS if name in named]
    return []


def _first_named(part: str) -> str | None:
    """The precision that part of a cell names first; of those that are not narrow, the usual one of mixed precision."""
    words = [name for name in _PRECISIONS if name in part]
    first = min(words, key=part.index, default=None)
    if first is None or _PRECISIONS[first] in NARROW:
        return first
    return next(name for name in words if _PRECISIONS[name] not in NARROW)


def _choices(config: RunConfig, model: Model, program: RowProgram, base: Layout, assumed: list[str]) -> dict[str, tuple]:
    """Settings that a row may leave open, each with its possible values."""
    schedules = _pipeline(config, model, program.usual, base.pp, assumed)
    return {
        "micro_batch_size": _micro_batches(config, program.usual, base, assumed),
        "recompute": _recompute(config, program, model),
        "pipeline": schedules,
    }


def _pipeline(config: RunConfig, model: Model, usual: Usual, pp: int, assumed: list[str]) -> tuple[tuple[str, int], ...]:
    """Schedules that a row may mean, each with its stages per rank."""
    layers = model.num_hidden_layers + model.num_nextn_predict_layers
    if pp == 1:
        return ((USUAL, 1),)
    if pp > layers + _ENDS:
        raise UnrunnableError(f"pp = {pp} is more than the {layers} layers, embedding and head")
    text = config.pp_schedule.lower()
    for schedule in reversed(SCHEDULES.values()):
        if schedule.pattern and schedule.name not in _PLAIN and re.search(schedule.pattern, text):
            return ((schedule.name, schedule.virtual_stages or DEFAULT_VIRTUAL_STAGES),)
    most = (layers + _ENDS) // pp
    if config.vpp is not None:
        if config.vpp > most:
            assumed.append(f"{most} chunks a rank: there are {layers} layers for {config.vpp} x {pp}")
        chunks = max(1, min(config.vpp, most))
        return ((schedule_for(chunks), chunks),)
    many = _interleaved(layers, most, pp, usual)
    if re.fullmatch(f"{_PLAIN[1]}[-_ ]*({_PLAIN[0]})?", text):
        return many or ((USUAL, 1),)
    # The number of stages per rank is not stated: "1f1b" is used for both.
    return ((USUAL, 1), *many) if usual.virtual_stages == "any" else ((USUAL, 1),)


def _interleaved(layers: int, most: int, pp: int, usual: Usual) -> tuple[tuple[str, int], ...]:
    """Interleaved schedules of a program, by stages per rank. Embedding and head may count as one layer each (Megatron's
    account_for_*_in_pipeline_split; Llama 3.1 405B)."""
    if usual.virtual_stages == "any" or usual.virtual_stages == (1,):
        counts = [n for n in range(2, most + 1) if layers % (pp * n) == 0 or (layers + _ENDS) % (pp * n) == 0]
    else:
        counts = [n for n in usual.virtual_stages if n <= most]
    return tuple((schedule_for(n), n) for n in counts)


def _micro_batches(config: RunConfig, usual: Usual, base: Layout, assumed: list[str]) -> tuple[int, ...]:
    if config.micro_batch:
        return (config.micro_batch,)
    if config.global_batch and config.grad_accum and config.global_batch % (base.dp * config.grad_accum) == 0:
        size = config.global_batch // (base.dp * config.grad_accum)
        if size:
            assumed.append(f"micro_batch = {size}")
            return (size,)
    if not config.global_batch:
        if base.pp == 1 and not config.grad_accum:
            return UNSTATED_MICRO_BATCHES
        assumed.append("micro_batch = 1")
        return (1,)
    per_replica = config.global_batch // base.dp
    size = usual.micro_batch_in_pipeline or 0
    if usual.micro_batches_in_pipeline == "pp":
        size = per_replica // base.pp if per_replica % base.pp == 0 else 0
    if base.pp > 1 and size:
        assumed.append(f"micro_batch = {size}, its program's default in a pipeline")
        return (size,)
    sizes = [2**k for k in range(LARGEST_MICRO_BATCH.bit_length()) if per_replica % 2**k == 0]
    return tuple(size for size in sizes if size <= LARGEST_MICRO_BATCH)


def _recompute_every(config: RunConfig) -> int:
    words = _EVERY.search(config.recompute_detail)
    return (_ORDINALS.get(words[1].lower()) or int(words[1])) if words else Layout.recompute_every


def _recompute(config: RunConfig, program: RowProgram, model: Model) -> tuple[str, ...]:
    text, stack = config.recompute.lower(), program.stacks[0]
    if named := _modules(config, stack, model):
        return (named,)
    if _EVERY.search(config.recompute_detail):
        return ("every-k",)
    if text == "selective" and stack.selective == "attention" and stack.kernels.attention == "flash":
        # Flash attention has nothing to recompute but itself, and Megatron's recipes then omit it.
        return ("none",) if "core" not in config.recompute_detail.lower() else ("selective",)
    if text:
        return (RECOMPUTE_WORDS.get(text, "selective"),)
    if stack.kernels.attention == "math" and program.usual.recompute == ("none", "full"):
        return ("none", "selective", "full")
    return program.usual.recompute


def _modules(config: RunConfig, stack: Stack, model: Model) -> str:
    """Modules named in a row with selective recomputation, among those that its framework can name and its model has; empty
    without any."""
    words = re.findall(r"[a-z_-]+", config.recompute_detail.lower()) if config.recompute.lower() == "selective" else ()
    named = {str((MODULES_IN_PROSE | SPELLINGS).get(word, word)) for word in words}
    named &= {*abilities(stack).modules} & {*available_modules(model)}
    return modules_name(named) if named else ""


def _sequences(config: RunConfig, base: Layout, choices: dict[str, tuple], assumed: list[str]) -> int:
    if config.global_batch:
        if config.global_batch < base.dp:
            raise UnrepresentableError(f"global_batch = {config.global_batch} is less than dp = {base.dp}")
        at_once = base.dp * choices["micro_batch_size"][0] if len(choices["micro_batch_size"]) == 1 else 0
        if not at_once or config.global_batch % at_once == 0 or config.global_batch < at_once:
            return config.global_batch
        rounded = round(config.global_batch / at_once) * at_once
        assumed.append(f"global_batch = {rounded}, of whole micro-batches: {config.global_batch} is none")
        return rounded
    rounds = config.grad_accum or base.pp
    sequences = base.dp * choices["micro_batch_size"][-1] * rounds
    if not (config.micro_batch and config.grad_accum):
        assumed.append(f"global_batch = {sequences}")
    return sequences


def _layouts(base: Layout, choices: dict[str, tuple], model: Model, sequences: int) -> Iterator[Layout]:
    for values in product(*choices.values()):
        named = dict(zip(choices, values, strict=True))
        schedule, chunks = named.pop("pipeline")
        layout = replace(base, **named, schedule=schedule, virtual_stages=chunks)
        if sequences % (layout.dp * layout.micro_batch_size) == 0:
            yield layout


LARGEST_COUNT = RANGES["dp"][1]
"""Largest number of GPUs and ranks: far above any run, as for a user's own layout."""
LARGEST_NUMBER = 2**31 - 1
"""Largest size or batch: the limit of a model's dimensions."""
_COUNTS = ("n_gpus", "nodes", "gpus_per_node", "micro_batch", "dp", "tp", "cp", "pp")
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "vocab", "seq_len", "global_batch", "grad_accum")
_MAY_BE_ZERO = (
    "vpp", "ep", "etp", "experts", "topk", "ffn_hidden", "expert_ffn", "shared_expert_ffn", "dense_layers",
)  # fmt: skip
"""Columns in which some tables write zero for none."""
RECOMPUTE_WORDS = {
    "none": "none", "false": "none", "no": "none", "0": "none", "full": "full", "true": "full", "yes": "full", "1": "full",
    "selective": "selective", "op": "selective", "partial": "selective",
}  # fmt: skip
"""Recomputation mode by the word in the column `recompute`; any other word is priced as selective."""
MODULES_IN_PROSE = {"rmsnorm": "norm", "up-projection": "mla_up_proj", "swiglu": "moe_act", "act": "moe_act"}
"""Names of modules in `recompute_detail`, as papers write them."""


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


def out_of_range(config: RunConfig) -> str:
    """Numbers that no run can have; empty if there are none."""
    limits = dict.fromkeys(_COUNTS, (1, LARGEST_COUNT)) | dict.fromkeys(_SIZES, (1, LARGEST_NUMBER))
    limits |= dict.fromkeys(_MAY_BE_ZERO, (0, LARGEST_NUMBER))
    problems = []
    for name, (low, high) in limits.items():
        value = getattr(config, name)
        if value is not None and value < low:
            problems.append(f"{name} must be at least {low}, found {value}")
        elif value is not None and value > high:
            problems.append(f"{name} must be at most {high:,}, found {_short(value)}")
    return "; ".join(problems)


def read_differently(config: RunConfig, model: Model, layout: Layout) -> Iterator[str]:
    """Cells of the row that are interpreted otherwise than written, or ignored."""
    if (config.ep or 1) > 1 and not model.num_experts:
        yield f"ep = {config.ep} is not read: the model has no experts"
    if (config.vpp or 1) > 1 and layout.pp == 1:
        yield f"vpp = {config.vpp} is not read: there is no pipeline"
    if config.grad_accum and config.micro_batch and config.global_batch:
        rounds = config.global_batch / (layout.dp * config.micro_batch)
        if rounds != config.grad_accum:
            computed = f"global_batch = {config.global_batch} over dp x micro_batch is {rounds:g}"
            yield f"grad_accum = {config.grad_accum} is not read: {computed}"
    if config.recompute and config.recompute.lower() not in RECOMPUTE_WORDS:
        yield f"recompute {config.recompute!r} is read as {layout.recompute}"
    if config.pp_schedule and not re.search(_SCHEDULES, config.pp_schedule.lower()):
        yield f"pp_schedule {config.pp_schedule!r} is read as {layout.schedule}"
    if re.search(_TWICE_THE_ACTIVATIONS, config.pp_schedule.lower()):
        yield f"pp_schedule {config.pp_schedule!r} is read as {layout.schedule}, which holds half as many activations"
    if config.attn_kind and not re.search("mha|mqa|gqa|mla|swa", config.attn_kind.lower()):
        yield f"attn_kind {config.attn_kind!r} is not read: heads and kv_heads say what attention it is"
    if (
        config.offload
        and not (layout.offload_activations or layout.offload_optimizer)
        and config.offload.lower() not in _NOTHING
    ):
        yield f"offload {config.offload!r} is not read: it names neither activations nor state of the optimizer"
    if config.flops_def and config.flops_def not in (*CONVENTIONS, "unstated"):
        yield f"flops_def {config.flops_def!r} is not read: it is none of {', '.join(CONVENTIONS)}"
    if (match := re.fullmatch(r"hsdp\s*-?(\d+)", config.zero_stage.lower())) and layout.shard_size != int(match[1]):
        yield f"zero_stage {config.zero_stage!r} is read as shards of {layout.shard_size}"


_SCHEDULES = "|".join(schedule.pattern for schedule in SCHEDULES.values() if schedule.pattern)
_TWICE_THE_ACTIVATIONS = r"zb[-_ ]*(?:h2|2p)"
"""Zero-bubble schedules without a bubble, in twice the activations of 1F1B (Qi et al. 2023)."""
_NOTHING = ("0", "no", "false", "off")


def _short(value: int) -> str:
    """A number as text, shortened if it has hundreds of digits."""
    return f"{value:,}" if value < 10**15 else f"about 10^{len(str(value)) - 1}"
