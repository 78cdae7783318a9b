"""What a power cut may leave of file operations; after Pillai et al. 2014, "All File Systems Are Not Created Equal".

Only fsync is believed: that of a file keeps its bytes, that of a folder the names in it. Everything later may have reached the
disk or not, in any order. Operations are noted while they are done; states are then built from those that arrived.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

ROOT = 0


@dataclass(frozen=True)
class Operation:
    """One change; `inode` is the file or folder that it is about, whatever name that has."""

    kind: Literal["write", "link", "unlink", "rename", "fsync", "promise"]
    inode: int
    folder: int = ROOT
    name: str = ""
    new_name: str = ""
    data: bytes = b""
    """Of a write, which appends; of a promise, what from here on must be found."""


@dataclass
class Recorder:
    """The operations under a folder."""

    root: Path
    operations: list[Operation] = field(default_factory=list)
    is_folder: dict[int, bool] = field(default_factory=lambda: {ROOT: True})
    _inodes: dict[str, int] = field(default_factory=dict)
    _open: dict[int, str] = field(default_factory=dict)

    def promise(self, text: str) -> None:
        """From here on, what was saved as `text` must be found, or something later."""
        self.operations.append(Operation("promise", ROOT, data=text.encode()))

    def at(self, path: Any, dir_fd: int | None = None) -> str | None:
        """The path from the root, if it is below."""
        full = os.path.join(self._open.get(dir_fd, "/nowhere"), path) if dir_fd is not None else os.path.abspath(path)
        return full if Path(full).is_relative_to(self.root) else None

    def inode(self, path: str) -> int:
        return ROOT if path == str(self.root) else self._inodes[path]

    def note(self, kind: Any, path: str, **more: Any) -> None:
        folder, name = os.path.split(path)
        self.operations.append(Operation(kind, self.inode(path), folder=self.inode(folder), name=name, **more))

    def made(self, path: str, *, is_folder: bool) -> None:
        self._inodes[path] = len(self.is_folder)
        self.is_folder[self._inodes[path]] = is_folder
        self.note("link", path)

    def moved(self, source: str, target: str) -> None:
        self.note("rename", source, new_name=os.path.basename(target))
        inside = [path for path in self._inodes if path == source or path.startswith(source + "/")]
        self._inodes |= {target + path[len(source) :]: self._inodes.pop(path) for path in inside}


@contextmanager
def recorded(root: Path) -> Iterator[Recorder]:
    """Note what is done below `root` through `os`, while doing it."""
    recorder, real = Recorder(root), {name: getattr(os, name) for name in WRAPPERS}
    try:
        for name, wrap in WRAPPERS.items():
            setattr(os, name, wrap(recorder, real[name]))
        yield recorder
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def _open(recorder: Recorder, real: Any) -> Any:
    def wrapped(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        at = recorder.at(path, dir_fd)
        is_new = at is not None and bool(flags & os.O_CREAT) and not os.path.lexists(at)
        fd = real(path, flags, mode, dir_fd=dir_fd)
        if at is not None:
            recorder._open[fd] = at
            if is_new:
                recorder.made(at, is_folder=False)
        return fd

    return wrapped


def _close(recorder: Recorder, real: Any) -> Any:
    return lambda fd: (recorder._open.pop(fd, None), real(fd))[1]


def _write(recorder: Recorder, real: Any) -> Any:
    def wrapped(fd: int, data: Any) -> int:
        count = real(fd, data)
        if fd in recorder._open:
            recorder.note("write", recorder._open[fd], data=bytes(data[:count]))
        return count

    return wrapped


def _fsync(recorder: Recorder, real: Any) -> Any:
    def wrapped(fd: int) -> None:
        if fd in recorder._open:
            recorder.operations.append(Operation("fsync", recorder.inode(recorder._open[fd])))

    return wrapped


def _mkdir(recorder: Recorder, real: Any) -> Any:
    def wrapped(path: Any, mode: int = 0o777) -> None:
        real(path, mode)
        if (at := recorder.at(path)) is not None:
            recorder.made(at, is_folder=True)

    return wrapped


def _rename(recorder: Recorder, real: Any) -> Any:
    def wrapped(source: Any, target: Any) -> None:
        real(source, target)
        if (at := recorder.at(source)) is not None:
            recorder.moved(at, recorder.at(target) or "")

    return wrapped


def _remove(recorder: Recorder, real: Any) -> Any:
    def wrapped(path: Any, *, dir_fd: int | None = None) -> None:
        if (at := recorder.at(path, dir_fd)) is not None:
            recorder.note("unlink", at)
        real(path, dir_fd=dir_fd)

    return wrapped


WRAPPERS = {"open": _open, "close": _close, "write": _write, "fsync": _fsync, "mkdir": _mkdir, "rename": _rename,
            "unlink": _remove, "rmdir": _remove}  # fmt: skip
Tree = dict[str, bytes | None]
"""Paths from the root, with the bytes of files; None for folders."""


def states(recorder: Recorder) -> Iterator[tuple[Tree, str]]:
    """What a power cut may leave, after each operation, each state once, with the promise that holds then.

    Of what no fsync has kept: all arrived, none, all but one, only one, only names, only bytes.
    """
    seen: set[tuple[Any, str]] = set()
    for count in range(len(recorder.operations) + 1):
        done = recorder.operations[:count]
        promised = [one.data.decode() for one in done if one.kind == "promise"]
        for arrived in _arrivals(done):
            tree = _tree(arrived, recorder.is_folder)
            state = (frozenset(tree.items()), promised[-1] if promised else "")
            if state not in seen:
                seen.add(state)
                yield tree, state[1]


def _arrivals(done: list[Operation]) -> Iterator[list[Operation]]:
    kept, pending = set(), []
    for index, one in enumerate(done):
        place = one.inode if one.kind == "write" else one.folder
        later = any(other.kind == "fsync" and other.inode == place for other in done[index + 1 :])
        if one.kind in ("fsync", "promise") or later:
            kept.add(index)
        else:
            pending.append(index)
    writes = {index for index in pending if done[index].kind == "write"}
    choices = [set(pending), set(), writes, set(pending) - writes]
    choices += [chosen for index in pending for chosen in (set(pending) - {index}, {index})]
    for chosen in choices:
        yield [one for index, one in enumerate(done) if index in kept | chosen]


def _tree(arrived: list[Operation], is_folder: dict[int, bool]) -> Tree:
    names: dict[int, dict[str, int]] = {inode: {} for inode, folder in is_folder.items() if folder}
    data: dict[int, bytes] = {inode: b"" for inode, folder in is_folder.items() if not folder}
    for one in arrived:
        if one.kind == "write":
            data[one.inode] += one.data
        elif one.kind == "link":
            names[one.folder][one.name] = one.inode
        elif one.kind == "unlink":
            names[one.folder].pop(one.name, None)
        elif one.kind == "rename":
            names[one.folder].pop(one.name, None)
            names[one.folder][one.new_name] = one.inode

    def walk(inode: int, at: str) -> Iterator[tuple[str, bytes | None]]:
        for name, inner in names[inode].items():
            yield f"{at}{name}", data.get(inner)
            if inner in names:
                yield from walk(inner, f"{at}{name}/")

    return dict(walk(ROOT, ""))


def build(tree: Tree, root: Path) -> None:
    """Make the files of a state, in the empty folder `root`."""
    for path, content in tree.items():
        if content is None:
            (root / path).mkdir(parents=True, exist_ok=True)
        else:
            (root / path).write_bytes(content)
