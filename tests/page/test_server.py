"""The server answers whoever has the link, asked by its own name, and gives out nothing but the page."""

from __future__ import annotations

import json
import socket
from http.client import HTTPConnection
from threading import Thread

import pytest

from ultrascale.cli.plan.page import question
from ultrascale.description.problems import SpecError
from ultrascale.page.server import LARGEST_BODY, STATIC, PageServer

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with PageServer(question) as found:
        Thread(target=found.serve_forever, daemon=True).start()
        yield found
        found.shutdown()


def asked(server, path, *, method="GET", body=None, headers=None):
    """(status, text, headers) of a request as written."""
    connection = HTTPConnection("127.0.0.1", server.server_address[1], timeout=60)
    connection.request(method, path, body, headers or {})
    reply = connection.getresponse()
    return reply.status, reply.read().decode(), reply.headers


def test_it_listens_on_this_machine_only(server):
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize("name", STATIC)
def test_the_page_is_served_behind_the_token_and_nowhere_else(server, name):
    status, text, headers = asked(server, f"/{server.token}/{name}")
    assert (status, len(text) > 500) == (200, True)
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert headers["Referrer-Policy"] == "no-referrer"
    for path in (f"/{name}", f"/wrong/{name}", f"/{server.token[:-1]}/{name}", f"//{name}"):
        assert asked(server, path)[0] == 404


OTHER_PATHS = (
    "../server.py",
    "%2e%2e/server.py",
    "static/page.js",
    "page.js/",
    "/etc/passwd",
    "html_file.py",
    "..",
    ".git/config",
)


@pytest.mark.parametrize("path", OTHER_PATHS)
def test_nothing_else_can_be_read(server, path):
    status, text, _ = asked(server, f"/{server.token}/{path}")
    assert (status, text) == (404, "nothing here\n")


HOSTS = ("evil.example", "127.0.0.1", "127.0.0.1:1", "localhost", "[::1]", "")


@pytest.mark.parametrize("host", HOSTS)
def test_another_host_is_refused_with_the_token_too(server, host):
    for method, body in (("GET", None), ("POST", "{}")):
        path = f"/{server.token}/{'answer' if body else ''}"
        assert asked(server, path, method=method, body=body, headers=JSON | {"Host": host})[0] == 403


def test_localhost_by_name_is_served(server):
    host = {"Host": f"localhost:{server.server_address[1]}"}
    assert asked(server, f"/{server.token}/", headers=host)[0] == 200


def test_a_question_of_another_page_is_refused(server):
    path = f"/{server.token}/answer"
    assert asked(server, path, method="POST", body="{}", headers=JSON | {"Origin": "https://evil.example"})[0] == 403
    assert asked(server, path, method="POST", body="{}", headers={"Content-Type": "text/plain"})[0] == 404
    assert asked(server, "/answer", method="POST", body="{}", headers=JSON)[0] == 404


def test_a_question_is_answered_with_a_plan(server):
    body = json.dumps({"model": "gpt2", "count": "8", "machine": "h100-sxm", "tp": "1", "pp": "1"})
    own = {"Origin": server.url.rsplit("/", 2)[0]}
    status, text, _ = asked(server, f"/{server.token}/answer", method="POST", body=body, headers=JSON | own)
    assert (status, json.loads(text)["verdict"]["kind"]) == (200, "good")


BODIES = {"[]": 400, "[" * 100_000: 400, "{": 400, "": 400, '"model"': 400, "\xff": 400}


@pytest.mark.parametrize(("body", "status"), BODIES.items(), ids=range(len(BODIES)))
def test_what_is_no_question_is_refused(server, body, status):
    assert asked(server, f"/{server.token}/answer", method="POST", body=body.encode("latin-1"), headers=JSON)[0] == status


@pytest.mark.parametrize("size", ["-1", "many", "\xb2", str(LARGEST_BODY + 1), "9" * 30])
def test_a_question_without_end_is_not_read(server, size):
    with socket.create_connection(server.server_address, timeout=30) as line:
        host = server.hosts()[0]
        head = f"POST /{server.token}/answer HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        line.sendall(f"{head}Content-Length: {size}\r\n\r\n".encode("latin-1"))
        assert b" 413 " in line.recv(200)


def test_tokens_are_long_and_new_each_time():
    tokens = set()
    for _ in range(3):
        with PageServer(question) as found:
            tokens.add(found.token)
    assert (len(tokens), min(map(len, tokens))) == (3, 32)


def test_a_port_that_is_taken_is_named(server):
    from ultrascale.page.server import serve

    with pytest.raises(SpecError, match="--port"):
        serve(question, port=server.server_address[1], opens_browser=False)
