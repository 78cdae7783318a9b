"""Layers of dotted keys, each value with its source: TOML files with `extends`, then flags. The last layer wins."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.config.schema import INVALID, STAND_INS, ValueContext, convert, leaves, sections, unknown_key
from ultrascale.description.parsing import MOST_TOML, key_lines, parse_toml, read_bounded
from ultrascale.description.problems import MOST_PROBLEMS, Problem


@dataclass(frozen=True)
class WrittenValue:
    """A value as written, with its source."""

    value: Any
    origin: str
    """`run.toml:12`, `flag`, `preset llama-3-8b`."""
    text: bool = False
    """True if the value is text from a command line, to be parsed as the field's type."""


@dataclass
class SettingsLayer:
    """Keys set by one file, or by the command line."""

    entries: dict[str, WrittenValue] = field(default_factory=dict)
    tables: list[str] = field(default_factory=list)
    """Sections written as tables, including empty ones."""


def read_files(path: Path, problems: list[Problem], *, chain: tuple[Path, ...] = ()) -> list[SettingsLayer]:
    """Layers of a TOML file, those that it extends first."""
    if path.is_dir() and (path / "run.toml").is_file():
        path = path / "run.toml"
    text = _file_text(path, problems, extended_by=chain[-1] if chain else None)
    if text is None:
        return []
    return read_text(text, path, problems, chain=chain)


def read_text(text: str, path: Path, problems: list[Problem], *, chain: tuple[Path, ...] = ()) -> list[SettingsLayer]:
    """Layers of a TOML text that is at, or treated as if at, `path`; those that it extends first."""
    try:
        values = parse_toml(text)
    except ValueError as error:
        line = re.search(r"line (\d+)", str(error))
        last = str(text.rstrip().count("\n") + 1) if "at end of document" in str(error) else None
        place = f"{path}:{line[1] if line else last}" if line or last else str(path)
        problems.append(Problem(place, f"is not TOML: {error}", "Repair this line."))
        return []
    lines = key_lines(text)
    lower: list[SettingsLayer] = []
    if "extends" in values:
        lower = _extended(path, values.pop("extends"), f"{path}:{lines.get('extends', 1)}", problems, chain)
    layer = SettingsLayer()
    _flatten(values, "", lambda key: f"{path}:{lines[key]}" if key in lines else str(path), layer, problems)
    return [*lower, layer]


def read_flags(overrides: Sequence[str] | Mapping[str, Any], problems: list[Problem]) -> SettingsLayer:
    """Layer of `--layout.dp 4`, `--layout.dp=4`, `--compile`, or of a mapping from keys to values."""
    layer = SettingsLayer()
    if isinstance(overrides, Mapping):
        for key, value in overrides.items():
            _add(key, WrittenValue(value, "flag", text=isinstance(value, str)), layer, problems)
        return layer
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--") or word == "--":
            problems.append(Problem(word, "is not a flag", "Write --section.key value, such as --layout.dp 2.", "flag"))
            continue
        key, equals, value = word[2:].partition("=")
        key = key.replace("-", "_")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else None
        if key in layer.entries:
            problems.append(Problem(key, "is given twice", "Keep one of the two.", "flag"))
        elif value is None and not (key in leaves() and leaves()[key].kind is bool):
            known = key in leaves() or key in STAND_INS
            missing = Problem(key, "has no value", f"Write --{key} VALUE.", "flag")
            problems.append(missing if known else unknown_key(key, "flag"))
        else:
            _add(key, WrittenValue(value if value is not None else "true", "flag", text=True), layer, problems)
    return layer


def take_settings(arguments: Sequence[str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """Flags `--PREFIX.KEY VALUE` or `--PREFIX.KEY=VALUE` as settings by key, `true` without a value; and all other words."""
    settings: dict[str, str] = {}
    other_words: list[str] = []
    words = list(arguments)
    while words:
        word = words.pop(0)
        if not word.startswith(f"--{prefix}."):
            other_words.append(word)
            continue
        key, equals, value = word.removeprefix(f"--{prefix}.").partition("=")
        if not equals:
            value = words.pop(0) if words and not words[0].startswith("--") else "true"
        settings[key.replace("-", "_")] = value
    return settings, other_words


def _file_text(path: Path, problems: list[Problem], *, extended_by: Path | None) -> str | None:
    where = f"{extended_by}, extends" if extended_by else ""
    try:
        return read_bounded(path, MOST_TOML, encoding="utf-8-sig")
    except FileNotFoundError:
        neighbours = sorted(str(p) for p in path.parent.glob("*.toml") if p.name != "pyproject.toml")[:5]
        if str(path) in PRESETS:
            remedy = f'It is a model: `ultrascale plan --model {path} --gpus 8xh100`; in a file, [model] preset = "{path}".'
        elif neighbours:
            remedy = f"There {'is' if len(neighbours) == 1 else 'are'} {', '.join(neighbours)}."
        else:
            remedy = "Give the path of a TOML file."
        problems.append(Problem(str(path), "there is no such file", remedy, where))
    except UnicodeDecodeError as error:
        problems.append(Problem(str(path), f"is not UTF-8 at byte {error.start}", "Save it as UTF-8.", where))
    except IsADirectoryError:
        remedy = "Give a TOML file, or the folder of a run that has started."
        problems.append(Problem(str(path), "is a folder without run.toml", remedy, where))
    except OSError as error:
        problems.append(Problem(str(path), f"cannot be read: {error.strerror}", "Give the path of a TOML file.", where))
    return None


def _extended(path: Path, target: Any, where: str, problems: list[Problem], chain: tuple[Path, ...]) -> list[SettingsLayer]:
    if convert(target, str, ValueContext("extends", where, False, problems)) is INVALID:
        return []
    other = path.parent / target
    links = (*chain, path)
    if other.resolve() in [link.resolve() for link in links]:
        circle = " -> ".join(str(link) for link in (*links, other))
        problems.append(Problem("extends", f"goes in a circle: {circle}", "Remove one of them.", where))
        return []
    return read_files(other, problems, chain=links)


def _flatten(values: Mapping[str, Any], prefix: str, origin, layer: SettingsLayer, problems: list[Problem]) -> None:
    for name, value in values.items():
        key = prefix + name
        if isinstance(value, dict) and key in sections():
            layer.tables.append(key)
            _flatten(value, f"{key}.", origin, layer, problems)
        else:
            _add(key, WrittenValue(value, origin(key)), layer, problems)


def _add(key: str, entry: WrittenValue, layer: SettingsLayer, problems: list[Problem]) -> None:
    """Add one entry, or record that its key does not exist. A section may be given as a mapping, an optional one as none."""
    if key in leaves() or key in STAND_INS:
        layer.entries[key] = entry
    elif key in sections() and isinstance(entry.value, Mapping):
        for name, value in entry.value.items():
            _add(f"{key}.{name}", WrittenValue(value, entry.origin), layer, problems)
    elif key == "model.rope_scaling" and entry.value in (None, "none"):
        layer.entries[key] = entry
    elif key in sections():
        rule = f"must be a table, is {entry.value!r}"
        problems.append(Problem(key, rule, f"Write [{key}] and its keys below.", entry.origin))
    else:
        problems.append(unknown_key(key, entry.origin, hints=len(problems) < MOST_PROBLEMS))
