"""Store through which islands that were started apart agree: a few words under names, which all of their ranks can read.

    file:///FOLDER      a folder that all of them see: a file a name. Nobody holds it, so nobody's end takes it away
    tcp://HOST:PORT     a server in memory: `python -m ultrascale.islands.store HOST PORT`, on a machine that all of them reach

A word is written whole or not at all, and of several that are first under a name one wins, the same for all. Here only
agreements are kept, some hundred bytes for each outer step; moves and states go from island to island.

The server trusts whoever reaches it, as torch's own rendezvous does: open its port to the machines of the run alone. Once it
has ended nobody can agree on anything: all islands end with a sentence, and go on from their checkpoints with the next one.
"""

from __future__ import annotations

import argparse
import os
import socket
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Protocol

from ultrascale.contact import meaning_of
from ultrascale.parallel.lost import LostRankError
from ultrascale.torch_private import FileStore, PrefixStore, Store, TCPStore


class LostStoreError(LostRankError):
    """The store between islands does not answer."""


class IslandStore(Protocol):
    """Words under names. All methods may be called by several threads, and raise LostStoreError."""

    def set(self, name: str, word: str) -> None:
        """Keep `word`, in the place of another."""
        ...

    def get(self, name: str) -> str | None:
        """The word under `name`; None if there is none."""
        ...

    def first(self, name: str, word: str) -> str:
        """The first word that was ever given for `name`: this one, if none was."""
        ...

    def forget(self, name: str) -> None:
        """Remove what is under `name`, if anything is."""
        ...

    def for_group(self, name: str, size: int) -> Store:
        """A store of torch's in which the `size` ranks of one process group find each other."""
        ...


def open_store(url: str, timeout: timedelta) -> IslandStore:
    """The store at `url`, of one of the two kinds above. Raises LostStoreError if it cannot be reached."""
    kind, _, place = url.partition("://")
    if kind == "tcp":
        host, _, port = place.rpartition(":")
        return TcpStore(host, int(port), timeout)
    return FolderStore(Path(place))


class FolderStore:
    """In a folder. A process that is stopped or killed in the middle of a call holds nobody up: there are no locks."""

    def __init__(self, folder: Path):
        self.folder = folder
        with self._reached():
            (folder / "groups").mkdir(parents=True, exist_ok=True)

    def set(self, name: str, word: str) -> None:
        """Keep `word`, in the place of another."""
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
        """The first word that was ever given for `name`: this one, if none was."""
        with self._reached():
            if (existing := self.get(name)) is not None:
                return existing
            written = self._written(word)
            with suppress(FileExistsError):
                os.link(written, self._path(name))
            written.unlink()
            return self._path(name).read_text()

    def forget(self, name: str) -> None:
        """Remove what is under `name`, if anything is."""
        with self._reached():
            self._path(name).unlink(missing_ok=True)

    def for_group(self, name: str, size: int) -> Store:
        """A store of torch's in which the `size` ranks of one process group find each other."""
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
    """At a server."""

    def __init__(self, host: str, port: int, timeout: timedelta):
        self._at, self._timeout = (host, port), timeout
        with self._reached():
            self._store = self._connected()

    def set(self, name: str, word: str) -> None:
        """Keep `word`, in the place of another. Others see it from now on: torch sends and does not wait, so that what is asked
        next, and answered, says that it was there."""
        with self._reached():
            self._store.set(name, word)
            self._store.check([name])

    def get(self, name: str) -> str | None:
        """The word under `name`; None if there is none."""
        with self._reached():
            return self._store.get(name).decode() if self._store.check([name]) else None

    def first(self, name: str, word: str) -> str:
        """The first word that was ever given for `name`: this one, if none was."""
        with self._reached():
            return self._store.compare_set(name, "", word).decode()

    def forget(self, name: str) -> None:
        """Remove what is under `name`, if anything is."""
        with self._reached():
            self._store.delete_key(name)

    def for_group(self, name: str, size: int) -> Store:
        """A store of torch's in which the `size` ranks of one process group find each other: with a connection of its own,
        since a wait in it would hold up all else."""
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
    """A server that listens at `host` and nowhere else; by itself torch's would on every interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.create_server((host, port), family=family)
    at = listening.getsockname()[1]
    return TCPStore(host, at, None, True, wait_for_workers=False, master_listen_fd=listening.detach())


def main() -> None:
    """Keep a store until this process is ended."""
    parser = argparse.ArgumentParser()
    parser.add_argument("host")
    parser.add_argument("port", type=int)
    args = parser.parse_args()
    server = serve(args.host, args.port)
    print(f"islands meet at tcp://{args.host}:{server.port}", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
