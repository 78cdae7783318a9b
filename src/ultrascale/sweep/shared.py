"""Shares the results of a sweep through a store, between machines without a common file system."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

from ultrascale.storage import Store, Stored
from ultrascale.sweep.cells import CellPlace

RESULT, FAILURE = "speed.json", "failed.json"
KEPT = ("run.toml", "log.txt", RESULT, FAILURE)
"""Files of a cell in the order in which they are written: a cell with a result there has the others too."""


class SharedCells:
    """A sweep's cells in `store`, under the names of the local folders. Raises StorageError if it cannot be used.

    `retries_failures`: ignore failures in the store. Cells are not locked: if two machines measure the same cell, the last
    result stays.
    """

    def __init__(self, store: Store, *, retries_failures: bool):
        self.store, self.retries_failures = store, retries_failures
        store.expect_usable(f".probe-{uuid.uuid4().hex}")

    def fetched(self, places: Iterable[CellPlace]) -> Iterator[CellPlace]:
        """Each of `places` in turn, after fetching its result or failure from the store if there is none here."""
        for place in places:
            if place.result is None and place.failure is None:
                self._fetch(place)
            yield place

    def send(self, place: CellPlace) -> None:
        """Write the result or failure of a cell to the store, unless it has one."""
        files = [name for name in KEPT if (place.path / name).exists()]
        if RESULT not in files and FAILURE not in files:
            return
        stored_sizes = {entry.key: entry.bytes for entry in self._names(place)}
        if RESULT in files:
            self.store.remove([self._key(place, FAILURE)] if FAILURE in stored_sizes else [])
        for name in files:
            if stored_sizes.get(name) != (place.path / name).stat().st_size:
                self.store.write_file(self._key(place, name), place.path / name)
        self.store.flush()

    def send_files(self, paths: Iterable[Path]) -> None:
        """Write files of the sweep (table, pictures) to the store, next to its cells."""
        for path in paths:
            self.store.write_file(path.name, path)
        self.store.flush()

    def _fetch(self, place: CellPlace) -> None:
        stored = {entry.key for entry in self._names(place)}
        wanted = {RESULT} if self.retries_failures else {RESULT, FAILURE}
        for name in KEPT if stored & wanted else ():
            if name in stored and (name in wanted or name == "log.txt"):
                place.keep(name, self.store.read(self._key(place, name)))

    def _names(self, place: CellPlace) -> list[Stored]:
        return self.store.names(f"cells/{place.path.name}")[0]

    def _key(self, place: CellPlace, name: str) -> str:
        return f"cells/{place.path.name}/{name}"
