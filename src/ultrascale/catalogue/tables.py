"""TOML tables in the package, read once: entries are checked key by key, numbers have a source and a date."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ultrascale.catalogue.cluster import Sourced
from ultrascale.description.problems import Problem, SpecError, mistake

_KINDS = {str: "a text", int: "a whole number", list: "a list", dict: "a table"}


@dataclass(frozen=True)
class Entry:
    """One table of a file. Reading a key that is missing or invalid raises SpecError with its position."""

    where: str
    values: Mapping[str, Any]

    def expect_only(self, *keys: str) -> None:
        """Raises SpecError for keys that are never read."""
        if unknown := [key for key in self.values if key not in keys]:
            raise SpecError([self._problem(key, "is no key of such an entry", f"Known: {', '.join(keys)}.") for key in unknown])

    def get(self, key: str, kind: type, default: Any = None) -> Any:
        """Value of `key`, or `default` if it is missing and there is one."""
        value = self.values.get(key, default)
        if not isinstance(value, kind) or isinstance(value, bool):
            if key not in self.values and default is None:
                raise SpecError([self._problem(key, "is missing", f"Write {key} = ... as the other entries do.")])
            if value is not default:
                raise SpecError([self._problem(key, f"must be {_KINDS[kind]}, is {value!r}", "Repair it.")])
        return value

    def sourced(self, key: str, scale: float = 1) -> Sourced:
        """`key = [value, source, date]`, with the value in units of `scale`."""
        parts = self.get(key, list)
        if (
            len(parts) != 3
            or not isinstance(parts[0], int | float)
            or not all(isinstance(text, str) and text for text in parts[1:])
        ):
            raise SpecError([self._problem(key, f"is {parts!r}", 'Write [number, "who says so", "when"].')])
        return Sourced(parts[0] * scale, parts[1], parts[2])

    def maybe_sourced(self, key: str, scale: float = 1) -> Sourced | None:
        """Number of `key` with its source; None if it is missing."""
        return self.sourced(key, scale) if key in self.values else None

    def one_of(self, key: str, known: Mapping[str, Any]) -> Any:
        """Entry of `known` named by `key`."""
        name = self.get(key, str)
        if name not in known:
            raise SpecError([self._problem(key, f"is {name!r}, which is not there", f"Choose one of {', '.join(known)}.")])
        return known[name]

    def flag(self, key: str) -> bool:
        """`key = true` or `false`; false if it is missing."""
        value = self.values.get(key, False)
        if not isinstance(value, bool):
            raise SpecError([self._problem(key, f"must be true or false, is {value!r}", "Write it without quotes.")])
        return value

    def _problem(self, key: str, rule: str, remedy: str) -> Problem:
        return Problem(f"{self.where}.{key}", rule, remedy)


def read_tables(name: str, folder: Path = Path(__file__).parent) -> dict[str, Any]:
    """Tables of a file in the package. Raises SpecError if it is not TOML.

    Packages are installed as files; importing importlib.resources would take 8 ms, twice the time of parsing the tables.
    """
    try:
        return tomllib.loads((folder / name).read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise mistake(name, f"is not TOML: {error}", "Repair this line.") from None


def entries(file: str, tables: Mapping[str, Any], *keys: str) -> Iterator[tuple[str, Entry]]:
    """Entries of a table by name. Raises SpecError for keys other than `keys`."""
    for name, values in tables.items():
        entry = Entry(f"{file}: {name}", values)
        entry.expect_only(*keys)
        yield name, entry


def with_aliases(entries: Mapping[str, Entry]) -> dict[str, str]:
    """Other names of entries. Raises SpecError for a name that two entries share, or that is an entry itself."""
    aliases: dict[str, str] = {}
    for name, entry in entries.items():
        for alias in entry.get("aliases", list, []):
            if alias in aliases or alias in entries:
                raise SpecError(
                    [Problem(f"{entry.where}.aliases", f"{alias!r} is taken by {aliases.get(alias, alias)}", "Drop it.")]
                )
            aliases[alias] = name
    return aliases
