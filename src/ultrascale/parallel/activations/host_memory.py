"""Pinned host memory for tensors that do not fit on the device, so that copies run asynchronously.

On the CPU, "device" and host share one memory. Tensors allocated here are marked all the same, so that code that counts device
memory (`measure.memory`, `trace`) leaves them out, and offload can be tested without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ultrascale.torch_private import without_modes

_MARK = "_ultrascale_on_host"


def host_tensor(like: Tensor) -> Tensor:
    """Uninitialised host tensor with the shape, strides and dtype of `like`: pinned if `like` is on CUDA; on the meta device (a
    simulated device) it takes no memory."""
    device = "meta" if like.device.type == "meta" else "cpu"
    with without_modes():  # or it would be counted before it is marked
        taken = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device, pin_memory=like.is_cuda)
    setattr(taken.untyped_storage(), _MARK, True)  # torch keeps a storage's Python object as long as the storage
    return taken


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """True if a storage was allocated by this module."""
    return getattr(storage, _MARK, False)


def host_twin(parameter: Tensor) -> Tensor:
    """`host_tensor` for this rank's shard of a parameter; a DTensor with the same placement if the parameter is one."""
    if not isinstance(parameter, DTensor):
        return host_tensor(parameter.detach())
    part = host_tensor(parameter.to_local().detach())
    return DTensor(part, parameter._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
