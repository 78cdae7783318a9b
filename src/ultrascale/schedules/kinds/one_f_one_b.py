"""One forward, one backward (PipeDream-flush, Narayanan et al. 2021): a micro-batch's backward pass runs as soon as it can.

    rank 0   F0 F1 .  .  B0 F2 B1 F3 B2 .  B3
    rank 1   .  F0 B0 F1 B1 F2 B2 F3 B3 .  .

Idle (p-1)(F+B), as all-forward-all-backward, but rank r keeps the activations of only p-r micro-batches.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.schedules.actions import Action, backward, forward


def one_f_one_b(pp: int, num_micro_batches: int, *, ranks: Sequence[int] = ()) -> list[list[Action]]:
    """Actions of each of `pp` ranks, or of some `ranks`; rank r holds stage r."""
    batches = range(num_micro_batches)
    return [
        alternate([forward(rank, k) for k in batches], [backward(rank, k) for k in batches], ahead=pp - 1 - rank)
        for rank in ranks or range(pp)
    ]


def alternate(forwards: list[Action], backwards: list[Action], *, ahead: int) -> list[Action]:
    """Returns `ahead` forwards, then a forward and a backward in turn, then the remaining backwards."""
    ahead = min(ahead, len(forwards))
    actions = forwards[:ahead]
    for pair in zip(forwards[ahead:], backwards, strict=False):
        actions += pair
    return actions + backwards[len(forwards) - ahead :]
