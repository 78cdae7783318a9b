"""A server whose port somebody else has taken is started again at another."""

from __future__ import annotations

import socket
import sys
import urllib.request

import pytest
from port_servers import MOST_STARTS, free_port, server_at_a_port


def words(port: int) -> list[str]:
    return [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]


def answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}", timeout=1).close()
    except OSError:
        return False
    return True


def test_a_port_that_was_taken_meanwhile_is_changed_for_another():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = [taken.getsockname()[1]]
        with server_at_a_port("server", words, answers, lambda: ports.pop() if ports else free_port()) as port:
            assert ports == [] and port != taken.getsockname()[1]


def test_a_server_that_always_ends_is_told():
    with (
        pytest.raises(AssertionError, match=f"server ended with exit code 1, {MOST_STARTS} times"),
        server_at_a_port("server", lambda port: ["false"], answers),
    ):
        pytest.fail("it answered")
