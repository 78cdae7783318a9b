"""Files of prepared data that are either whole or not there, and `DataError`, the one error of this package.

A file is written under a temporary name, then fsync, rename, fsync of the folder.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ultrascale.description.parsing import parse_json
from ultrascale.description.problems import Problem
from ultrascale.failpoints import failpoint

PARTIAL = ".partial"
BLOCK_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turns an OSError of the body into a DataError that names `path` and says that nothing finished is lost."""
    try:
        yield
    except OSError as error:
        remedy = "Make room or choose another folder and run the same command again: finished shards are kept."
        raise DataError(str(error.filename or path), f"cannot be written: {error.strerror or error}", remedy) from error


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Replaces `path` with `content` in one step; `durable`: and waits until it would survive a loss of power.

    Raises DataError if the disk is full or the folder is read-only.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}{PARTIAL}")
    with writing(path):
        try:
            with open(partial, "wb") as file:
                file.write(content)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            failpoint("file.written")
            os.replace(partial, path)
            if durable:
                make_names_durable(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def make_names_durable(folder: Path) -> None:
    """Waits until renames in a folder would survive a loss of power."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Writes JSON with sorted keys, whole or not at all."""
    write_whole(path, (json.dumps(value, indent=1, sort_keys=True) + "\n").encode(), durable=durable)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object. Raises DataError if it is not one."""
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise DataError(str(path), f"cannot be read: {error}", "Prepare the data again, into a new folder.") from error
    if not isinstance(value, dict):
        raise DataError(str(path), "does not hold a JSON object", "Prepare the data again, into a new folder.")
    return value


def sha256_of(path: Path, after_block: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Checksum of a file, in hex. `after_block`: told the bytes of each block read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            after_block(len(block))
    return digest.hexdigest()


class DataError(ValueError):
    """Something is wrong with input text, a shard, or where it is to be written.

    `where` names the file, with the line, byte or token it is about; `problem` says what was expected and found; `remedy` says
    what to do; `reason` is the short name under which `--on-bad skip` counts it ("" when it cannot be skipped).
    """

    def __init__(self, where: str, problem: str, remedy: str, reason: str = ""):
        super().__init__(where, problem, remedy, reason)
        self.where, self.problem, self.remedy, self.reason = where, problem, remedy, reason

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Mistakes as the command line lists them."""
        return (Problem(self.where, self.problem, self.remedy),)

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}. {self.remedy}"


class DataCommandError(DataError):
    """The command is wrong, and not what was read: a path that is not there or of another kind, a place out of range."""

    is_asked = True


class SeveralDataErrors(DataError):
    """Mistakes that can be told together; `where` and the rest are those of the first."""

    def __init__(self, errors: list[DataError]):
        first = errors[0]
        super().__init__(first.where, first.problem, first.remedy, first.reason)
        self.errors = tuple(errors)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Mistakes of all errors."""
        return tuple(problem for error in self.errors for problem in error.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))
