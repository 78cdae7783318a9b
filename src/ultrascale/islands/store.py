"""Store through which islands that were started separately agree: short words under names, which all of their ranks can read.

    file:///FOLDER      a shared folder: one file per name. No process hosts it, so no process's end removes it
    tcp://HOST:PORT     a server in memory: `python -m ultrascale.islands.store HOST PORT`, on a machine that all of them reach

Writes are atomic, and of several first writes under a name one wins, the same for all. The store holds only agreements, some
hundred bytes for each outer step; deltas and states go from island to island.

The server trusts every client, as torch's rendezvous does: open its port to the machines of the run alone. Once it has ended no
agreement is possible: all islands end with an error message, and resume from their checkpoints with the next server.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from ultrascale.console import error_text
from ultrascale.contact import meaning_of
from ultrascale.parallel.lost import LostRankError
from ultrascale.torch_private import FileStore, PrefixStore, Store, TCPStore


class LostStoreError(LostRankError):
    """The store between islands does not respond."""


class IslandStore(Protocol):
    """Words under names. All methods are thread-safe, and raise LostStoreError."""

    def set(self, name: str, word: str) -> None:
        """Set `word`, replacing an earlier one."""
        ...

    def get(self, name: str) -> str | None:
        """The word under `name`; None if there is none."""
        ...

    def first(self, name: str, word: str) -> str:
        """The first word ever written for `name`: this one, if there was none."""
        ...

    def forget(self, name: str) -> None:
        """Remove the word under `name`, if there is one."""
        ...

    def for_group(self, name: str, size: int) -> Store:
        """A torch store through which the `size` ranks of one process group connect."""
        ...


def open_store(url: str, timeout: timedelta) -> IslandStore:
    """The store at `url`, of one of the two kinds above. Raises LostStoreError if it cannot be reached."""
    kind, _, place = url.partition("://")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return TcpStore(host, int(port), timeout)
    return FolderStore(Path(place))


class FolderStore:
    """Store in a folder. It has no locks, so a process that is suspended or killed in the middle of a call blocks no other."""

    def __init__(self, folder: Path):
        self.folder = folder
        with self._reached():
            (folder / "groups").mkdir(parents=True, exist_ok=True)

    def set(self, name: str, word: str) -> None:
        """Set `word`, replacing an earlier one."""
        with self._reached():
            self._written(word).replace(self._path(name))

    def get(self, name: str) -> str | None:
        """The word under `name`; None if there is none."""
        with self._reached():
            try:
                return self._path(name).read_text()
            except FileNotFoundError:
                return None

    def first(self, name: str, word: str) -> str:
        """The first word ever written for `name`: this one, if there was none."""
        with self._reached():
            if (existing := self.get(name)) is not None:
                return existing
            written = self._written(word)
            with suppress(FileExistsError):
                os.link(written, self._path(name))
            written.unlink()
            return self._path(name).read_text()

    def forget(self, name: str) -> None:
        """Remove the word under `name`, if there is one."""
        with self._reached():
            self._path(name).unlink(missing_ok=True)

    def for_group(self, name: str, size: int) -> Store:
        """A torch store through which the `size` ranks of one process group connect."""
        return FileStore(str(self.folder / "groups" / name.replace("/", ".")), size)

    def _path(self, name: str) -> Path:
        return self.folder / name.replace("/", ".")

    def _written(self, word: str) -> Path:
        path = self.folder / f"{uuid.uuid4().hex}.tmp"
        path.write_text(word)
        return path

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise LostStoreError(_lost(f"the folder {self.folder}", error.strerror or "it fails")) from error


class TcpStore:
    """Store on a server."""

    def __init__(self, host: str, port: int, timeout: timedelta):
        self._at, self._timeout = (host, port), timeout
        with self._reached():
            self._store = self._connected()

    def set(self, name: str, word: str) -> None:
        """Set `word`, replacing an earlier one. Visible to others on return: torch sends without waiting, so a following query,
        once answered, confirms the write."""
        with self._reached():
            self._store.set(name, word)
            self._store.check([name])

    def get(self, name: str) -> str | None:
        """The word under `name`; None if there is none."""
        with self._reached():
            return self._store.get(name).decode() if self._store.check([name]) else None

    def first(self, name: str, word: str) -> str:
        """The first word ever written for `name`: this one, if there was none."""
        with self._reached():
            return self._store.compare_set(name, "", word).decode()

    def forget(self, name: str) -> None:
        """Remove the word under `name`, if there is one."""
        with self._reached():
            self._store.delete_key(name)

    def for_group(self, name: str, size: int) -> Store:
        """A torch store through which the `size` ranks of one process group connect. It has its own connection, since a wait
        would block other calls."""
        with self._reached():
            return PrefixStore(f"groups/{name}", self._connected())

    def _connected(self) -> TCPStore:
        host, port = self._at
        return TCPStore(host, port, None, False, self._timeout, wait_for_workers=False)

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise LostStoreError(_lost(f"the server at tcp://{self._at[0]}:{self._at[1]}", meaning_of(error))) from error


def _lost(where: str, cause: str) -> str:
    remedy = "Bring it back and start the islands again: each goes on from its checkpoint"
    return f"islands cannot agree any more, because {where} (islands.meet) does not answer: {cause}. {remedy}."


def serve(host: str, port: int) -> TCPStore:
    """A server that listens at `host` alone; torch's default listens on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    at = listening.getsockname()[1]
    return TCPStore(host, at, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def main(words: Sequence[str] | None = None) -> None:
    """Run the server until this process is ended, at the address in `words`, else of the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    args = parser.parse_args(words)
    with suppress(KeyboardInterrupt):
        try:
            server = serve(args.host, args.port)
        except (OSError, OverflowError) as error:  # OverflowError: a port above 65535
            sys.exit(
                f"cannot listen at {args.host}:{args.port}: {error_text(error)}. "
                "Name an address and a free port of this machine."
            )
        print(f"islands meet at tcp://{args.host}:{server.port}", flush=True)  # Ctrl-C may follow the line at once
        threading.Event().wait()


if __name__ == "__main__":
    main()
