"""Signs of life of one rank, in a file that it shares with whoever watches it.

A rank writes into memory mapped from a file: what it does now, of which step, since when, and the last collectives it came to.
Another process reads them at any time, also when this one is stopped, holds the interpreter's lock or is dead: the file
outlives it. A beat costs some microseconds and no system call. Without a file everything here does nothing.

Times are of the machine's monotonic clock, which its processes share.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple
from zlib import crc32

_HEAD = struct.Struct("<QdqqqIBdQH")
"""Beats, time, steps done, steps done at the start (-1: not yet known), nanoseconds waited, pid, waiting, allowance, waits,
length of the text."""
_CHECK = struct.Struct("<I")
"""CRC-32 of what follows. A rank may lose the processor, or be stopped, in the middle of writing a beat: it writes to two slots
in turn, and the older one is whole."""
_TEXT = 240
_SLOT_BYTES = 320
_ENTRY = struct.Struct("<QH")
_ENTRY_BYTES = 256
_BAR = " | "
_PACKAGE = f"{Path(__file__).parent}/"
SKIPPED_FILES = ("parallel/lost.py", "parallel/time_limits.py", "parallel/mesh.py", "heartbeat.py", "launch/orphans.py")
"""Files of ours whose lines say less than their callers'."""
RING = 64
"""Collectives remembered."""
_RING_AT = 2 * _SLOT_BYTES
FILE_BYTES = _RING_AT + RING * _ENTRY_BYTES
SUFFIX = ".beat"
DONE = "done"
"""Action of a rank that has stopped giving signs."""


class ReachedCollective(NamedTuple):
    """One that a rank came to."""

    group: str
    number: int
    """Number in its group, from zero: all ranks of the group must come to the same one."""
    what: str
    line: str = ""
    """Line of the source, where this rank came to it; not part of what all must agree on."""


@dataclass(frozen=True)
class Heartbeat:
    """Contents of a rank's file."""

    rank: int
    pid: int
    beats: int
    time: float
    """Time of the last beat."""
    steps_done: int
    started_at: int
    """Steps done when this process had found its checkpoint; -1 before."""
    doing: str
    waiting: bool
    """True if it waits for other ranks."""
    allowance: float
    """Seconds after which the next beat is overdue."""
    collectives: tuple[ReachedCollective, ...]
    """The last ones it came to, in order."""

    @property
    def overdue(self) -> float:
        """Seconds since the next beat should have come; negative while there is time."""
        return time.monotonic() - self.time - self.allowance

    @property
    def lives(self) -> bool:
        """True if a process has the rank's id, perhaps another user's by now."""
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def allocate(file: IO[bytes]) -> None:
    """Give the file its length and its room: in one that was only made longer, a beat on a full disk would end the process by
    SIGBUS.

    Raises OSError if there is no room.
    """
    file.write(bytes(FILE_BYTES))
    file.flush()


class HeartbeatWriter:
    """The writing end. Raises OSError if there is no room for its file."""

    def __init__(self, folder: Path, rank: int, *, hang_seconds: float, group_prefix: str = ""):
        self.hang_seconds, self.group_prefix = hang_seconds, group_prefix
        self.longest = 0.0
        """The longest gap between two beats of steps so far: slow machines and large models are no hangs."""
        self.steps_done, self.started_at = 0, -1
        self._beats = self._waits = 0
        self._numbers: Counter[str] = Counter()
        self._last = time.monotonic()
        self._extra = self.patience = 0.0
        path = folder / f"{rank}{SUFFIX}"
        with open(path, "w+b") as file:
            allocate(file)
            self._memory = mmap.mmap(file.fileno(), FILE_BYTES)
        self.beat("start", extra_seconds=0.0)

    def beat(self, doing: str, *, waiting: bool = False, extra_seconds: float | None = None) -> None:
        """Say what this rank does from now on. `extra_seconds`: how much longer than a part of a step it may take."""
        now = time.monotonic()
        if self._extra == 0.0 and self.steps_done > self.started_at >= 0:
            self.longest = max(self.longest, now - self._last)
        is_starting = self.started_at < 0 or self.steps_done == self.started_at
        self._last, self._extra = now, max(extra_seconds or 0.0, START_SECONDS if is_starting else 0.0, self.patience)
        self._beats += 1
        text = doing.encode()[:_TEXT]
        allowance = max(self.hang_seconds, MOST_TIMES_LONGEST * self.longest) + self._extra
        head = _HEAD.pack(
            self._beats, now, self.steps_done, self.started_at, int(_waited * 1e9), os.getpid(), waiting, allowance,
            self._waits, len(text),
        )  # fmt: skip
        payload = head + text
        offset = self._beats % 2 * _SLOT_BYTES
        self._memory[offset : offset + _CHECK.size + len(payload)] = _CHECK.pack(crc32(payload)) + payload

    def note_collective(self, group: str, what: str) -> None:
        """Remember a collective of the ranks `group` that this rank has come to."""
        group = f"{self.group_prefix}{group}"
        text = f"{group}{_BAR}{self._numbers[group]}{_BAR}{_caller()}{_BAR}{what}".encode()[: _ENTRY_BYTES - _ENTRY.size]
        self._numbers[group] += 1
        offset = _RING_AT + self._waits % RING * _ENTRY_BYTES
        _ENTRY.pack_into(self._memory, offset, self._waits, len(text))
        self._memory[offset + _ENTRY.size : offset + _ENTRY.size + len(text)] = text
        self._waits += 1


START_SECONDS = 600.0
"""Additional seconds before the end of the first step: loading, planning, compilation."""
MOST_TIMES_LONGEST = 10
"""A part of a step may take so many times the longest one so far."""
_heart: HeartbeatWriter | None = None
_waited = 0.0
_depth = 0


def start(folder: Path, rank: int, *, hang_seconds: float, group_prefix: str = "") -> None:
    """Starts signs of life of this process in `folder`, as rank `rank`. `group_prefix`: of its groups' names, where others
    of these names are watched too. Raises OSError if there is no room for them."""
    global _heart
    _heart = HeartbeatWriter(folder, rank, hang_seconds=hang_seconds, group_prefix=group_prefix)


def stop() -> None:
    """Give no more signs, as when the run is over and what follows takes its own time."""
    global _heart
    if _heart is not None:
        _heart.beat(DONE, extra_seconds=float("inf"))
    _heart = None


def beat(doing: str, *, extra_seconds: float | None = None) -> None:
    """Say what this rank does from now on."""
    if _heart is not None:
        _heart.beat(doing, extra_seconds=extra_seconds)


@contextmanager
def patient(doing: str, seconds: float) -> Iterator[None]:
    """While inside, this rank does something that may take so much longer than a part of a step, waits for others included."""
    if _heart is not None:
        _heart.patience = seconds
    beat(doing)
    try:
        yield
    finally:
        if _heart is not None:
            _heart.patience = 0.0
        beat(f"after {doing}")


def steps_done(steps: int) -> None:
    """Say how far this rank is. The first call of a process says where it started."""
    if _heart is not None:
        _heart.steps_done = steps
        if _heart.started_at < 0:
            _heart.started_at = steps
        _heart.beat("between steps")


@contextmanager
def waits(what: str, *, collective: tuple[str, str] | None = None) -> Iterator[None]:
    """While inside, this rank waits for others; the time is counted. `collective`: its group and what it is, as all ranks of
    the group must name it."""
    global _waited, _depth
    started = time.monotonic()
    if _heart is not None:
        if collective is not None:
            _heart.note_collective(*collective)
        _heart.beat(what, waiting=True)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _waited += time.monotonic() - started
    if _heart is not None:  # after an error it is still known what it waited for
        _heart.beat(f"after {what}")


def waited_seconds() -> float:
    """Seconds that this process has waited for others so far."""
    return _waited


def read(folder: Path) -> list[Heartbeat]:
    """Beats from the ranks' files in `folder`, in order of rank."""
    beats = [_read(path) for path in folder.glob(f"*{SUFFIX}")]
    return sorted((beat for beat in beats if beat is not None), key=lambda beat: beat.rank)


def _read(path: Path) -> Heartbeat | None:
    data = path.read_bytes()
    if len(data) != FILE_BYTES:
        return None
    slots = [slot for offset in (0, _SLOT_BYTES) if (slot := _slot(data[offset : offset + _SLOT_BYTES])) is not None]
    if not slots:
        return None
    (beats, when, done, started_at, _, pid, waiting, allowance, waits_, _), doing = max(slots)
    return Heartbeat(
        int(path.stem), pid, beats, when, done, started_at, doing, bool(waiting), allowance, tuple(_collectives(data, waits_))
    )


def _slot(data: bytes) -> tuple[tuple[Any, ...], str] | None:
    """The fields and the text of a beat; None if it is not whole."""
    (check,) = _CHECK.unpack_from(data)
    fields = _HEAD.unpack_from(data, _CHECK.size)
    end = _CHECK.size + _HEAD.size + fields[-1]
    if not fields[0] or end > _SLOT_BYTES or crc32(data[_CHECK.size : end]) != check:
        return None
    return fields, data[_CHECK.size + _HEAD.size : end].decode(errors="replace")


def _collectives(data: bytes, count: int) -> Iterator[ReachedCollective]:
    for number in range(max(0, count - RING), count):
        offset = _RING_AT + number % RING * _ENTRY_BYTES
        stored_number, length = _ENTRY.unpack_from(data, offset)
        parts = data[offset + _ENTRY.size : offset + _ENTRY.size + length].decode(errors="replace").split(_BAR, 3)
        if stored_number == number and len(parts) == 4 and parts[1].isdigit():  # else it is just being written over
            yield ReachedCollective(parts[0], int(parts[1]), parts[3], parts[2])


def _caller() -> str:
    """The innermost line of ours that asked for the collective: `train/step.py:190 in agree_on_targets`."""
    frame = sys._getframe(2)
    while frame is not None:
        if (file := _package_file(frame.f_code.co_filename)) is not None:
            return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


@cache
def _package_file(path: str) -> str | None:
    """A source file's name in the package; None for what is not of it, or says less than its caller."""
    relative = path.removeprefix(_PACKAGE)
    return None if relative == path or relative in SKIPPED_FILES else relative
