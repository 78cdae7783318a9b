"""Buckets, through obstore: Amazon's S3 and compatible stores, Google's and Azure's.

Why obstore and not fsspec: one wheel for all three, the same conditional put for all, no cache of listings to invalidate, and
threads instead of an event loop beside torch's. Credentials come from the vendors' usual places: the environment, the shared
file of profiles, the machine's role. None is ever read from a URL or a run's file, and a server's message is reduced to its
error code before it is shown, because messages quote requests.
"""

from __future__ import annotations

import configparser
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

from ultrascale.storage.errors import ConflictError, DamagedError, MissingError, RefusedError, StorageError
from ultrascale.storage.store import PAUSE_SECONDS, READS, Block, Store, Stored, Version, with_retries

T = TypeVar("T")
CONNECT_SECONDS, REQUEST_SECONDS = 10, 300
"""A part of 16 MiB at 1 Mbit/s takes half the latter."""
MULTIPART_BYTES, MULTIPART_STREAMS = 16 << 20, 8
BLOCK_BYTES = 256 << 10
"""Block size for streamed reads: larger blocks leave the CPU caches between two uses."""
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3}[ \w]*)")
_FULL = re.compile(r"507|Insufficient ?Storage|Quota ?Exceeded|XMinioStorageFull|No space", re.IGNORECASE)
_EXPIRED = re.compile(r"Expired|TokenRefreshRequired")
_SKEWED = re.compile(r"RequestTimeTooSkewed|RequestExpired")
_REFUSED = re.compile(r"40[13]|AccessDenied|InvalidAccessKey|SignatureDoesNotMatch|Unauthorized|Forbidden|AllAccessDisabled")
_NO_CREDENTIALS = re.compile(
    r"instance credentials|metadata|169\.254\.169\.254|No credentials|CredentialsNotFound", re.IGNORECASE
)


_VARIABLES = {"s3": "AWS_...", "gs": "GOOGLE_...", "az": "AZURE_STORAGE_..."}


class ObjectStore(Store):
    """A prefix of a bucket. Raises StorageError if obstore is not installed, or cannot be set up for `url`."""

    def __init__(self, url: str, *, patience_seconds: float):
        try:
            import obstore
            from obstore.exceptions import BaseError
            from obstore.store import from_url
        except ImportError as error:
            remedy = "Install it with: pip install 'ultrascale[store]'"
            raise StorageError(f"{url} needs the package obstore, which is not installed. {remedy}.") from error
        self.url = url
        self._obstore: Any = obstore
        make: Any = from_url  # its types expect one vendor's settings, known before the URL is
        self._errors = (BaseError, OSError)
        try:
            self._store: Any = make(
                url,
                config=_config(url),
                client_options={
                    "connect_timeout": f"{CONNECT_SECONDS}s",
                    "timeout": f"{REQUEST_SECONDS}s",
                    "allow_http": _allows_http(),
                },
                retry_config={
                    "max_retries": 100,
                    "retry_timeout": timedelta(seconds=patience_seconds),
                    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=10), "base": 2},
                },
            )
        except (*self._errors, ValueError) as error:
            remedy = f"Set the variables of its maker, {_VARIABLES[url.partition(':')[0]]}, if it needs them"
            raise StorageError(f"{url} cannot be opened as a store: {_short(str(error))}. {remedy}.") from error

    def read(self, key: str) -> bytes:
        return self._read(key, lambda: bytes(self._obstore.get(self._store, key).bytes()))

    def read_version(self, key: str) -> tuple[bytes, Version]:
        def get() -> tuple[bytes, Version]:
            answer = self._obstore.get(self._store, key)
            return bytes(answer.bytes()), _version(answer.meta)

        return self._read(key, get)

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        return self._read(key, lambda: bytes(self._obstore.get_range(self._store, key, start=begin, end=end)))

    def blocks(self, key: str) -> Iterator[Block]:
        try:
            yield from self._obstore.get(self._store, key).stream(min_chunk_size=BLOCK_BYTES)
        except self._errors as error:
            raise self._error(key, error) from None

    def look_up(self, key: str) -> Stored:
        return _stored(self._read(key, lambda: self._obstore.head(self._store, key)), key)

    def write(self, key: str, data: bytes | memoryview) -> None:
        self._do(key, lambda: self._obstore.put(self._store, key, data, use_multipart=False))

    def write_file(self, key: str, path: Path) -> None:
        path.stat()
        put, streams = self._obstore.put, MULTIPART_STREAMS
        self._do(key, lambda: put(self._store, key, path, chunk_size=MULTIPART_BYTES, max_concurrency=streams))

    def publish(self, key: str, data: bytes, *, replacing: Version | None) -> Version:
        mode = "create" if replacing is None else _condition(replacing)
        failure: Exception | None = None
        for attempt in range(READS):
            time.sleep(PAUSE_SECONDS * (attempt > 0))
            try:
                return _version(self._obstore.put(self._store, key, data, mode=mode))
            except self._errors as error:
                failure = error
            # A refusal may answer a retry of a request that succeeded; no response leaves the outcome unknown.
            try:
                now, version = self.read_version(key)
                if now == data:
                    return version
                if version != replacing:
                    raise ConflictError(f"{self.where(key)} was written by somebody else.") from failure
            except MissingError:
                if replacing is not None:
                    raise ConflictError(f"{self.where(key)} was removed by somebody else.") from failure
        assert failure is not None
        raise self._error(key, failure) from failure

    def names(self, prefix: str) -> tuple[list[Stored], list[str]]:
        prefix = prefix.rstrip("/")
        listing = self._do(prefix, lambda: self._obstore.list_with_delimiter(self._store, prefix or None))
        objects = [_stored(entry, _name(entry["path"])) for entry in listing["objects"]]
        return sorted(objects, key=lambda stored: stored.key), sorted(_name(folder) for folder in listing["common_prefixes"])

    def walk(self, prefix: str) -> Iterator[Stored]:
        prefix = prefix.rstrip("/")
        pages = self._do(prefix, lambda: list(self._obstore.list(self._store, prefix or None, chunk_size=1000)))
        yield from (_stored(entry, entry["path"]) for page in pages for entry in page)

    def remove(self, keys: Iterable[str]) -> None:
        for key in keys:
            with suppress(MissingError):
                self._do(key, lambda key=key: self._obstore.delete(self._store, key))

    def _read(self, key: str, work: Callable[[], T]) -> T:
        """Result of `work`; a response that breaks off is requested again."""
        return with_retries(lambda: self._do(key, work))

    def _do(self, key: str, work: Callable[[], T]) -> T:
        try:
            return work()
        except self._errors as error:
            raise self._error(key, error) from None  # its text quotes the request

    def _error(self, key: str, error: Exception) -> StorageError:
        text = str(error)
        if "NoSuchBucket" in text or "ContainerNotFound" in text or "specified bucket does not exist" in text:
            return RefusedError(f"{self.url}: there is no such bucket. Make it first, or name another one.")
        if isinstance(error, FileNotFoundError):
            return MissingError(f"{self.where(key)} is not there.")
        message = _short(text)
        if _SKEWED.search(text):
            return RefusedError(f"{self.url} refuses this machine's clock ({message}). Set the clock.")
        if _EXPIRED.search(text):
            return RefusedError(f"{self.url}: the credentials have expired ({message}). Renew those in the environment.")
        if _NO_CREDENTIALS.search(text):
            return RefusedError(f"{self.url}: no credentials were found. Put them into the environment or the shared file.")
        if _FULL.search(message):
            return StorageError(f"{self.where(key)} cannot be written: the store is full ({message}). Free space there.")
        if _REFUSED.search(message) or isinstance(error, PermissionError):
            remedy = "Give credentials in the environment that may read, write, list and remove there"
            return RefusedError(f"{self.where(key)} was refused ({message}). {remedy}.")
        return StorageError(f"{self.where(key)}: the store does not answer as it should ({message}).")


def _config(url: str) -> dict[str, Any]:
    if not url.startswith("s3://"):
        return {}
    return {"checksum_algorithm": "SHA256", **_profile()}


def _profile() -> dict[str, str]:
    """Settings from the shared profile files, unless the environment has keys or a role."""
    roles = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_FULL_URI",
             "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_SKIP_SIGNATURE")  # fmt: skip
    if any(os.environ.get(name) for name in roles):
        return {}
    files = configparser.ConfigParser(interpolation=None)
    name = os.environ.get("AWS_PROFILE", "default")
    folder = Path("~/.aws").expanduser()
    try:
        files.read([
            os.environ.get("AWS_CONFIG_FILE", folder / "config"),
            os.environ.get("AWS_SHARED_CREDENTIALS_FILE", folder / "credentials"),
        ])  # fmt: skip
    except (OSError, configparser.Error):
        return {}
    settings: dict[str, str] = {}
    for section in (f"profile {name}", name):
        if files.has_section(section):
            settings |= dict(files[section])
    keys = {"aws_access_key_id": "access_key_id", "aws_secret_access_key": "secret_access_key",
            "aws_session_token": "session_token", "region": "region", "endpoint_url": "endpoint"}  # fmt: skip
    return {keys[key]: value for key, value in settings.items() if key in keys}


def _allows_http() -> bool:
    """True if the user asked for a server without encryption, such as a local one."""
    endpoints = (os.environ.get(f"AWS_ENDPOINT{end}", "") for end in ("", "_URL", "_URL_S3"))
    return any(endpoint.startswith("http://") for endpoint in endpoints) or os.environ.get("AWS_ALLOW_HTTP") == "true"


def _stored(meta: Any, key: str) -> Stored:
    return Stored(key, int(meta["size"]), meta["e_tag"] or str(meta["last_modified"]))


def _version(meta: Any) -> Version:
    if not meta["e_tag"]:
        raise DamagedError("the store gives its objects no tags (ETag), so none can be replaced on a condition.")
    return Version(meta["e_tag"], meta.get("version"))


def _condition(version: Version) -> dict[str, str]:
    return {"e_tag": version.tag} | ({} if version.number is None else {"version": version.number})


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


def _short(text: str) -> str:
    """The message of a server or connection error, without the quoted request."""
    details = [match[1].strip() for match in (_STATUS.search(text), _CODE.search(text)) if match]
    if details:
        return ", ".join(details)
    first = text.partition("Debug source")[0].strip().splitlines()[0:1] or [type(text).__name__]
    last = first[0].rsplit(" - ", 1)[-1].rsplit("failed: ", 1)[-1]
    return re.sub(r"\S+://\S+|\?\S+", "...", last)[:200].rstrip(" .:")
