"""The page on 127.0.0.1, for users with its link.

Any program of this machine, and any web page open in a browser here, can connect to a port of 127.0.0.1. Therefore:

token    random, the first part of every path: without it every response is 404
Host     must be 127.0.0.1 or localhost with the server's port: another name for 127.0.0.1 (DNS rebinding) is refused
files    those of `static`, by name; no path is ever joined
answers  POST of application/json, which a foreign page cannot send without a preflight request; Origin must be the page's
"""

from __future__ import annotations

import hmac
import json
import secrets
import sys
import webbrowser
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from threading import Lock
from typing import Any

from ultrascale.description.parsing import parse_json
from ultrascale.description.problems import mistake
from ultrascale.page.controls import LARGEST_FILE, controls_json

Question = Callable[[dict[str, Any]], dict[str, Any]]
STATIC = {
    "": ("index.html", "text/html"), "page.css": ("page.css", "text/css"), "charts.js": ("charts.js", "text/javascript"),
    "page.js": ("page.js", "text/javascript"), "server.js": ("server.js", "text/javascript"),
}  # fmt: skip
"""All served files: path behind the token to file and type."""
LARGEST_BODY = 2 * LARGEST_FILE
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
"""Headers that forbid scripts, pictures and responses from elsewhere, and keep the token out of every Referer."""


def static_text(name: str) -> str:
    """Text of a file of the page."""
    return (files("ultrascale.page") / "static" / name).read_text(encoding="utf-8")


class PageServer(ThreadingHTTPServer):
    """Answers questions one at a time: a search uses all cores."""

    daemon_threads = True

    def __init__(self, question: Question, port: int = 0) -> None:
        self.question, self.token, self.lock = question, secrets.token_urlsafe(24), Lock()
        super().__init__(("127.0.0.1", port), _Handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a browser that disconnects before its answer."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def hosts(self) -> tuple[str, str]:
        """Accepted values of the Host header."""
        return f"127.0.0.1:{self.server_address[1]}", f"localhost:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: PageServer
    server_version, sys_version = "ultrascale", ""
    timeout = 60
    """Time limit in seconds for a silent browser."""

    def do_GET(self) -> None:
        path = self._allowed_path()
        if path == "controls.json":
            self._send(200, "application/json", json.dumps(controls_json()))
        elif path in STATIC:
            name, kind = STATIC[path]
            self._send(200, kind, static_text(name))
        elif path is not None:
            self._refuse(404, "nothing here")

    def do_POST(self) -> None:
        path = self._allowed_path()
        if path is None:
            return
        origin, size = self.headers.get("Origin"), self.headers.get("Content-Length", "")
        if origin is not None and origin.removeprefix("http://") not in self.server.hosts():
            return self._refuse(403, "asked by another page")
        if path != "answer" or self.headers.get("Content-Type", "").partition(";")[0] != "application/json":
            return self._refuse(404, "nothing here")
        if not size.isdecimal() or int(size) > LARGEST_BODY:
            return self._refuse(413, f"a question has at most {LARGEST_BODY:,} bytes")
        try:
            question = parse_json(self.rfile.read(int(size)))
        except ValueError:
            question = None
        if not isinstance(question, dict):
            return self._refuse(400, "a question is a JSON object")
        with self.server.lock:
            reply = self.server.question(question)
        self._send(200, "application/json", json.dumps(reply))

    def _allowed_path(self) -> str | None:
        """Path after the token; None if the request is refused, in which case the refusal has been sent."""
        if self.headers.get("Host") not in self.server.hosts():
            return self._refuse(403, "this Host is not served")
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not hmac.compare_digest(token.encode(), self.server.token.encode()):
            return self._refuse(404, "nothing here: open the link that `ultrascale page` has printed")
        return path

    def _refuse(self, code: int, why: str) -> None:
        self.close_connection = True
        self._send(code, "text/plain", why + "\n")

    def _send(self, code: int, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {"Content-Type": f"{kind}; charset=utf-8", "Content-Length": str(len(body)), **HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing: a line per request would hide the link, and contains the token."""


def serve(question: Question, *, port: int, opens_browser: bool) -> None:
    """Serve until Ctrl-C. Raises SpecError if the port is taken."""
    try:
        server = PageServer(question, port)
    except OSError as error:
        rule = f"{port} cannot be served on: {error.strerror}"
        raise mistake("--port", rule, "Leave it out for a port that is free.") from None
    print(f"{server.url}\nOnly this link opens it, and only on this machine. Ctrl-C ends it.", flush=True)
    if opens_browser and not webbrowser.open(server.url):
        print("ultrascale: no browser could be opened; open the link yourself.", file=sys.stderr)
    with server:
        server.serve_forever()
