"""All forward, all backward (GPipe; Huang et al. 2018): all micro-batches run forward, then all backward.

    rank 0   F0 F1 F2 F3 .  .  B0 B1 B2 B3
    rank 1   .  F0 F1 F2 F3 B0 B1 B2 B3 .

Idle (p-1)(F+B) per rank; the activations of all m micro-batches are in memory at once. 1F1B idles as long and keeps those of p.
"""

from __future__ import annotations

from ultrascale.schedules.actions import Action, backward, forward


def afab(pp: int, num_micro_batches: int) -> list[list[Action]]:
    """Actions of each of `pp` ranks; rank r holds stage r."""
    batches = range(num_micro_batches)
    return [[forward(rank, k) for k in batches] + [backward(rank, k) for k in batches] for rank in range(pp)]
