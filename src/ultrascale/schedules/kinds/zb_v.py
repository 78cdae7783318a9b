"""ZB-V (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory", and section 6 of Qi et al. 2023): two stages per rank,
in a V.

rank      0  1  2  3        Rank r holds stages r and 2p-1-r: the loss is on rank 0, whose backward passes start at once,
stages    0  1  2  3        and every rank's memory is the same: 2p stages' activations, as on 1F1B's first rank.
          7  6  5  4        No idle time where F = I = W; otherwise some, because the order assumes equal times.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.schedules.actions import Action, only_micro_batches
from ultrascale.schedules.kinds.streams import Streams


def zb_v(pp: int, num_micro_batches: int, *, ranks: Sequence[int] = ()) -> list[list[Action]]:
    """Actions of each of `pp` ranks, or of some `ranks`; rank r holds stages r and 2 pp - 1 - r.

    Fewer than 2 pp - 1 micro-batches run as the first ones of a schedule of 2 pp - 1.
    """
    enough = max(2 * pp - 1, num_micro_batches)
    return [only_micro_batches(_rank_actions(rank, pp, enough), num_micro_batches) for rank in ranks or range(pp)]


def _rank_actions(rank: int, pp: int, count: int) -> list[Action]:
    streams = Streams(lambda k: (rank, k), lambda k: (2 * pp - 1 - rank, k))
    streams.add("F0", 2 * (pp - rank) - 1)
    streams.add("F1 F0", rank)
    streams.add("F1 I1 W1", pp - rank)
    streams.add("F0 I0 W0 F1 I1 W1", count - (2 * pp - 1) + rank)
    streams.add("I0 W0 F1 I1 W1", pp - 1 - rank)
    streams.add("I0 I1", rank)
    streams.add("I0 W0", pp - rank)
    streams.add("W1", rank)
    streams.add("W0", rank)
    return streams.actions
