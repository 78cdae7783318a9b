"""Interleaved 1F1B (Narayanan et al. 2021, section 2.2): rank r holds the v stages r, r+p, r+2p, ...

A round of about p micro-batches passes through a rank's first stage, then through its second, and so on. Filling and draining
the pipeline then takes passes of a stage that is v times smaller:

    idle (p-1)(F+B) of one stage, 1/v of 1F1B's;  traffic times v;  rank r keeps (v-1)p + 2(p-r) - 1 stages' activations

Megatron requires that p divide m, torch that m // p do. Here rounds of p or more share any m evenly, larger ones first: a round
smaller than p would leave every rank idle for (v-1)(p - m mod p) stage passes; one larger by k keeps (v-1)k more activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ultrascale.schedules.actions import Action, backward, forward
from ultrascale.schedules.kinds.one_f_one_b import alternate


def interleaved(pp: int, num_micro_batches: int, virtual_stages: int = 2, *, ranks: Sequence[int] = ()) -> list[list[Action]]:
    """Actions of each of `pp` ranks, or of some `ranks`; rank r holds stages r, r + pp, ...: `virtual_stages` of them."""
    return [_rank_actions(rank, pp, rounds(pp, num_micro_batches), virtual_stages) for rank in ranks or range(pp)]


def rounds(pp: int, num_micro_batches: int) -> list[range]:
    """Micro-batches that pass through a rank's stages together: rounds of `pp` or a few more, or all if there are fewer."""
    count = max(1, num_micro_batches // pp)
    size, larger = divmod(num_micro_batches, count)
    starts = [number * size + min(number, larger) for number in range(count + 1)]
    return [range(start, end) for start, end in pairwise(starts)]


def _rank_actions(rank: int, pp: int, groups: list[range], virtual_stages: int) -> list[Action]:
    stages = range(rank, pp * virtual_stages, pp)
    forwards = [forward(stage, k) for group in groups for stage in stages for k in group]
    backwards = [backward(stage, k) for group in groups for stage in reversed(stages) for k in group]
    return alternate(forwards, backwards, ahead=(virtual_stages - 1) * len(groups[0]) + 2 * (pp - 1 - rank))
