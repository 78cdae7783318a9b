"""Results of a sweep in a store, for machines that share no file system: each takes what the others have measured."""

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
    """The folder of a sweep's cells in `store`, by the names of those here. Raises StorageError if it cannot be used.

    With `retries_failures` failures there count as none. A cell is not claimed: two machines at one cell both measure it, and
    the last result stays.
    """

    def __init__(self, store: Store, *, retries_failures: bool):
        self.store, self.retries_failures = store, retries_failures
        store.expect_usable(f".probe-{uuid.uuid4().hex}")

    def fetched(self, places: Iterable[CellPlace]) -> Iterator[CellPlace]:
        """Each of `places` in turn, with the result or the failure that is in the store by then if it has neither here."""
        for place in places:
            if place.result is None and place.failure is None:
                self._fetch(place)
            yield place

    def send(self, place: CellPlace) -> None:
        """Write what came of a cell to the store, unless it is there."""
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
        """Write the table and the pictures of a sweep beside its cells."""
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
