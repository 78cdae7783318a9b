"""Files that appear whole or not at all: a full disk leaves nothing in the way, and nobody reads half of one."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from shutil import copymode
from uuid import uuid4


def make_durable(path: Path) -> None:
    """Wait until a file, or a folder's list of names, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_output(path: str | Path, content: str | bytes) -> None:
    """Write `content` (text as UTF-8) under a temporary name and rename it to `path`; a device or pipe is written to directly.

    Raises OSError that names `path`, which is then as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{uuid4().hex[:8]}.partial")
    try:
        if target.exists() and not target.is_file():
            target.write_bytes(data)
            return
        partial.write_bytes(data)
        if target.exists():
            copymode(target, partial)
        partial.replace(target)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        with suppress(OSError):
            partial.unlink()
