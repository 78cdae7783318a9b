"""Offload of activations: what a block's operations save waits in the host's memory, and is back before it is read.

    forward    block i computes     what block i-1 saved is on its way down
    backward   block i computes     what block i-1 saved is on its way up

On the device are the block at work and the one before it (`description.layout.OFFLOAD_RESIDENT`), however many blocks there
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

from ultrascale.description.layout import OFFLOAD_FROM_BYTES, OFFLOAD_RESIDENT, Layout
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.activations.host_memory import host_tensor
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.torch_private import tree_leaves


def apply_activation_offload(stage: Decoder, layout: Layout) -> None:
    """Let what the blocks of `stage` save go to the host, in place; outside recomputation and compilation, inside FSDP2."""
    if not layout.offload_activations:
        return
    travel, blocks = ActivationOffload(), [block for _, block in stage.blocks()]
    for place, block in enumerate(blocks):
        if place == len(blocks) - 1 and layout.pp == 1:
            break  # read at once: its backward pass follows
        # A pipeline holds a stage's input until its backward pass.
        is_first = place == 0
        forward = partial(travel.run, block, block.forward, is_first=is_first, input_is_kept=is_first and not stage.is_first)
        setattr(block, "forward", forward)  # noqa: B010


@dataclass(eq=False)
class Saved:
    """One storage: on the device, on the host, or both."""

    device_copy: Tensor | None
    """All of it, flat."""
    host_copy: Tensor | None = None
    arrived: torch.Event | None = None
    """Event at which `device_copy` has the data copied back to the device."""
    uses: int = 0
    """Number of times it is saved, and not yet read."""


class View(NamedTuple):
    """The object that autograd holds in the place of a tensor."""

    saved: Saved
    offloaded: BlockOffload
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(eq=False)
class BlockOffload:
    """The tensors that one block saved of one micro-batch."""

    before: BlockOffload | None
    """Offload of the block before, which is read next in the backward pass."""
    saved: dict[tuple[int, torch.dtype], Saved] = field(default_factory=dict)
    copied: torch.Event | None = None
    """Event at which all of it is on the host."""
    is_read: bool = False


class ActivationOffload:
    """Copies to the host and back of a stage's blocks."""

    def __init__(self) -> None:
        self.copying: deque[BlockOffload] = deque()
        self._newest: BlockOffload | None = None
        self._device = torch.device("cpu")
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def run(
        self, block: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, *shared: Any, is_first: bool,
        input_is_kept: bool, **options: Any,
    ) -> Tensor:  # fmt: skip
        """The forward pass of a block. `is_first`: of its stage; `input_is_kept`: its input is held by others."""
        if not torch.is_grad_enabled():
            return forward(hidden, *shared, **options)
        kept_keys = {
            _key(tensor)
            for tensor in (*block.parameters(), *computing_copies(block), *tree_leaves((shared, options)))
            if _is_plain(tensor)
        }
        kept_keys |= {_key(hidden)} if input_is_kept else set()
        offloaded = self._newest = BlockOffload(None if is_first else self._newest)
        with saved_tensors_hooks(partial(self._pack, offloaded, kept_keys), self._unpack):
            output = forward(hidden, *shared, **options)
        self._device = hidden.device
        self._offload(offloaded)
        return output

    def _pack(self, offloaded: BlockOffload, kept_keys: set[int], tensor: Tensor) -> Tensor | View:
        storage = tensor.untyped_storage()
        if storage.nbytes() < OFFLOAD_FROM_BYTES or _key(tensor) in kept_keys or _is_parameter(tensor):
            return tensor
        key = (storage._cdata, tensor.dtype)
        if key not in offloaded.saved:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            offloaded.saved[key] = Saved(whole)
        saved = offloaded.saved[key]
        saved.uses += 1
        return View(saved, offloaded, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _offload(self, offloaded: BlockOffload) -> None:
        """Copy to the host; what was sent before the last `OFFLOAD_RESIDENT` - 1 blocks has had its time, and goes."""
        with self._beside(0) as stream:
            for saved in offloaded.saved.values():
                assert saved.device_copy is not None
                saved.host_copy = host_tensor(saved.device_copy)
                saved.host_copy.copy_(saved.device_copy, non_blocking=True)
            offloaded.copied = None if stream is None else stream.record_event()
        self.copying.append(offloaded)
        while len(self.copying) >= OFFLOAD_RESIDENT:
            self._release(self.copying.popleft())

    def _release(self, offloaded: BlockOffload) -> None:
        if offloaded.copied is not None:
            torch.cuda.current_stream().wait_event(offloaded.copied)
        if not offloaded.is_read:
            for saved in offloaded.saved.values():
                saved.device_copy = None

    def _unpack(self, view: Tensor | View) -> Tensor:
        if isinstance(view, Tensor):
            return view
        saved, offloaded = view.saved, view.offloaded
        if not offloaded.is_read:
            self._prefetch(offloaded)
            offloaded.is_read = True
            if offloaded.before is not None:
                self._prefetch(offloaded.before)
        assert saved.device_copy is not None, "what was saved is read once more than it was saved"
        if saved.arrived is not None:
            torch.cuda.current_stream().wait_event(saved.arrived)
        tensor = saved.device_copy.as_strided(view.size, view.stride, view.offset)
        saved.uses -= 1
        if not saved.uses:
            saved.device_copy = saved.host_copy = None
        return tensor

    def _prefetch(self, offloaded: BlockOffload) -> None:
        """Copy to the device what is not there, beside what it computes."""
        on_host = [saved for saved in offloaded.saved.values() if saved.device_copy is None and saved.host_copy is not None]
        if offloaded in self.copying:
            self.copying.remove(offloaded)
        if not on_host:
            return
        for saved in on_host:  # memory of the stream that computes, and goes back to it
            assert saved.host_copy is not None
            saved.device_copy = torch.empty_like(saved.host_copy, device=self._device, pin_memory=False)
        with self._beside(1) as stream:
            for saved in on_host:
                assert saved.device_copy is not None and saved.host_copy is not None
                saved.device_copy.copy_(saved.host_copy, non_blocking=True)
            arrived = None if stream is None else stream.record_event()
        for saved in on_host:
            saved.arrived = arrived

    @contextmanager
    def _beside(self, direction: int) -> Iterator[torch.Stream | None]:
        """Inside, on CUDA, copies run on the stream of the way down (0) or up (1), after what the device was asked for."""
        if self._device.type != "cuda":
            yield None
            return
        if self._streams is None:
            self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device))
        stream = self._streams[direction]
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
