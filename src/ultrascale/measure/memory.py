"""Live bytes of tensors on this process, by category, operation by operation.

    memory = LiveMemory(model, optimizer)        # before the first step; fully_shard already applied
    with memory:
        for step in range(4):
            memory.mark("forward", step)
            ...
    memory.peak.by_category                      # bytes of each category at the moment the sum was highest

A CPU has no allocator with statistics. A dispatch mode sees the result of every operation, forward and backward; each storage
is counted when first seen and, through a weak reference, subtracted when it is freed. FSDP2 frees gathered parameters by
resizing their storage to zero, so `resize_` is tracked too. The code that allocates a storage determines its category:

    parameters     the master parameters, or this rank's shard of them
    gathered       unsharded parameters for the computation (FSDP2's all-gather results; on one rank, the bf16 copies)
    gradients      gradients of parameters, unsharded or sharded
    optimizer      everything allocated inside `optimizer.step()`
    activations    everything allocated in a forward pass
    temporary      everything else allocated in a backward pass: gradients of activations, recomputed activations
    communication  flat buffers that collectives read and write
    other          buffers of the model, batches, everything that existed before

Between steps nothing is counted: there saves and islands copy to the host, whose memory the plan of a device leaves out.

Scratch memory inside a kernel is not a tensor and is not seen. Costs about 20 microseconds per operation, only inside the
`with`. On CUDA the allocator's own numbers are better (`torch.cuda.max_memory_allocated`). The alternative on CPU, torch's
MemTracker, has no category for gathered weights and was 1.4 percent off on the same runs.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

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
"""Category of tensors offloaded to host memory (`parallel.activations.host_memory`); not part of any sum."""
BETWEEN_STEPS = "between"
"""Phase in which nothing is counted: saves and islands copy to host memory, which is also the device's only on a CPU."""


@dataclass(frozen=True)
class Sample:
    """Live bytes at one moment."""

    step: int
    phase: str
    """Last phase marked by the trainer: `forward`, `backward`, `optimizer`, ..."""
    by_category: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_category.values())  # without host memory


@dataclass
class _Block:
    """One living storage."""

    size: int
    category: str
    reference: weakref.ref


class LiveMemory(TorchDispatchMode):
    """Counts live bytes by category while it is entered; see the module docstring."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *, round_to: int = 1):
        """Count for `model` and `optimizer`; sizes are rounded up to multiples of `round_to` bytes (CUDA's allocator: 512)."""
        super().__init__()
        self.model, self.optimizer, self.round_to = model, optimizer, round_to
        self.now: dict[str, int] = {category: 0 for category in CATEGORIES}
        self.on_host = self.peak_on_host = 0
        """Offloaded bytes in host memory: now, and at the peak."""
        self.samples: list[Sample] = []
        self.peak = Sample(0, "start", dict(self.now))
        self._step, self._phase = 0, "start"
        self._blocks: dict[int, _Block] = {}
        self._region: str | None = None
        self._total = 0
        self._undo: list[Any] = []

    def mark(self, phase: str, step: int | None = None) -> None:
        """Set the phase (and step) of the samples that follow."""
        self._phase = phase
        self._step = self._step if step is None else step
        self._sample()

    def timeline(self, max_points: int = 2000) -> list[dict[str, Any]]:
        """Samples in order as JSON-able rows, at most about `max_points`: the highest of each interval of equal length."""
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
        self._blocks.clear()  # deletes the weak references, so their callbacks do not run after this

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor dispatches to local operations first, which arrive here again
        result = func(*args, **(kwargs or {}))
        if self._phase == BETWEEN_STEPS:
            return result
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

    # Counting

    def _category(self) -> str:
        if self._region is not None:
            return self._region
        return "temporary" if in_backward_pass() else "activations"

    def _count(self, tensor: torch.Tensor, category: str) -> None:
        if isinstance(tensor, FakeTensor) or tensor.device.type == "meta":
            return
        storage = storage_of(tensor)
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
        storage = storage_of(tensor)
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

    # Categories of allocations

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
        for name in ("make_gradients", "reduce_weight_gradients"):  # W, which runs outside autograd
            self._patch(pipeline_passes, name, region="gradients")

    def _after_gather(self, group: Any, *unused: Any) -> None:
        """Track gradients of the unsharded parameters, which exist from the first all-gather on."""
        for parameter in (shard._unsharded_param for shard in group.fsdp_params if hasattr(shard, "_unsharded_param")):
            if parameter.requires_grad and getattr(parameter, "_counted_by", None) is not self:
                hook = parameter.register_post_accumulate_grad_hook(lambda p: self._retag(p.grad, "gradients"))
                parameter._counted_by = self
                self._undo += [hook.remove, lambda parameter=parameter: setattr(parameter, "_counted_by", None)]

    def _after_reduce(self, group: Any, *unused: Any) -> None:
        """Track unsharded gradients kept for the next micro-batch, cast to the reduction's dtype."""
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
        """Wrap `owner.name` until exit: its allocations get category `region`, and `after` is called with its arguments."""
        original = getattr(owner, name)

        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._in_region(region or self._region):
                result = original(*args, **kwargs)
            if after is not None:
                after(*args)
            return result

        self._replace(owner, name, watched)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until exit."""
        replacement = patch.object(owner, name, value)
        replacement.start()
        self._undo.append(replacement.stop)

    @contextmanager
    def _in_region(self, region: str | None) -> Iterator[None]:
        before, self._region = self._region, region
        try:
            yield
        finally:
            self._region = before


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage of a tensor, or of a DTensor's local shard."""
    return (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
