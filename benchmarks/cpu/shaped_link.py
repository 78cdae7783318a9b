"""Network namespaces joined by a line of a given rate and delay, for kernels without `tc`'s netem.

    with shaped_link(2, bits_per_second=1e8, one_way_seconds=0.05) as names: ...   # 10.77.0.1, .2, ...

Each namespace has a TUN device, whose packets a process here sends on to the namespace of their address: at the rate of the
sender's line, one after another, and then after the delay. What would wait for longer than QUEUE_SECONDS is dropped, as by a
router. The process goes before all others at a processor. Needs root. TCP runs over it as over any line.
"""

from __future__ import annotations

import fcntl
import heapq
import multiprocessing
import os
import select
import struct
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

MTU = 9000
QUEUE_SECONDS = 0.5
_SET_INTERFACE, _TUN, _NO_HEADER = 0x400454CA, 0x0001, 0x1000
_DESTINATION = slice(16, 20)


@contextmanager
def shaped_link(count: int, *, bits_per_second: float, one_way_seconds: float) -> Iterator[list[str]]:
    """While inside, `count` namespaces are joined; their names. Namespace k has the address 10.77.0.(k + 1)."""
    names = [f"line{os.getpid()}-{k}" for k in range(count)]
    carrier = None
    try:
        devices = [_device(name, f"line{k}", f"10.77.0.{k + 1}") for k, name in enumerate(names)]
        carrier = multiprocessing.get_context("fork").Process(target=_carry, args=(devices, bits_per_second, one_way_seconds))
        carrier.start()
        yield names
    finally:
        if carrier is not None:
            carrier.kill()
            carrier.join()
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False)


def _device(namespace: str, name: str, address: str) -> int:
    """A TUN device in a new namespace, open here."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _SET_INTERFACE, struct.pack("16sH", name.encode(), _TUN | _NO_HEADER))
    inside = ["ip", "netns", "exec", namespace]
    for words in (
        ["ip", "netns", "add", namespace],
        ["ip", "link", "set", name, "netns", namespace],
        [*inside, "ip", "link", "set", "lo", "up"],
        [*inside, "ip", "addr", "add", f"{address}/24", "dev", name],
        [*inside, "ip", "link", "set", name, "mtu", str(MTU), "txqueuelen", "10000", "up"],
        [*inside, "sysctl", "-q", "net.ipv4.tcp_slow_start_after_idle=0"],
    ):
        subprocess.run(words, check=True)
    return device


def _carry(devices: list[int], bits_per_second: float, one_way_seconds: float) -> None:
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a line does not wait for its turn at a processor
    free = [0.0] * len(devices)  # when each sender's line is
    waiting: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        for device in select.select(devices, [], [], left)[0]:
            packet, now, sender = os.read(device, MTU + 64), time.monotonic(), devices.index(device)
            target = packet[_DESTINATION][3] - 1
            if packet[0] >> 4 != 4 or not 0 <= target < len(devices) or free[sender] > now + QUEUE_SECONDS:
                continue
            free[sender] = max(now, free[sender]) + len(packet) * 8 / bits_per_second
            number += 1
            heapq.heappush(waiting, (free[sender] + one_way_seconds, number, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            os.write(devices[target], packet)
