"""What a block computes again in its backward pass, in words: `none`, `full`, `selective`, or `selective+mlp+qkv`.

    selective   what is element-wise: norms, rotary, activation functions; results of products and attention are kept
    +KIND       the products of that kind again too

    qkv         queries, keys and values of the block's input        attention   what queries gather
    output      attention's product back to the stream               mlp         gate and up
    down        the product back to the stream from the MLP          experts     gate and up of routed experts

What is not named stays: choices of experts, and what came over the network between them. Without tp nobody needs the result of
`down`, and torch stops before it would make it again.
A whole model is told in its order, equal blocks together: ["selective+mlp x 20", "none x 12"].
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

KINDS = ("qkv", "attention", "output", "mlp", "down", "experts")


class Again(NamedTuple):
    """What one block computes again; a block that computes nothing again has none."""

    whole: bool
    kinds: frozenset[str] = frozenset()
    """Of `KINDS`. Read only if not `whole`."""


SELECTIVE, WHOLE = Again(False), Again(True)
_PLAIN: dict[str, Again | None] = {"none": None, "selective": SELECTIVE, "full": WHOLE}


@lru_cache(maxsize=1024)
def parse_mode(text: str) -> Again | None:
    """One block's. Raises ValueError, saying what is wrong."""
    first, *kinds = text.split("+")
    if first not in _PLAIN:
        raise ValueError(f"is {first!r} where none, selective or full must stand")
    if kinds and first != "selective":
        raise ValueError(f"adds +{kinds[0]} to {first!r}, and only selective can be added to")
    for kind in kinds:
        if kind not in KINDS:
            raise ValueError(f"names {kind!r}, and there are {', '.join(KINDS)}")
    return Again(False, frozenset(kinds)) if kinds else _PLAIN[first]


def mode_name(kinds: Iterable[str]) -> str:
    """`selective` with these kinds, always in the same order."""
    named = set(kinds)
    return "+".join(["selective", *(kind for kind in KINDS if kind in named)])


@lru_cache(maxsize=256)
def modes_of(blocks: tuple[str, ...]) -> tuple[str, ...]:
    """One mode per block, of texts such as `selective+mlp x 20` and `none`. Raises ValueError, saying what is wrong."""
    found: list[str] = []
    for text in blocks:
        mode, times, count = (part.strip() for part in text.partition(" x "))
        if times and not (count.isdecimal() and int(count)):
            raise ValueError(f"has {text!r}, and after x a number of blocks must stand")
        parse_mode(mode)
        found += [mode] * (int(count) if times else 1)
    return tuple(found)


def blocks_text(modes: Sequence[str]) -> tuple[str, ...]:
    """The reverse of `modes_of`: equal neighbours together."""
    counted = ((mode, len(list(same))) for mode, same in groupby(modes))
    return tuple(mode if count == 1 else f"{mode} x {count}" for mode, count in counted)
