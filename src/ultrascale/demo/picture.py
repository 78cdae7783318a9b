"""The loss curve in letters, for a terminal: no reader has to open a file to see that something was learned."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

HEIGHT = 9
BLOCKS = " ▁▂▃▄▅▆▇█"


def loss_curve(losses: Sequence[float], *, width: int, marks: Sequence[tuple[int, str]] = ()) -> str:
    """A curve of `losses` by step, `width` columns at most, with a line below that names the step of each mark.

    Each column is the mean of its steps; the axis starts at the lowest loss, so that the fall is seen.
    """
    columns = min(width, len(losses))
    edges = [len(losses) * at // columns for at in range(columns + 1)]
    means = [sum(losses[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    levels = [round((value - low) / ((high - low) or 1) * (HEIGHT * 8 - 1)) + 1 for value in means]
    rows = []
    for row in range(HEIGHT, 0, -1):
        cells = "".join(BLOCKS[max(0, min(8, level - 8 * (row - 1)))] for level in levels)
        name = f"{high:6.2f} " if row == HEIGHT else f"{low:6.2f} " if row == 1 else " " * 7
        rows.append((name + cells).rstrip())
    for step, text in marks:
        at = min(columns - 1, max(0, (step - 1) * columns // len(losses)))
        rows.append(f"{' ' * (7 + at)}^ step {step}: {text}")
    return "\n".join(rows)
