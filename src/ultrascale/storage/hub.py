"""Repositories of the Hugging Face Hub, read only: `hf://datasets/USER/NAME/FOLDER`, `hf://USER/NAME` for a model's.

A process reads all of a repository at one commit: the one that the revision (`NAME@REVISION`, else main) resolves to at the
first request. `hub_branch` writes; it has the branch that a run is kept on.

The Hub accepts 10,000 files in a folder, and lists each large one in .gitattributes, which must stay small, unless a pattern
there matches it. So the part SAVE/FILE.00012-1a2b3c4d of a save has the path SAVE/FILE/00012-1a2b3c4d.bin there.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from functools import cache
from typing import Any, NoReturn, TypeVar

from ultrascale.storage.errors import MissingError, RefusedError, StorageError
from ultrascale.storage.store import Block, Store, Stored, Version

T = TypeVar("T")
BLOCK_BYTES = 8 << 20
PLACE = re.compile(r"(datasets/)?(?!datasets/|spaces/)([\w.-]+/[\w.-]+)(?:@([^/@]+))?(?:/([^@?]*))?", re.ASCII)
COMMITS: dict[tuple[str, str, str], str] = {}
"""Commits that this process reads, by type and name of the repository, and revision."""
_LOCK = threading.Lock()
LIMITS = {"connect": 30.0, "read": 120.0, "write": 120.0}
"""Time limits in seconds for a stalled request; huggingface_hub has none."""
UNTIL: ContextVar[float] = ContextVar("UNTIL", default=math.inf)
"""If set, the time after which no request starts, and a temporary refusal of the Hub fails at once: the code that sets it
retries, in place of huggingface_hub, which retries without a limit of ours.
"""
_FOR_NOW = (408, 429, 500, 502, 503, 504)
_PART = re.compile(r"^((?:.*/)?[0-9a-f]{32}/[^/]+)\.(\d{5,}-[0-9a-f]{8})$")
_PATH = re.compile(r"^((?:.*/)?[0-9a-f]{32}/[^/]+)/(\d{5,}-[0-9a-f]{8})\.bin$")
READ_ONLY = "is only read here: only a run and a sweep write to the Hub, and --push-to-hub"


class HubStore(Store):
    """A folder of a repository. Raises StorageError if huggingface_hub is not installed."""

    listings_lag = False

    def __init__(self, url: str):
        try:
            import huggingface_hub
            from huggingface_hub import errors, utils
        except ImportError as error:
            remedy = "Install it with: pip install 'ultrascale[hub]'"
            raise StorageError(f"{url} needs the package huggingface_hub, which is not installed. {remedy}.") from error
        self.url = url
        place = PLACE.fullmatch(url.removeprefix("hf://"))
        assert place is not None, url
        self._hub: Any = huggingface_hub
        self._utils: Any = utils
        self._errors: Any = errors
        utils.logging.set_verbosity_error()  # its warnings quote signed addresses
        _limit_requests(self._hub)
        self._type = "dataset" if place[1] else "model"
        self._repo, self._revision = place[2], (place[3] or "main").replace("%2F", "/")
        self._redirects: dict[str, str] = {}  # by URL, the URL to which the Hub redirects for a file on another server
        self._folder = f"{place[4].strip('/')}/" if place[4] else ""

    @property
    def _commit(self) -> str:
        name = (self._type, self._repo, self._revision)
        with _LOCK:
            if name not in COMMITS:
                info = self._hub.HfApi().repo_info(self._repo, revision=self._revision, repo_type=self._type)
                COMMITS[name] = info.sha
            return COMMITS[name]

    def read(self, key: str) -> bytes:
        return self._do(key, lambda: self._get(key, {}).content)

    def read_version(self, key: str) -> tuple[bytes, Version]:
        return self.read(key), Version(self._do(key, lambda: self._commit))

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        def get() -> bytes:
            try:
                answer = self._get(key, {"Range": f"bytes={begin}-{end - 1}"})
            except self._errors.HfHubHTTPError as error:
                if error.response.status_code == 416:  # it ends before
                    return b""
                raise
            return answer.content if answer.status_code == 206 else answer.content[begin:end]

        return self._do(key, get) if begin < end else b""

    def blocks(self, key: str) -> Iterator[Block]:
        size = self.size(key)
        for offset in range(0, size, BLOCK_BYTES):
            block = self.read_range(key, offset, offset + BLOCK_BYTES)
            if len(block) != min(BLOCK_BYTES, size - offset):
                raise StorageError(f"{self.where(key)}: {len(block):,} bytes came of a block at {offset:,}, which has more.")
            yield block

    def look_up(self, key: str) -> Stored:
        facts = self._do(key, lambda: self._hub.get_hf_file_metadata(self._address(key)))
        return Stored(key, int(facts.size), facts.etag or "")

    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        entries = self._tree(prefix, recursive=False)
        objects = [_stored(entry, entry.path.rsplit("/", 1)[-1]) for entry in entries if hasattr(entry, "size")]
        folders = [entry.path.rsplit("/", 1)[-1] for entry in entries if not hasattr(entry, "size")]
        return sorted(objects, key=lambda stored: stored.key), sorted(folders)

    def walk(self, prefix: str) -> Iterator[Stored]:
        for entry in self._tree(prefix, recursive=True):
            if hasattr(entry, "size"):
                yield _stored(entry, _PATH.sub(r"\1.\2", entry.path.removeprefix(self._folder)))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RefusedError(f"{self.url} {READ_ONLY}.")

    write = write_file = publish = remove = _refuse

    def _path(self, key: str) -> str:
        """Path in the repository."""
        return self._folder + _PART.sub(r"\1/\2.bin", key)

    def _tree(self, prefix: str, *, recursive: bool) -> list[Any]:
        path = f"{self._folder}{prefix}".strip("/") or None
        api, where = self._hub.HfApi(), {"repo_type": self._type, "recursive": recursive}
        try:
            return self._do(prefix, lambda: list(api.list_repo_tree(self._repo, path, revision=self._commit, **where)))
        except MissingError:
            return []

    def _address(self, key: str) -> str:
        return self._hub.hf_hub_url(self._repo, self._path(key), repo_type=self._type, revision=self._commit)

    def _get(self, key: str, headers: dict[str, str]) -> Any:
        """Response to a request for a file; huggingface_hub retries requests that may succeed later."""
        headers = {"Accept-Encoding": "identity", **headers}
        address = self._address(key)
        if redirect := self._redirects.get(address):
            answer = self._utils.http_backoff("GET", redirect, headers=headers, follow_redirects=True)
            if answer.is_success or answer.status_code == 416:
                self._utils.hf_raise_for_status(answer)
                return answer
            self._redirects.pop(address, None)  # such addresses are good for some time
        signed = self._utils.build_hf_headers(headers=headers)
        answer = self._utils.http_backoff("GET", address, headers=signed, follow_redirects=True)
        self._utils.hf_raise_for_status(answer)
        if answer.history and answer.url.host != answer.history[0].url.host:
            self._redirects[address] = str(answer.url)
        return answer

    def _do(self, key: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except Exception as error:  # of whichever HTTP client huggingface_hub brings along
            raise self._error(key, error) from None  # its text quotes the request

    def _error(self, key: str, error: Exception) -> StorageError:
        status = getattr(getattr(error, "response", None), "status_code", None)
        answer = type(error).__name__ if status is None else f"status {status}"
        if isinstance(error, self._errors.EntryNotFoundError):
            return MissingError(f"{self.where(key)} is not there.")
        if isinstance(error, self._errors.HFValidationError):
            return RefusedError(f"{self.url} names no repository, by huggingface_hub's rules. Check its name.")
        if isinstance(error, self._errors.RevisionNotFoundError):
            return RefusedError(f"{self.url}: the repository has no revision {self._revision!r}.")
        if isinstance(error, self._errors.RepositoryNotFoundError) or status in (401, 403):
            remedy = "Check its name, and the key in HF_TOKEN or of `hf auth login`"
            return RefusedError(f"{self.url}: there is no such repository, or not for this key ({answer}). {remedy}.")
        remedy = "" if status is not None else " Check the network, and HF_ENDPOINT if it is set."
        return StorageError(f"{self.where(key)}: the Hub does not answer as it should ({answer}).{remedy}")


@cache
def _limit_requests(package: Any) -> None:
    """Apply LIMITS and UNTIL to each client that huggingface_hub creates from now on, also by a user's factory."""
    make = package.utils._http._GLOBAL_CLIENT_FACTORY

    def before(request: Any) -> None:
        if time.monotonic() > UNTIL.get():
            raise TimeoutError
        limits = request.extensions.setdefault("timeout", {})
        limits.update({name: seconds for name, seconds in LIMITS.items() if limits.get(name) is None})

    def after(answer: Any) -> None:
        if answer.status_code in _FOR_NOW and UNTIL.get() < math.inf:
            package.utils.hf_raise_for_status(answer)

    def make_limited() -> Any:
        client = make()
        client.event_hooks["request"].append(before)
        client.event_hooks["response"].append(after)
        return client

    package.set_client_factory(make_limited)


def _stored(entry: Any, key: str) -> Stored:
    return Stored(key, entry.size, entry.blob_id if entry.lfs is None else entry.lfs.sha256)
