"""Offload of activations: what a block's operations save waits in the host's memory, and is back before it is read.

    forward    block i computes     what block i-1 saved is on its way down
    backward   block i computes     what block i-1 saved is on its way up

On the device are then the block at work and the one before it (`description.layout.OFFLOAD_LEFT`), however many blocks there
are. What went down last and was not let go yet is read where it is. Without a pipeline the last block stays: it is read at
once.

What goes: tensors of `OFFLOAD_FROM_BYTES` or more, each storage once however many views of it are saved. What stays: parameters
and views of them, angles and masks that all blocks share, and the input of a stage that a pipeline holds anyway. Of a block
that is recomputed it is its input alone. The sums and their order are the same: gradients are equal to the bit.

Why not `torch.autograd.graph.save_on_cpu`: its copies up are asked for when they are needed, so that nothing runs beside them,
it sends parameters down too, and a tensor as often as it is saved.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor

from ultrascale.description.layout import OFFLOAD_FROM_BYTES, OFFLOAD_LEFT, Layout
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.host_memory import host_tensor
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.torch_private import tree_leaves


def apply_activation_offload(stage: Decoder, layout: Layout) -> None:
    """Let what the blocks of `stage` save go to the host, in place; outside recomputation and compilation, inside FSDP2."""
    if not layout.offload_activations:
        return
    travel, blocks = Travel(), [block for _, block in stage.blocks()]
    for place, block in enumerate(blocks):
        if place == len(blocks) - 1 and layout.pp == 1:
            break  # read at once: its backward pass follows
        # A pipeline holds a stage's input until its backward pass.
        is_first = place == 0
        forward = partial(travel.run, block, block.forward, is_first=is_first, stays=is_first and not stage.is_first)
        setattr(block, "forward", forward)  # noqa: B010


@dataclass(eq=False)
class Saved:
    """One storage: on the device, on the host, or both."""

    here: Tensor | None
    """All of it, flat."""
    host: Tensor | None = None
    arrived: torch.Event | None = None
    """Event at which `here` has the data copied back to the device."""
    uses: int = 0
    """Number of times it is saved, and not yet read."""


class View(NamedTuple):
    """The object that autograd holds in the place of a tensor."""

    saved: Saved
    trip: Trip
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(eq=False)
class Trip:
    """The tensors that one block saved of one micro-batch."""

    before: Trip | None
    """Trip of the block before, which is read next in the backward pass."""
    saved: dict[tuple[int, torch.dtype], Saved] = field(default_factory=dict)
    left: torch.Event | None = None
    """Event at which all of it is on the host."""
    is_read: bool = False


class Travel:
    """The way down and the way up of a stage's blocks."""

    def __init__(self) -> None:
        self.leaving: deque[Trip] = deque()
        self._newest: Trip | None = None
        self._device = torch.device("cpu")
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def run(
        self, block: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, *shared: Any, is_first: bool, stays: bool,
        **options: Any,
    ) -> Tensor:  # fmt: skip
        """The forward pass of a block. `is_first`: of its stage; `stays`: its input is held by others."""
        if not torch.is_grad_enabled():
            return forward(hidden, *shared, **options)
        kept = {
            _key(one)
            for one in (*block.parameters(), *computing_copies(block), *tree_leaves((shared, options)))
            if _is_plain(one)
        }
        kept |= {_key(hidden)} if stays else set()
        trip = self._newest = Trip(None if is_first else self._newest)
        with saved_tensors_hooks(partial(self._pack, trip, kept), self._unpack):
            made = forward(hidden, *shared, **options)
        self._device = hidden.device
        self._send_down(trip)
        return made

    def _pack(self, trip: Trip, kept: set[int], tensor: Tensor) -> Tensor | View:
        storage = tensor.untyped_storage()
        if storage.nbytes() < OFFLOAD_FROM_BYTES or _key(tensor) in kept or _is_parameter(tensor):
            return tensor
        key = (storage._cdata, tensor.dtype)
        if key not in trip.saved:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            trip.saved[key] = Saved(whole)
        saved = trip.saved[key]
        saved.uses += 1
        return View(saved, trip, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _send_down(self, trip: Trip) -> None:
        """Copy to the host; what was sent before the last `OFFLOAD_LEFT` - 1 blocks has had its time, and goes."""
        with self._beside(0) as stream:
            for saved in trip.saved.values():
                assert saved.here is not None
                saved.host = host_tensor(saved.here)
                saved.host.copy_(saved.here, non_blocking=True)
            trip.left = None if stream is None else stream.record_event()
        self.leaving.append(trip)
        while len(self.leaving) >= OFFLOAD_LEFT:
            self._let_go(self.leaving.popleft())

    def _let_go(self, trip: Trip) -> None:
        if trip.left is not None:
            torch.cuda.current_stream().wait_event(trip.left)
        if not trip.is_read:
            for saved in trip.saved.values():
                saved.here = None

    def _unpack(self, view: Tensor | View) -> Tensor:
        if isinstance(view, Tensor):
            return view
        saved, trip = view.saved, view.trip
        if not trip.is_read:
            self._bring_up(trip)
            trip.is_read = True
            if trip.before is not None:
                self._bring_up(trip.before)
        assert saved.here is not None, "what was saved is read once more than it was saved"
        if saved.arrived is not None:
            torch.cuda.current_stream().wait_event(saved.arrived)
        tensor = saved.here.as_strided(view.size, view.stride, view.offset)
        saved.uses -= 1
        if not saved.uses:
            saved.here = saved.host = None
        return tensor

    def _bring_up(self, trip: Trip) -> None:
        """Copy to the device what is not there, beside what it computes."""
        away = [saved for saved in trip.saved.values() if saved.here is None and saved.host is not None]
        if trip in self.leaving:
            self.leaving.remove(trip)
        if not away:
            return
        for saved in away:  # memory of the stream that computes, and goes back to it
            assert saved.host is not None
            saved.here = torch.empty_like(saved.host, device=self._device, pin_memory=False)
        with self._beside(1) as stream:
            for saved in away:
                assert saved.here is not None and saved.host is not None
                saved.here.copy_(saved.host, non_blocking=True)
            arrived = None if stream is None else stream.record_event()
        for saved in away:
            saved.arrived = arrived

    @contextmanager
    def _beside(self, way: int) -> Iterator[torch.Stream | None]:
        """Inside, on CUDA, copies run on the stream of the way down (0) or up (1), after what the device was asked for."""
        if self._device.type != "cuda":
            yield None
            return
        if self._streams is None:
            self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device))
        stream = self._streams[way]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_plain(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, DTensor)


def _is_parameter(tensor: Tensor) -> bool:
    """Also of experts, whose parameters FSDP2 gathers inside the block, and views of them."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
