"""Records every dispatched operation of a rank: its allocations, messages and FLOPs.

On the meta device nothing is computed, and most operations repeat: an operation that neither writes in place nor returns views
gets its results from the cached shapes of the first such call, at a tenth of the time of torch's shape functions. Values are
made up where the trainer needs them: each number that it reads is 2, and all experts are chosen equally often (`trace.rank`).
A model that reads a value is refused, with the operation and the line.

Allocations and frees of storages are tracked as in `measure.memory`, with names, and every change is kept.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ultrascale.kernels.fp8 import fp8_matrices as fp8
from ultrascale.measure.memory import LiveMemory, storage_of
from ultrascale.parallel import all_to_all
from ultrascale.parallel.activations import recompute
from ultrascale.parallel.activations.host_memory import is_on_host
from ultrascale.parallel.activations.regions import RerunRegion
from ultrascale.parallel.precision import fp8_wires
from ultrascale.parallel.tensor import tensor_ops
from ultrascale.torch_private import (
    CustomOpDef,
    FakeTensor,
    FakeWork,
    TorchDispatchMode,
    in_backward_pass,
    is_tracing_shapes,
)
from ultrascale.trace.groups import group_of
from ultrascale.trace.recording.flops import FLOPS
from ultrascale.trace.recording.recipes import from_recipe, key_of, recipe_of, tensors_in
from ultrascale.trace.recording.record import Mark, RankTrace, Sent, StorageRecord
from ultrascale.trace.views.lines import line_of_code, line_of_ours, may_read

AGAIN = ", again"
"""Suffix of the name of a block that is recomputed."""


class Storages(LiveMemory):
    """Records live storages while it is entered, from `watch` on."""

    def __init__(self, trace: RankTrace, *, stream_name: Callable[[], str] = lambda: "compute"):
        super().__init__(nn.Module(), None, round_to=trace.round_to)
        self.trace, self.stream_name = trace, stream_name
        self.counted = ("meta", "cpu") if trace.device == "cpu" else ("meta",)
        """Device types whose storages count: with a CPU target, host storages are in the same memory."""
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
        """Start counting, with the storages that exist."""
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
        """Label what follows."""
        self._step = self._step if step is None else step
        self._phase, self._during = phase, action or phase
        if not action:
            self.times = 1
        self.trace.marks.append(Mark(self._tick, self._step, phase, action))

    def as_batch(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, with all that it allocates counted as a batch."""

        def counted(*args: Any) -> Any:
            with self._in_region("other"):
                return make(*args)

        return counted

    def _hide(self, storage: torch.UntypedStorage) -> None:
        """Excludes a storage from the count."""
        key = storage._cdata
        self._hidden[key] = weakref.ref(storage, lambda _: self._hidden.pop(key, None))

    def _count_all(self, result: Any, func: Any) -> None:
        if not self.is_counting:
            return
        for tensor in tensors_in(result):
            self._count(tensor, self._category(), func)

    def _add_new(self, result: Any, func: Any) -> None:
        if not self.is_counting:
            return
        for tensor in tensors_in(result):
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
        trace.blocks.append(StorageRecord(category, what, line_of_ours(sys._getframe()), during, self.stream_name()))
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
        """Hook recomputation, to tell a block's second forward pass from its first."""
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

        self._replace(recompute, "checkpoint", watched)
        begin, run_again = RerunRegion.__init__, RerunRegion.run_again

        def begun(region: RerunRegion, *args: Any) -> None:
            begin(region, *args)
            setattr(region, "block", self._block)  # noqa: B010

        def again(region: RerunRegion) -> None:
            before, self._block = self._block, f"{getattr(region, 'block')}{AGAIN}"  # noqa: B009
            try:
                run_again(region)
            finally:
                self._block = before

        self._replace(RerunRegion, "__init__", begun)
        self._replace(RerunRegion, "run_again", again)

    def _watch_blocks(self) -> None:
        """Hook the model's blocks, so that storages are labelled with the block that made them."""
        for stage in self.model.modules():
            if not hasattr(stage, "blocks"):
                continue
            for number, block in stage.blocks():  # pyright: ignore[reportCallIssue]

                def enter(module: nn.Module, inputs: Any, number: int = number) -> None:
                    self._block = f"block {number}"

                def leave(module: nn.Module, inputs: Any, result: Any) -> None:
                    self._block = ""

                self._undo += [block.register_forward_pre_hook(enter).remove, block.register_forward_hook(leave).remove]


_aten = torch.ops.aten
PRETENDED_NUMBER = 2.0
"""Value of every number that the trainer reads from the device: as a norm above any limit, so gradients are clipped."""

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


class TraceError(RuntimeError):
    """The model or the run cannot be traced."""


class Recorder(Storages):
    """Records operations, messages and FLOPs while it is entered, and storages from `watch` on."""

    def __init__(self, trace: RankTrace, **options: Any):
        super().__init__(trace, **options)
        self._handlers: dict[Any, Handler] = {}
        self._known: dict[Any, Any] = {}
        self._flops_of: dict[Any, int] = {}

    def __enter__(self) -> Recorder:
        self._patch(torch.UntypedStorage, "resize_", self._after_resize)
        self._watch_recomputation()
        self._watch_fsdp()
        TorchDispatchMode.__enter__(self)
        return self

    def __exit__(self, *exc: Any) -> None:
        self.trace.ticks, self.is_counting = self._tick, False
        self._numbers.clear()
        self._references.clear()
        self._hidden.clear()
        super().__exit__(*exc)

    # Operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for kind in types:
            if issubclass(kind, DTensor):
                return NotImplemented
        if is_tracing_shapes():  # DTensor's own shape propagation
            return func(*args, **(kwargs or {}))
        handler = self._handlers.get(func)
        if handler is None:
            handler = self._handlers[func] = self._handler(func)
        self._tick += 1
        try:
            return handler(func, args, kwargs or {})
        except NotImplementedError as error:
            raise _needs_values(func, "its result's shape, or what is done next, depends on them") from error

    def _handler(self, func: Any) -> Handler:
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._communicate
        if (implementation := OWN_OPERATIONS.get(func)) is not None:
            return lambda func, args, options: self._inside(implementation, args, options)
        if func in SPECIAL:
            return SPECIAL[func].__get__(self)
        schema, name = func._schema, func._schema.name.rpartition("::")[2]
        if func.namespace != "aten" or torch.Tag.inplace_view in func.tags or name.endswith(("resize_", "set_")):
            return self._run
        if not schema.is_mutable and not any(result.alias_info for result in schema.returns):
            return self._make
        writes = schema.arguments[0].alias_info is not None and name.endswith("_")
        return self._write if writes and len(schema.returns) < 2 else self._run

    def _inside(self, implementation: Callable[..., Any], args: Any, options: Any) -> Any:
        """Runs a custom operation of ours, recording the operations inside it."""
        TorchDispatchMode.__enter__(self)
        try:
            return implementation(*args, **options)
        finally:
            TorchDispatchMode.__exit__(self, None, None, None)

    def _run(self, func: Any, args: Any, options: Any) -> Any:
        """Runs an operation on the meta device by torch's shape function."""
        result = func(*args, **options)
        self._count_flops(func, args, options, result)
        self._count_all(result, func)
        return result

    def _write(self, func: Any, args: Any, options: Any) -> Any:
        """Handles an in-place operation: nothing to compute."""
        first = args[0]
        example = first[0] if isinstance(first, list | tuple) else first
        if not isinstance(example, Tensor) or example.device.type != "meta":
            if func is _aten.copy_.default and args[1].device.type == "meta":
                return first
            return self._run(func, args, options)
        if func._overloadpacket in FLOPS:
            self._add_flops(func, FLOPS[func._overloadpacket](*args, **options, out_val=first))
        return first if func._schema.returns else None

    def _make(self, func: Any, args: Any, options: Any) -> Any:
        """New result tensors, from the cached shapes of the first such operation."""
        try:
            key = (func, key_of(args), key_of(tuple(options.items())) if options else None)
            known = self._known.get(key)
        except TypeError:
            return self._run(func, args, options)
        if known is None:
            result = func(*args, **options)
            self._known[key] = recipe_of(result, args, options)
            self._flops_of[key] = self._flops(func, args, options, result)
        elif known is False:
            result = func(*args, **options)
        else:
            result = from_recipe(known)
        if flops := self._flops_of[key]:
            self._add_flops(func, flops)
        if known:
            self._add_new(result, func)
        else:
            self._count_all(result, func)
        return result

    # Operations that read values

    def _read_number(self, func: Any, args: Any, options: Any) -> Any:
        (tensor,) = args
        if tensor.device.type != "meta":
            return func(*args, **options)
        if not may_read(sys._getframe()):
            raise _needs_values(func, "the host reads a number, on which shapes and branches may depend")
        if tensor.dtype.is_floating_point:
            return PRETENDED_NUMBER
        return True if tensor.dtype is torch.bool else 0

    def _to_copy(self, func: Any, args: Any, options: Any) -> Any:
        device = options.get("device")
        if device is not None and device.type == "cpu" and args[0].device.type == "meta":
            if not may_read(sys._getframe()):
                raise _needs_values(func, "numbers are copied to the host, which may do anything with them")
            result = torch.zeros(args[0].shape, dtype=options.get("dtype") or args[0].dtype)
            self._hide(result.untyped_storage())  # on a CPU it would be no copy
            return result
        if device is not None and device.type == "meta" and args[0].device.type == "cpu":
            result = func(*args, **options)
            self._count(result, "other")  # a batch, on its way to the device
            return result
        return self._make(func, args, options)

    def _lift(self, func: Any, args: Any, options: Any) -> Any:
        """Handles a tensor that comes from NumPy or Python: a batch."""
        self._count(args[0], "other")
        return func(*args, **options)

    def _bincount(self, func: Any, args: Any, options: Any) -> Any:
        if args[0].device.type != "meta":
            return func(*args, **options)
        bins = options.get("minlength", args[2] if len(args) > 2 else 0)
        result = torch.empty(bins, dtype=torch.int64, device="meta")
        self._count_all(result, func)
        return result

    def _grouped_mm(self, func: Any, args: Any, options: Any) -> Any:
        """Grouped GEMM: torch's shape function supports only bf16, its kernels more dtypes."""
        left, right = args[0], args[1]
        ends = options.get("offs", args[2] if len(args) > 2 else None)
        groups = (len(ends),) if right.dim() == 2 and ends is not None else ()
        result = left.new_empty(*groups, left.shape[-2], right.shape[-1])
        self._count_flops(func, args, options, result)
        self._count_all(result, func)
        return result

    # Messages

    def _communicate(self, func: Any, args: Any, options: Any) -> Any:
        self._note(func, args)
        if func.namespace != "c10d":
            raise TraceError(f"{func} at {line_of_code(sys._getframe())} is a collective that a trace does not know")
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _note(self, func: Any, args: Any) -> None:
        name = func._schema.name.rpartition("::")[2]
        kind, position = KINDS.get(name, (name, 0))
        group = next((candidate for candidate in map(_as_group, args) if candidate is not None), None)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1:
            return
        tensors = list(tensors_in(args[position])) if args else []
        place = group_of(self.trace.layout, ranks)
        line, is_host = line_of_ours(sys._getframe()), bool(tensors) and tensors[0].device.type == "cpu"
        size = sum(tensor.nbytes for tensor in tensors)
        if tensors and tensors[0].dtype == torch.int64:
            kind = f"{kind} of counts"
        self.trace.sent.append(
            Sent(self._tick, self._step, kind, *place, size, line, f"{self._during} {self._block}".strip(), is_host, self.times)
        )

    # FLOPs

    def _count_flops(self, func: Any, args: Any, options: Any, result: Any) -> None:
        if flops := self._flops(func, args, options, result):
            self._add_flops(func, flops)

    def _flops(self, func: Any, args: Any, options: Any, result: Any) -> int:
        formula = FLOPS.get(func._overloadpacket)
        return 0 if formula is None else formula(*args, **options, out_val=result)

    def _add_flops(self, func: Any, flops: int) -> None:
        self.trace.flops[self._step, func._schema.name.rpartition("::")[2], self._pass()] += flops * self.times

    def _pass(self) -> str:
        if not in_backward_pass():
            return "forward"
        return "recomputed" if self._block.endswith(AGAIN) else "backward"


def _needs_values(func: Any, why: str) -> TraceError:
    return TraceError(
        f"{func} at {line_of_code(sys._getframe())}: needs values, and a trace has shapes alone: {why}. "
        "Write it without, such as with torch.where or a fixed size."
    )


def _as_group(value: Any) -> dist.ProcessGroup | None:
    if isinstance(value, dist.ProcessGroup):
        return value
    if isinstance(value, torch.ScriptObject):
        try:
            return dist.ProcessGroup.unbox(value)
        except (RuntimeError, TypeError):
            return None
    return None


OWN_OPERATIONS = {
    value._opoverload: value._init_fn
    for module in (tensor_ops, all_to_all, fp8_wires, fp8)
    for value in vars(module).values()
    if isinstance(value, CustomOpDef)
}
"""Custom operations of ours that are recorded from inside: their gathers count as memory, their sends as messages."""
SPECIAL = {
    _aten._local_scalar_dense.default: Recorder._read_number,
    _aten._to_copy.default: Recorder._to_copy,
    _aten.lift_fresh.default: Recorder._lift,
    _aten.bincount.default: Recorder._bincount,
    _aten._grouped_mm.default: Recorder._grouped_mm,
}
KINDS = {
    "allreduce_": ("all_reduce", 0), "allreduce_coalesced_": ("all_reduce", 0), "_allgather_base_": ("all_gather", 0),
    "allgather_": ("all_gather", 0), "_reduce_scatter_base_": ("reduce_scatter", 1), "reduce_scatter_": ("reduce_scatter", 1),
    "alltoall_base_": ("all_to_all", 1), "alltoall_": ("all_to_all", 1), "broadcast_": ("broadcast", 0), "send": ("send", 0),
    "recv_": ("receive", 0), "barrier": ("barrier", 0),
}  # fmt: skip
"""Kind of each of torch's collectives, and the argument whose bytes count."""
