"""Atomic writes of prepared data, and `DataError`, the error of this package.

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
from ultrascale.output_file import make_durable
from ultrascale.storage import StorageError

PARTIAL = ".partial"
BLOCK_BYTES = 1 << 20


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context that turns an OSError into a DataError that names `path` and says that finished files are intact."""
    try:
        yield
    except OSError as error:
        remedy = "Make room or choose another folder and run the same command again: finished shards are kept."
        raise DataError(str(error.filename or path), f"cannot be written: {error.strerror or error}", remedy) from error


@contextmanager
def reading(where: str, remedy: str = "Check the name, and the credentials in the environment.") -> Iterator[None]:
    """Context that turns an error of a store into a DataError that names `where`."""
    try:
        yield
    except StorageError as error:
        raise DataError(where, f"cannot be read: {str(error).rstrip('.')}", remedy) from error


def write_whole(path: Path, content: bytes, *, durable: bool = True) -> None:
    """Atomically replaces `path` with `content`; with `durable`, waits until it would survive a loss of power.

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
                make_durable(path.parent)
        finally:
            partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Writes JSON with sorted keys, atomically."""
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
    """Checksum of a file, in hex. `after_block`: called with the bytes of each block read."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(BLOCK_BYTES):
            digest.update(block)
            after_block(len(block))
    return digest.hexdigest()


class DataError(ValueError):
    """Error in input text, in a shard, or in the place to write to.

    `where` names the file, with line, byte or token; `problem` says what was expected and found; `remedy` says what to do;
    `reason` is the short name under which `--on-bad skip` counts it ("" if it cannot be skipped).
    """

    def __init__(self, where: str, problem: str, remedy: str, reason: str = ""):
        super().__init__(where, problem, remedy, reason)
        self.where, self.problem, self.remedy, self.reason = where, problem, remedy, reason

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The error as the command line lists it."""
        return (Problem(self.where, self.problem, self.remedy),)

    def __str__(self) -> str:
        return f"{self.where}: {self.problem}. {self.remedy}"


class DataCommandError(DataError):
    """Error in the command, not in the data: a path that does not exist or is of another kind, an index out of range."""

    is_usage_error = True


class SeveralDataErrors(DataError):
    """Several errors reported together; `where` and the other fields are those of the first."""

    def __init__(self, errors: list[DataError]):
        first = errors[0]
        super().__init__(first.where, first.problem, first.remedy, first.reason)
        self.errors = tuple(errors)
        self.is_usage_error = any(isinstance(error, DataCommandError) for error in errors)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """Mistakes of all errors."""
        return tuple(problem for error in self.errors for problem in error.problems)

    def __str__(self) -> str:
        return "\n".join(map(str, self.errors))
