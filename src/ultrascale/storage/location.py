"""Location of a store: `s3://bucket/prefix`, `gs://`, `az://container/prefix`, `file:///folder`, `hf://`, a plain path."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ultrascale.storage.errors import StorageError
from ultrascale.storage.hub import PLACE, HubStore
from ultrascale.storage.hub_branch import HubBranch
from ultrascale.storage.store import Store

SCHEMES = ("s3", "gs", "az")
PATIENCE_SECONDS = 120.0
"""Time in seconds for which transient failures are retried."""
_NO_NAME = re.compile(r"--|\.\.|\.git$|(?:^|/)[-.]|[-.](?:/|$)|[^/]{97}")
"""Names that the Hub refuses for users and repositories."""
_URL = re.compile(r"([a-z][a-z0-9+.-]*):/{1,3}(.*)", re.DOTALL)


def url_of(place: str | Path) -> str | None:
    """The URL in `place`; None for a plain path. Restores a URL that lost a slash in `Path`."""
    match = _URL.fullmatch(str(place))
    if match is None:
        return None
    scheme, rest = match[1], match[2].rstrip("/")
    return f"file:///{rest}" if scheme == "file" else f"{scheme}://{rest}"


def join_url(url: str, *names: str) -> str:
    """`url` with names under it."""
    return "/".join([url.rstrip("/"), *names])


def obstacle(folder: Path) -> Path | None:
    """Path that prevents writing `folder`: its nearest existing ancestor, or itself, if that is a file or read-only."""
    nearest = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.lexists(path))
    return None if nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK) else nearest


def url_problem(place: str, *, to_write: bool = False) -> str | None:
    """Why `place` cannot name a store (with `to_write`: a writable one); None if it can, as far as can be checked offline."""
    url = url_of(place)
    if url is None:
        return None if place else "is empty"
    scheme, rest = url.split("://", 1)
    if scheme == "hf":
        match = PLACE.fullmatch(rest)
        if match is None or _NO_NAME.search(match[2]):
            return "names no repository: expected hf://USER/NAME or hf://datasets/USER/NAME/FOLDER"
        if to_write and {".git", ".cache"} & {*rest.split("/")}:
            return "has '.git' or '.cache' between slashes, which huggingface_hub does not write to"
        if to_write and re.fullmatch(r"[0-9a-f]{40}", match[3] or ""):
            return f"names a commit, which stays as it is: expected a branch, as in hf://{match[2]}@main"
    elif scheme not in (*SCHEMES, "file"):
        return f"{scheme}:// is none of {', '.join(f'{known}://' for known in SCHEMES)}, hf://, file:// or a path"
    elif "@" in rest or "?" in rest:
        return "must hold no credentials: they come from the environment"
    if not rest.strip("/").split("/")[0]:
        return f"names no bucket: expected {scheme}://BUCKET/PREFIX"
    if scheme != "file" and {".", ".."} & {*rest.split("/")}:
        return "has '.' or '..' between slashes, which a bucket does not go by"
    return None


def open_store(place: str | Path, *, patience_seconds: float = PATIENCE_SECONDS, to_write: bool = False) -> Store:
    """The store at a URL or path, without any request yet. A Hub store is read at one commit, unless opened to write. Raises
    StorageError if `place` cannot be a store."""
    problem = url_problem(str(place), to_write=to_write)
    if problem is not None:
        raise StorageError(f"{place}: {problem}.")
    url = url_of(place)
    if url is None or url.startswith("file://"):
        from ultrascale.storage.files import FileStore

        return FileStore(Path(place) if url is None else Path(url.removeprefix("file://")))
    if url.startswith("hf://"):
        return HubBranch(url, patience_seconds=patience_seconds) if to_write else HubStore(url)
    from ultrascale.storage.objects import ObjectStore

    return ObjectStore(url, patience_seconds=patience_seconds)
