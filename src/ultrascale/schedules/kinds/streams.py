"""Actions of a rank that processes two streams of micro-batches, written by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ultrascale.schedules.actions import Action, backward, forward, input_gradient, overlapped, weight_gradient

StreamOrder = Callable[[int], tuple[int, int]]
"""Function from k to the stage and micro-batch of a stream's k-th micro-batch on this rank."""
_MAKE = {"F": forward, "B": backward, "I": input_gradient}


class Streams:
    """Names as in the papers: F0 B0 I0 W0 of one stream, F1 B1 I1 W1 of the other; `F0&B1` is an overlapped pair.

    Each stream counts its own micro-batches; W0 and W1 belong to the stream's oldest I whose W is missing, W to the oldest of
    both.
    """

    def __init__(self, near: StreamOrder, far: StreamOrder):
        self.actions: list[Action] = []
        self._places = (near, far)
        self._num_passes = {"F": [0, 0], "B": [0, 0]}
        self._pending: tuple[deque[tuple[int, tuple[int, int]]], ...] = (deque(), deque())
        self._num_split = 0

    def add(self, steps: str, times: int = 1) -> None:
        """Append the actions named in `steps`, repeated `times` times."""
        named = [[(part[0], int(part[1:] or -1)) for part in step.split("&")] for step in steps.split()]
        for _ in range(times):
            for ahead, *back in named:
                action = self._next(*ahead)
                self.actions.append(overlapped(action, self._next(*back[0])) if back else action)

    def _next(self, kind: str, stream: int) -> Action:
        if kind == "W":
            waiting = min(filter(None, self._pending)) if stream == -1 else self._pending[stream]
            return weight_gradient(*waiting.popleft()[1])
        passed = self._num_passes["F" if kind == "F" else "B"]
        where = self._places[stream](passed[stream])
        passed[stream] += 1
        if kind == "I":
            self._pending[stream].append((self._num_split, where))
            self._num_split += 1
        return _MAKE[kind](*where)
