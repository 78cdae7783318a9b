"""Rules of divisibility: a layout must divide the model's numbers, but not sequence lengths. Problems name sizes that do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem
from ultrascale.description.recomputed import CHOSEN, is_modules, modes_of, modules_name, parse_mode
from ultrascale.description.units import divisors
from ultrascale.work.kept import available_modules

_MOST_NAMED = 8


def cut_problems(model: Model, layout: Layout, *, sequence_length: int | None = None) -> list[Problem]:
    """Every rule that `layout` breaks for `model`, with keys in `layout`. None as sequence length: not judged."""
    found = [*_tensor(model, layout), *_experts(model, layout), *_stages(model, layout), *_recomputed(model, layout)]
    if layout.cp > 1 and layout.cp_grid[1] > 1:
        found += _heads_over_context(model, layout)
    return found + (list(_sequence(layout, sequence_length)) if sequence_length is not None else [])


def _tensor(model: Model, layout: Layout) -> Iterator[Problem]:
    """Whole heads on every rank of tp (or copies of those of keys and values), and equal shares of feed-forward layers."""
    tp, heads, groups = layout.tp, model.num_attention_heads, model.num_key_value_heads
    widths = {"num_attention_heads": heads}
    if not model.num_experts or model.first_k_dense_replace:
        widths["intermediate_size"] = model.intermediate_size
    if model.shared_expert_intermediate_size:
        widths["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    broken = {key: width for key, width in widths.items() if width % tp}
    if not broken and _shares_heads(tp, groups):
        return
    good = [n for n in range(1, heads + 1) if all(width % n == 0 for width in widths.values()) and _shares_heads(n, groups)]
    for key, width in broken.items():
        yield Problem("layout.tp", f"must divide model.{key} = {width}, is {tp}", _choose(good, tp))
    if heads % tp == 0 and not _shares_heads(tp, groups):
        rule = f"must divide model.num_key_value_heads = {groups}, or be a multiple of it (heads are then repeated), is {tp}"
        yield Problem("layout.tp", rule, _choose(good, tp))


def _shares_heads(tp: int, groups: int) -> bool:
    return groups % tp == 0 or tp % groups == 0


def _experts(model: Model, layout: Layout) -> Iterator[Problem]:
    if not model.num_experts:
        for key in ("ep", "expert_tp"):
            if getattr(layout, key) > 1:
                rule = f"cuts experts, but the model has none, is {getattr(layout, key)}"
                yield Problem(f"layout.{key}", rule, "Leave it out, or use tp.")
        return
    for key, field in (("ep", "num_experts"), ("expert_tp", "moe_intermediate_size")):
        ranks, width = getattr(layout, key), getattr(model, field)
        if width % ranks:
            rule = f"must divide model.{field} = {width}, is {ranks}"
            yield Problem(f"layout.{key}", rule, _choose([n for n in divisors(width) if n <= layout.world_size], ranks))


def _stages(model: Model, layout: Layout) -> Iterator[Problem]:
    layers, stages, given = model.num_hidden_layers, layout.num_stages, layout.layers_per_stage
    if layout.pp == 1:
        return
    most = layers + 2 if layout.pp > 1 else layers
    if stages > most:  # embedding and head may be stages of their own, as in Llama 3 405B (section 3.3.2)
        parts = f"{layers} layers, with embedding and head {most} parts"
        rule = f"makes {layout.pp} x {layout.virtual_stages} = {stages} stages, but the model has {parts}"
        fewer = most // layout.virtual_stages
        remedy = f"Use pp = {fewer} or less." if fewer > 1 else f"Use at most {most // layout.pp or 1} virtual_stages."
        yield Problem("layout.pp", rule, remedy)
    elif given is not None and sum(given) != layers:
        rule = f"must sum to model.num_hidden_layers = {layers}, sums to {sum(given)}"
        yield Problem("layout.layers_per_stage", rule, "Change it, or leave it out for an even cut.")


def _recomputed(model: Model, layout: Layout) -> Iterator[Problem]:
    """Every block has a way to recompute it, and there is a layer to be taken in pieces."""
    if layout.mlp_chunks > 1 and model.num_experts and not model.first_k_dense_replace:
        rule = f"is {layout.mlp_chunks}, but the model has no dense feed-forward layer"
        yield Problem("layout.mlp_chunks", rule, "Leave it out: experts see their tokens in pieces already.")
    named = 0
    with suppress(ValueError):  # `Layout.problems` tells it
        named = len(modes_of(layout.recompute_blocks))
        yield from _unknown_modules(model, layout)
    if layout.recompute == "blocks" and named and named != model.num_hidden_layers:
        rule = f"must name a way for each of model.num_hidden_layers = {model.num_hidden_layers} blocks, names {named}"
        yield Problem("layout.recompute_blocks", rule, 'Change it, or let recompute = "auto" choose.')


def _unknown_modules(model: Model, layout: Layout) -> Iterator[Problem]:
    """Modules that are named for recomputation, and are not in the model."""
    there = available_modules(model)
    told = {"recompute_blocks": modes_of(layout.recompute_blocks)}
    if is_modules(layout.recompute):
        told["recompute"] = (layout.recompute,)
    for key, modes in told.items():
        named = {name for mode in modes if (again := parse_mode(mode)) is not None for name in again.modules - {CHOSEN}}
        if missing := modules_name(named - {*there}).split("+") if named - {*there} else []:
            rule = f"names {' and '.join(missing)}, and this model has {', '.join(there)}"
            yield Problem(f"layout.{key}", rule, "Name modules that it has.")


def _heads_over_context(model: Model, layout: Layout) -> Iterator[Problem]:
    """All-to-all gives each rank of cp whole sequences of some heads (Jacobs et al. 2023, DeepSpeed-Ulysses)."""
    heads, rest, swap = model.num_attention_heads, model.num_attention_heads // layout.tp, layout.cp_grid[1]
    if heads % (layout.tp * swap) and heads % layout.tp == 0:
        key = "layout.cp" if swap == layout.cp else "layout.cp_heads"
        rule = f"must divide the {rest} heads of a rank (num_attention_heads / tp) for all-to-all, is {swap}"
        yield Problem(key, rule, f'{_choose(divisors(rest), swap)} Or cp_method = "ring", which cuts no heads.')


def _sequence(layout: Layout, length: int) -> Iterator[Problem]:
    """Pieces may be of uneven length, but each rank needs one."""
    pieces, why = _sequence_pieces(layout)
    if length < pieces:
        key = "layout.cp" if layout.cp > 1 else "layout.tp"
        rule = f"cuts sequences into {pieces} pieces ({why}), but batch.sequence_length = {length}"
        yield Problem(key, rule, f"Use sequences of {pieces} tokens or more, or fewer ranks.")


def _sequence_pieces(layout: Layout) -> tuple[int, str]:
    pieces, why = 1, []
    if layout.cp > 1:
        pieces *= layout.cp
        why.append("cp")
    if layout.tp > 1 and layout.sequence_parallel:
        pieces *= layout.tp
        why.append("tp with sequence_parallel")
    return pieces, ", ".join(why)


def _choose(options: Sequence[int], wrong: int) -> str:
    """The options nearest to what was given, in order."""
    near = sorted(sorted(options, key=lambda n: abs(n - wrong))[:_MOST_NAMED])
    return f"Choose one of {near}."
