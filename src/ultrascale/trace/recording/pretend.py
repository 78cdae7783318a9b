"""Simulates one rank of many, and its device, in a single process.

    processes    a backend that completes every message at once, with only the process groups of this rank
    device       the meta device in place of the target (`kernels.choice.device_kind`); weights are not initialised
    FSDP2        treats the meta device as one with streams; the recorder of memory sees their names
    kernels      attention and RMSNorm choose kernels in C++ by device: here those of the target

Every patch is in this file, replaces something of torch or `parallel.apply`, and is undone at exit.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.optim.optimizer as torch_optimizer
from torch import Tensor
from torch.distributed.tensor import debug
from torch.nn import functional as F

from ultrascale.kernels.choice.device_kind import Kind, meta_stands_for
from ultrascale.kernels.choice.wide import wide_dtype
from ultrascale.parallel import apply
from ultrascale.parallel.mesh import Ranks
from ultrascale.torch_private import (
    FakeProcessGroup,
    FakeWork,
    FSDPParam,
    FSDPParamGroup,
    HashStore,
    fsdp_modules,
    mesh_resources,
)

META = torch.device("meta")
BACKEND = "ultrascale_trace"
_aten = torch.ops.aten


@contextmanager
def pretended_rank(rank: int, world: int, kind: Kind) -> Iterator[tuple[Ranks, PretendDevice]]:
    """Context in which this process acts as `rank` of `world` on a device of this `kind`. No process group may exist."""
    assert not dist.is_initialized(), "this process is a rank of a run already"
    streams = PretendDevice(kind)
    forget_meshes()
    with ExitStack() as undo:
        undo.callback(forget_meshes)
        undo.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", FutureWarning)  # torch's, of names that older versions have alone
        undo.enter_context(meta_stands_for(kind))
        for owner, name, value in _replacements(kind, streams):
            undo.enter_context(patch.object(owner, name, value))
        group = None
        if world > 1:
            undo.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # torch's begins each line with [rank1]
            _join(rank, world)
            undo.callback(dist.destroy_process_group)
            group = dist.group.WORLD
        yield Ranks(rank, world, META, group), streams


def forget_meshes() -> None:
    """Clear DTensor's caches of ranks simulated earlier: they are keyed by mesh, and meshes of two ranks may be equal."""
    for name in ("_clear_python_sharding_prop_cache", "_clear_fast_path_sharding_prop_cache"):
        getattr(debug, name, lambda: None)()


def _replacements(kind: Kind, streams: PretendDevice) -> Iterator[tuple[Any, str, Any]]:
    fsdp = fsdp_modules()
    yield fsdp["_fully_shard"], "_get_device_from_mesh", lambda mesh: META
    for name in ("_fsdp_param_group", "_fsdp_state", "_fsdp_collectives"):
        yield fsdp[name], "_get_device_handle", lambda device: streams
    # DTensor prices moves between layouts by it, from torch 2.14 on also where it detaches a shard.
    yield mesh_resources, "num_devices_per_host", lambda device_type: 1
    yield FakeWork, "is_completed", lambda work: True
    yield torch.accelerator, "current_stream", streams.current_stream
    yield FSDPParamGroup, "_validate_no_meta_params", lambda group: None
    yield FSDPParam, "reset_sharded_param", _padding(FSDPParam.reset_sharded_param)
    yield torch_optimizer, "_get_fused_kernels_supported_devices", lambda: ["meta", "cpu", "cuda"]
    yield apply, "initialise", lambda *given, **options: None
    yield F, "scaled_dot_product_attention", _attention_of[kind]
    if kind == "cuda":
        yield F, "rms_norm", _fused_rms_norm


def _padding(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """FSDP2's `reset_sharded_param` with padding on the meta device too: torch pads shorter shards to the first rank's length
    only on other devices."""

    def padded(parameter: Any) -> None:
        reset(parameter)
        shard, size = parameter.sharded_param._local_tensor, parameter.padded_sharded_param_size
        if shard.is_meta and shard.untyped_storage().nbytes() < size.numel() * shard.itemsize:
            whole = shard.new_zeros(size)
            parameter._sharded_param_data = whole.view(-1)
            parameter.sharded_param._local_tensor = whole.narrow(0, 0, len(shard))

    return padded


def _join(rank: int, world: int) -> None:
    if not hasattr(dist.Backend, BACKEND.upper()):
        dist.Backend.register_backend(BACKEND, _create_backend, extended_api=True, devices=["cpu", "meta"])
    dist.init_process_group(BACKEND, rank=rank, world_size=world, store=HashStore())


def _create_backend(common: Any, options: Any) -> FakeProcessGroup:
    return FakeProcessGroup._create_internal(common.group_rank, common.group_size, options)  # pyright: ignore[reportCallIssue]


class PretendDevice:
    """Stand-in for the parts of a device's module (`torch.cuda`, `torch.cpu`) that FSDP2 uses."""

    def __init__(self, kind: Kind):
        self.kind = kind
        self.compute = Stream("compute")
        self.current = self.compute
        self.made = 0

    def Stream(self, *unused: Any, **options: Any) -> Stream:
        """A new stream. FSDP2 makes four, named by purpose."""
        names = ("gather copies", "gathers", "reductions", "sums over copies")
        name = names[self.made % len(names)] if self.kind == "cuda" else "compute"
        self.made += 1
        return Stream(name)

    def Event(self, *unused: Any, **options: Any) -> CompletedEvent:
        return CompletedEvent()

    def current_stream(self, *unused: Any) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Context whose allocations belong to `stream`."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


class CompletedEvent:
    """An event that has already completed."""

    def record(self, *unused: Any) -> CompletedEvent:
        return self

    def query(self) -> bool:
        return True

    def wait(self, *unused: Any) -> None: ...

    def synchronize(self) -> None: ...


class Stream:
    """A stream whose work is always complete."""

    def __init__(self, name: str):
        self.name = name

    def wait_stream(self, stream: Stream) -> None: ...

    def wait_event(self, event: CompletedEvent) -> None: ...

    def record_event(self, *unused: Any) -> CompletedEvent:
        return CompletedEvent()


def _attention_on_cpu(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    out, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
    )
    return out


def _attention_on_cuda(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    if query.dtype == torch.float64:
        return _aten._scaled_dot_product_attention_math(query, key, value, attn_mask, 0.0, is_causal, scale=scale)[0]
    one_width = query.shape[-1] == value.shape[-1]
    if attn_mask is None and one_width and query.dtype in (torch.bfloat16, torch.float16):
        return _aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2])
    needs = torch.is_grad_enabled() and query.requires_grad
    return _aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs, dropout_p, is_causal, scale=scale)[0]


_attention_of: dict[Kind, Callable[..., Tensor]] = {"cpu": _attention_on_cpu, "cuda": _attention_on_cuda}


def _fused_rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    return _PretendRMSNorm.apply(x, weight)  # pyright: ignore[reportReturnType]


class _PretendRMSNorm(torch.autograd.Function):
    """Stand-in for CUDA's fused RMSNorm, which saves the input, the weight and one number a row."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        rows = x.new_empty((*x.shape[:-1], 1), dtype=wide_dtype(x))
        ctx.save_for_backward(x, weight, rows)
        return torch.empty_like(x, memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(weight)
