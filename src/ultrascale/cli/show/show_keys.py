"""`ultrascale show keys`: every configuration key in one line: on a terminal, as docs/reference.md, or as JSON."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.config.reference import Key, keys
from ultrascale.description.problems import mistake

HEAD = """# All keys of a description

Made by `ultrascale show keys --markdown` from the docstrings of `description.run` and its parts, so that it says what the
program reads; `ultrascale show keys WORD` finds one. A key is a line of a run's TOML file, in the table before its dot, and a
flag of every verb that takes a run: `layout.dp` is `dp = 2` below `[layout]`, and `--layout.dp 2`. A key whose default is none
may be "none". [Describing a run](describe.md) explains how keys go together. Editors complete and check `run.toml` by the JSON
Schema that `ultrascale show schema run.toml` prints.
"""


def show_keys(
    word: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[WORD]")] = (),
    /,
    markdown: bool = False,
    json: bool = False,
) -> int:
    """Print every configuration key of a run: type, unit, default, allowed values, and description.

        ultrascale show keys

        ultrascale show keys recompute

    Args:
        word: Print only keys with this word in their name; if there are none, in their description.
        markdown: Print the Markdown of docs/reference.md.
        json: Print one JSON object.
    """
    if len(word) > 1:
        raise mistake("keys", f"are looked up by one word, got {' '.join(word)}", "Give one.")
    matches = keys(*word)
    if word and not matches:
        raise mistake("keys", f"has none with {word[0]!r} in its name or text", "`ultrascale show keys` lists all.")
    if json:
        print_json({"keys": [asdict(key) for key in matches]}, "keys", indent=1)
    elif markdown:
        print(as_markdown(matches))
    else:
        _show(matches)
    return 0


def command(arguments: list[str]) -> int:
    """Run the verb."""
    return parse(show_keys, "show keys", arguments)


def _show(rows: list[Key]) -> None:
    from rich.text import Text

    console = console_for_people()
    for key in rows:
        console.print(Text(key.key, style="bold").append(f"  {_facts(key)}", style="not bold"), soft_wrap=True)
        console.print(Text(f"    {key.about}"), soft_wrap=True)


def _facts(key: Key) -> str:
    """`whole number of tokens, default 1024, at least 1`"""
    if key.kind == "choice":
        kind, allowed = f"one of {key.allowed}", []
    else:
        kind = f"{key.kind} of {key.unit}" if key.unit else key.kind
        allowed = [key.allowed] if key.allowed else []
    return "; ".join([kind, *([f"default {key.default}"] if key.default else []), *allowed])


def as_markdown(rows: list[Key]) -> str:
    """Markdown of the reference: a table for each table of the TOML file."""
    sections: dict[str, list[Key]] = {}
    for key in rows:
        sections.setdefault(key.key.rpartition(".")[0], []).append(key)
    lines = [HEAD.rstrip()]
    for section, section_keys in sections.items():
        lines += ["", f"## {f'[{section}]' if section else 'Above all tables'}", ""]
        lines += ["| key | type | unit | default | allowed | what it is |", "|---|---|---|---|---|---|"]
        for key in section_keys:
            cells = (key.key.rpartition(".")[2], key.kind, key.unit, key.default, key.allowed, key.about)
            lines.append("| " + " | ".join(_cell(number, text) for number, text in enumerate(cells)) + " |")
    return "\n".join(lines)


def _cell(number: int, text: str) -> str:
    """Names and defaults as code; bars are escaped, since they separate cells."""
    escaped = text.replace("|", "\\|")
    return f"`{escaped}`" if escaped and number in (0, 3) else escaped
