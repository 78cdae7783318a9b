"""Servers of tests that are told a port, and take it some time later: somebody else may have taken it by then."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

MOST_STARTS = 5
PATIENCE_SECONDS = 60.0


def free_port() -> int:
    """A port that nobody has at this moment."""
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server_at_a_port(
    name: str,
    words: Callable[[int], list[str]],
    answers: Callable[[int], bool],
    find_port: Callable[[], int] = free_port,
) -> Iterator[int]:
    """The port of a server that is started as `words` of a free port says, once it `answers`. One that ends before it does is
    started again at another port."""
    for number in range(MOST_STARTS):
        port = find_port()
        process = subprocess.Popen(words(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            until = time.monotonic() + PATIENCE_SECONDS
            while process.poll() is None and not answers(port):
                assert time.monotonic() < until, f"{name} does not answer"
                time.sleep(0.1)
            if process.poll() is None:
                yield port
                return
        finally:
            process.kill()
            process.wait()
        assert number + 1 < MOST_STARTS, f"{name} ended with exit code {process.returncode}, {MOST_STARTS} times"
