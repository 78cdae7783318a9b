"""Cost of offloading optimizer state or activations to host memory: the device-host link, and the host's update.

update on the host   gradients to the host, AdamW on the CPU, parameters back: in turn, or overlapped block by block
activations          to the host in the forward pass, back in the backward pass, overlapped with compute
"""

from __future__ import annotations

import numpy as np

from ultrascale.plan.layouts import Floats
from ultrascale.plan.workload import Workload

HOST_LINK_BYTES_PER_SECOND = {"a100": 25e9, "a800": 25e9, "v100": 12e9, "gh200": 400e9, "gb200": 200e9, "gb300": 200e9}
"""Bytes per second from one device to its host, with its neighbours busy too: PCIe 4 (V100: 3) x16, 32 GB/s nominal;
NVLink-C2C, 450 GB/s, shared by two in a GB200."""
OLDER_HOST_LINK = 25e9
"""Bytes per second of all other devices of machines whose devices are joined by PCIe 4."""
NEWER_HOST_LINK = 50e9
"""Bytes per second of those that are left: PCIe 5 x16, 64 GB/s nominal."""
HOST_MEMORY_BYTES_PER_SECOND = 25e9
"""Bytes per second of a device's share of its host's memory: two sockets of eight DDR channels for eight devices."""


def host_link(workload: Workload) -> float:
    """Bytes per second from a device to its host, and in the other direction at the same time."""
    name, inside = workload.accelerator.kind, workload.cluster.node.intra_link
    rates = (rate for start, rate in HOST_LINK_BYTES_PER_SECOND.items() if name.startswith(start))
    return next(rates, OLDER_HOST_LINK if inside is not None and inside.name.startswith("PCIe 4") else NEWER_HOST_LINK)


def offloaded_update(workload: Workload, parameters: Floats, blocks: Floats) -> Floats:
    """Seconds of an update on the host of `parameters` in `blocks` blocks.

    Download, update and upload overlap: the slowest shows in full, the others only for the first and the last block.
    """
    stack, link = workload.stack, host_link(workload)
    state = 2 * parameters * (stack.master_bytes + stack.moment_bytes) / HOST_MEMORY_BYTES_PER_SECOND
    if not stack.overlaps_offloaded_update:
        return parameters * (stack.gradient_bytes + 2) / link + state
    down, up = parameters * stack.gradient_bytes / link, parameters * stack.master_bytes / link
    slowest = np.maximum(np.maximum(down, up), state)
    return slowest + (down + up + state - slowest) / np.maximum(blocks, 1)


def exposed_seconds(workload: Workload, saved: Floats, forward: Floats, backward: Floats) -> Floats:
    """Exposed seconds of offloading `saved` bytes during a forward pass of `forward` seconds, and bringing them back during a
    backward pass of `backward` seconds."""
    one_way = saved / host_link(workload)
    return np.maximum(one_way - forward, 0.0) + np.maximum(one_way - backward, 0.0)
