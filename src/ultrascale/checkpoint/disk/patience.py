"""Retries after transient errors: a network disk drops a request now and then, which should not end a run of weeks. The work
must be repeatable from its start. A failed fsync is not (the kernel may have dropped the data, and reports that once), so a
file is then rewritten.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
TRANSIENT_ERRORS = {errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.EREMOTEIO, errno.ENOLINK}
"""Errors that may pass; a full disk, a quota or a missing permission does not."""
PAUSES_SECONDS = (0.1, 1.0)
"""Pauses before the second and the third attempt, which is the last."""


def with_retries(work: Callable[[], T]) -> T:
    """The result of `work`, tried up to three times while it fails with a transient error. Raises the last error."""
    for pause in PAUSES_SECONDS:
        try:
            return work()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(pause)
    return work()


def is_transient(error: BaseException | None) -> bool:
    """True if `error` was caused by a transient OSError."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRORS
        error = error.__cause__
    return False


def rename(source: Path, target: Path) -> None:
    """Rename with retries. On a network file system the first attempt may have succeeded although it reported an error; the
    second then finds no source. Raises OSError."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        if tries > 1 and os.path.lexists(target) and not os.path.lexists(source):
            return
        os.rename(source, target)

    with_retries(attempt)
