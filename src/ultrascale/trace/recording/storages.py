"""Storages as they come and go: `measure.memory` with names, and every change kept."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.activations import recompute
from ultrascale.parallel.activations.host_memory import is_on_host
from ultrascale.parallel.activations.remade import Region
from ultrascale.torch_private import FakeTensor, in_backward_pass
from ultrascale.trace.recording.recipes import tensors_in
from ultrascale.trace.recording.record import Block, Mark, RankTrace
from ultrascale.trace.views.lines import line_of_ours

AGAIN = ", again"
"""Behind the name of a block that is recomputed."""


class Storages(LiveMemory):
    """Writes down what lives while it is entered, from `watch` on."""

    def __init__(self, trace: RankTrace, *, is_real: bool = False, stream_name: Callable[[], str] = lambda: "compute"):
        super().__init__(nn.Module(), None, round_to=trace.round_to)
        self.trace, self.is_real, self.stream_name = trace, is_real, stream_name
        self.counted = ("cpu",) if is_real else ("meta", "cpu") if trace.device == "cpu" else ("meta",)
        """Types of devices: with a CPU for a target what the host keeps is in the same memory."""
        self.is_counting = False
        self._numbers: dict[int, int] = {}
        """Number of the block of each living storage, by address."""
        self._names: dict[int, str] = {}
        """Names of parameters' storages."""
        self._references: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._hidden: dict[int, Any] = {}
        self._tick, self._during, self._block = 0, "", ""
        self.times = 1
        """Number of actions that the current one stands for."""

    def watch(self, model: nn.Module, optimizer: torch.optim.Optimizer, names: dict[nn.Parameter, str]) -> None:
        """Count from here on, with what is there."""
        self.model, self.optimizer, self.is_counting = model, optimizer, True
        for parameter, name in names.items():
            self._names[storage_of(parameter)._cdata] = name
        self._count_what_is_there()
        for parameter, name in names.items():
            for value in optimizer.state.get(parameter, {}).values():
                if isinstance(value, Tensor) and (number := self._numbers.get(storage_of(value)._cdata)) is not None:
                    self.trace.blocks[number].what = name
        self._watch_gradients()
        self._watch_optimizer()
        self._watch_blocks()

    def mark(self, phase: str, step: int | None = None, action: str = "") -> None:
        """Say what comes next."""
        self._step = self._step if step is None else step
        self._phase, self._during = phase, action or phase
        if not action:
            self.times = 1
        self.trace.marks.append(Mark(self._tick, self._step, phase, action))

    def _hide(self, storage: torch.UntypedStorage) -> None:
        """Excludes a storage from the count."""
        key = storage._cdata
        self._hidden[key] = weakref.ref(storage, lambda _: self._hidden.pop(key, None))

    def _count_all(self, result: Any, func: Any) -> None:
        if not self.is_counting:
            return
        if isinstance(result, Tensor):
            self._count(result, self._category(), func)
            return
        for tensor in tensors_in(result):
            self._count(tensor, self._category(), func)

    def _add_new(self, result: Any, func: Any) -> None:
        if not self.is_counting:
            return
        for tensor in (result,) if isinstance(result, Tensor) else tensors_in(result):
            if tensor.device.type in self.counted and not is_on_host(tensor.untyped_storage()):
                self._add(tensor.untyped_storage(), self._category(), func)

    def _count(self, tensor: Tensor, category: str, func: Any = None) -> None:
        if not self.is_counting or isinstance(tensor, FakeTensor):
            return
        storage = storage_of(tensor)
        if is_on_host(storage):
            return
        if storage.device.type in self.counted and storage._cdata not in self._numbers and storage._cdata not in self._hidden:
            self._add(storage, category, func)

    def _add(self, storage: torch.UntypedStorage, category: str, func: Any = None) -> None:
        key, trace = storage._cdata, self.trace
        number = len(trace.blocks)
        what = self._names.get(key) or ("" if func is None else func._schema.name.rpartition("::")[2])
        during = f"{self._during} {self._block}".strip()
        trace.blocks.append(Block(category, what, line_of_ours(sys._getframe()), during, self.stream_name()))
        self._numbers[key] = number
        self._references[key] = weakref.ref(storage, lambda _: self._forget(key))
        self._sizes[key] = 0
        self._resize(key, storage.nbytes())

    def _forget(self, key: int) -> None:
        if key in self._numbers:
            self._resize(key, 0)
            del self._numbers[key], self._references[key], self._sizes[key]

    def _resize(self, key: int, num_bytes: int) -> None:
        size = self._rounded(num_bytes)
        if change := size - self._sizes[key]:
            self._sizes[key] = size
            self.trace.changes.append((self._tick, self._numbers[key], change))

    def _retag(self, tensor: Tensor | None, category: str) -> None:
        if tensor is None or not self.is_counting:
            return
        self._count(tensor, category)
        number = self._numbers.get(storage_of(tensor)._cdata)
        if number is None:
            return
        block = self.trace.blocks[number]
        if block.category != category:
            self.trace.moves.append((self._tick, number, block.category))
            block.category = category

    def _after_resize(self, storage: torch.UntypedStorage, *unused: Any) -> None:
        if not self.is_counting or storage.device.type not in self.counted:
            return
        if storage._cdata in self._numbers:
            self._tick += 1
            self._resize(storage._cdata, storage.nbytes())
        else:
            self._add(storage, self._category())

    def _sample(self) -> None: ...

    def _watch_recomputation(self) -> None:
        """Know a block's second forward pass from its first."""
        checkpoint = recompute.checkpoint

        def watched(forward: Callable[..., Any], *args: Any, **options: Any) -> Any:
            block = self._block

            def either(*inputs: Any, **given: Any) -> Any:
                before = self._block
                if in_backward_pass():
                    self._block = f"{block}{AGAIN}"
                try:
                    return forward(*inputs, **given)
                finally:
                    self._block = before

            return checkpoint(either, *args, **options)

        setattr(recompute, "checkpoint", watched)  # noqa: B010
        self._undo.append(lambda: setattr(recompute, "checkpoint", checkpoint))
        begin, run_again = Region.__init__, Region.run_again

        def begun(region: Region, *args: Any) -> None:
            begin(region, *args)
            setattr(region, "block", self._block)  # noqa: B010

        def again(region: Region) -> None:
            before, self._block = self._block, f"{getattr(region, 'block')}{AGAIN}"  # noqa: B009
            try:
                run_again(region)
            finally:
                self._block = before

        setattr(Region, "__init__", begun)  # noqa: B010
        setattr(Region, "run_again", again)  # noqa: B010
        self._undo.append(lambda: (setattr(Region, "__init__", begin), setattr(Region, "run_again", run_again)))

    def _watch_blocks(self) -> None:
        """Let storages tell the block of the model they were made in."""
        for stage in self.model.modules():
            if not hasattr(stage, "blocks"):
                continue
            for number, block in stage.blocks():  # pyright: ignore[reportCallIssue]

                def enter(module: nn.Module, inputs: Any, number: int = number) -> None:
                    self._block = f"block {number}"

                def leave(module: nn.Module, inputs: Any, result: Any) -> None:
                    self._block = ""

                self._undo += [block.register_forward_pre_hook(enter).remove, block.register_forward_hook(leave).remove]


def storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
