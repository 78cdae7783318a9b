"""Monitored messages: whether a rank waits before it reads, and does not overwrite data in flight.

Without its wait a message has usually arrived anyway on a test machine, and nothing differs. So here a receive fills a separate
buffer, and the caller's tensor holds `POISON` until it has waited; a sent tensor is compared with its earlier value once the
send completes. Messages that are never waited for are kept, so that no rank waits forever.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

import ultrascale
from ultrascale.torch_private import modules_of_collectives

POISON = 7
"""A finite number: a NaN would end the step before the comparison. For integers 1."""
PACKAGE = str(Path(ultrascale.__file__).parent)
OWN = str(Path(__file__).parents[1])


class Watch:
    """The messages of this rank."""

    def __init__(self) -> None:
        self.under_way: list[_Watched] = []
        self.mistakes: list[str] = []

    @contextmanager
    def on(self) -> Iterator[None]:
        """While inside, messages that this rank starts are watched."""
        isend, irecv, exchange, reduce = dist.isend, dist.irecv, dist.all_to_all_single, dist.all_reduce

        def send(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            return self._watched(isend(tensor, *arguments, **named), "send", sent=tensor)

        def receive(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
            buffer = _poisoned(tensor)
            return self._watched(irecv(buffer, *arguments, **named), "receive", filled=(tensor, buffer))

        def exchange_rows(output: Tensor, input: Tensor, *arguments: Any, async_op: bool = False, **named: Any) -> Any:
            if not async_op:
                return exchange(output, input, *arguments, **named)
            buffer = _poisoned(output)
            work = exchange(buffer, input, *arguments, async_op=True, **named)
            return self._watched(work, "exchange", sent=input, filled=(output, buffer))

        def reduce_all(tensor: Tensor, *arguments: Any, async_op: bool = False, **named: Any) -> Any:
            if not async_op:
                return reduce(tensor, *arguments, **named)
            buffer = _poisoned(tensor, keep=True)
            return self._watched(reduce(buffer, *arguments, async_op=True, **named), "sum", filled=(tensor, buffer))

        watched = {"isend": send, "irecv": receive, "all_to_all_single": exchange_rows, "all_reduce": reduce_all}
        with ExitStack() as stack:
            for name, function in watched.items():
                for module in modules_of_collectives():
                    stack.enter_context(patch.object(module, name, function))
            yield

    def settle(self) -> list[str]:
        """Mistakes that this rank made with messages since the last call, in words. Call it when no message should be in
        flight: one that still is, is reported and waited for."""
        for message in list(self.under_way):
            self.mistakes.append(f"rank {dist.get_rank()} never waited for {message.name}")
            message.wait()
        mistakes, self.mistakes = self.mistakes, []
        return list(dict.fromkeys(mistakes))

    def _watched(
        self, work: dist.Work | None, kind: str, *, sent: Tensor | None = None, filled: tuple[Tensor, Tensor] | None = None
    ) -> Any:
        if work is None:
            return None
        self.under_way.append(_Watched(work, f"a {kind} that {_caller()} starts", sent, filled, self))
        return self.under_way[-1]


class _Watched(dist.Work):
    """A message in flight."""

    def __init__(self, work: dist.Work, name: str, sent: Tensor | None, filled: tuple[Tensor, Tensor] | None, watch: Watch):
        super().__init__()
        self.work, self.name, self.sent, self.filled, self.watch = work, name, sent, filled, watch
        self.copy = None if sent is None else sent.detach().clone()

    def wait(self, *timeout: Any) -> bool:
        """Wait for completion; only then copy received data to the caller's tensor."""
        self.work.wait(*timeout)
        if self in self.watch.under_way:
            self.watch.under_way.remove(self)
            if self.filled is not None:
                self.filled[0].data.copy_(self.filled[1])  # as from outside: autograd knows nothing of it
            if self.sent is not None and self.copy is not None and not same_bits(self.sent, self.copy):
                self.watch.mistakes.append(f"rank {dist.get_rank()} overwrote the data of {self.name} before it had left")
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed()


def _poisoned(tensor: Tensor, *, keep: bool = False) -> Tensor:
    """Buffer in place of `tensor`, with its content if `keep`; `tensor` itself is poisoned."""
    if not tensor.is_contiguous():
        return tensor  # torch refuses it
    buffer = tensor.detach().clone() if keep else torch.empty_like(tensor)
    tensor.data.fill_(POISON if tensor.is_floating_point() else 1)
    return buffer


def same_bits(first: Tensor, second: Tensor) -> bool:
    """True if dtypes, shapes and all bits are equal: a NaN equals itself, and -0 is not 0."""
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    left, right = (tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in (first, second))
    return torch.equal(left, right)


def _caller() -> str:
    """The line of the package that started a message."""
    frame = sys._getframe(1)
    while frame.f_back is not None and (
        not frame.f_code.co_filename.startswith(PACKAGE) or frame.f_code.co_filename.startswith(OWN)
    ):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
