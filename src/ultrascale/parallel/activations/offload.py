"""Activation offload: tensors that a block saves for the backward pass are copied to host memory, and prefetched before they
are read.

    forward    block i computes     tensors saved by block i-1 are copied to the host
    backward   block i computes     tensors saved by block i-1 are copied back

The device holds the saved tensors of the current block and the one before it (`description.layout.OFFLOAD_RESIDENT`), however
many blocks there are. A tensor whose device copy is not freed yet is read from the device. Without a pipeline the last block is
not offloaded: its backward pass follows at once.

Offloaded: tensors of `OFFLOAD_FROM_BYTES` or more, each storage once however many views of it are saved. Not offloaded:
parameters and views of them, RoPE angles and masks that all blocks share, and a stage's input, which the pipeline holds anyway.
A recomputed block offloads only its input. Sums and their order do not change: gradients are equal to the bit.

Why not `torch.autograd.graph.save_on_cpu`: it starts the copies back only when they are needed, so that nothing overlaps with
them; it offloads parameters too, and copies a tensor as many times as it is saved.
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
from ultrascale.parallel.activations.regions import storage_key
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.torch_private import tree_leaves


def apply_activation_offload(stage: Decoder, layout: Layout) -> None:
    """Offload the tensors that the blocks of `stage` save, in place; applied outside recomputation and compilation, inside
    FSDP2."""
    if not layout.offload_activations:
        return
    travel, blocks = ActivationOffload(), [block for _, block in stage.blocks()]
    for place, block in enumerate(blocks):
        if place == len(blocks) - 1 and layout.pp == 1:
            break  # its backward pass follows at once
        # A pipeline holds a stage's input until its backward pass.
        is_first = place == 0
        forward = partial(travel.run, block, block.forward, is_first=is_first, input_is_kept=is_first and not stage.is_first)
        setattr(block, "forward", forward)  # noqa: B010


@dataclass(eq=False)
class Saved:
    """One storage: on the device, on the host, or both."""

    device_copy: Tensor | None
    """The whole storage as a flat tensor."""
    host_copy: Tensor | None = None
    arrived: torch.Event | None = None
    """Event at which `device_copy` has the data copied back to the device."""
    uses: int = 0
    """Number of saved references that have not been read yet."""


class OffloadHandle(NamedTuple):
    """Handle that autograd holds in place of a tensor."""

    saved: Saved
    offloaded: BlockOffload
    size: torch.Size
    stride: tuple[int, ...]
    offset: int | torch.SymInt


@dataclass(eq=False)
class BlockOffload:
    """Tensors that one block saved for one micro-batch."""

    before: BlockOffload | None
    """Offload of the previous block, which the backward pass reads next."""
    saved: dict[tuple[int, torch.dtype], Saved] = field(default_factory=dict)
    copied: torch.Event | None = None
    """Event at which all copies to the host are done."""
    is_read: bool = False


class ActivationOffload:
    """Copies the saved tensors of a stage's blocks to the host and back."""

    def __init__(self) -> None:
        self.copying: deque[BlockOffload] = deque()
        self._newest: BlockOffload | None = None
        self._device = torch.device("cpu")
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None

    def run(
        self, block: nn.Module, forward: Callable[..., Tensor], hidden: Tensor, *shared: Any, is_first: bool,
        input_is_kept: bool, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Run a block's forward pass. `is_first`: it is the stage's first block; `input_is_kept`: its input is held elsewhere
        anyway."""
        if not torch.is_grad_enabled():
            return forward(hidden, *shared, **options)
        kept_keys = {
            storage_key(tensor)
            for tensor in (*block.parameters(), *computing_copies(block), *tree_leaves((shared, options)))
            if isinstance(tensor, Tensor) and not isinstance(tensor, DTensor)
        }
        kept_keys |= {storage_key(hidden)} if input_is_kept else set()
        offloaded = self._newest = BlockOffload(None if is_first else self._newest)
        with saved_tensors_hooks(partial(self._pack, offloaded, kept_keys), self._unpack):
            output = forward(hidden, *shared, **options)
        self._device = hidden.device
        self._offload(offloaded)
        return output

    def _pack(self, offloaded: BlockOffload, kept_keys: set[int], tensor: Tensor) -> Tensor | OffloadHandle:
        storage = tensor.untyped_storage()
        if storage.nbytes() < OFFLOAD_FROM_BYTES or storage_key(tensor) in kept_keys or _is_parameter(tensor):
            return tensor
        key = (storage._cdata, tensor.dtype)
        if key not in offloaded.saved:
            whole = tensor.detach().as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0)
            offloaded.saved[key] = Saved(whole)
        saved = offloaded.saved[key]
        saved.uses += 1
        return OffloadHandle(saved, offloaded, tensor.size(), tensor.stride(), tensor.storage_offset())

    def _offload(self, offloaded: BlockOffload) -> None:
        """Start the copy to the host, and free the device copies of all but the last `OFFLOAD_RESIDENT` - 1 blocks."""
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

    def _unpack(self, view: Tensor | OffloadHandle) -> Tensor:
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
        """Start copying to the device what is not there; the copy overlaps with computation."""
        on_host = [saved for saved in offloaded.saved.values() if saved.device_copy is None and saved.host_copy is not None]
        if offloaded in self.copying:
            self.copying.remove(offloaded)
        if not on_host:
            return
        for saved in on_host:  # allocated on the compute stream, and freed to it
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
        """On CUDA, run the copies inside on the stream to the host (0) or to the device (1), after all work queued so far."""
        if self._device.type != "cuda":
            yield None
            return
        if self._streams is None:
            self._streams = (torch.cuda.Stream(self._device), torch.cuda.Stream(self._device))
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield stream


def _is_parameter(tensor: Tensor) -> bool:
    """True for parameters and views of them, including experts' parameters, which FSDP2 all-gathers inside the block."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
