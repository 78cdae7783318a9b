"""DualPipe (DeepSeek-V3 2024, section 3.2.1): micro-batches enter from both ends at once; forwards overlap with backwards.

    rank         0  1  2  3      Rank r holds stage r for the first half of the micro-batches and stage p-1-r for the second:
    first half   0  1  2  3      two copies of all weights, gradients summed over both. One half's forward passes overlap with
    second half  3  2  1  0      the other's backward passes, so that each hides the other's all-to-alls.

Idle (p/2-1)(F&B + B - 3W) per rank, with F, B, W of one stage and F&B of an overlapped pair; p + 1 micro-batches' activations.
It is DualPipeV unfolded: DualPipeV needs no second copy. Orders after github.com/deepseek-ai/DualPipe (MIT), dualpipe.py.
"""

from __future__ import annotations

from ultrascale.schedules.actions import Action, only_micro_batches
from ultrascale.schedules.kinds.dualpipe_v import two_streams


def dualpipe(pp: int, num_micro_batches: int) -> list[list[Action]]:
    """Actions of each of `pp` ranks, an even number; rank r holds stages r and pp - 1 - r.

    The first half of the micro-batches, rounded up, enters at rank 0. Fewer than 2 pp micro-batches run as the first ones of a
    schedule of 2 pp.
    """
    assert pp % 2 == 0, pp
    return [_rank_actions(rank, pp, num_micro_batches) for rank in range(pp)]


def _rank_actions(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    half = (num_micro_batches + 1) // 2
    position = min(rank, pp - 1 - rank)
    second_is_near = int(rank != position)
    # Numbering during construction: the first half is 0, 2, 4, ... and the second 1, 3, 5, ...
    actions = two_streams(
        position, pp // 2, max(pp, half),
        near=lambda k: (position, 2 * k + second_is_near),
        far=lambda k: (pp - 1 - position, 2 * k + 1 - second_is_near),
    )  # fmt: skip
    return [_renumbered(action, half) for action in only_micro_batches(actions, num_micro_batches)]


def _renumbered(action: Action, half: int) -> Action:
    """The action and its overlapped one, renumbered: even numbers become the first `half` micro-batches, odd ones the rest."""
    turn, odd = divmod(action.micro_batch, 2)
    overlapped_with = None if action.overlapped_with is None else _renumbered(action.overlapped_with, half)
    return action._replace(micro_batch=turn + half * odd, overlapped_with=overlapped_with)
