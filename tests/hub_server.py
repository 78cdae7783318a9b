"""A stand-in of the Hugging Face Hub's HTTP interface for tests: one repository, which is written by commits and read."""

from __future__ import annotations

import base64
import fnmatch
import hashlib
import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

REPO = "ada/tiny"
COMMIT = "0" * 40
SILENCE_SECONDS = 200.0


@contextmanager
def hub_server() -> Iterator[Hub]:
    """A Hub, while inside."""
    server = Hub()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()


class Hub(ThreadingHTTPServer):
    """One repository in memory, for what huggingface_hub 1 and 2 send: create, preupload, LFS, commit, resolve, tree."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Answer)
        self.files: dict[str, bytes] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[str] = []
        """Their titles."""
        self.history: dict[str, dict[str, bytes]] = {}
        """Files of the commits before the last."""
        self.before_commit: Callable[[], None] = lambda: None
        self.lost_answers = 0
        """Commits that are made, and whose answers never come."""
        self.branch = "main"
        self.tags: list[str] = []
        self.large = ["*.bin", "*.safetensors"]
        """Patterns of .gitattributes; a large file that none names adds itself there."""
        self.most_large, self.most_in_folder = 100, 10_000
        """Lines of .gitattributes, and files of one folder, above which a commit is refused."""
        self.ignored = ""
        """A pattern in the repository's .gitignore."""
        self.refused_name = ""
        """No commit that names a path with this is taken."""
        self.silent, self.silences_left = "", 10**9
        """Requests with this in their path are never answered: after SILENCE_SECONDS the connection is closed."""
        self.limit = '"api";r=480;t=189'
        """RateLimit, which is on every answer."""
        self.may_write, self.has_repository = True, True
        self.retry_after = ""
        self.turn, self.ended = threading.Lock(), threading.Event()
        self.private: bool | None = None
        self.refuse: dict[str, int] = {}
        """Parts of paths, and the status that answers them."""
        self.refusals_left, self.kind = 10**9, "application/json"
        self.only_with_key = False
        self.elsewhere = ""
        """Another server, that files are sent for to."""
        self.commit_now = COMMIT
        """That which `main` leads to."""
        self.ranges = "kept"
        """Or `short`: of a range a byte is lacking; or `ignored`: all of the file comes."""
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        """Those that were read."""

    def at(self, revision: str) -> dict[str, bytes] | None:
        """Files of a commit, or of the branch; None if there is no such revision."""
        return self.history.get(revision, self.files if revision in (self.branch, COMMIT, self.commit_now) else None)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["Authorization"])
        if self._refused() or self._is_hidden():
            return
        path, _, query = unquote(self.path).partition("?")
        if match := re.fullmatch(r"/(?:datasets/)?[^/]+/[^/]+/resolve/([^/]+)/(.+)", path):
            self.file(*match.groups())
        elif match := re.fullmatch(r"/api/\w+/[^/]+/[^/]+/tree/([^/]+)/?(.*)", path):
            self.tree(match[1], match[2], recursive="recursive=true" in query.lower())
        elif path.endswith("/refs"):
            named = {"branches": [self.server.branch], "tags": self.server.tags, "converts": []}
            kinds = {
                kind: [{"name": one, "ref": one, "targetCommit": COMMIT} for one in names] for kind, names in named.items()
            }
            self.say(kinds)
        elif path.endswith("/auth-check/write"):
            self.say({}, status=200 if self.server.may_write else 403)
        elif (match := re.search(r"/revision/(.+)$", path)) and self.server.at(match[1]) is None:
            self.say({"error": "no"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        else:
            now = match[1] if match and match[1] in self.server.history else self.server.commit_now
            self.say({"id": REPO, "sha": now, "siblings": [{"rfilename": name} for name in self.server.files]})

    def file(self, revision: str, name: str) -> None:
        held = (self.server.at(revision) or {}).get(name)
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers["Range"] or "")
        if held is None:
            self.say({"error": "no"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
        elif self.server.elsewhere and self.server.elsewhere.partition("://")[2] != self.headers["Host"]:
            self.say(None, status=302, headers={"Location": f"{self.server.elsewhere}{self.path}"})
        elif asked and int(asked[1]) >= len(held):
            self.say({}, status=416)
        elif asked and self.server.ranges != "ignored":
            end = int(asked[2]) + (self.server.ranges == "kept")
            self.say(held[int(asked[1]) : end], status=206)
        else:
            self.say(held)

    def tree(self, revision: str, folder: str, *, recursive: bool) -> None:
        start = f"{folder}/" if folder else ""
        below = {name: len(held) for name, held in (self.server.at(revision) or {}).items() if name.startswith(start)}
        if not below:
            return self.say({"error": "no"}, status=404, headers={"X-Error-Code": "EntryNotFound"})
        entries: dict[str, dict[str, Any]] = {}
        for name, size in below.items():
            first, inner, _ = name.removeprefix(start).partition("/")
            if inner:
                entries[first] = {"type": "directory", "path": start + first, "oid": "1"}
            if recursive or not inner:
                entries[name] = {"type": "file", "path": name, "size": size, "oid": "1"}
        self.say(list(entries.values()))

    def do_HEAD(self) -> None:
        self.server.paths.append(self.path)
        if self._refused():
            return
        _, revision, name = re.split(r"/resolve/([^/]+)/", unquote(self.path).partition("?")[0])
        held = (self.server.at(revision) or {}).get(name)
        if held is None:
            return self.say(None, status=404, headers={"X-Error-Code": "EntryNotFound"})
        self.say(None, headers={"X-Repo-Commit": revision, "ETag": '"1"', "X-Linked-Size": str(len(held))})

    def do_PUT(self) -> None:
        body, oid = self.body(), self.path.rpartition("/")[2]
        if self._refused():
            return
        right = hashlib.sha256(body).hexdigest() == oid
        self.server.objects |= {oid: body} if right else {}
        self.say({}, status=200 if right else 400)

    def do_POST(self) -> None:
        body, hub = self.body(), self.server
        if self._refused():
            return
        if self.headers["Authorization"] != "Bearer hf_right":
            self.say({"error": "Invalid credentials"}, status=401)
        elif not hub.may_write:
            self.say({"error": "no"}, status=403)
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            hub.private = asked.get("private", asked.get("visibility") == "private")
            self.say({"url": f"{hub.address}/{REPO}"})
        elif (match := re.search(r"/(?:preupload|commit)/([^/?]+)", self.path)) and unquote(match[1]) != hub.branch:
            self.say({"error": f"Invalid rev id: {match[1]}"}, status=404, headers={"X-Error-Code": "RevisionNotFound"})
        elif "/preupload/" in self.path:
            asked = json.loads(body)
            ignored = asked.get("gitIgnore") or hub.ignored
            files = [
                {"path": one["path"], "uploadMode": mode, "shouldIgnore": fnmatch.fnmatch(one["path"], ignored)}
                for one, mode in zip(asked["files"], map(self._mode, asked["files"]), strict=True)
            ]
            self.say({"files": files})
        elif self.path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            sent = [{"actions": {"upload": {"href": f"{hub.address}/lfs/{one['oid']}"}}} for one in wanted]
            upload = [one | ({} if one["oid"] in hub.objects else to) for one, to in zip(wanted, sent, strict=True)]
            self.say({"transfer": "basic", "objects": upload}, kind="application/vnd.git-lfs+json")
        elif "/commit/" in self.path:
            self.commit([json.loads(line) for line in body.splitlines()])
        else:
            self.say({})

    def commit(self, lines: list[dict[str, Any]]) -> None:
        self.server.before_commit()
        with self.server.turn:
            status = self._commit(lines)
        now = self.server.commit_now
        if status == 200 and self.server.lost_answers:
            self.server.lost_answers -= 1
            self.close_connection = True
            return
        if isinstance(status, str):
            return self.say({"error": f"{status}\nAt {self.server.address}, with hf_right"}, status=400)
        self.say(
            {"success": True, "commitOid": now, "commitUrl": f"{self.server.address}/{REPO}/commit/{now}"},
            status=status,
            headers={"X-Error-Code": "EntryNotFound"} if status == 404 else None,
        )

    def _commit(self, lines: list[dict[str, Any]]) -> int | str:
        """All of a commit or nothing; its status, or why it is refused."""
        hub, header = self.server, lines[0]["value"]
        if header.get("parentCommit", hub.commit_now) != hub.commit_now:
            return 412
        files, large = dict(hub.files), list(hub.large)
        named = [line["value"]["path"] for line in lines[1:]]
        if hub.refused_name and any(hub.refused_name in path for path in named):
            return "Your push was rejected: see https://hub/storage?X-Amz-Signature=secret"
        for key, value in ((line["key"], line["value"]) for line in lines[1:]):
            if key == "deletedFile":
                if files.pop(value["path"], None) is None:
                    return 404
            elif key == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile" and len(hub.objects.get(value["oid"], b"")) == value["size"]:
                files[value["path"]] = hub.objects[value["oid"]]
                large += [value["path"]] if not any(fnmatch.fnmatch(value["path"], one) for one in large) else []
            else:
                return 400
        if len(large) > hub.most_large:
            return f"Your push was rejected: .gitattributes has {len(large)} lines"
        crowd = max(Counter(path.rpartition("/")[0] for path in files).values(), default=0)
        if crowd > hub.most_in_folder:
            return f"Your push was rejected: {crowd} files in one folder, at most {hub.most_in_folder}"
        hub.large = large
        hub.history[hub.commit_now] = hub.files
        hub.files = files
        hub.commits.append(header["summary"])
        hub.commit_now = f"{len(hub.commits):040x}"
        return 200

    def _mode(self, file: dict[str, Any]) -> str:
        """As the Hub has it: named so in .gitattributes, or no text."""
        sample = base64.b64decode(file["sample"])
        is_named = any(fnmatch.fnmatch(file["path"], one) for one in self.server.large)
        return "lfs" if is_named or not sample.isascii() or b"\0" in sample else "regular"

    def _refused(self) -> bool:
        if self.server.silent and self.server.silent in self.path and self.server.silences_left > 0:
            self.server.silences_left -= 1
            self.close_connection = True
            self.server.ended.wait(SILENCE_SECONDS)
            return True
        status = next((status for part, status in self.server.refuse.items() if part in self.path), None)
        if self.server.refusals_left <= 0:
            status = None
        if status is not None:
            self.server.refusals_left -= 1
            again = {"Retry-After": self.server.retry_after or "0"}
            self.say({"error": "no"}, status=status, kind=self.server.kind, headers=again)
        return status is not None

    def _is_hidden(self) -> bool:
        """True, and said, if the repository is for those with a key alone."""
        hidden = self.server.only_with_key and self.headers["Authorization"] != "Bearer hf_right"
        hidden = hidden or not self.server.has_repository
        if hidden:
            self.say({"error": "no"}, status=401, headers={"X-Error-Code": "RepoNotFound"})
        return hidden

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def say(
        self, value: Any, *, status: int = 200, kind: str = "application/json", headers: dict[str, str] | None = None
    ) -> None:
        text = b"" if value is None else value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        left = {"RateLimit": self.server.limit, "RateLimit-Policy": '"fixed window";"api";q=500;w=300'}
        for name, content in {"Content-Type": kind, "Content-Length": str(len(text)), **left, **(headers or {})}.items():
            self.send_header(name, content)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def log_message(self, *arguments: Any) -> None: ...
