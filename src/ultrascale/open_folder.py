"""A folder held open: whether its path still leads to it, and where it is now.

A path may come to lead elsewhere under a running job: the folder is removed, moved, or another is put in its place. The open
descriptor keeps the folder's identity (its number is given to no other one meanwhile) and reaches it wherever it was moved.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path

ELSEWHERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ESTALE}
"""Errors that say that a path no longer leads to the folder. Others, as of a disk that fails, say nothing of that."""


class OpenFolder:
    """The folder that was at `path` when it was opened. Raises OSError if there is none."""

    def __init__(self, path: Path):
        self.path = path
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)

    def fate(self) -> str:
        """Fate of the folder, as in `was removed` or `was moved to /elsewhere`; empty while its path leads to it."""
        try:
            if os.path.samestat(os.stat(self.path), os.fstat(self.fd)):
                return ""
            in_its_place = ", and something else is in its place"
        except OSError as error:
            if error.errno not in ELSEWHERE:
                return ""
            in_its_place = ""
        place = self.place()
        outcome = "was removed" if os.path.isdir("/proc/self/fd") else "was removed or moved"
        return (outcome if place is None else f"was moved to {place}") + in_its_place

    def place(self) -> Path | None:
        """Path of the folder now; None if it was removed, or where the system does not tell."""
        try:
            place = Path(os.readlink(f"/proc/self/fd/{self.fd}"))
            return place if os.path.samestat(os.stat(place), os.fstat(self.fd)) else None
        except OSError:
            return None

    def close(self) -> None:
        """Let go of it."""
        os.close(self.fd)
