"""Activation checkpointing (recomputation): the tensors that a block saves for its backward pass, those it recomputes, and the
communication of that. The only place that defines this.

Three modes, of which a block has one (`description.recomputed` names them):

    whole      saves its input; all of it runs again, up to the last operation that saves something
    results    saves the results of some operations, `saved_results`; the others run again, all before its backward pass
    modules    saves what autograd saves except results of `regions`: each is recomputed when its first reader needs it, and
               freed after its last

A region saves its inputs. So a norm costs its input, which the residual stream saves anyway, and an activation function the two
tensors that its own backward pass reads. The trainer implements this in `parallel.activations.regions` and
`parallel.activations.recompute`; `plan` simulates it (`stage_replay`, `block_memory`) and prices it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

from ultrascale.catalogue.stacks.stack import Selective, Stack
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import NARROW, Layout, Precision
from ultrascale.description.recomputed import (
    ELEMENTWISE,
    MODULES,
    SELECTIVE,
    SELECTIVE_MODULES,
    BlockRecompute,
    modules_name,
    parse_mode,
)
from ultrascale.work.fp8_slots import fp8_layers
from ultrascale.work.ops import Op, Shape
from ultrascale.work.work import block_work

EXPERTS = "mlp.experts."
SELECTIVE_LIMIT = 0.15
"""Largest fraction of a block's forward pass that its selective recomputation may take, which is 5 percent of its step.
DeepSeek-V3's published choice (section 3.2.3 of its report: norms, SwiGLU, up-projections of latents) takes 13."""
LEAST_SAVED = 0.02
"""Least fraction of a block's saved bytes: below it recomputing modules is not worthwhile. Norm and activation save 32 percent
of a block of Llama-3 8B in bf16, and 0.01 in fp8."""
NOMINAL_LENGTH = 4096
NOMINAL_FLOPS_PER_SECOND, NOMINAL_BYTES_PER_SECOND = 500e12, 2.5e12
"""Rates by which `selective_modules` estimates time: GEMMs and memory of one H100. Only their ratio matters, and it is fixed,
so that trainer, trace and plan agree on any machine."""

_GATE_AND_UP = ("gate_proj", "up_proj", "gate_up_proj")
_ACTIVATIONS = ("swiglu", "gelu", "silu", "multiply")
_ROUNDED_WITH = {
    "attention_in.quantise": ("norm", "attention_in"), "mlp_in.quantise": ("norm", "mlp_in"),
    "expert_product.quantise": ("moe_act", "mlp.experts"), "product.quantise": ("mlp", ""),
    "shared_product.quantise": ("shared_experts", ""),
}  # fmt: skip
"""Megatron's quantised copies behind a recomputed module, by module and region."""
_AROUND_CORE = ("_repeat", "_swapped", ".swap_back")


class Region(NamedTuple):
    """Operations whose results are freed and recomputed together."""

    module: str
    ops: tuple[Op, ...]
    """Operations that run again, in order."""
    reads: tuple[str, ...]
    """Activations saved as its inputs."""
    drops: frozenset[str]
    """Results that a backward pass reads, but that are not saved."""
    hidden: frozenset[str]
    """Results that no operation outside reads."""

    @property
    def end(self) -> str:
        """Name of its last operation."""
        return self.ops[-1].name


@lru_cache(maxsize=256)
def available_modules(model: Model) -> tuple[str, ...]:
    """Modules that some block of `model` has."""
    dense = any(not model.is_moe(layer) for layer in range(model.num_hidden_layers))
    shared = bool(model.num_experts and model.shared_expert_intermediate_size)
    has = {
        "norm": bool(model.block_norms.before_mlp), "core_attn": True, "mla_up_proj": model.latent_attention,
        "mlp": dense, "mlp_act": dense or shared, "moe": model.num_experts > 0, "moe_act": model.num_experts > 0,
        "moe_permute": model.num_experts > 0, "shared_experts": shared,
    }  # fmt: skip
    return tuple(name for name in MODULES if has[name])


def resolved(recompute: BlockRecompute | None, model: Model, layer: int, parallelism: Layout | Shape) -> BlockRecompute | None:
    """Recomputation with the modules that `model` selects for block `layer`, if left to it. In fp8, if those save next to
    nothing, the mode that saves only results of GEMMs and attention: fp8 GEMMs save their inputs in quantised form."""
    if recompute is None or SELECTIVE_MODULES not in recompute.modules:
        return recompute
    layer = min(layer, model.num_hidden_layers - 1)
    block = model, model.is_moe(layer), dispatches_tokens(parallelism)
    rounds = parallelism.precision in NARROW and (isinstance(parallelism, Shape) or layer in fp8_layers(model, parallelism))
    if rounds and not _saves_rounded(*block, parallelism.precision):
        return ELEMENTWISE
    return BlockRecompute(False, modules=frozenset(selective_modules(*block)))


@lru_cache(maxsize=256)
def _saves_rounded(model: Model, of_experts: bool, tokens_travel: bool, precision: Precision) -> bool:
    """True if recomputing `selective_modules` frees a worthwhile fraction of a block's saved bytes in this precision."""
    layer = next(layer for layer in range(model.num_hidden_layers) if model.is_moe(layer) == of_experts)
    ops = block_work(model, layer, Shape(1, min(NOMINAL_LENGTH, model.max_position_embeddings), precision, device="cuda"))
    sizes = {activation.name: activation.num_bytes for op in ops for activation in op.makes}
    saved = sum(sizes.get(name, 0) for name in {name for op in ops for name in op.saves})
    chosen = regions(ops, selective_modules(model, of_experts, tokens_travel))
    return saved_bytes(ops, chosen) >= LEAST_SAVED * saved


def dispatches_tokens(parallelism: Layout | Shape) -> bool:
    """True if tokens are sent to experts on other ranks."""
    return parallelism.ep * parallelism.expert_tp > 1


def recompute_of_mode(mode: str, model: Model, layer: int, shape: Shape, stack: Stack) -> BlockRecompute | None:
    """Recomputation of block `layer` under `mode`; "selective" is as the stack defines it."""
    return recompute_in_stack(stack, parse_mode(mode), model, layer, shape)


def recompute_in_stack(
    stack: Stack, recompute: BlockRecompute | None, model: Model, layer: int, parallelism: Layout | Shape
) -> BlockRecompute | None:
    """Recomputation of the block in this stack, from the layout's setting."""
    if stack.selective == "modules":
        return resolved(recompute, model, layer, parallelism)
    if recompute == SELECTIVE:
        recompute = BlockRecompute(False, modules=frozenset({"core_attn"})) if stack.selective == "attention" else ELEMENTWISE
    return recompute._replace(as_megatron=True) if recompute is not None and recompute.modules else recompute


@lru_cache(maxsize=256)
def selective_modules(model: Model, of_experts: bool, tokens_travel: bool = False) -> tuple[str, ...]:
    """Modules that selective recomputation recomputes in blocks with, or without, experts. Candidates send nothing on a single
    tp rank; they are taken in order of bytes saved per second of recomputation, as long as together they stay below
    `SELECTIVE_LIMIT` of the block's forward pass. Attention's core is never one: its cost grows with the sequence length, on
    which this choice must not depend."""
    layer = next(layer for layer in range(model.num_hidden_layers) if model.is_moe(layer) == of_experts)
    shape = Shape(1, min(NOMINAL_LENGTH, model.max_position_embeddings), "bf16", device="cuda")
    ops = block_work(model, layer, shape)
    limit = SELECTIVE_LIMIT * _nominal_seconds(ops)
    never = {"moe", "core_attn", "moe_permute"} if tokens_travel else {"moe", "core_attn"}
    left, chosen = set(available_modules(model)) - never, frozenset[str]()
    while left:
        saved, seconds = _gain(ops, chosen)
        gains = {name: _gain(ops, chosen | {name}) for name in left}
        worth = [
            ((more - saved) / (later - seconds), name)
            for name, (more, later) in gains.items()
            if more > saved and later <= limit
        ]
        if not worth:
            break
        chosen |= {max(worth)[1]}
        left -= chosen
    return tuple(name for name in MODULES if name in chosen)


def _gain(ops: tuple[Op, ...], modules: frozenset[str]) -> tuple[int, float]:
    """Bytes saved, and seconds of recomputation."""
    chosen = regions(ops, modules)
    return saved_bytes(ops, chosen), _nominal_seconds(op for region in chosen for op in region.ops)


def _nominal_seconds(ops: Iterable[Op]) -> float:
    return sum(
        op.flops * (op.scores.share if op.scores is not None else 1.0) / NOMINAL_FLOPS_PER_SECOND
        + op.moved_bytes / NOMINAL_BYTES_PER_SECOND
        for op in ops
    )


def selective_words(model: Model, parallelism: Layout | Shape) -> str:
    """Modules that `selective` recomputes, in words, by block where they differ."""
    kinds = {model.is_moe(layer): layer for layer in range(model.num_hidden_layers // 2, -1, -1)}
    kinds |= {model.is_moe(layer): layer for layer in range(model.num_hidden_layers) if model.is_moe(layer) not in kinds}
    chosen = {kind: resolved(SELECTIVE, model, layer, parallelism) for kind, layer in kinds.items()}
    words = {kind: modules_name(mode.modules) if mode is not None and mode.modules else "element-wise work"
            for kind, mode in chosen.items()}  # fmt: skip
    if len(set(words.values())) == 1:
        return next(iter(words.values()))
    return f"{words[False]} in dense blocks, {words[True]} in those of experts"


# Modules


def saved_bytes(ops: Sequence[Op], chosen: Sequence[Region]) -> int:
    """Bytes of a block's activations that these regions free."""
    sizes = {activation.name: activation.num_bytes for op in ops for activation in op.makes}
    dropped = {name for region in chosen for name in region.drops}
    saved = {name for op in ops for name in op.saves}
    new = {name for region in chosen for name in region.reads} - saved - dropped
    return sum(sizes.get(name, 0) for name in dropped) - sum(sizes.get(name, 0) for name in new)


def regions_of(ops: tuple[Op, ...], recompute: BlockRecompute | None) -> tuple[Region, ...]:
    """Regions of a block under this recomputation; empty unless it names modules."""
    return () if recompute is None else regions(ops, recompute.modules, as_megatron=recompute.as_megatron)


def regions(ops: tuple[Op, ...], modules: Collection[str], *, as_megatron: bool = False) -> tuple[Region, ...]:
    """Regions of a block that are recomputed if `modules` are named; `as_megatron` as in `BlockRecompute`."""
    return _regions(ops, frozenset(modules), as_megatron) if modules else ()


@lru_cache(maxsize=8192)
def _regions(ops: tuple[Op, ...], modules: frozenset[str], as_megatron: bool) -> tuple[Region, ...]:
    places = {op.name: index for index, op in enumerate(ops)}
    after = places["attention_residual"]
    is_moe, is_alone = "mlp.choose" in places, "mlp.whole" not in places
    groups: dict[tuple[str, str], list[Op]] = {}
    for index, op in enumerate(ops):
        around = as_megatron and op.kind != "attention" and op.name.endswith(_AROUND_CORE)
        place = None if around else _place(op, modules, is_moe=is_moe, in_mlp=index > after)
        if place is None and as_megatron and (rounded := _ROUNDED_WITH.get(op.name)) is not None and rounded[0] in modules:
            place = rounded
        if place is not None:
            groups.setdefault(place, []).append(op)
        elif "moe_permute" in modules and op.name == "mlp.permute" and op.makes[0].name == "expert_in" and is_alone:
            groups["moe_permute", ""] = [_without_order(op)]
    parts = [_region(module, tuple(members), ops, as_megatron) for (module, _), members in groups.items()]
    if as_megatron:  # a recomputed module does not save the result of a norm that it reads
        read = {name for region in parts for name in region.reads}
        results = [{activation.name for op in region.ops for activation in op.makes} for region in parts]
        parts = [region._replace(drops=region.drops | names & read) for region, names in zip(parts, results, strict=True)]
    return tuple(part for part in parts if part.drops and (part.module != "norm" or any(op.kind == "norm" for op in part.ops)))


def _place(op: Op, modules: Collection[str], *, is_moe: bool, in_mlp: bool) -> tuple[str, str] | None:
    """Module with which `op` is recomputed, the outermost of those named, and its region in it."""
    owner, _, leaf = op.name.rpartition(".")
    of_input = op.name.startswith("mlp_in")  # gathered, or quantised
    if "moe" in modules and is_moe and in_mlp and (op.name.startswith("mlp.") or leaf == "quantise" or of_input):
        return "moe", ""
    wide = of_input or leaf in _GATE_AND_UP or leaf in _ACTIVATIONS
    if wide and in_mlp and (of_input or owner in ("mlp", "mlp.shared_experts")):
        module = "shared_experts" if is_moe else "mlp"
        if module in modules:
            return module, ""
    if leaf in _ACTIVATIONS and in_mlp and len(op.makes) == 1:  # else it saves its own inputs for recomputation
        module = "moe_act" if owner == "mlp.experts" else "mlp_act"
        return (module, owner) if module in modules else None
    if "core_attn" in modules and (op.kind == "attention" or (owner == "self_attn" and op.name.endswith(_AROUND_CORE))):
        return "core_attn", ""
    if "norm" in modules and op.kind == "norm" and op.makes[0].name in ("attention_in", "mlp_in"):
        return "norm", op.makes[0].name
    if "mla_up_proj" in modules and (half := _half_of_latents(op)):
        return "mla_up_proj", half
    return None


def _without_order(op: Op) -> Op:
    """Reordering of rows, with the order saved."""
    rows, order = op.makes
    return replace(op, makes=(rows,), reads=(*op.reads, order.name), saves=())


def _half_of_latents(op: Op) -> str:
    if op.name == "self_attn.q_b_proj" or op.name.startswith("q_narrow."):
        return "queries"
    in_keys = op.name in ("self_attn.kv_b_proj", "self_attn.k_join", "self_attn.v_copy") and "qkv" not in op.reads
    return "keys" if in_keys or op.name.startswith("kv_narrow.") else ""


def _region(module: str, members: tuple[Op, ...], ops: tuple[Op, ...], as_megatron: bool) -> Region:
    results = {activation.name for op in members for activation in op.makes}
    names = {op.name for op in members}
    outside = {name for op in ops if op.name not in names for name in op.saves}
    read = {name for op in members for name in op.saves}
    drops = results & (outside | read)
    if module == "core_attn" and as_megatron:
        drops -= outside
    if module == "mla_up_proj" and members[0].name != "self_attn.kv_b_proj":
        members, drops = _with_rotary(members, ops, drops)
        results = {activation.name for op in members for activation in op.makes}
    wanted = drops & outside
    # Experts' results are all-gathered over tp within their module, and again when it is recomputed.
    runs = [op.saves or op.name == "mlp.whole" or any(activation.name in wanted for activation in op.makes) for op in members]
    last = max((index for index, is_run in enumerate(runs) if is_run), default=-1)
    run = members[: last + 1]
    reads = dict.fromkeys(name for op in run for name in (*op.reads, *op.saves) if name not in results)
    names = {op.name for op in members}
    hidden = results - outside - {name for op in ops if op.name not in names for name in op.reads}
    return Region(module, run, tuple(reads), frozenset(drops), frozenset(hidden))


def _with_rotary(members: tuple[Op, ...], ops: tuple[Op, ...], drops: set[str]) -> tuple[tuple[Op, ...], set[str]]:
    """Adds RoPE of latent attention's queries to their region."""
    if not any(op.name == "self_attn.q_b_proj" for op in members):
        return members, drops
    turned = [op for op in ops if op.name == "self_attn.q_rotary"]
    return (*members, *turned), drops | {activation.name for op in turned for activation in op.makes}


# Results


def saved_results(ops: tuple[Op, ...], recompute: BlockRecompute, selective: Selective) -> frozenset[str]:
    """Names of the activations saved by a block that is recomputed except for results of some operations. `selective`: the
    stack's definition, if `recompute` names no kinds."""
    kept = [op for op in ops if op.is_saved(recompute.kinds)]
    if selective == "alternate-products" and not recompute.kinds:
        # Only aten.mm: grouped GEMMs of experts are another operator, and not saved.
        products = [op for op in kept if op.kind == "matmul" and not op.name.startswith(EXPERTS)]
        kept = [op for op in kept if op.kind != "matmul" or (op in products and products.index(op) % 2 == 0)]
    if selective == "wide-products" and not recompute.kinds:
        kept = [op for op in kept if op.kind == "matmul" and op.name.startswith("self_attn.")]
    return frozenset(activation.name for op in kept for activation in op.makes)


# What runs again


def reruns_last(ops: Iterable[Op], *, tp: int, splits: bool) -> bool:
    """True if, when a whole block is recomputed, its last operation that saves something runs too. torch stops recomputation
    before a plain GEMM, which saves only its input, but after a custom operation: over tp (with its sum), of experts, in fp8,
    and where the schedule `splits` backward passes, which makes GEMMs custom operations."""
    return splits or tp > 1 or any(op.name.startswith(EXPERTS) or op.in_fp8 for op in ops)


def recomputed_ops(recompute: BlockRecompute | None, ops: tuple[Op, ...], *, reruns_last: bool) -> list[Op]:
    """Operations of a block that run again. `reruns_last`: from the function of that name."""
    if recompute is None:
        return []
    if recompute.modules:
        assert recompute != SELECTIVE, "the model has not chosen: `resolved`"
        return [op for region in regions_of(ops, recompute) for op in region.ops]
    last = max(index for index, op in enumerate(ops) if op.saves)
    run = ops[: last + (reruns_last or bool(ops[last].inside))]
    if recompute.whole:
        return list(run)
    sums = {name for op in ops if op.is_saved(recompute.kinds) for name in op.reads}
    return [op for op in run if not op.is_saved(recompute.kinds) and not (op.makes_partial_sums and op.makes[0].name in sums)]


def resent_ops(recompute: BlockRecompute | None, ops: tuple[Op, ...]) -> list[Op]:
    """Operations whose communication recomputation repeats: for a whole block up to the last that saves something, with its sum
    if they are one operation; else those whose results are not saved."""
    if recompute is None:
        return []
    if recompute.modules:
        return [op for op in recomputed_ops(recompute, ops, reruns_last=False) if op.collectives]
    last = max(index for index, op in enumerate(ops) if op.saves)
    run = ops[: last + 1 + ops[last].makes_partial_sums]
    if recompute.whole:
        return list(run)
    recomputed = [op for op in run if op.recompute_kind in recompute.kinds]
    read = {name for op in recomputed for name in op.reads}
    return [op for op in run if op in recomputed or op.name == "mlp.expert_gather"
            or op.kind == "router" or any(item.axis == "cp" for item in op.collectives)
            or ((op.kind == "gather" or op.makes_partial_sums) and op.makes[0].name in read)]  # fmt: skip


def adds_bias_apart(op: Op) -> bool:
    """True if a GEMM's bias is added by a separate operation: then a saved result is the GEMM without bias, in addition to the
    sum that the next operation reads. So with experts and in fp8; elsewhere the bias is part of the GEMM."""
    if op.kind != "matmul" or not any(name.endswith(".bias") for name in op.weights):
        return False
    return op.name.startswith(EXPERTS) or op.in_fp8


def saved_bytes_by_kind(
    ops: tuple[Op, ...], recompute: BlockRecompute | None, hidden_bytes: int, selective: Selective
) -> dict[str, int]:
    """Bytes a block holds between forward and backward, by the kind of operation that produced them; `residual` is the stream.
    `selective`: the stack's definition."""
    makers = {activation.name: (op, activation.num_bytes) for op in ops for activation in op.makes}
    saved = dict.fromkeys(name for op in ops for name in op.saves if name in makers)  # a set's order varies by process
    if recompute is not None:
        if recompute.whole:
            saved = {}
        elif recompute.modules:
            chosen = regions_of(ops, recompute)
            dropped = {name for region in chosen for name in region.drops}
            saved |= dict.fromkeys(name for region in chosen for name in region.reads if name in makers)
            saved = {name: None for name in saved if name not in dropped}
        else:
            names = saved_results(ops, recompute, selective)
            saved = dict.fromkeys(activation.name for op in ops for activation in op.makes if activation.name in names)
    by_kind = {"residual": hidden_bytes}
    for name in saved:
        op, num_bytes = makers[name]
        kind = op.kind if name != "hidden_mid" else "residual"
        by_kind[kind] = by_kind.get(kind, 0) + num_bytes
    return by_kind
