"""A verb's function as its command line: positional words, flags and help come from the signature and its docstring.

What is typed is read by `cli.terminal.words`; the parser library, which takes 0.3 s of CPU to import, only prints the help.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from difflib import get_close_matches
from inspect import getdoc, signature
from pathlib import Path
from types import MappingProxyType, NoneType, UnionType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, Union, get_args, get_origin, get_type_hints

from ultrascale.cli.terminal.words import ALIKE, read_words
from ultrascale.config.schema import STAND_INS, leaves, unknown_key
from ultrascale.description.problems import SpecError

T = TypeVar("T")
SWITCHED = ("true", "false", "yes", "no", "on", "off", "1", "0")
"""Words accepted for a setting that is on or off; which of them it takes is checked where it is read."""
MEANT = (*SWITCHED, "enabled", "disabled", "maybe")
"""Words that say so, or were meant to, and those that are like them."""


def parse(
    verb: Callable[..., T] | Any, name: str, arguments: list[str], *, about: str | None = None,
    positional: Mapping[str, str | None] | None = None,
) -> T:  # fmt: skip
    """Call `verb` (a function, a dataclass, or a choice of them) with `arguments` and return what it returns.

    `about`: the help's first sentence, of a choice. `positional`: names that have no flag, with what the help calls them (None:
    their own name). Raises SpecError with everything that is wrong; `--help` ends the process with exit code 0.
    """
    if _asks_for_help(arguments):
        _print_help(verb, name, arguments, about=about, positional=positional or {})
    return read_words(verb, name, arguments, positional=positional or {})[0]


def parse_with_overrides(
    verb: Callable[..., T], name: str, arguments: list[str], *, positional: Mapping[str, str | None] | None = None,
    short: Mapping[str, str] | None = None,
) -> tuple[T, list[str]]:  # fmt: skip
    """The verb's result, and the words that it did not know: settings of a run, which `config.resolve` reads and checks.

    Settings may stand before the words of the verb too: `ultrascale train --layout.tp 2 run.toml`. `short`: settings by names
    that they have as flags here, if the verb has none so named itself: `--tp 2`.
    """
    if _asks_for_help(arguments):
        _print_help(verb, name, arguments, about=None, positional=positional or {})
    settings, words = set_aside(arguments, own=signature(verb).parameters.keys(), short=short or {})
    try:
        result, unknown = read_words(verb, name, words, positional=positional or {}, settings=True)
    except SpecError as error:  # told with what is wrong with the names of settings
        keys = (word[2:].partition("=")[0].replace("-", "_") for word in settings if word.startswith("--"))
        wrong = [unknown_key(key, "flag") for key in keys if key not in leaves() and key not in STAND_INS]
        raise SpecError([*wrong, *error.problems]) from None
    return result, [*settings, *unknown]


def take_settings(arguments: list[str], prefix: str) -> tuple[dict[str, str], list[str]]:
    """Flags `--PREFIX.KEY VALUE` or `--PREFIX.KEY=VALUE` as settings by key, `true` without a value; and all other words."""
    settings: dict[str, str] = {}
    others: list[str] = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        if not word.startswith(f"--{prefix}."):
            others.append(word)
            continue
        key, equals, value = word.removeprefix(f"--{prefix}.").partition("=")
        if not equals:
            value = words.popleft() if words and not words[0].startswith("--") else "true"
        settings[key.replace("-", "_")] = value
    return settings, others


def what_it_does(verb: Any) -> str | None:
    """The docstring above its arguments, examples right below what they are of: tyro begins a line of its own for each, and
    would put two empty ones above that. None for a choice of verbs, each of which has its own."""
    if get_origin(verb) in (Union, UnionType):
        return None
    return (getdoc(verb) or "").partition("\n\nArgs:")[0].replace("\n\n    ", "\n    ")


def set_aside(
    arguments: list[str], *, own: Collection[str], short: Mapping[str, str] = MappingProxyType({})
) -> tuple[list[str], list[str]]:
    """Flags of a run's settings, with their values, and all other words. `own`: flags that the verb has itself; `short`: other
    names of settings, which are returned by their own.

    A setting that is on or off takes the next word only if that says so.
    """
    sections = {key.partition(".")[0] for key in leaves() if "." in key}
    settings: list[str] = []
    others: list[str] = []
    words = deque(arguments)
    while words:
        word = words.popleft()
        flag, equals, value = word.partition("=")
        key = flag.removeprefix("--").replace("-", "_")
        if flag.startswith("--") and key in short and key not in own:
            key = short[key]
            word = f"--{key}{equals}{value}"
        is_setting = key in leaves() or key in STAND_INS or ("." in key and key.partition(".")[0] in sections)
        if not flag.startswith("--") or key in own or not is_setting:
            others.append(word)
            continue
        settings.append(word)
        is_switch = key in leaves() and leaves()[key].kind is bool
        if words and not equals and not words[0].startswith("--") and (not is_switch or _switches(*list(words)[:2])):
            settings.append(words.popleft())
    return settings, others


def _switches(word: str, following: str = "--") -> bool:
    """True if `word` says whether a setting is on, or was meant to: nearly one of `MEANT`, before a flag or the end, that is no
    file."""
    is_last = following.startswith("--") and not Path(word).exists()
    meant = is_last and word.isalpha() and get_close_matches(word.lower(), MEANT, n=1, cutoff=ALIKE) != []
    return word.lower() in SWITCHED or meant


def _asks_for_help(arguments: list[str]) -> bool:
    return not {"-h", "--help"}.isdisjoint(arguments)


def _print_help(
    verb: Any, name: str, arguments: list[str], *, about: str | None, positional: Mapping[str, str | None]
) -> NoReturn:
    """Print the help of a verb, or of the chosen one of several, and end the process with exit code 0."""
    import tyro

    _prepare(verb, positional)
    of = [*arguments[:1], "--help"] if what_it_does(verb) is None and arguments[:1] != ["-h"] else ["--help"]
    tyro.cli(
        verb, prog=f"ultrascale {name}", description=about or what_it_does(verb), args=of,
        config=(tyro.conf.FlagCreatePairsOff,),
    )  # fmt: skip
    raise AssertionError("the help ends the process")


def _prepare(verb: Any, positional: Mapping[str, str | None]) -> None:
    """Mark what has no flag, in a verb that knows nothing of command lines; and see `_say_what_to_give`."""
    import tyro

    hints = get_type_hints(verb) if positional else {}
    for name, metavar in positional.items():
        verb.__annotations__[name] = Annotated[hints[name], tyro.conf.Positional, tyro.conf.arg(metavar=metavar)]
    _say_what_to_give(verb)


def _say_what_to_give(verb: Any) -> None:
    """Let the help of a setting that may be left out say what to give, `INT`, and not `{None}|INT ... (default: None)`.

    Changes the annotations of `verb`, which are there for its command line.
    """
    import tyro

    if get_origin(verb) in (Union, UnionType):
        for one in get_args(verb):
            _say_what_to_give(one)
        return
    for name, hint in get_type_hints(verb, include_extras=True).items():
        if name in (settings := signature(verb).parameters) and settings[name].default in (None, "", ()):
            given = [kind for kind in get_args(hint) if kind is not NoneType]
            is_plain = get_origin(hint) in (Union, UnionType) and len(given) == 1 and isinstance(given[0], type)
            metavar = given[0].__name__.upper() if is_plain else None
            if len(given) == 1 and get_origin(given[0]) is Literal:
                metavar = f"{{{','.join(map(str, get_args(given[0])))}}}"
            verb.__annotations__[name] = Annotated[hint, tyro.conf.arg(help_behavior_hint="", metavar=metavar)]
