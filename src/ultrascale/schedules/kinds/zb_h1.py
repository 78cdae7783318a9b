"""ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"): 1F1B with backward passes split, so that W fills the drain.

    rank 0   F0 F1 .  .  I0 W0 F2 I1 W1 F3 ...
    rank 1   .  F0 I0 F1 I1 W0 F2 I2 W1 ...

Rank r defers W by r micro-batches: every rank then keeps p micro-batches (p-r fully, r only the inputs of W), as many as 1F1B's
first rank, and idles (p-1)(F+I-W), a third of 1F1B's where F = I = W. DeepSeek calls it ZB1P.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.schedules.actions import Action, forward, input_gradient, weight_gradient


def zb_h1(pp: int, num_micro_batches: int, *, ranks: Sequence[int] = ()) -> list[list[Action]]:
    """Actions of each of `pp` ranks, or of some `ranks`; rank r holds stage r."""
    return [_rank_actions(rank, pp, num_micro_batches) for rank in ranks or range(pp)]


def _rank_actions(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    ahead, late = min(pp - 1 - rank, num_micro_batches), min(rank, num_micro_batches)
    actions = [forward(rank, k) for k in range(ahead)]
    for k in range(num_micro_batches):
        if ahead + k < num_micro_batches:
            actions.append(forward(rank, ahead + k))
        actions.append(input_gradient(rank, k))
        if k >= late:
            actions.append(weight_gradient(rank, k - late))
    return actions + [weight_gradient(rank, k) for k in range(num_micro_batches - late, num_micro_batches)]
