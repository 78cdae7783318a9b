"""A verb's function as its command line: positional words, flags and help come from the signature and its docstring.

Arguments are parsed here; the parser library, which takes 0.3 s of CPU to import, only prints the help.

    --seq-len 128k, --seq-len=128k, --seq_len 128k      an option with one value
    --json                                              a boolean option
    --out a.png b.json, --exclude a --exclude b         an option with several values

Values are parsed like those of a run's settings, and errors are reported in the same way: all at once, each with a remedy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import MISSING, dataclass, field, is_dataclass, replace
from difflib import get_close_matches
from inspect import Parameter, getdoc, signature
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ultrascale.api.keywords import MIN_SIMILARITY, as_kind, unknown_flag
from ultrascale.config.choices import without_none
from ultrascale.config.schema import STAND_INS, leaves, unknown_key
from ultrascale.description.problems import Problem, SpecError, did_you_mean, expect_none, mistake

T = TypeVar("T")
BOOLEAN_WORDS = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""Words accepted for a boolean setting; the setting itself checks which of them are valid."""
NEARLY_BOOLEAN = (*BOOLEAN_WORDS, "enabled", "disabled", "maybe")
"""Boolean words, and words that were probably meant as one."""


def parse(
    verb: Callable[..., T] | Any, name: str, arguments: list[str], *, about: str | None = None,
    positional: Mapping[str, str | None] | None = None,
) -> T:  # fmt: skip
    """Call `verb` (a function, a dataclass, or a choice of them) with `arguments` and return its result.

    `about`: first sentence of the help of a choice. `positional`: names without a flag, with their names in the help (None: the
    same). Raises SpecError with every mistake; `--help` ends the process with exit code 0.
    """
    if _asks_for_help(arguments):
        _print_help(verb, name, arguments, about=about, positional=positional or {})
    return read_words(verb, name, arguments, positional=positional or {})[0]


def parse_with_overrides(
    verb: Callable[..., T], name: str, arguments: list[str], *, positional: Mapping[str, str | None] | None = None,
    short: Mapping[str, str] | None = None,
) -> tuple[T, list[str]]:  # fmt: skip
    """The verb's result, and unknown words: settings of a run, which `config.resolve` reads and checks.

    Settings may also precede the words of the verb: `ultrascale train --layout.tp 2 run.toml`. `short`: short flags of
    settings, unless the verb has a flag of that name: `--tp 2`.
    """
    if _asks_for_help(arguments):
        _print_help(verb, name, arguments, about=None, positional=positional or {})
    settings, words = split_settings(arguments, verb_flags=signature(verb).parameters.keys(), short=short or {})
    try:
        result, unknown = read_words(verb, name, words, positional=positional or {}, settings=True)
    except SpecError as error:  # reported together with unknown settings
        keys = (word[2:].partition("=")[0].replace("-", "_") for word in settings if word.startswith("--"))
        wrong = [unknown_key(key, "flag") for key in keys if key not in leaves() and key not in STAND_INS]
        raise SpecError([*wrong, *error.problems]) from None
    return result, [*settings, *unknown]


def description_of(verb: Any) -> str | None:
    """The docstring above the arguments, with examples directly below their sentences: tyro starts a new line for each, and
    would insert two empty ones above it. None for a choice of verbs, each of which has its own."""
    if get_origin(verb) in (Union, UnionType):
        return None
    return (getdoc(verb) or "").partition("\n\nArgs:")[0].replace("\n\n    ", "\n    ")


def split_settings(
    arguments: list[str], *, verb_flags: Collection[str], short: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Flags of a run's settings, with their values, and all other words. `verb_flags`: the verb's own; `short`: short names of
    settings, which are returned as full names.

    A boolean setting takes the next word only if that is a boolean word.
    """
    sections = {key.partition(".")[0] for key in leaves() if "." in key}
    settings: list[str] = []
    other_words: list[str] = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and key in short and key not in verb_flags:
            key = short[key]
            word = f"--{key}{equals}{value}"
        is_setting = key in leaves() or key in STAND_INS or ("." in key and key.partition(".")[0] in sections)
        if not flag.startswith("--") or key in verb_flags or not is_setting:
            other_words.append(word)
            continue
        settings.append(word)
        is_switch = key in leaves() and leaves()[key].kind is bool
        if words and not equals and not words[0].startswith("--") and (not is_switch or _switches(*list(words)[:2])):
            settings.append(words.popleft())
    return settings, other_words


def _switches(word: str, following: str = "--") -> bool:
    """True if `word` is a boolean value of a setting, or was meant as one: similar to one in `NEARLY_BOOLEAN`, followed by a
    flag or the end, and not a file."""
    is_last = following.startswith("--") and not Path(word).exists()
    meant = is_last and word.isalpha() and get_close_matches(word.lower(), NEARLY_BOOLEAN, n=1, cutoff=MIN_SIMILARITY) != []
    return word.lower() in BOOLEAN_WORDS or meant


def _asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def _print_help(
    verb: Any, name: str, arguments: list[str], *, about: str | None, positional: Mapping[str, str | None]
) -> NoReturn:
    """Print the help of a verb, or of the chosen one of several, and end the process with exit code 0."""
    import tyro

    _prepare(verb, positional)
    help_words = [*arguments[:1], "--help"] if description_of(verb) is None and arguments[:1] != ["-h"] else ["--help"]
    tyro.cli(
        verb, prog=f"ultrascale {name}", description=about or description_of(verb), args=help_words,
        config=(tyro.conf.FlagCreatePairsOff,),
    )  # fmt: skip
    raise AssertionError("the help ends the process")


def _prepare(verb: Any, positional: Mapping[str, str | None]) -> None:
    """Mark positional arguments in a verb without annotations for the command line; see also `_set_metavars`."""
    import tyro

    hints = get_type_hints(verb) if positional else {}
    for name, metavar in positional.items():
        verb.__annotations__[name] = Annotated[hints[name], tyro.conf.Positional, tyro.conf.arg(metavar=metavar)]
    _set_metavars(verb)


def _set_metavars(verb: Any) -> None:
    """Make the help of an optional setting show the expected value, `INT`, instead of `{None}|INT ... (default: None)`.

    Changes the annotations of `verb`, which exist for its command line.
    """
    import tyro

    if get_origin(verb) in (Union, UnionType):
        for choice in get_args(verb):
            _set_metavars(choice)
        return
    for name, hint in get_type_hints(verb, include_extras=True).items():
        if name in (settings := signature(verb).parameters) and settings[name].default in (None, "", ()):
            kinds = [kind for kind in get_args(hint) if kind is not NoneType]
            is_plain = get_origin(hint) in (Union, UnionType) and len(kinds) == 1 and isinstance(kinds[0], type)
            metavar = kinds[0].__name__.upper() if is_plain else None
            if len(kinds) == 1 and get_origin(kinds[0]) is Literal:
                metavar = f"{{{','.join(map(str, get_args(kinds[0])))}}}"
            verb.__annotations__[name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="", metavar=metavar)]


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
    values: list[str] = field(default_factory=list)

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
    """Call `verb` (a function, a dataclass, or a choice of dataclasses) with the parsed `words`; returns its result and unknown
    words.

    `settings`: True if settings of a run are allowed among them; `config.resolve` reads those. Raises SpecError.
    """
    if get_origin(verb) in (Union, UnionType):
        return _chosen(get_args(verb), name, words)
    options = {option.name: option for option in _options(verb, positional)}
    problems: list[Problem] = []
    loose = _sort(options, deque(words), name, problems, settings)
    unknown_words = _place(options, deque(loose), name, problems, settings)
    values = {option.name: _value(option, name, problems) for option in options.values()}
    expect_none(problems)
    return _call(verb, values), unknown_words


def _chosen(verbs: tuple[Any, ...], name: str, words: list[str]) -> tuple[Any, list[str]]:
    """The dataclass that the first word selects: `List` for `checkpoint list`."""
    by_word = {choice.__name__.lower(): choice for choice in verbs}
    word = words[0] if words else ""
    if word not in by_word:
        rule = f"there is no verb `{name} {word}`" if word else f"is missing: {name} does several things"
        remedy = did_you_mean(word, by_word, f"Say one of {', '.join(by_word)}.")
        raise mistake("VERB", rule, remedy)
    return read_words(by_word[word], f"{name} {word}", words[1:], positional={})


def _options(verb: Any, positional: Mapping[str, str | None]) -> list[Option]:
    """Parameters of a verb; for an option that is a dataclass, such as `cost`, its fields: `cost.forward`."""
    hints, options = get_type_hints(verb, include_extras=True), []
    for name, parameter in signature(verb).parameters.items():
        hint = hints[name]
        marks = getattr(hint, "__metadata__", ())
        kind = without_none(get_args(hint)[0] if marks else hint)
        if is_dataclass(kind):
            options += [replace(option, name=f"{name}.{option.name}") for option in _options(kind, {})]
            continue
        marked = any(str(mark) == "Positional" for mark in marks) or parameter.kind is Parameter.POSITIONAL_ONLY
        metavar = positional.get(name) or next((mark.metavar for mark in marks if getattr(mark, "metavar", None)), None)
        default = MISSING if parameter.default is Parameter.empty else parameter.default
        takes_one = any(str(mark) == "UseAppendAction" for mark in marks)
        options.append(Option(name, kind, default, metavar or name.upper(), marked or name in positional, takes_one))
    return options


def _sort(options: Mapping[str, Option], words: deque[str], name: str, problems: list[Problem], settings: bool) -> list[str]:
    """Assign each flag's words to its option. Returns the words without a flag."""
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
            problems.append(unknown_flag(flag, list(flags), name, settings=settings))
            if not equals and words and not _is_flag(words[0]):
                words.popleft()
        elif equals:
            option.values.append(value)
        elif option.kind is bool:
            option.values.append(words.popleft() if words and words[0].lower() in BOOLEANS else "true")
        else:
            _take(option, words, problems)
    return loose


def _take(option: Option, words: deque[str], problems: list[Problem]) -> None:
    """Take the words after a flag: one, or, for an option with several values, all up to the next flag."""
    if not words or _is_flag(words[0]):
        problems.append(Problem(option.flag, "is given without a value", f"Write {option.flag} {option.metavar}."))
        return
    option.values.append(words.popleft())
    while option.holds_several and not option.takes_one and words and not _is_flag(words[0]):
        option.values.append(words.popleft())


def _place(options: Mapping[str, Option], loose: deque[str], name: str, problems: list[Problem], settings: bool) -> list[str]:
    """Assign words without a flag to positional options; the rest is an error, or a run's settings."""
    for option in (option for option in options.values() if option.is_positional):
        while loose and (option.holds_several or not option.values):
            option.values.append(loose.popleft())
    if settings:
        return list(loose)
    problems += [Problem(word, f"is one word more than {name} takes", f"See `ultrascale {name} --help`.") for word in loose]
    return []


def _value(option: Option, name: str, problems: list[Problem]) -> Any:
    """The parsed value, of the option's type; the default if none is given."""
    key = option.metavar if option.is_positional else option.flag
    if not option.values:
        if option.default is MISSING:
            problems.append(Problem(key, "is missing", f"Give it; `ultrascale {name} --help` has an example."))
        return option.default
    if option.kind is bool and option.values[-1].lower() in BOOLEANS:
        return BOOLEANS[option.values[-1].lower()]
    if option.kind is str:  # the verb checks the value
        return option.values[-1]
    with suppress(ValueError):
        if option.kind is float:  # checked here too, including nan
            return float(option.values[-1])
    return as_kind(tuple(option.values) if option.holds_several else option.values[-1], option.kind, key, problems)


def _call(verb: Any, values: dict[str, Any]) -> Any:
    """Call `verb` with the values, grouping dotted names."""
    parameters, hints = signature(verb).parameters, get_type_hints(verb)
    together: dict[str, Any] = {}
    for name, value in values.items():
        if "." not in name:
            together[name] = value
            continue
        outer, _, inner = name.partition(".")
        together.setdefault(outer, {})[inner] = value
    together = {name: hints[name](**value) if is_dataclass(hints[name]) else value for name, value in together.items()}
    first = [together.pop(name) for name, parameter in parameters.items() if parameter.kind is Parameter.POSITIONAL_ONLY]
    return verb(*first, **together)


def _is_flag(word: str) -> bool:
    return word.startswith("--") or (len(word) == 2 and word[0] == "-" and word[1].isalpha())
