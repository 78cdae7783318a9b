"""`ultrascale show rules`: what must hold of a run's description, a rule in a line, from the tables that check it."""

from __future__ import annotations

import json as jsonlib
from typing import Annotated

import tyro

from ultrascale.api.schemas.stamp import stamped
from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people
from ultrascale.config.rules.run_rules import RULES, TRAINING_RULES
from ultrascale.config.rules.trainable import LAYOUT_RULES
from ultrascale.description.problems import Problem, SpecError


def show_rules(
    word: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[WORD]")] = (), /, json: bool = False
) -> tuple[tuple[str, ...], bool]:
    """Every rule across a run's keys: what must hold, and the keys that it reads. Sections have rules of their own beside them.

        ultrascale show rules

        ultrascale show rules compile

    Args:
        word: Only rules with this in a key that they read, or in what they say.
        json: Print one JSON object.
    """
    return word, json


def command(arguments: list[str]) -> int:
    """Run the verb."""
    words, as_json = parse(show_rules, "show rules", arguments)
    if len(words) > 1:
        raise SpecError([Problem("rules", f"are looked up by one word, got {' '.join(words)}", "Give one.")])
    tables = {"any run": RULES, "a run that trains": (*TRAINING_RULES, *LAYOUT_RULES)}
    found = [
        {"of": of, "says": rule.says, "reads": list(rule.reads)} for of, rules in tables.items() for rule in rules
        if not words or any(words[0].lower() in text.lower() for text in (rule.says, *rule.reads))
    ]  # fmt: skip
    if words and not found:
        rule = f"has none with {words[0]!r} in its keys or text"
        raise SpecError([Problem("rules", rule, "`ultrascale show rules` lists all.")])
    if as_json:
        print(jsonlib.dumps(stamped("rules", {"rules": found}), indent=1))
        return 0
    console = console_for_people()
    for one in found:
        console.print(one["says"], style="bold", soft_wrap=True)
        console.print(f"    of {one['of']}: {', '.join(one['reads'])}", soft_wrap=True)
    return 0
