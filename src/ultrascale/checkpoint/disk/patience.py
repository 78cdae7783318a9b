"""Once more after an error that may pass: a disk behind a network drops a request now and then, and a run of weeks should not
end by it. Only what can be done again from its beginning may be given here; an fsync that failed cannot (the kernel may have
dropped what it could not write, and says so once), so a file is then written anew.
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
"""A full disk, a quota or a missing permission does not pass."""
PAUSES_SECONDS = (0.1, 1.0)
"""Pauses before the second and the third attempt, which is the last."""


def with_retries(work: Callable[[], T]) -> T:
    """The result of `work`, tried up to three times while it fails with an error that may pass. Raises the last error."""
    for pause in PAUSES_SECONDS:
        try:
            return work()
        except Exception as error:
            if not is_transient(error):
                raise
            time.sleep(pause)
    return work()


def is_transient(error: BaseException | None) -> bool:
    """True if an OSError that may pass is behind `error`."""
    while error is not None:
        if isinstance(error, OSError):
            return error.errno in TRANSIENT_ERRORS
        error = error.__cause__
    return False


def rename(source: Path, target: Path) -> None:
    """Rename patiently. On a network file system the first attempt may have been carried out although it failed: then the
    second finds no source. Raises OSError."""
    tries = 0

    def attempt() -> None:
        nonlocal tries
        tries += 1
        if tries > 1 and os.path.lexists(target) and not os.path.lexists(source):
            return
        os.rename(source, target)

    with_retries(attempt)
