"""Words of a command line as the arguments of a verb, read without a parser library: 0.3 s of CPU less at every start.

    --seq-len 128k, --seq-len=128k, --seq_len 128k      the value of one option
    --json                                              of an option that is off or on
    --out a.png b.json, --exclude a --exclude b         of one that holds several

Values are read as those of a run's settings are, and mistakes are told as theirs: all at once, each with what to do. `--help`
is the parser's (`cli.terminal.parse`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from ultrascale.api.asked import as_kind
from ultrascale.config.schema import ELSEWHERE, STAND_INS, leaves
from ultrascale.description.problems import Problem, SpecError

ALIKE = 0.7
"""Similarity from which on one name may be a misspelling of the other."""
BOOLEANS = {"true": True, "false": False}


@dataclass
class Option:
    """One argument of a verb."""

    name: str
    kind: Any
    """Type, without `None` and without annotations."""
    default: Any
    metavar: str
    """Name of the value in help and in errors."""
    is_positional: bool
    takes_one: bool
    """True if each flag takes one of several values."""
    given: list[str] = field(default_factory=list)

    @property
    def flag(self) -> str:
        """`--seq-len`"""
        return f"--{self.name.replace('_', '-')}"

    @property
    def holds_several(self) -> bool:
        """True if the type is a tuple."""
        return get_origin(self.kind) is tuple


def read_words(
    verb: Callable[..., Any] | Any, name: str, words: list[str], *, positional: Mapping[str, str | None], settings: bool = False
) -> tuple[Any, list[str]]:
    """Call `verb` (a function, a dataclass, or a choice of dataclasses) with what `words` say; and what they do not know.

    `settings`: whether settings of a run may stand among them, which are left to `config.resolve`. Raises SpecError.
    """
    if get_origin(verb) in (Union, UnionType):
        return _chosen(get_args(verb), name, words)
    options = {option.name: option for option in _options(verb, positional)}
    problems: list[Problem] = []
    loose = _sort(options, deque(words), name, problems, settings)
    rest = _place(options, deque(loose), name, problems, settings)
    values = {option.name: _value(option, name, problems) for option in options.values()}
    if problems:
        raise SpecError(problems)
    return _call(verb, values), rest


def _chosen(verbs: tuple[Any, ...], name: str, words: list[str]) -> tuple[Any, list[str]]:
    """The dataclass of the first word: `List` of `checkpoint list`."""
    by_word = {one.__name__.lower(): one for one in verbs}
    word = words[0] if words else ""
    if word not in by_word:
        rule = f"there is no verb `{name} {word}`" if word else f"is missing: {name} does several things"
        near = get_close_matches(word, by_word, n=1)
        remedy = f"Did you mean {near[0]}?" if near else f"Say one of {', '.join(by_word)}."
        raise SpecError([Problem("VERB", rule, remedy)])
    return read_words(by_word[word], f"{name} {word}", words[1:], positional={})


def _options(verb: Any, positional: Mapping[str, str | None]) -> list[Option]:
    """Parameters of a verb; of an option that is a dataclass, such as `cost`, its fields: `cost.forward`."""
    hints, found = get_type_hints(verb, include_extras=True), []
    for name, parameter in signature(verb).parameters.items():
        hint = hints[name]
        marks = getattr(hint, "__metadata__", ())
        kind = get_args(hint)[0] if marks else hint
        inner = [one for one in get_args(kind) if one is not NoneType]
        if get_origin(kind) in (Union, UnionType) and len(inner) == 1:
            kind = inner[0]
        if is_dataclass(kind):
            found += [_inner(name, one) for one in _options(kind, {})]
            continue
        marked = any(str(mark) == "Positional" for mark in marks) or parameter.kind is Parameter.POSITIONAL_ONLY
        metavar = positional.get(name) or next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
        default = MISSING if parameter.default is Parameter.empty else parameter.default
        takes_one = any(str(mark) == "UseAppendAction" for mark in marks)
        found.append(Option(name, kind, default, metavar or name.upper(), marked or name in positional, takes_one))
    return found


def _inner(of: str, option: Option) -> Option:
    return Option(f"{of}.{option.name}", option.kind, option.default, option.metavar, False, option.takes_one)


def _sort(options: Mapping[str, Option], words: deque[str], name: str, problems: list[Problem], settings: bool) -> list[str]:
    """Give each flag's words to its option. Returns the words without a flag."""
    flags = {option.flag: option for option in options.values() if not option.is_positional}
    loose: list[str] = []
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        option = flags.get(flag.replace("_", "-"))
        if word == "--":
            loose += words
            break
        if not _is_flag(word):
            loose.append(word)
        elif option is None:
            problems.append(_unknown(flag, list(flags), name, settings))
            if not equals and words and not _is_flag(words[0]):
                words.popleft()
        elif equals:
            option.given.append(value)
        elif option.kind is bool:
            option.given.append(words.popleft() if words and words[0].lower() in BOOLEANS else "true")
        else:
            _take(option, words, problems)
    return loose


def _take(option: Option, words: deque[str], problems: list[Problem]) -> None:
    """The words after a flag: one, or of an option that holds several all up to the next flag."""
    if not words or _is_flag(words[0]):
        problems.append(Problem(option.flag, "is given without a value", f"Write {option.flag} {option.metavar}."))
        return
    option.given.append(words.popleft())
    while option.holds_several and not option.takes_one and words and not _is_flag(words[0]):
        option.given.append(words.popleft())


def _place(options: Mapping[str, Option], loose: deque[str], name: str, problems: list[Problem], settings: bool) -> list[str]:
    """Give words without a flag to the options that have none; what is left over is wrong, or a run's."""
    for option in (one for one in options.values() if one.is_positional):
        while loose and (option.holds_several or not option.given):
            option.given.append(loose.popleft())
    if settings:
        return list(loose)
    problems += [Problem(word, f"is one word more than {name} takes", f"See `ultrascale {name} --help`.") for word in loose]
    return []


def _value(option: Option, name: str, problems: list[Problem]) -> Any:
    """Value given, as the option's type; the default if none is."""
    key = option.metavar if option.is_positional else option.flag
    if not option.given:
        if option.default is MISSING:
            problems.append(Problem(key, "is missing", f"Give it; `ultrascale {name} --help` has an example."))
        return option.default
    if option.kind is bool and option.given[-1].lower() in BOOLEANS:
        return BOOLEANS[option.given[-1].lower()]
    if option.kind is str:  # the verb says which it takes
        return option.given[-1]
    with suppress(ValueError):
        if option.kind is float:  # here too: nan or not
            return float(option.given[-1])
    return as_kind(tuple(option.given) if option.holds_several else option.given[-1], option.kind, key, problems)


def _call(verb: Any, values: dict[str, Any]) -> Any:
    """`verb` with the values, dotted ones put together again."""
    parameters, hints = signature(verb).parameters, get_type_hints(verb)
    together: dict[str, Any] = {}
    for name, value in values.items():
        if "." not in name:
            together[name] = value
            continue
        outer, _, inner = name.partition(".")
        together.setdefault(outer, {})[inner] = value
    together = {name: hints[name](**one) if is_dataclass(hints[name]) else one for name, one in together.items()}
    first = [together.pop(name) for name, one in parameters.items() if one.kind is Parameter.POSITIONAL_ONLY]
    return verb(*first, **together)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) == 2 and word[0] == "-" and word[1].isalpha())


def _unknown(flag: str, known: list[str], name: str, settings: bool) -> Problem:
    """A flag that is none, with the one that was probably meant: `--seqlen`, `--gpu`, `--dp`."""
    letters = {one.replace("-", ""): one for one in [*known, *(_of_settings() if settings else ())]}
    word = flag.lower().replace("-", "").replace("_", "")
    near = get_close_matches(word, letters, n=1, cutoff=ALIKE)
    last = {key.rpartition(".")[2].replace("_", ""): key for key in leaves()} if settings and word not in letters else {}
    meant = letters[near[0]] if near else f"--{last[word].replace('_', '-')}" if word in last else None
    if (ours := ELSEWHERE.get(flag.removeprefix("--").replace("-", "_"))) is not None and word not in letters:
        short = f"--{ours.rpartition('.')[2].replace('_', '-')}"
        meant = short if short in known else f"--{ours.replace('_', '-')}" if settings else meant
    remedy = f"Did you mean {meant}?" if meant else f"See `ultrascale {name} --help`."
    return Problem(flag, f"is no flag of {name}", remedy)


def _of_settings() -> list[str]:
    return [f"--{key.replace('_', '-')}" for key in (*leaves(), *STAND_INS)]
