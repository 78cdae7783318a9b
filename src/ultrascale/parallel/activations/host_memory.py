"""The host's memory, for what a device has no room for: tensors that copies reach without waiting (pinned).

On the CPU "device" and host are one memory; tensors taken here are marked all the same, so that whoever counts the device's
memory (`measure.memory`, `trace`) leaves them out, and what offload does can be seen and proven without a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ultrascale.torch_private import without_modes

_MARK = "_ultrascale_on_host"


def host_tensor(like: Tensor) -> Tensor:
    """An uninitialised tensor of the host, of the shape, strides and dtype of `like`: pinned if that is on CUDA; on the meta
    device, where a device is pretended, without memory."""
    device = "meta" if like.device.type == "meta" else "cpu"
    with without_modes():  # or it would be counted before it is marked
        taken = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device, pin_memory=like.is_cuda)
    setattr(taken.untyped_storage(), _MARK, True)  # torch keeps a storage's Python object as long as the storage
    return taken


def is_on_host(storage: torch.UntypedStorage) -> bool:
    """True if a storage was allocated here."""
    return getattr(storage, _MARK, False)


def host_twin(parameter: Tensor) -> Tensor:
    """`host_tensor` of this rank's part of a parameter; cut over ranks as the parameter is, if it is."""
    if not isinstance(parameter, DTensor):
        return host_tensor(parameter.detach())
    part = host_tensor(parameter.to_local().detach())
    return DTensor(part, parameter._spec, requires_grad=False)  # pyright: ignore[reportCallIssue]
