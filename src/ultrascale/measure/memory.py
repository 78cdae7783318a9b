"""Live bytes of tensors on this process, by category, operation by operation.

    memory = LiveMemory(model, optimizer)        # before the first step; fully_shard already applied
    with memory:
        for step in range(4):
            memory.mark("forward", step)
            ...
    memory.peak.by_category                      # bytes of each category at the moment the sum was highest

On a CPU there is no allocator to ask. A dispatch mode sees the result of every operation, forward and backward; each storage is
counted when first seen and, through a weak reference, discounted when it dies. FSDP2 frees gathered parameters by resizing
their storage to nothing, so `resize_` is watched too. Which category a storage belongs to is decided by who made it:

    parameters     the master parameters, or this rank's share of them
    gathered       whole copies of parameters that the computation uses (FSDP2's all-gather results; on one rank, in bf16)
    gradients      of parameters, whole or cut
    optimizer      everything made inside `optimizer.step()`
    activations    everything made in a forward pass
    temporary      everything else made in a backward pass: gradients of activations, recomputed activations
    communication  flat buffers that collectives read and write
    other          buffers of the model, batches, whatever was there before

Scratch inside a kernel is not a tensor and is not seen. Costs about 20 microseconds an operation, only inside the `with`.
On CUDA the allocator knows better (`torch.cuda.max_memory_allocated`). The alternative on CPU, torch's MemTracker, has no
category for gathered weights and was 1.4 percent off on the same runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ultrascale.parallel.activations.host_memory import is_on_host
from ultrascale.parallel.activations.offload import ActivationOffload
from ultrascale.parallel.pipeline import pipeline_passes
from ultrascale.parallel.precision.mixed_precision import computing_copies
from ultrascale.parallel.share import Share
from ultrascale.torch_private import FakeTensor, FSDPParamGroup, TorchDispatchMode, in_backward_pass, tree_leaves

CATEGORIES = (
    "parameters", "gathered", "gradients", "optimizer", "activations", "temporary", "communication", "other",
)  # fmt: skip
HOST = "host"
"""Category for what waits in host memory (`parallel.activations.host_memory`), in no sum."""


@dataclass(frozen=True)
class Sample:
    """Live bytes at one moment."""

    step: int
    phase: str
    """Phase that the trainer marked last: `forward`, `backward`, `optimizer`, ..."""
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())  # the host's is not in it


@dataclass
class _Block:
    """One living storage."""

    size: int
    category: str
    reference: weakref.ref


class LiveMemory(TorchDispatchMode):
    """Counts live bytes by category while it is entered. See the head of this file."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, round_to: int = 1):
        """Count for `model` and `optimizer`; sizes are rounded up to multiples of `round_to` bytes (CUDA's allocator: 512)."""
        super().__init__()
        self.model, self.optimizer, self.round_to = model, optimizer, round_to
        self.now: dict[str, int] = {category: 0 for category in CATEGORIES}
        self.on_host = self.peak_on_host = 0
        """Bytes in the host's memory, beside the device's: now, and the most there were."""
        self.samples: list[Sample] = []
        self.peak = Sample(0, "start", dict(self.now))
        self._step, self._phase = 0, "start"
        self._blocks: dict[int, _Block] = {}
        self._region: str | None = None
        self._total = 0
        self._undo: list[Any] = []

    def mark(self, phase: str, step: int | None = None) -> None:
        """Say what comes next: samples from here on carry this name (and step)."""
        self._phase = phase
        self._step = self._step if step is None else step
        self._sample()

    def timeline(self, max_points: int = 2000) -> list[dict[str, Any]]:
        """Samples in order as JSON-able rows; of each stretch of equal length the highest, at most about `max_points`."""
        stride = -(-len(self.samples) // max_points) or 1
        stretches = (self.samples[start : start + stride] for start in range(0, len(self.samples), stride))
        peaks = (max(stretch, key=lambda sample: sample.total) for stretch in stretches)
        return [{"step": s.step + 1, "phase": s.phase, "bytes": s.by_category} for s in peaks]

    def __enter__(self) -> LiveMemory:
        self._count_what_is_there()
        self._watch_gradients()
        self._watch_optimizer()
        self._watch_fsdp()
        self._patch(torch.UntypedStorage, "resize_", self._after_resize)
        self._sample()
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()
        self._blocks.clear()  # the weak references die with it, so nothing of ours is called after this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor turns itself into local operations first; those come back here
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, self._region or "other")
        category = self._category()
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor, category)
        if self._total != self.samples[-1].total:
            self._sample()
        return result

    # What is counted

    def _category(self) -> str:
        if self._region is not None:
            return self._region
        return "temporary" if in_backward_pass() else "activations"

    def _count(self, tensor: torch.Tensor, category: str) -> None:
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        if storage._cdata not in self._blocks:
            self._add(storage, category)

    def _add(self, storage: torch.UntypedStorage, category: str) -> None:
        category = HOST if is_on_host(storage) else category
        key, size = storage._cdata, self._rounded(storage.nbytes())
        self._blocks[key] = _Block(size, category, weakref.ref(storage, lambda _: self._remove(key)))
        self._change(category, size)

    def _remove(self, key: int) -> None:
        block = self._blocks.pop(key, None)
        if block is not None:
            self._change(block.category, -block.size)

    def _retag(self, tensor: torch.Tensor | None, category: str) -> None:
        if tensor is None:
            return
        self._count(tensor, category)
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        block = self._blocks[storage._cdata]
        if block.category == HOST:
            return
        self.now[block.category] -= block.size
        self.now[category] += block.size
        block.category = category

    def _change(self, category: str, size: int) -> None:
        if category == HOST:
            self.on_host += size
            self.peak_on_host = max(self.peak_on_host, self.on_host)
            return
        self.now[category] += size
        self._total += size
        if self._total > self.peak.total:
            self.peak = Sample(self._step, self._phase, dict(self.now))

    def _rounded(self, size: int) -> int:
        return -(-size // self.round_to) * self.round_to

    def _sample(self) -> None:
        self.samples.append(Sample(self._step, self._phase, dict(self.now)))

    # Who makes what

    def _count_what_is_there(self) -> None:
        for parameter in self.model.parameters():
            self._count(parameter, "parameters")
            if parameter.grad is not None:
                self._count(parameter.grad, "gradients")
        for copy in computing_copies(self.model):
            self._count(copy, "gathered")
        for buffer in self.model.buffers():
            self._count(buffer, "other")
        self._count_optimizer_state()

    def _count_optimizer_state(self, *unused: Any) -> None:
        if self.optimizer is not None:
            for value in tree_leaves([list(state.values()) for state in self.optimizer.state.values()]):
                if isinstance(value, torch.Tensor):
                    self._count(value, "optimizer")

    def _watch_gradients(self) -> None:
        for parameter in self.model.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self._retag(p.grad, "gradients"))
                self._undo.append(hook.remove)

    def _watch_optimizer(self) -> None:
        if self.optimizer is None:
            return

        def before(*unused: Any) -> None:
            self._region = "optimizer"

        def after(*unused: Any) -> None:
            self._region = None

        self._undo += [
            self.optimizer.register_step_pre_hook(before).remove,
            self.optimizer.register_step_post_hook(after).remove,
        ]

    def _watch_fsdp(self) -> None:
        self._patch(FSDPParamGroup, "unshard", region="communication")
        self._patch(FSDPParamGroup, "wait_for_unshard", self._after_gather, region="gathered")
        self._patch(FSDPParamGroup, "post_backward", self._after_reduce, region="communication")
        self._patch(Share, "finish_gradients", region="communication")
        self._patch(ActivationOffload, "_prefetch", region="activations")  # in the backward pass, from the host
        for name in ("make_gradients", "reduce_weight_gradients"):  # W, in which autograd has no part
            self._patch(pipeline_passes, name, region="gradients")

    def _after_gather(self, group: Any, *unused: Any) -> None:
        """Watch the gradients of the gathered parameters, which exist from the first all-gather on."""
        for parameter in (shard._unsharded_param for shard in group.fsdp_params if hasattr(shard, "_unsharded_param")):
            if parameter.requires_grad and getattr(parameter, "_counted_by", None) is not self:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self._retag(p.grad, "gradients"))
                parameter._counted_by = self
                self._undo += [hook.remove, lambda parameter=parameter: setattr(parameter, "_counted_by", None)]

    def _after_reduce(self, group: Any, *unused: Any) -> None:
        """Whole gradients that wait for the next micro-batch, cast to the dtype of the reduction."""
        for shard in group.fsdp_params:
            self._retag(shard.unsharded_accumulated_grad, "gradients")

    def _after_resize(self, storage: torch.UntypedStorage, *unused: Any) -> None:
        block = self._blocks.get(storage._cdata)
        if block is None:
            self._add(storage, self._category())
        else:
            size = self._rounded(storage.nbytes())
            self._change(block.category, size - block.size)
            block.size = size
        self._sample()

    def _patch(self, owner: Any, name: str, after: Any = None, *, region: str | None = None) -> None:
        """Wrap `owner.name` until exit: what it makes is of category `region`, and `after` is called with its arguments."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._in_region(region or self._region):
                result = original(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        setattr(owner, name, watched)
        self._undo.append(lambda: setattr(owner, name, original))

    @contextmanager
    def _in_region(self, region: str | None) -> Iterator[None]:
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before
