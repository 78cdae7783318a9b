"""Branches of the Hub's repositories as stores of runs: writes become visible with a commit.

The Hub accepts some hundred commits an hour, and a checkpoint has a part for every 16 MiB. So a part is uploaded at once, as
content without a commit, and its name waits in this process for the next commit: by `publish`, `remove` or `flush`, or by
another process that takes it over (`take_pending`). A checkpoint of any number of ranks is then one commit, with its index and
parts. `publish` uses the Hub's own condition, `parentCommit`: the branch has not moved since the object was read.

A reader sees the branch as it is when it requests an object or a listing; a part, which never changes, is read at the commit
where it was last seen.
"""

from __future__ import annotations

import json
import random
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from posixpath import commonpath
from typing import Any

from ultrascale.storage.errors import ConflictError, RefusedError, StorageError
from ultrascale.storage.hub import UNTIL, HubStore, T
from ultrascale.storage.store import PAUSE_SECONDS, Stored, Version

COMMIT_FILES = 1000
"""Most files of one commit: with many more the Hub's response exceeds its own time limit."""
MOST_PAUSE_SECONDS = 10.0
MOST_WORDS = 200
_MAY_PASS = (408, 409, 412, 425, 429)
"""Statuses below 500 after which the same request may succeed; 409 and 412: another commit came first."""


class HubBranch(HubStore):
    """A folder of a branch, writable. Transient failures are retried for `patience_seconds`. Raises StorageError if
    huggingface_hub is not installed."""

    def __init__(self, url: str, *, patience_seconds: float):
        super().__init__(url)
        self._utils.disable_progress_bars()
        self._patience_seconds = patience_seconds
        self._head: str | None = None
        self._pending: dict[str, dict[str, Any]] = {}
        """Operations of the next commit, by path, in the Hub's format."""
        self._held: tuple[str, Version] | None = None
        self._lock = threading.RLock()

    @property
    def _commit(self) -> str:
        return self._head or self._read_head()

    def read(self, key: str) -> bytes:
        self._refresh(key)
        return super().read(key)

    def read_version(self, key: str) -> tuple[bytes, Version]:
        data = self.read(key)
        return data, Version.of(data)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        self._flush_under(key)
        return super().read_range(key, begin, end)

    def look_up(self, key: str) -> Stored:
        self._flush_under(key)
        return super().look_up(key)

    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        self._refresh(prefix)
        return super().names(prefix)

    def walk(self, prefix: str) -> Iterator[Stored]:
        self._refresh(prefix)
        yield from super().walk(prefix)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._add(key, bytes(data))

    def write_file(self, key: str, path: Path) -> None:
        path.stat()
        self._add(key, path)

    def publish(self, key: str, data: bytes, *, replacing: Version | None) -> Version:
        added = self._do(key, lambda: self._upload(key, data))

        def commit() -> None:
            parent = self._read_head()
            now = self._now(key)
            if now != data and (None if now is None else Version.of(now)) != replacing:
                raise ConflictError(f"{self.where(key)} was written by somebody else.")
            if now != data or self._pending:
                self._send([*self._pending.values(), *([added] if now != data else [])], f"Publish {key}", parent=parent)
            self._pending.clear()

        with self._lock:
            self._flush_under(key)
            self.flush(least=COMMIT_FILES)
            self._do(key, commit)
        return Version.of(data)

    def hold(self, key: str, version: Version) -> None:
        self._held = key, version

    def remove(self, keys: Iterable[str]) -> None:
        wanted = sorted({*keys})
        with self._lock:
            self.flush()
            for first in range(0, len(wanted), COMMIT_FILES):
                batch = wanted[first : first + COMMIT_FILES]
                self._do(batch[0], lambda batch=batch: self._remove(batch))

    def _remove(self, keys: list[str]) -> None:
        parent = self._read_head()
        paths = [self._path(key) for key in keys]
        folders = {path.rpartition("/")[0] for path in paths}
        above = f"{commonpath(folders)}/".removeprefix(self._folder)
        existing = {entry.path for entry in self._tree(above, recursive=len(folders) > 1)}
        doomed = [path for path in paths if path in existing]
        if doomed:  # the Hub refuses to remove a missing file
            lines = [{"key": "deletedFile", "value": {"path": path}} for path in doomed]
            self._send(lines, f"Remove {len(doomed)} files", parent=parent)

    def flush(self, *, least: int = 1) -> None:
        """Commit pending files, if there are at least `least`."""
        with self._lock:
            while len(self._pending) >= least:
                batch = dict([*self._pending.items()][:COMMIT_FILES])
                self._do(next(iter(batch)), lambda batch=batch: self._send([*batch.values()], f"Write {len(batch)} files"))
                self._pending = {path: op for path, op in self._pending.items() if op is not batch.get(path)}

    def take_pending(self) -> dict[str, Any]:
        with self._lock:
            pending, self._pending = self._pending, {}
        return pending

    def add_pending(self, pending: dict[str, Any]) -> None:
        with self._lock:
            self._pending |= pending

    def expect_usable(self, probe: str) -> None:
        """Check write permission, and list, without making a commit. Raises RefusedError if the key may not write."""
        address = f"{self._api}/auth-check/write"
        self._do("", lambda: self._ask("GET", address))
        refs = self._do("", lambda: self._hub.HfApi().list_repo_refs(self._repo, repo_type=self._type))
        if self._revision in {tag.name for tag in refs.tags}:
            raise RefusedError(f"{self.url}: {self._revision!r} is a tag, which stays as it is. Name a branch there.")
        self.names("")

    @property
    def _api(self) -> str:
        return f"{self._hub.HfApi().endpoint}/api/{self._type}s/{self._repo}"

    def _read_head(self) -> str:
        """The branch's current commit."""
        with self._lock:
            query = {"revision": self._revision, "repo_type": self._type, "expand": ["sha"]}  # no list of files
            return self._set_head(self._hub.HfApi().repo_info(self._repo, **query).sha)

    def _set_head(self, head: str) -> str:
        if head != self._head:
            self._redirects.clear()  # by addresses that name the commit
        self._head = head
        return head

    def _refresh(self, key: str) -> None:
        """Make the next read or listing at or under `key` see the branch's current state, own writes included."""
        self._flush_under(key)
        self._do(key, self._read_head)

    def _flush_under(self, key: str) -> None:
        path = self._path(key).rstrip("/")
        with self._lock:
            if any(not path or pending == path or pending.startswith(f"{path}/") for pending in self._pending):
                self.flush()

    def _add(self, key: str, content: bytes | Path) -> None:
        added = self._do(key, lambda: self._upload(key, content))
        with self._lock:
            self._pending[self._path(key)] = added
            self.flush(least=COMMIT_FILES)

    def _upload(self, key: str, content: bytes | Path) -> dict[str, Any]:
        """The operation that creates a file; large content is uploaded to the Hub first, small content is sent with the
        commit."""
        file = self._hub.CommitOperationAdd(self._path(key), content)
        place = {"repo_type": self._type, "revision": self._revision}
        self._hub.HfApi().preupload_lfs_files(self._repo, [file], **place, gitignore_content="# nothing")
        path, info = file.path_in_repo, file.upload_info
        if info.size and file.path_or_fileobj == b"":  # so it says that it was uploaded
            return {"key": "lfsFile", "value": {"path": path, "algo": "sha256", "oid": info.sha256.hex(), "size": info.size}}
        return {"key": "file", "value": {"path": path, "encoding": "base64", "content": file.b64content().decode()}}

    def _now(self, key: str) -> bytes | None:
        """An object at the last refresh."""
        try:
            return self._get(key, {}).content
        except self._errors.EntryNotFoundError:
            return None

    def _send(self, operations: list[dict[str, Any]], title: str, *, parent: str | None = None) -> None:
        """Send one commit. With `parent`: status 412 if the branch has moved since."""
        if self._held is not None:
            key, version = self._held
            parent = parent or self._read_head()
            if Version.of(self._now(key) or b"") != version:
                raise ConflictError(f"{self.where(key)} was written by somebody else: nothing more is written there.")
        header = {"summary": f"{title} ({self._folder.rstrip('/') or self._repo})", "description": ""}
        header |= {} if parent is None else {"parentCommit": parent}
        lines = [{"key": "header", "value": header}, *operations]
        body = "".join(f"{json.dumps(line)}\n" for line in lines).encode()
        # As `urllib.parse.quote`: nothing of urllib is imported, which also fetches.
        branch = re.sub(rb"[^\w.-]", lambda match: b"%%%02X" % ord(match[0]), self._revision.encode()).decode()
        with self._lock:
            self._set_head(self._ask("POST", f"{self._api}/commit/{branch}", body).json()["commitOid"])

    def _ask(self, method: str, address: str, body: bytes | None = None) -> Any:
        headers = self._utils.build_hf_headers(headers={} if body is None else {"Content-Type": "application/x-ndjson"})
        once = {"retry_on_exceptions": (), "retry_on_status_codes": ()}  # `_do` sends it again
        answer = self._utils.http_backoff(method, address, headers=headers, content=body, **once)
        self._utils.hf_raise_for_status(answer)
        return answer

    def _do(self, key: str, work: Callable[[], T]) -> T:
        patience, pause = self._patience_seconds, PAUSE_SECONDS
        until = time.monotonic() + patience
        for attempt in count():
            token = UNTIL.set(time.monotonic() + patience)
            try:
                return work()
            except Exception as error:  # of whichever HTTP client huggingface_hub brings along
                failure = self._error(key, error)
                wait = max(pause * random.uniform(0.5, 1.5), _retry_after_seconds(error))
                is_late = attempt > 0 and time.monotonic() + wait > until  # also a slow request is sent twice
                if type(failure) is not StorageError or wait > patience or is_late:
                    raise failure from None  # its text quotes the request
            finally:
                UNTIL.reset(token)
            time.sleep(wait)
            pause = min(2 * pause, MOST_PAUSE_SECONDS)
        raise AssertionError

    def _error(self, key: str, error: Exception) -> StorageError:
        if isinstance(error, StorageError):
            return error
        status = getattr(getattr(error, "response", None), "status_code", None)
        failure, words = super()._error(key, error), _words(error)
        if isinstance(error, self._errors.RevisionNotFoundError):
            return RefusedError(f"{failure} Make the branch first, with huggingface_hub's HfApi().create_branch.")
        if isinstance(error, self._errors.RepositoryNotFoundError):
            remedy = "Make the repository first, or check its name and the key in HF_TOKEN"
            return RefusedError(f"{self.url}: there is no such repository, or not for this key (status {status}). {remedy}.")
        if status == 403:
            remedy = "Give HF_TOKEN one that may write there; if it may, see whether the account's space is used up"
            return RefusedError(f"{self.url}: the Hub lets this key write nothing there (status 403). {remedy}.{words}")
        if status == 429:
            seconds = f", and asks to wait {_retry_after_seconds(error):.0f} s" if _retry_after_seconds(error) else ""
            remedy = "It takes some hundred commits an hour: save less often (checkpoint.every_steps)"
            return StorageError(f"{self.where(key)}: the Hub takes no more for now (status 429){seconds}. {remedy}.{words}")
        if type(failure) is StorageError and status is not None and status < 500 and status not in _MAY_PASS:
            return RefusedError(f"{failure}{words}")
        return failure


def _retry_after_seconds(error: Exception) -> float:
    """Seconds that the Hub asks to wait; 0 if it does not. Every response has RateLimit headers."""
    answer = getattr(error, "response", None)
    if answer is None:
        return 0.0
    used_up = (
        re.search(r"\br\s*=\s*0\s*;\s*t\s*=\s*(\d+)", answer.headers.get("RateLimit", ""))
        if answer.status_code == 429
        else None
    )
    match = used_up or re.fullmatch(r"(\d+)", answer.headers.get("Retry-After", ""))
    return 0.0 if match is None else float(match[1])


def _words(error: Exception) -> str:
    """First line of the Hub's own message, without addresses and keys; empty if there is none, or another server responded."""
    answer = getattr(error, "response", None)
    if answer is None or "json" not in answer.headers.get("Content-Type", ""):
        return ""
    line = re.sub(r"\S*://\S*|\bhf_\w+", "...", (getattr(error, "server_message", None) or "").partition("\n")[0])
    return f" It says: {line[:MOST_WORDS]}" if line else ""
