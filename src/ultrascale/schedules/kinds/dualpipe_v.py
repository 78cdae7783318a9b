"""DualPipeV (DeepSeek 2025; "cut-in-half" DualPipe): two stages per rank in a V; forwards overlap with backwards.

Rank r holds stages r and 2p-1-r, as in ZB-V. In the steady state every forward runs together with the backward of another
micro-batch: expert parallelism's all-to-alls of one overlap with the GEMMs of the other. At the start and the end backwards are
split (I, W), so that W fills idle time.

Idle (p-1)(F&B + B - 3W) per rank, with F, B, W of one stage and F&B of an overlapped pair; 2p+1 stages' activations. Orders
after github.com/deepseek-ai/DualPipe (MIT), dualpipev.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ultrascale.schedules.actions import Action, only_micro_batches
from ultrascale.schedules.kinds.streams import StreamOrder, Streams


def dualpipe_v(pp: int, num_micro_batches: int, *, ranks: Sequence[int] = ()) -> list[list[Action]]:
    """Actions of each of `pp` ranks, or of some `ranks`; rank r holds stages r and 2 pp - 1 - r.

    Fewer than 2 pp micro-batches run as the first ones of a schedule of 2 pp.
    """
    return [only_micro_batches(_rank_actions(rank, pp, num_micro_batches), num_micro_batches) for rank in ranks or range(pp)]


def _rank_actions(rank: int, pp: int, num_micro_batches: int) -> list[Action]:
    return two_streams(rank, pp, max(2 * pp, num_micro_batches), near=lambda k: (rank, k), far=lambda k: (2 * pp - 1 - rank, k))


def two_streams(position: int, depth: int, count: int, *, near: StreamOrder, far: StreamOrder) -> list[Action]:
    """Actions of the rank at `position` of `depth`, where two streams of `count` micro-batches meet.

    `near`: the stream that reaches this rank from outside. `far`: the one that returns from the last of the `depth` ranks,
    where the streams turn around.
    """
    streams = Streams(near, far)
    behind = depth - position - 1
    steady = count - 2 * depth + position + 1
    streams.add("F0", 2 * behind)
    streams.add("F0 F1", position + 1)
    streams.add("I1 W F1", behind)
    # On the rank where the streams turn, the first two passes are not overlapped: that would only lengthen the fill.
    streams.add("F0 B1 F1&B0" if behind == 0 else "F0&B1 F1&B0")
    streams.add("F0&B1 F1&B0", steady - 1)
    streams.add("B1 F1&B0", behind)
    backwards = ["B1", "B0"] * (position + 1)
    num_whole = position + 1  # half of them unsplit; the others defer W until the rank would idle
    streams.add(" ".join(backwards[:num_whole] + [step.replace("B", "I") for step in backwards[num_whole:]]))
    streams.add("W I0", behind)
    streams.add("W", position + 1)
    return streams.actions
