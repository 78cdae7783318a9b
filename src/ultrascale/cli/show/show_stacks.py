"""`ultrascale show stacks`: the frameworks that can be planned for, and the settings of each."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Annotated

import tyro
from rich.console import Console

from ultrascale.api.stamp import stamped
from ultrascale.catalogue.stacks.stack_files import StackFile, settings_of, stack_file, stack_names
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.console import plain_table


def stacks(name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[NAME]")] = "", /, json: bool = False) -> int:
    """List the training frameworks that can be planned for, or every setting of one, with its source.

    Change a setting with `plan --stack NAME --stack.KEY VALUE`, or in a column `stack.KEY` of measured runs.

        ultrascale show stacks

        ultrascale show stacks megatron

    Args:
        name: Name of a framework.
        json: Print one JSON object.
    """
    if json:
        documents = {stack: stamped("stack", _as_json(stack_file(stack))) for stack in ([name] if name else stack_names())}
        print_json(documents[name] if name else documents, indent=2)
        return 0
    console = console_for_people()
    if name:
        _show_stack(stack_file(name), console)
        return 0
    table = plain_table("stack", "what it is", "as read from", folds=True)
    for stack in stack_names():
        table.add_row(stack, stack_file(stack).title, stack_file(stack).release)
    console.print(table)
    return 0


command = partial(parse, stacks, "show stacks")
"""Run the verb; returns its exit code."""


def _show_stack(file: StackFile, console: Console) -> None:
    console.print(f"[bold]{file.title}[/bold]\n{file.release}\n", soft_wrap=True, markup=True)
    table = plain_table("setting", "value", "from", whole=("setting",), folds=True)
    for key, value in settings_of(file.stack).items():
        source = file.sources.get(key, "")
        table.add_row(f"stack.{key}", _text(value), source or "default", style="" if source else "dim")
    console.print(table)
    can = {key: value for key, value in asdict(file.can).items() if value not in ((), False, 1)}
    console.print("\n[bold]can[/bold]    " + "; ".join(f"{key} {_text(value)}" for key, value in can.items()), soft_wrap=True)
    usual = {
        key: value for key, value in asdict(file.usual).items() if value not in ((), None) and not key.startswith("settings")
    }
    console.print("[bold]usual[/bold]  " + "; ".join(f"{key} {_text(value)}" for key, value in usual.items()), soft_wrap=True)
    for key, values in file.usual.settings.items():
        console.print(f"       {key} differs between its runs: {_text(tuple(values))}", soft_wrap=True)
    for precision, settings in file.usual.settings_in.items():
        for key, values in settings.items():
            console.print(f"       {key} differs between its runs in {precision}: {_text(tuple(values))}", soft_wrap=True)


def _as_json(file: StackFile) -> dict:
    settings = {key: {"value": value, "from": file.sources.get(key)} for key, value in settings_of(file.stack).items()}
    usual, can = asdict(file.usual), asdict(file.can)
    return {"title": file.title, "release": file.release, "settings": settings, "usual": usual, "can": can}


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
