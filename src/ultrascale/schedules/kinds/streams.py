"""Actions of a rank through which two streams of micro-batches flow, written down by name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ultrascale.schedules.actions import Action, backward, forward, input_gradient, together, weight_gradient

Place = Callable[[int], tuple[int, int]]
"""Stage and micro-batch of the k-th micro-batch of a stream on this rank."""
_MAKE = {"F": forward, "B": backward, "I": input_gradient}


class Streams:
    """Names as in the papers: F0 B0 I0 W0 of one stream, F1 B1 I1 W1 of the other, `F0&B1` a pair that runs at the same time.

    Each stream counts its own micro-batches; W0 and W1 are of the stream's oldest I without one, W of the oldest of both.
    """

    def __init__(self, near: Place, far: Place):
        self.actions: list[Action] = []
        self._places = (near, far)
        self._passed = {"F": [0, 0], "B": [0, 0]}
        self._waiting: tuple[deque[tuple[int, tuple[int, int]]], ...] = (deque(), deque())
        self._cut = 0

    def add(self, steps: str, times: int = 1) -> None:
        """Append the actions named in `steps`, `times` times over."""
        named = [[(one[0], int(one[1:] or -1)) for one in step.split("&")] for step in steps.split()]
        for _ in range(times):
            for ahead, *back in named:
                action = self._next(*ahead)
                self.actions.append(together(action, self._next(*back[0])) if back else action)

    def _next(self, kind: str, stream: int) -> Action:
        if kind == "W":
            waiting = min(filter(None, self._waiting)) if stream == -1 else self._waiting[stream]
            return weight_gradient(*waiting.popleft()[1])
        passed = self._passed["F" if kind == "F" else "B"]
        where = self._places[stream](passed[stream])
        passed[stream] += 1
        if kind == "I":
            self._waiting[stream].append((self._cut, where))
            self._cut += 1
        return _MAKE[kind](*where)
