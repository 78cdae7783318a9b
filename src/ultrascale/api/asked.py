"""Keywords of Python as the command line reads its flags: the same names, values and sentences about mistakes.

    zero_stage=3, tp=[4, 8]            the verb's own flags, `--zero-stage 3 --tp 4,8`
    layout={"attention": "sdpa"}       settings of a run, `--layout.attention sdpa`
    **{"layout.attention": "sdpa"}     the same

Several values are a list; a path may be a Path.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from json import dumps
from os import PathLike, fspath
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from ultrascale.config.schema import BAD, ELSEWHERE, STAND_INS, At, convert, default_of, leaves, sections
from ultrascale.description.problems import Problem, SpecError

T = TypeVar("T")
OF_THE_COMMAND_LINE = ("json", "brief", "compare")
"""Flags that only say how to print."""
ALIKE = 0.7
"""Similarity from which on one name may be a misspelling of the other."""


@dataclass(frozen=True)
class Asked(Generic[T]):
    """A request to a verb."""

    options: T
    settings: tuple[str, ...] = ()
    """Settings of the run, as words: `--layout.dp 2`."""
    stack: tuple[tuple[str, str], ...] = ()
    """Changed settings of the stack."""
    words: tuple[str, ...] = ()
    """Words that would be typed after the verb for the same request."""


def read_keywords(
    kind: type[T], verb: str, given: Mapping[str, Any], *, positional: tuple[str, ...] = (),
    short: Mapping[str, str] = MappingProxyType({}), of_a_run: bool = True,
) -> Asked[T]:  # fmt: skip
    """`given` as options of `kind` and settings beside them; None is not given. `positional`: options that have no flag;
    `short`: settings by other names, which are read where `kind` has no such option; `of_a_run`: a run has settings too.

    Raises SpecError with everything that is wrong.
    """
    problems: list[Problem] = []
    hints = {name: hint for name, hint in get_type_hints(kind).items() if name not in OF_THE_COMMAND_LINE}
    values: dict[str, Any] = {}
    settings: list[tuple[str, str]] = []
    for key, value in ((key.replace("-", "_"), value) for key, value in given.items()):
        is_table = isinstance(value, Mapping) and (key in sections() or key == "stack")
        if key not in hints or is_table:
            settings += _settings(key if value is None else short.get(key, key), value)
        elif value is not None:
            values[key] = as_kind(value, hints[key], key if key in positional else _flag(key), problems)
    known, unknown = [*map(_flag, hints)], [key for key, _ in settings if "." not in key and key not in leaves()]
    problems += [unknown_flag(_flag(key), known, verb, settings=of_a_run) for key in unknown]
    missing = [name for name in positional if not hasattr(kind, name) and given.get(name) is None]
    problems += [Problem(name, "is missing", f"Give it; `ultrascale {verb} --help` has an example.") for name in missing]
    if problems:
        raise SpecError(problems)
    options = kind(**values)
    stack = tuple((key.removeprefix("stack."), text) for key, text in settings if key.startswith("stack."))
    rest = [word for key, text in settings if not key.startswith("stack.") for word in (f"--{key}", text)]
    changed = [word for key, text in stack for word in (f"--stack.{key}", text)]
    return Asked(options, tuple(rest), stack, (*_words(options, values, positional), *rest, *changed))


def as_kind(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    """`value` as the type of an option; what is written as text on the command line may come as what it stands for."""
    inner = [one for one in get_args(kind) if one is not NoneType]
    plain = inner[0] if len(inner) == 1 and NoneType in get_args(kind) else kind
    at = At(key, "", isinstance(value, str), problems)
    if is_dataclass(plain):
        return _as_dataclass(value, plain, key, problems)
    if get_origin(plain) is tuple:
        many = value if isinstance(value, list | tuple) else (value,)
        return tuple(as_kind(one, get_args(plain)[0], key, problems) for one in many)
    if plain is Path:
        return Path(value) if isinstance(value, str | PathLike) else at.wrong(f"must be a path, is {value!r}", "Give text.")
    if plain is str and not isinstance(value, str):
        return _text(value) if isinstance(value, int | float | list | tuple | PathLike) else convert(value, str, at)
    found = convert(value, plain, at)
    return None if found is BAD else found


def _as_dataclass(value: Any, kind: Any, key: str, problems: list[Problem]) -> Any:
    hints = get_type_hints(kind)
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        problems.append(Problem(key, f"must be a mapping, is {value!r}", f"Its keys are {', '.join(hints)}."))
        return None
    for name in value.keys() - hints.keys():
        problems.append(Problem(f"{key}.{name}", "is not a key here", f"Known: {', '.join(hints)}."))
    known = {name: one for name, one in value.items() if name in hints}
    return kind(**{name: as_kind(one, hints[name], f"{key}.{name}", problems) for name, one in known.items()})


def _settings(key: str, value: Any) -> Iterator[tuple[str, str]]:
    """Dotted keys and texts of a setting; of a section, of each in it."""
    if isinstance(value, Mapping) and (key in sections() or key == "stack"):
        for name, one in value.items():
            yield from _settings(f"{key}.{name}", one)
    elif value is not None or "." in key or key in leaves() or key in STAND_INS:
        yield key, _text(value)


def _text(value: Any) -> str:
    """A value as it is written on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        tables = any(isinstance(one, Mapping) for one in value)
        return f"[{', '.join(map(_toml, value))}]" if tables else ",".join(map(_text, value))
    return "none" if value is None else fspath(value) if isinstance(value, PathLike) else str(value)


def _toml(value: Any) -> str:
    """An item of a list of tables, such as a source of data, as TOML writes it in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {_toml(one)}" for key, one in value.items()) + "}"
    return dumps(fspath(value) if isinstance(value, PathLike) else value)


def unknown_flag(flag: str, known: list[str], verb: str, *, settings: bool) -> Problem:
    """The problem of a flag that is none, with the one that was probably meant: `--seqlen`, `--gpu`, `--dp`. `settings`: the
    verb takes those of a run too."""
    letters = {one.replace("-", ""): one for one in [*known, *(map(_flag, (*leaves(), *STAND_INS)) if settings else ())]}
    word = flag.lower().replace("-", "").replace("_", "")
    near = get_close_matches(word, letters, n=1, cutoff=ALIKE)
    last = {key.rpartition(".")[2].replace("_", ""): key for key in leaves()} if settings and word not in letters else {}
    meant = letters[near[0]] if near else _flag(last[word]) if word in last else None
    ours = ELSEWHERE.get(flag.removeprefix("--").replace("-", "_").rpartition(".")[2])
    if ours is not None and word not in letters:
        short = "--seq-len" if ours == "batch.sequence_length" else _flag(ours.rpartition(".")[2])
        meant = short if short in known else _flag(ours) if settings else meant
    remedy = f"Did you mean {meant}?" if meant else f"See `ultrascale {verb} --help`."
    return Problem(flag, f"is no flag of {verb}", remedy)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _words(options: Any, given: Mapping[str, Any], positional: tuple[str, ...]) -> list[str]:
    """The words that say what was given, positional ones first."""
    found: list[str] = []
    for name in positional:
        value = getattr(options, name)
        found += [value] if isinstance(value, str) and value else map(str, value) if isinstance(value, tuple) else []
    defaults = {field.name: default_of(field) for field in fields(options)}
    for name in (name for name in given if name not in positional):
        value, flag = getattr(options, name), _flag(name)
        if is_dataclass(value):
            changed = {key: one for key, one in vars(value).items() if one != getattr(defaults[name], key)}
            found += [word for key, one in changed.items() for word in (f"{flag}.{key.replace('_', '-')}", _text(one))]
        elif isinstance(value, bool):
            found += [flag] if value else []
        else:
            found += [flag, *map(_text, value)] if isinstance(value, tuple) else [flag, _text(value)]
    return found
