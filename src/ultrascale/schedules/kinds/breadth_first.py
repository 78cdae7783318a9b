"""Breadth-first (Lamy-Poirier 2022): all micro-batches run through a rank's first stage, then all through its next, and back.

Idle (p-1)(F+B) of one stage, as interleaved 1F1B, but with the activations of all m micro-batches in all v stages. Its
advantage: a stage's weights are used in one stretch per direction, so that ZeRO 3 could gather them, and reduce gradients, once
a step. The executor does not do so: it gathers block by block in every pass, because gathering a stage at a time takes ZeRO 2's
memory.
"""

from __future__ import annotations

from ultrascale.schedules.actions import Action, backward, forward


def breadth_first(pp: int, num_micro_batches: int, virtual_stages: int = 2) -> list[list[Action]]:
    """Actions of each of `pp` ranks; rank r holds stages r, r + pp, ...: `virtual_stages` of them."""
    return [_rank_actions(range(rank, pp * virtual_stages, pp), range(num_micro_batches)) for rank in range(pp)]


def _rank_actions(stages: range, batches: range) -> list[Action]:
    ahead = [forward(stage, k) for stage in stages for k in batches]
    return ahead + [backward(stage, k) for stage in reversed(stages) for k in batches]
