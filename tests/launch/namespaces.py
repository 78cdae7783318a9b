"""Nodes that are network namespaces of this machine, each with an address of its own, joined by a bridge."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Node:
    """A namespace, with one device beside loopback."""

    name: str
    address: str
    device: str

    def start(self, words: list[str], log: Path, environment: dict[str, str]) -> None:
        """Start a command there, its output added to `log`."""
        with open(log, "a") as out:
            subprocess.Popen(
                ["ip", "netns", "exec", self.name, *words],
                env=os.environ | {"GLOO_SOCKET_IFNAME": self.device} | environment,
                stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def processes(self) -> list[int]:
        """Those that run there."""
        return [int(pid) for pid in ip("netns", "pids", self.name).split()]

    def kill(self) -> None:
        """End everything there at once, as a power cut does."""
        while pids := self.processes():
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def ip(*words: str) -> str:
    """What `ip` prints. Raises CalledProcessError, OSError."""
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout


@contextmanager
def joined(number: int, *, network: str = "10.78.0") -> Iterator[list[Node]]:
    """So many nodes on one bridge, which is in a namespace too: nothing of the machine's own network is touched. Skips the
    test, by name, where namespaces cannot be made."""
    own = os.getpid() % 100_000
    bridge, nodes = f"br{own}", [Node(f"n{own}x{each}", f"{network}.{each + 1}", f"eth{each}") for each in range(number)]
    try:
        ip("netns", "add", bridge)
        ip("-n", bridge, "link", "add", "hub", "type", "bridge")
        ip("-n", bridge, "link", "set", "hub", "up")
        for each, node in enumerate(nodes):
            ip("netns", "add", node.name)
            ip("link", "add", node.device, "netns", node.name, "type", "veth", "peer", "name", f"port{each}", "netns", bridge)
            ip("-n", bridge, "link", "set", f"port{each}", "master", "hub", "up")
            ip("-n", node.name, "addr", "add", f"{node.address}/24", "dev", node.device)
            for device in ("lo", node.device):
                ip("-n", node.name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(bridge, nodes)
        told = getattr(error, "stderr", "") or error
        pytest.skip(f"nodes of several network namespaces: they cannot be made here: {str(told).strip()}")
    try:
        yield nodes
    finally:
        _remove(bridge, nodes)


def _remove(bridge: str, nodes: list[Node]) -> None:
    for node in nodes:
        with suppress(OSError, subprocess.CalledProcessError):
            node.kill()
    for name in (bridge, *(node.name for node in nodes)):
        with suppress(OSError, subprocess.CalledProcessError):
            ip("netns", "del", name)
