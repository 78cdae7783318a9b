"""Pipeline ranks of the first and the last stage, whether both hold the embedding, and mirrors: ranks that hold the same
stages, each for a part of the micro-batches."""

from __future__ import annotations

from functools import cache

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.schedules.build import stages_of_ranks


def shares_embedding(model: Model, layout: Layout) -> bool:
    """True if two pipeline ranks hold the embedding, and must sum its gradient."""
    first, last = first_and_last_rank(layout)
    apart = last not in (first, mirror_of(layout, first))  # mirrors hold the stages of both
    return apart and bool(model.tie_word_embeddings or model.num_nextn_predict_layers)


def mirror_of(layout: Layout, rank: int) -> int:
    """The other pipeline rank that holds the stages of pipeline rank `rank`; `rank` itself if none does."""
    return _mirrors(layout)[rank]


def ranks_sharing_embedding(layout: Layout, rank: int) -> tuple[int, ...]:
    """Pipeline ranks at the other end with which `rank` sums the gradient of an embedding that both ends hold; empty if `rank`
    is at neither end. Mirrors pair with mirrors, the lower with the lower; a rank without one pairs with both of the other end.
    """
    ends = [sorted({end, mirror_of(layout, end)}) for end in first_and_last_rank(layout)]
    for this_end, other_end in (ends, reversed(ends)):
        if rank in this_end:
            return tuple(other_end) if len(this_end) == 1 else (other_end[this_end.index(rank) % len(other_end)],)
    return ()


def has_mirrors(layout: Layout) -> bool:
    """True if some stages are on two pipeline ranks."""
    return any(mirror_of(layout, rank) != rank for rank in range(layout.pp))


def first_and_last_rank(layout: Layout) -> tuple[int, int]:
    """Pipeline ranks of the first and the last stage; a schedule from a file may place them anywhere."""
    ranks = ranks_of_stages(layout)
    return ranks[0], ranks[-1]


@cache
def ranks_of_stages(layout: Layout) -> tuple[int, ...]:
    """Pipeline rank of each stage, the lower of two."""
    if layout.pp == 1:
        return (0,) * layout.num_stages
    held_stages = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    return tuple(next(rank for rank, stages in enumerate(held_stages) if stage in stages) for stage in range(layout.num_stages))


@cache
def _mirrors(layout: Layout) -> tuple[int, ...]:
    if layout.pp == 1:
        return (0,)
    held_stages = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    return tuple(
        next((r for r in range(layout.pp) if r != rank and held_stages[r] == held_stages[rank]), rank)
        for rank in range(layout.pp)
    )
