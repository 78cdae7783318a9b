"""Recomputation of a block's activations in its backward pass, in words. `work.recompute` has what stays, and the price.

    none, full   nothing; the whole block from its input
    MODULES      named parts, joined by +, such as `norm+moe_act`: their results are freed, and recomputed when needed
    selective    the modules that save most a second, chosen for the model at hand (`work.recompute.selective_modules`)

The names are those of Megatron-Core's --recompute-modules, and two (*) for what that has no name for:

    norm            norms before the halves of the block              mlp     gate and up of a dense layer, and what is between
    mlp_act *       activation functions of dense and shared layers   moe     the whole layer of experts, its messages too
    moe_act         those of routed experts                           shared_experts   gate and up of the shared expert
    moe_permute *   rows of tokens by expert, of experts that are     core_attn        what queries gather
                    all on their tokens' rank                         mla_up_proj      queries, keys and values of latents

The older way names what is kept, operation by operation: all results of products and attention but those of some kinds.

    selective+KIND   qkv         queries, keys and values of the block's input   attention   what queries gather
                     output      attention's product back to the stream          mlp         gate and up
                     down        the product back to the stream from the MLP     experts     gate and up of routed experts

What is not named stays there: choices of experts, and what came over the network between them. Without tp nobody needs the
result of `down`, and torch stops before it would make it again.
A whole model is listed in order, equal blocks together: ["norm+moe_act x 20", "none x 12"].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

KINDS = ("qkv", "attention", "output", "mlp", "down", "experts")
MODULES = {
    "norm": "norms",
    "mlp_act": "activation functions of dense layers",
    "moe_act": "activation functions of experts",
    "moe_permute": "rows of tokens by expert",
    "shared_experts": "gate and up of the shared expert",
    "core_attn": "attention's core",
    "mla_up_proj": "queries, keys and values of latents",
    "mlp": "gate and up",
    "moe": "layers of experts",
}
"""By name, what is made again, in words."""
SPELLINGS = {"layernorm": "norm"}
"""Megatron-Core's names for modules of ours."""
SELECTIVE_MODULES = "selective"
"""In the place of modules that the model decides."""


class BlockRecompute(NamedTuple):
    """Recomputation of one block; None stands for a block without any. Neither `whole` nor by modules: every result is
    recomputed but those of GEMMs and attention."""

    whole: bool
    kinds: frozenset[str] = frozenset()
    """Names from `KINDS` of results that are recomputed too. Read only if not `whole` and without modules."""
    modules: frozenset[str] = frozenset()
    """Names from `MODULES`, or `SELECTIVE_MODULES` alone."""
    as_megatron: bool = False
    """True for modules as Megatron has them: attention's core is its kernel alone, and what that made stays, for the projection
    behind it reads it; what a product reads of a module is rounded once more with it. Ours: what swaps or repeats heads around
    the core is of it, its result goes too, and what products read is kept as they rounded it."""


ELEMENTWISE, SELECTIVE, FULL = (
    BlockRecompute(False),
    BlockRecompute(False, modules=frozenset({SELECTIVE_MODULES})),
    BlockRecompute(True),
)
_PLAIN: dict[str, BlockRecompute | None] = {"none": None, "selective": SELECTIVE, "full": FULL}


@lru_cache(maxsize=1024)
def parse_mode(text: str) -> BlockRecompute | None:
    """One block's. Raises ValueError, saying what is wrong."""
    first, *kinds = text.split("+")
    first = SPELLINGS.get(first, first)
    if first in MODULES:
        return BlockRecompute(False, modules=frozenset(map(_module, (first, *kinds))))
    if first not in _PLAIN:
        raise ValueError(f"has {first!r}, which is neither none, selective, full nor a module of a block")
    if kinds and first != "selective":
        raise ValueError(f"adds +{kinds[0]} to {first!r}, and only selective can be added to")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"names {kind!r}, and there are {', '.join(KINDS)}")
    return BlockRecompute(False, frozenset(kinds)) if kinds else _PLAIN[first]


def _module(name: str) -> str:
    known = SPELLINGS.get(name, name)
    if known not in MODULES:
        raise ValueError(f"names {name!r}, and there are {', '.join(MODULES)}")
    return known


def is_modules(text: str) -> bool:
    """True if `text` names modules."""
    return SPELLINGS.get(text.partition("+")[0], text.partition("+")[0]) in MODULES


def megatron_modules(text: str) -> list[str]:
    """Names of the modules of `text` for Megatron-Core's --recompute-modules."""
    back = {ours: theirs for theirs, ours in SPELLINGS.items()}
    return [back.get(name, name) for name in modules_name(modules_named(text)).split("+")]


def modules_named(text: str) -> frozenset[str]:
    """The modules of `text`, which names some."""
    return (parse_mode(text) or ELEMENTWISE).modules


def mode_name(kinds: Iterable[str]) -> str:
    """`selective` with these kinds, always in the same order."""
    named = set(kinds)
    return "+".join(["selective", *(kind for kind in KINDS if kind in named)])


def modules_name(modules: Iterable[str]) -> str:
    """These modules joined, always in the same order; `none` without any."""
    named = set(modules)
    return "+".join(name for name in MODULES if name in named) or "none"


@lru_cache(maxsize=256)
def modes_of(blocks: tuple[str, ...]) -> tuple[str, ...]:
    """One mode per block, of texts such as `selective+mlp x 20` and `none`. Raises ValueError, saying what is wrong."""
    modes: list[str] = []
    for text in blocks:
        mode, times, count = (part.strip() for part in text.partition(" x "))
        if times and not (count.isdecimal() and int(count)):
            raise ValueError(f"has {text!r}, and after x a number of blocks must stand")
        parse_mode(mode)
        modes += [mode] * (int(count) if times else 1)
    return tuple(modes)


def blocks_text(modes: Sequence[str]) -> tuple[str, ...]:
    """The reverse of `modes_of`: equal neighbours together."""
    counted = ((mode, len(list(same))) for mode, same in groupby(modes))
    return tuple(mode if count == 1 else f"{mode} x {count}" for mode, count in counted)
