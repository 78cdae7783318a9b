"""Results that are freed after the forward pass, and recomputed when the backward pass first reads one of them.

    forward     region(x) -> y      tensors saved inside, and y where an operation outside saves it, become cells (`RegionCell`)
    backward    a cell is read      the region runs again from its saved inputs, and fills all its cells
                a cell is freed     with the last operation that saved it

Megatron-Core calls this recomputation without output. torch.utils.checkpoint cannot do it: it frees tensors saved inside a
region, but for a norm or an activation function the tensor that matters is the result, which the next operation saves. Regions
may read results that other regions recompute. The second run stops as soon as every cell still in use is full; its own graph is
dropped, for the first run's graph is used.

Costs one Python call per tensor that a block saves. Nothing random may happen inside a region.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class RecomputedRegions:
    """Recomputed regions of one block."""

    def __init__(self) -> None:
        self._pass: _Pass | None = None

    def block(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The block's `forward`, in which regions free their results and recompute them."""

        def watched(*inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*inputs, **options)
            this_pass = self._pass = _Pass()
            try:
                with saved_tensors_hooks(this_pass.pack, _unpack):
                    return forward(*inputs, **options)
            finally:
                self._pass = None

        return watched

    def region(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` as a region whose inputs are its positional tensors. Inside another region, or where nothing is tracked
        (during recomputation too), it is simply called."""
        return partial(self._enter, forward)

    def _enter(self, forward: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        this_pass = self._pass
        if this_pass is None or this_pass.region is not None:
            return forward(*inputs, **options)
        return this_pass.run(partial(forward, **options), inputs)


class _Pass:
    """One forward pass of a block: maps storages to cells."""

    def __init__(self) -> None:
        self.region: RerunRegion | None = None
        self._cells: dict[int, tuple[weakref.ref[Any], RegionCell]] = {}

    def run(self, forward: Callable[..., Any], inputs: tuple[Any, ...]) -> Any:
        """Run a region for the first time."""
        input_keys = {storage_key(value) for value in inputs if isinstance(value, Tensor)}
        handles = [
            (self._handle(value), value.requires_grad) if isinstance(value, Tensor) else (value, False) for value in inputs
        ]
        self.region = region = RerunRegion(forward, handles, input_keys)
        try:
            output = forward(*inputs)
        finally:
            self.region = None
        for place, value in enumerate(output if isinstance(output, tuple) else (output,)):
            if isinstance(value, Tensor) and storage_key(value) not in input_keys:
                self._claim(value, RegionCell(region, place))
        return output

    def pack(self, tensor: Tensor) -> Any:
        """The object that autograd keeps in place of a tensor that an operation saves."""
        region = self.region
        if region is None or storage_key(tensor) in region.input_keys or isinstance(tensor, torch.nn.Parameter):
            return self._handle(tensor)
        return region.inside()

    def _claim(self, tensor: Tensor, cell: RegionCell) -> None:
        storage, key = tensor.untyped_storage(), storage_key(tensor)
        self._cells[key] = weakref.ref(storage, lambda _: self._cells.pop(key, None)), cell

    def _handle(self, tensor: Tensor) -> Any:
        """The tensor itself, or a handle by which it can be recomputed."""
        entry = self._cells.get(storage_key(tensor))
        if entry is None or entry[0]() is None:
            return tensor
        return _View(entry[1], tensor.size(), tensor.stride(), tensor.storage_offset())


class RegionCell:
    """Result of a region: empty from the forward pass until it is first read."""

    def __init__(self, region: RerunRegion, place: int | None):
        self.region, self.value = region, None
        if place is not None:
            region.results.append((place, weakref.ref(self)))

    value: Tensor | None

    def get(self) -> Tensor:
        """The tensor, recomputed at the first call."""
        if self.value is None:
            self.region.run_again()
        assert self.value is not None, "a second run made something else than the first"
        return self.value


class _View:
    """A view of a result, as autograd saved it (transposed or flattened, for example)."""

    def __init__(self, cell: RegionCell, *geometry: Any):
        self.cell, self.geometry = cell, geometry

    def get(self) -> Tensor:
        return self.cell.get().as_strided(*self.geometry)


@dataclass(eq=False)
class RerunRegion:
    """The inputs and the function needed to run a region again."""

    forward: Callable[..., Any]
    inputs: list[tuple[Any, bool]]
    """Pairs of an input and whether it needs a gradient."""
    input_keys: set[int]
    """Storages of the inputs."""
    saves: list[weakref.ref[RegionCell]] = field(default_factory=list)
    """Cells in the order in which operations inside save tensors."""
    results: list[tuple[int, weakref.ref[RegionCell]]] = field(default_factory=list)

    def inside(self) -> RegionCell:
        """Create a cell for a tensor that an operation inside the region saves."""
        cell = RegionCell(self, None)
        self.saves.append(weakref.ref(cell))
        return cell

    def run_again(self) -> None:
        """Run the region again and fill the cells still in use."""
        handles, self.inputs = self.inputs, []
        inputs = [_again(*saved) for saved in handles]
        del handles
        input_keys = {storage_key(value) for value in inputs if isinstance(value, Tensor)}
        count, wants_result = 0, any(cell() is not None for _, cell in self.results)

        def fill(tensor: Tensor) -> int:
            nonlocal count
            if storage_key(tensor) not in input_keys and not isinstance(tensor, torch.nn.Parameter):
                if (cell := self.saves[count]()) is not None:
                    cell.value = tensor.detach()
                count += 1
                if count == len(self.saves) and not wants_result:
                    raise _AllRecomputed
            return 0

        try:
            with torch.enable_grad(), saved_tensors_hooks(fill, _never):
                output = self.forward(*inputs)
        except _AllRecomputed:
            return
        results = output if isinstance(output, tuple) else (output,)
        for place, reference in self.results:
            if (cell := reference()) is not None:
                cell.value = results[place].detach()


class _AllRecomputed(Exception):
    """Every cell in use has been filled."""


def _again(handle: Any, needs_grad: bool) -> Any:
    """An input of the second run, restored from its handle."""
    return _unpack(handle).detach().requires_grad_(needs_grad) if isinstance(handle, Tensor | _View) else handle


def _unpack(handle: Any) -> Tensor:
    return handle if isinstance(handle, Tensor) else handle.get()


def _never(unused: Any) -> Tensor:
    raise AssertionError("nobody goes back through a second run")


def storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
