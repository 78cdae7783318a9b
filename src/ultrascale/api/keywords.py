"""Keyword arguments in the form of command-line flags: the same names, values and error messages.

    zero_stage=3, tp=[4, 8]            the verb's own flags, `--zero-stage 3 --tp 4,8`
    layout={"attention": "sdpa"}       settings of a run, `--layout.attention sdpa`
    **{"layout.attention": "sdpa"}     the same

Several values are a list; a path may be a Path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from ultrascale.config.choices import without_none
from ultrascale.config.resolve import toml_value
from ultrascale.config.schema import (
    ELSEWHERE,
    INVALID,
    STAND_INS,
    ValueContext,
    convert,
    default_of,
    leaves,
    may_be_meant,
    sections,
)
from ultrascale.description.problems import Problem, expect_none

T = TypeVar("T")
COMMAND_LINE_ONLY = ("json", "brief", "compare")
"""Flags that only change how results are printed."""
PROCESS_FLAGS = ("gpus", "num_gpus", "nproc", "nproc_per_node", "num_processes", "world_size")
"""Names in other frameworks for the number of processes."""
MIN_SIMILARITY = 0.7
"""Similarity from which one name may be a misspelling of the other."""


@dataclass(frozen=True)
class VerbRequest(Generic[T]):
    """A request to a verb: its options, and settings of the run."""

    options: T
    settings: tuple[str, ...] = ()
    """Settings of the run, as words: `--layout.dp 2`."""
    stack: tuple[tuple[str, str], ...] = ()
    """Changed settings of the framework."""
    words: tuple[str, ...] = ()
    """Equivalent command line: the words after the verb."""


def read_keywords(
    kind: type[T], verb: str, keywords: Mapping[str, Any], *, positional: tuple[str, ...],
    short: Mapping[str, str] = MappingProxyType({}), run_settings: bool = True,
) -> VerbRequest[T]:  # fmt: skip
    """Read `keywords` as options of `kind` and further settings; None counts as not given. `positional`: options without a
    flag; `short`: settings by other names, read where `kind` has no such option; `run_settings`: settings of a run are allowed.

    Raises SpecError with every invalid keyword.
    """
    problems: list[Problem] = []
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in COMMAND_LINE_ONLY}
    values: dict[str, Any] = {}
    settings: list[tuple[str, str]] = []
    for key, value in ((key.replace("-", "_"), value) for key, value in keywords.items()):
        is_table = isinstance(value, Mapping) and (key in sections() or key == "stack")
        if key not in hints or is_table:
            settings += _settings(key if value is None else short.get(key, key), value)
        elif value is not None:
            values[key] = as_kind(value, hints[key], key if key in positional else _flag(key), problems)
    known, unknown = [*map(_flag, hints)], [key for key, _ in settings if "." not in key and key not in leaves()]
    problems += [
        Problem(key, f"must be a mapping, is {keywords[key]!r}", f"Such as {key}={{{_example_of(key)}}}.")
        if run_settings and (key in sections() or key == "stack")
        else unknown_flag(_flag(key), known, verb, settings=run_settings)
        for key in unknown
    ]
    missing = [name for name in positional if not hasattr(kind, name) and keywords.get(name) is None]
    problems += [Problem(name, "is missing", f"Give it; `ultrascale {verb} --help` has an example.") for name in missing]
    expect_none(problems)
    options = kind(**values)
    stack = tuple((key.removeprefix("stack."), text) for key, text in settings if key.startswith("stack."))
    setting_words = [word for key, text in settings if not key.startswith("stack.") for word in (f"--{key}", text)]
    changed = [word for key, text in stack for word in (f"--stack.{key}", text)]
    return VerbRequest(options, tuple(setting_words), stack, (*_words(options, values, positional), *setting_words, *changed))


def as_kind(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    """`value` converted to the type of an option; what the command line takes as text may also be given as a Python value."""
    plain = without_none(kind)
    value = value.tolist() if hasattr(value, "tolist") else [*value] if isinstance(value, range) else value  # numpy's, pandas'
    at = ValueContext(key, "", isinstance(value, str), problems)
    if is_dataclass(plain):
        return _as_dataclass(value, plain, key, problems)
    if get_origin(plain) is tuple:
        parts = value if isinstance(value, list | tuple) else (value,)
        return tuple(as_kind(part, get_args(plain)[0], key, problems) for part in parts)
    if plain is Path and value == "":
        return at.wrong("is empty: a path of no letters", "Name a file or folder; . is the current one.")
    if plain is Path:
        return Path(value) if isinstance(value, str | PathLike) else at.wrong(f"must be a path, is {value!r}", "Give text.")
    if plain is str and not isinstance(value, str):
        return _text(value) if isinstance(value, int | float | list | tuple | PathLike) else convert(value, str, at)
    converted = convert(value, plain, at)
    return None if converted is INVALID else converted


def _as_dataclass(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    hints = get_type_hints(kind)
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        problems.append(Problem(key, f"must be a mapping, is {value!r}", f"Its keys are {', '.join(hints)}."))
        return None
    for name in value.keys() - hints.keys():
        problems.append(Problem(f"{key}.{name}", "is not a key here", f"Known: {', '.join(hints)}."))
    known = {name: field_value for name, field_value in value.items() if name in hints}
    return kind(**{name: as_kind(field_value, hints[name], f"{key}.{name}", problems) for name, field_value in known.items()})


def _settings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted keys and texts of a setting, or of every setting in a section."""
    if isinstance(value, Mapping) and (key in sections() or key == "stack"):
        for name, nested in value.items():
            yield from _settings(f"{key}.{name}", nested)
    elif value is not None or "." in key or key in leaves() or key in STAND_INS:
        yield key, _text(value)


def _text(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        tables = any(isinstance(entry, Mapping) for entry in value)
        return toml_value(value) if tables else ",".join(map(_text, value))
    return "none" if value is None else fspath(value) if isinstance(value, PathLike) else str(value)


def _example_of(section: str) -> str:
    """First setting of a section of a run, as an entry of a dictionary."""
    first = next((key.removeprefix(f"{section}.") for key in leaves() if key.startswith(f"{section}.")), "dispatcher")
    return f'"{first}": ...'


def unknown_flag(flag: str, known: list[str], verb: str, *, settings: bool) -> Problem:
    """Problem of an unknown flag, with the flag that was probably meant: `--seqlen`, `--gpu`, `--dp`. `settings`: the verb also
    takes settings of a run."""
    letters = {name.replace("-", ""): name for name in [*known, *(map(_flag, (*leaves(), *STAND_INS)) if settings else ())]}
    word = flag.lower().replace("-", "").replace("_", "")
    closest = get_close_matches(word, letters, n=1, cutoff=MIN_SIMILARITY) or [
        other
        for other in (name.replace("-", "") for name in known)
        if min(len(word), len(other)) > 2 and (word.startswith(other) or other.startswith(word))
    ]
    written = flag.removeprefix("--").replace("-", "_")
    keys = [key for key in leaves() if may_be_meant(key, written)] if settings and word not in letters else []
    last = {key.rpartition(".")[2].replace("_", ""): key for key in keys}
    name = written.rpartition(".")[2]
    meant = letters[closest[0]] if closest else _flag(last[tail]) if (tail := name.replace("_", "").lower()) in last else None
    ours = "processes" if name in PROCESS_FLAGS and "--processes" in known else ELSEWHERE.get(name)
    if ours is not None and word not in letters:
        short = [_flag(ours.rpartition(".")[2]), *(["--seq-len"] if ours == "batch.sequence_length" else [])]
        meant = next((name for name in short if name in known), _flag(ours) if settings else meant)
    if name.startswith("resume") and verb == "train":
        return Problem(flag, f"is no flag of {verb}", "Leave it out: the same command resumes a run.")
    remedy = f"Did you mean {meant}?" if meant not in (None, flag.replace("_", "-")) else f"See `ultrascale {verb} --help`."
    return Problem(flag, f"is no flag of {verb}", remedy)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(options: Any, keywords: Mapping[str, Any], positional: tuple[str, ...]) -> list[str]:
    """Command-line words for the given options, positional ones first."""
    words: list[str] = []
    for name in positional:
        value = getattr(options, name)
        words += [value] if isinstance(value, str) and value else map(str, value) if isinstance(value, tuple) else []
    defaults = {field.name: default_of(field) for field in fields(options)}
    for name in (name for name in keywords if name not in positional):
        value, flag = getattr(options, name), _flag(name)
        if is_dataclass(value):
            changed = {
                key: field_value for key, field_value in vars(value).items() if field_value != getattr(defaults[name], key)
            }
            words += [
                word for key, field_value in changed.items() for word in (f"{flag}.{key.replace('_', '-')}", _text(field_value))
            ]
        elif isinstance(value, bool):
            words += [flag] if value else []
        else:
            words += [flag, *map(_text, value)] if isinstance(value, tuple) else [flag, _text(value)]
    return words
