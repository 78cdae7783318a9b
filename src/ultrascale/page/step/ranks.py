"""Memory by category at the peak, on each rank of the pipeline.

Each is simulated (`plan.memory.replay`), for any framework.
"""

from __future__ import annotations

import numpy as np

from ultrascale.description.problems import SpecError
from ultrascale.description.schedules import SCHEDULES
from ultrascale.plan.memory.replay import plan_memory
from ultrascale.plan.memory.stage_player import RecordedPasses
from ultrascale.plan.search.replayed import categories_of
from ultrascale.plan.time.price import Prediction

MOST_REPLAYED = 16
"""Most simulated ranks of a pipeline; of a longer one this many, evenly spaced."""


def rank_memories(prediction: Prediction) -> list[tuple[str, dict[str, float]]]:
    """Name and bytes by category of each simulated rank of the pipeline; empty without a pipeline."""
    if prediction.layout.pp == 1 or prediction.layout.schedule not in SCHEDULES:
        return []
    try:
        return _replayed(prediction)
    except SpecError:  # a batch that this schedule cannot split
        return []


def _replayed(prediction: Prediction) -> list[tuple[str, dict[str, float]]]:
    layout = prediction.layout
    in_stage = layout.world_size // layout.pp
    passes = RecordedPasses()
    shown = np.unique(np.linspace(0, layout.pp - 1, min(layout.pp, MOST_REPLAYED)).round().astype(int)).tolist()
    plans = {
        rank: plan_memory(layout=layout, rank=rank * in_stage, passes=passes, **prediction.workload.replayed)
        for rank in shown
    }  # fmt: skip
    return [(f"rank {rank}", categories_of(plan)) for rank, plan in plans.items()]
