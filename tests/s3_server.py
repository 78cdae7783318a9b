"""A real S3 server for tests: moto's, in a process of its own, and a proxy before it that does what networks and servers do.

Where moto is not installed, tests that need a server are skipped, and say so by its name.
"""

from __future__ import annotations

import http.client
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from urllib.parse import unquote

import pytest

NEEDED = ("moto", "flask", "flask_cors", "obstore")
BUCKET = "bucket"
SECRET = "not-for-anybodys-eyes"
SERVER = """
import logging, sys, threading
logging.getLogger("werkzeug").disabled = True
from moto.moto_server.werkzeug_app import DomainDispatcherApplication
from moto.server import ThreadedMotoServer

# S3 compares and writes at once; moto's threads look first and write later.
one_at_a_time, call = threading.Lock(), DomainDispatcherApplication.__call__

def dispatch(self, environ, start_response):
    if environ["REQUEST_METHOD"] == "PUT" and {"HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH"} & set(environ):
        with one_at_a_time:
            return call(self, environ, start_response)
    return call(self, environ, start_response)

DomainDispatcherApplication.__call__ = dispatch
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
"""


@contextmanager
def s3_server() -> Iterator[str]:
    """The address of a server with one empty bucket, while inside."""
    missing = [name for name in NEEDED if find_spec(name) is None]
    if missing:
        pytest.skip(
            f"no S3 server here: {', '.join(missing)} cannot be imported; pip install 'moto[s3]' flask flask-cors obstore"
        )
    process = subprocess.Popen(
        [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        port = next(int(line) for line in process.stdout if line.strip().isdigit())
        address = f"http://127.0.0.1:{port}"
        urllib.request.urlopen(urllib.request.Request(f"{address}/{BUCKET}", method="PUT")).close()
        yield address
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def environment(address: str) -> dict[str, str]:
    """What a process needs to reach the server at `address`."""
    return {
        "AWS_ENDPOINT_URL": address, "AWS_ACCESS_KEY_ID": "AKIATEST", "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }  # fmt: skip


@contextmanager
def reached_at(address: str) -> Iterator[None]:
    """While inside, this process's environment leads to the server at `address`."""
    before = dict(os.environ)
    os.environ.update(environment(address))
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@dataclass
class Request:
    """One request on its way, and what may be done to it."""

    method: str
    path: str
    """With the query, as a person writes it."""
    number: int
    """From 1, of all that came this way."""
    headers: dict[str, str]
    """By names in small letters."""

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and ("list-type=2" in self.path or "comp=list" in self.path)

    @property
    def is_part(self) -> bool:
        return bool(re.search(r"\.\d{5}-[0-9a-f]{8}", self.path))

    @property
    def is_index(self) -> bool:
        return bool(re.search(r"checkpoints/step-\d+\.json", self.path))


@dataclass
class Answer:
    """What a rule makes of a request. The default passes it on as it is."""

    status: int | None = None
    """Answer this instead, and pass nothing on."""
    code: str = "ServiceUnavailable"
    drop_before: bool = False
    """Close the connection without passing it on."""
    drop_after: bool = False
    """Pass it on, and close the connection instead of answering."""
    cut: float | None = None
    """Send this share of the body, then close the connection."""
    truncate: float | None = None
    """Send this share of the body as if it were all."""
    flip: bool = False
    """Change a byte in the body's middle."""
    tag: str | None = None
    """Another ETag; where the server counts states, another count."""
    body: bytes | None = None
    """Another body."""
    bytes_per_second: float | None = None
    delay: float = 0.0


@dataclass
class Proxy:
    """Between client and server; `rule` is asked of every request."""

    address: str
    rule: Callable[[Request], Answer | None] = lambda request: None
    seen: list[Request] = field(default_factory=list)
    server_url: str = ""


@contextmanager
def proxied(server: str) -> Iterator[Proxy]:
    """A proxy before the server at `server`, while inside."""
    proxy = Proxy("", server_url=server)
    target = server.removeprefix("http://")
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with lock:
                request = Request(
                    self.command, unquote(self.path), len(proxy.seen) + 1, {n.lower(): v for n, v in self.headers.items()}
                )
                proxy.seen.append(request)
                answer = proxy.rule(request) or Answer()
            time.sleep(answer.delay)
            if answer.drop_before:
                return self.hang_up()
            if answer.status is not None:
                text = f'<?xml version="1.0"?><Error><Code>{answer.code}</Code><Message>as asked</Message></Error>'.encode()
                return self.reply(answer.status, [("Content-Type", "application/xml")], text, answer)
            connection = http.client.HTTPConnection(target, timeout=60)
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            found = connection.getresponse()
            data, status, kept = found.read(), found.status, found.getheaders()
            connection.close()
            if answer.drop_after:
                return self.hang_up()
            self.reply(status, kept, data, answer)

        def reply(self, status: int, headers: list[tuple[str, str]], data: bytes, answer: Answer) -> None:
            if answer.body is not None:
                data = answer.body
            if answer.flip and data:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 0x10]) + data[middle + 1 :]
            if answer.truncate is not None:
                data = data[: int(len(data) * answer.truncate)]
            self.send_response(status)
            for name, value in headers:
                if name.lower() == "etag" and answer.tag is not None:
                    value = f'"{answer.tag}"'
                if name.lower() == "x-goog-generation" and answer.tag is not None:
                    value = "1"
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            length = next((value for name, value in headers if name.lower() == "content-length"), "0")
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(data)))
            self.end_headers()
            if self.command == "HEAD":
                return
            sent = data if answer.cut is None else data[: int(len(data) * answer.cut)]
            if answer.bytes_per_second is None:
                self.wfile.write(sent)
            else:
                for at in range(0, len(sent), 4096):
                    self.wfile.write(sent[at : at + 4096])
                    self.wfile.flush()
                    time.sleep(4096 / answer.bytes_per_second)
            if answer.cut is not None:
                self.hang_up()

        def hang_up(self) -> None:
            self.close_connection = True
            self.connection.shutdown(2)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            pass

    server_here = Quiet(("127.0.0.1", 0), Handler)
    proxy.address = f"http://127.0.0.1:{server_here.server_address[1]}"
    thread = threading.Thread(target=server_here.serve_forever, daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        server_here.shutdown()
        server_here.server_close()
