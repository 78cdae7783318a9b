"""Every use of torch that torch does not promise to keep, in one place. A part that is missing costs only what needs it.

    what                                                 for
    FSDP2's state, buckets and gathered gradients        W and reductions without a backward pass (`pipeline_data`), gathers on
                                                         their way while the CPU computes (`data_parallel`), a fault of 2.12
                                                         (`reduced_buckets`)
    AllGather, ReduceScatter                             collectives of our own for FSDP2 (`collectives`)
    CachedTorchDispatchMode                              selective recomputation around FSDP2 of experts (`recompute`)
    without_modes                                        memory of the host, which nobody counts (`host_memory`)
    _resolve_process_group                               operations of torch's know a group by its name
    _set_pg_timeout                                      limits of a step, once the first one is done (`time_limits`)
    _is_profiler_enabled                                 ranges for a profiler, and nothing without one (`lost`)
    _PipelineScheduleRuntime, _Action                    torch's own executor of schedules (`pipeline_torch`)
    FakeProcessGroup, FakeTensor, TorchDispatchMode,
    _mesh_resources                                      traces, and memory counted on the CPU (`trace`, `measure.memory`)
    _scaled_mm                                           products in fp8
    _disable_dynamo, __dynamo_disable                    the compiler left unloaded where nothing is compiled
    _symmetric_memory                                    products of tp over memory of other ranks (`tensor_overlap`)
    FileStore, PrefixStore, Store, TCPStore, foreach,
    _assert_async, _backward_hooks, _sleep, tree_leaves                 public in all but name

Names of `MODULES_OF` are imported when they are first asked for. Tested with torch 2.11 to 2.14.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from math import nan
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import FSDPModule, fully_shard

if TYPE_CHECKING:
    from torch._C._distributed_c10d import FakeProcessGroup, FakeWork, FileStore, HashStore, PrefixStore, Store, TCPStore
    from torch._library.custom_ops import CustomOpDef
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.distributed.device_mesh import _mesh_resources as mesh_resources
    from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._python_dispatch import _disable_current_modes as without_modes
    from torch.utils._pytree import tree_leaves
    from torch.utils.checkpoint import _CachedTorchDispatchMode as CachedTorchDispatchMode

__all__ = [
    "AllGather", "CachedTorchDispatchMode", "CustomOpDef", "FSDPParam", "FSDPParamGroup", "FakeProcessGroup", "FakeTensor",
    "FakeWork", "FileStore", "HashStore", "PrefixStore", "ReduceScatter", "Store", "TCPStore", "TorchDispatchMode",
    "mesh_resources", "tree_leaves", "without_modes",
]  # fmt: skip

TESTED = ("2.11", "2.12", "2.13", "2.14")
Hook = Callable[..., Any]
_FSDP = "torch.distributed.fsdp._fully_shard."
MODULES_OF = {
    **dict.fromkeys(
        ("FakeProcessGroup", "FakeWork", "FileStore", "HashStore", "PrefixStore", "Store", "TCPStore"),
        "torch._C._distributed_c10d",
    ),
    "CustomOpDef": "torch._library.custom_ops",
    "FakeTensor": "torch._subclasses.fake_tensor",
    **dict.fromkeys(("AllGather", "ReduceScatter"), _FSDP + "_fsdp_api"),
    "FSDPParam": _FSDP + "_fsdp_param",
    "FSDPParamGroup": _FSDP + "_fsdp_param_group",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "without_modes": "torch.utils._python_dispatch",
    "tree_leaves": "torch.utils._pytree",
    "CachedTorchDispatchMode": "torch.utils.checkpoint",
    "mesh_resources": "torch.distributed.device_mesh",
}
"""The module of each name."""
_TORCH_NAMES = {
    "without_modes": "_disable_current_modes", "CachedTorchDispatchMode": "_CachedTorchDispatchMode",
    "mesh_resources": "_mesh_resources",
}  # fmt: skip
"""Names that are others there."""


def __getattr__(name: str) -> Any:
    """A name of `MODULES_OF`. Raises ImportError, with the tested releases, where this torch lacks it."""
    if name not in MODULES_OF:
        raise AttributeError(name)
    try:
        value = getattr(import_module(MODULES_OF[name]), _TORCH_NAMES.get(name, name))
    except (ImportError, AttributeError) as error:
        raise _missing_error([f"{MODULES_OF[name]} {_TORCH_NAMES.get(name, name)}"]) from error
    globals()[name] = value
    return value


def missing() -> Iterator[str]:
    """Names of FSDP2 and its like that are used here and that this torch does not have."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    wanted: list[tuple[Any, Sequence[str]]] = [
        (torch, ("_foreach_add_", "_foreach_copy_", "_foreach_mul_", "_foreach_norm", "_fused_adamw_", "_assert_async")),
        (torch.Tensor, ("_backward_hooks",)),
        (torch.autograd.profiler, ("_is_profiler_enabled",)),
        (distributed_c10d, ("_resolve_process_group", "_set_pg_timeout")),
        (fully_shard, ("state",)),
        (FSDPModule, ("_get_fsdp_state", "_set_unshard_async_op")),
        (state := FSDPState(), ("_state_ctx", "_root_post_backward_final_callback")),
        (getattr(state, "_state_ctx", None), ("all_states",)),
        (FSDPParamGroup, ("post_backward",)),
        (FSDPParam, ("to_accumulated_grad_if_needed", "reset_sharded_param", "_sharded_local_tensor", "_init_extensions")),
    ]
    for owner, names in wanted:
        yield from (f"{type(owner).__name__} {name}" for name in names if not hasattr(owner, name))
    if not any(hasattr(state, name) for name in ("_fsdp_param_group", "_fsdp_param_groups")):
        yield "FSDPState _fsdp_param_groups"
    if "unsharded_accumulated_grad" not in FSDPParam.__annotations__:
        yield "FSDPParam unsharded_accumulated_grad"


def expect_all(names: Sequence[str]) -> None:
    """Raises ImportError if any name is missing."""
    if names:
        raise _missing_error(names)


@cache
def expect_parts() -> None:
    """Raises ImportError if this torch lacks what data parallelism and the trainer stand on; looked for once."""
    expect_all(list(missing()))


def _missing_error(names: Sequence[str]) -> ImportError:
    tested = ", ".join(TESTED)
    return ImportError(f"torch {torch.__version__} lacks {', '.join(names)}; install a tested one: {tested}")


def fsdp_modules() -> dict[str, ModuleType]:
    """FSDP2's own modules by their names, for a trace, which puts parts of them aside. Raises ImportError."""
    names = ("_fsdp_collectives", "_fsdp_param", "_fsdp_param_group", "_fsdp_state", "_fully_shard")
    try:
        return {name: import_module(_FSDP + name) for name in names}
    except ImportError as error:
        raise _missing_error([_FSDP + "*"]) from error


def pipeline_runtime() -> tuple[Any, Callable[[str], Any]]:
    """The class of torch's executor of schedules, and what reads an action of its lists. A second to import: not with others.
    Raises ImportError."""
    from torch.distributed.pipelining import schedules

    runtime, action = (getattr(schedules, name, None) for name in ("_PipelineScheduleRuntime", "_Action"))
    wanted = [(runtime, "_initialize_stages"), (runtime, "_step_microbatches"), (runtime, "step"), (action, "from_str")]
    expect_all([f"torch.distributed.pipelining.schedules {name}" for owner, name in wanted if not hasattr(owner, name)])
    return runtime, action.from_str  # pyright: ignore[reportOptionalMemberAccess]


def seconds_of_compiling() -> dict[str, float]:
    """Seconds that torch's compiler has taken in this process, by phase. Loads the compiler: a second and 100 MB."""
    from torch._dynamo.utils import calculate_time_spent

    return dict(calculate_time_spent())


def compiler_settings() -> Any:
    """The settings of torch's compiler. Loads it: a second and 100 MB."""
    from torch._inductor import config

    return config


def never_compiled(function: Hook) -> Hook:
    """Decorator: `torch.compiler.disable`, but the compiler is loaded at the first call and not where `function` is defined."""
    return getattr(torch, "_disable_dynamo", torch.compiler.disable)(function)


def leave_compiler_out() -> None:
    """Let optimizers add groups and drop gradients without the compiler, which torch loads to keep it away from them. Does
    nothing where it is loaded already."""
    if "torch._dynamo" in sys.modules:
        return
    for method in (torch.optim.Optimizer.add_param_group, torch.optim.Optimizer.zero_grad):
        plain: Any = getattr(method, "__wrapped__", None)
        if plain is not None:
            setattr(plain, "__dynamo_disable", plain)


def load_compiler() -> None:
    """Load what FSDP2 and optimizers load at first use, which takes seconds: once, before ranks are forked."""
    import_module("torch._dynamo")


def in_backward_pass() -> bool:
    """True if autograd runs a backward pass on this thread."""
    return torch._C._current_graph_task_id() != -1


def is_tracing_shapes() -> bool:
    """True if DTensor is asking itself for shapes, with tensors that are not there."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None  # pyright: ignore


def scaled_mm(*operands: Tensor, **settings: Any) -> Tensor:
    """`torch._scaled_mm`: a product of two matrices in fp8 with their scales."""
    product: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
    return product(*operands, **settings)


def multiply_all(tensors: Sequence[Tensor], factor: float) -> None:
    """Multiply all of `tensors` by `factor`, in place."""
    torch._foreach_mul_(list(tensors), factor)  # pyright: ignore[reportPrivateImportUsage]


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of this name: operations of torch's take no other thing for it."""
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore


def modules_of_collectives() -> tuple[ModuleType, ModuleType]:
    """Modules where functions such as `isend` are looked up: torch's own know each other by the second."""
    return dist, distributed_c10d


def set_group_timeout(timeout: timedelta, group: dist.ProcessGroup) -> None:
    """Let collectives of `group` take so long from now on."""
    public = getattr(dist, "set_timeout", None)  # torch 2.14 and later
    (public or distributed_c10d._set_pg_timeout)(timeout, group)


def fsdp_state(module: nn.Module | FSDPModule) -> Any:
    """FSDP2's state of a module that it manages; several modules of one bucket have one."""
    return fully_shard.state(module)  # pyright: ignore[reportFunctionMemberAccess, reportArgumentType]


def fsdp_buckets(module: nn.Module) -> list[Any]:
    """All buckets of the model of which `module` is the root, the last first. Since torch 2.12 a module may have several;
    before that it had one or none."""
    buckets: list[Any] = []
    for state in reversed(fsdp_state(module)._state_ctx.all_states):
        buckets += reversed(_buckets_of(state))
    return buckets


def buckets_of_module(module: FSDPModule) -> list[Any]:
    """The buckets of this module alone."""
    return _buckets_of(fsdp_state(module))


def pad_shards(module: FSDPModule) -> None:
    """Let FSDP2 pad the shards of one module, as it does before the first forward pass."""
    for bucket in buckets_of_module(module):
        for parameter in bucket.fsdp_params:
            parameter.reset_sharded_param()


def fsdp_shard(parameter: nn.Parameter) -> Tensor:
    """This rank's shard of a parameter under FSDP2: the very tensor, which it keeps."""
    return parameter._local_tensor  # pyright: ignore[reportAttributeAccessIssue]


def gather_through(module: FSDPModule, hooks: Mapping[Tensor, tuple[Hook, Hook]]) -> None:
    """Let FSDP2 send what hooks give of parameters of `module`, whose shards are padded, and take what hooks make of it: its
    extensions for tensor subclasses (`fsdp_pre_all_gather`, `fsdp_post_all_gather`), which it looks for on the tensor. Set on
    one, masters stay plain tensors."""
    for bucket in buckets_of_module(module):
        for parameter in bucket.fsdp_params:
            if parameter.sharded_param in hooks:
                shard = parameter._sharded_local_tensor
                shard.fsdp_pre_all_gather, shard.fsdp_post_all_gather = hooks[parameter.sharded_param]
                parameter._init_extensions()


class _ShapeOnly:
    """Stand-in for the memory of which FSDP2 makes a parameter with `torch.as_strided`."""

    def __init__(self, dtype: torch.dtype, device: torch.device):
        self.dtype, self.device = dtype, device

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Tensor:
        assert func is torch.as_strided, f"FSDP2 asks for {func}"
        made, size = args[0], args[1]
        return torch.full((), nan, dtype=made.dtype, device=made.device).expand(size)


def shape_only(dtype: torch.dtype, device: torch.device) -> object:
    """Result of a hook of `gather_through` for a parameter that nobody reads: it has the shape that its gradients need, and the
    memory of one element, which is NaN."""
    return _ShapeOnly(dtype, device)


def _buckets_of(state: Any) -> list[Any]:
    several = hasattr(state, "_fsdp_param_groups")
    return list(state._fsdp_param_groups) if several else list(filter(None, [state._fsdp_param_group]))


def end_backward(module: nn.Module) -> None:
    """Let FSDP2 do for the model of root `module` what it does at the end of a backward pass of autograd's."""
    fsdp_state(module)._root_post_backward_final_callback()


def gather_beside_computation(module: FSDPModule) -> None:
    """Let gathers of `module` be waited for where they are read, on the CPU too."""
    module._set_unshard_async_op(True)


def has_hooks(tensor: Tensor) -> bool:
    """True if hooks want to see its gradient."""
    return bool(tensor._backward_hooks)


def copy_all(into: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copy each of `values` into its place, in as few kernels as can be."""
    torch._foreach_copy_(list(into), list(values))  # pyright: ignore[reportPrivateImportUsage]


def fused_adamw(
    parameters: list[Tensor], gradients: list[Tensor], first: list[Tensor], second: list[Tensor], steps: list[Tensor],
    **settings: Any,
) -> None:  # fmt: skip
    """Step of torch's fused AdamW: counts the update in `steps`, and writes parameters and moments."""
    torch._foreach_add_(steps, 1)  # pyright: ignore[reportPrivateImportUsage]
    torch._fused_adamw_(  # pyright: ignore[reportPrivateImportUsage]
        parameters, gradients, first, second, [], steps, amsgrad=False, maximize=False, **settings
    )


def norms_of(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each, [number]."""
    return torch.stack(list(torch._foreach_norm(list(tensors))))  # pyright: ignore[reportPrivateImportUsage]


def load_symmetric_memory() -> None:
    """Make `torch.ops.symm_mem` known: torch 2.11 does where its Python part is imported, and imports it nowhere."""
    import_module("torch.distributed._symmetric_memory")


def delay_on_device(seconds: float) -> None:
    """Keep the current CUDA stream from what is launched next for about `seconds`, at clocks of 2 GHz."""
    torch.cuda._sleep(int(seconds * 2e9))  # pyright: ignore[reportPrivateUsage]


def assert_on_device(holds: Tensor) -> None:
    """Trip a device assertion where a 0-d boolean is false, without waiting for it."""
    torch._assert_async(holds)  # pyright: ignore[reportPrivateImportUsage]


def flight_record() -> str | None:
    """Record of torch's flight recorder about the last collectives of this process, as JSON; None where torch has none for the
    backend or it is off (TORCH_FR_BUFFER_SIZE)."""
    dump = getattr(getattr(torch._C, "_distributed_c10d", None), "_dump_fr_trace_json", None)
    return None if dump is None else dump(True, False).decode(errors="replace")


def profiler_is_active() -> bool:
    """True if a profiler runs in this process. Torch's own optimizers ask the same before they name what they do."""
    return torch.autograd.profiler._is_profiler_enabled
