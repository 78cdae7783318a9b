"""Pipeline ranks of the stages: of the first and the last, and whether both of these hold the embedding."""

from __future__ import annotations

from functools import cache

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.schedules.build import stages_of_ranks


def shares_embedding(model: Model, layout: Layout) -> bool:
    """True if two pipeline ranks hold the embedding, and must sum its gradient."""
    first, last = ends_of(layout)
    return first != last and bool(model.tie_word_embeddings or model.num_nextn_predict_layers)


def ends_of(layout: Layout) -> tuple[int, int]:
    """The pipeline ranks of the first stage and of the last: a schedule of a file puts them where it likes."""
    ranks = ranks_of_stages(layout)
    return ranks[0], ranks[-1]


@cache
def ranks_of_stages(layout: Layout) -> tuple[int, ...]:
    """The pipeline rank of each stage."""
    if layout.pp == 1:
        return (0,) * layout.num_stages
    held = stages_of_ranks(layout.schedule, layout.pp, layout.virtual_stages)
    return tuple(next(rank for rank, stages in enumerate(held) if stage in stages) for stage in range(layout.num_stages))
