"""`ultrascale show rules`: all rules of a run's configuration, one line each, from the tables that check them."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import tyro

from ultrascale.cli.terminal.parse import parse
from ultrascale.cli.terminal.screen import console_for_people, print_json
from ultrascale.config.rules.run_rules import RULES, TRAINING_RULES
from ultrascale.config.rules.trainable import LAYOUT_RULES
from ultrascale.description.problems import mistake


def show_rules(word: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[WORD]")] = "", /, json: bool = False) -> int:
    """Print every rule across a run's keys: what must hold, and the keys that it reads. Sections have further rules of their
    own.

        ultrascale show rules

        ultrascale show rules compile

    Args:
        word: Print only rules with this word in a key that they read, or in their text.
        json: Print one JSON object.
    """
    tables = {"any run": RULES, "a run that trains": (*TRAINING_RULES, *LAYOUT_RULES)}
    rows = [
        {"of": of, "says": rule.says, "reads": list(rule.reads)} for of, rules in tables.items() for rule in rules
        if any(word.lower() in text.lower() for text in (rule.says, *rule.reads))
    ]  # fmt: skip
    if word and not rows:
        rule = f"has none with {word!r} in its keys or text"
        raise mistake("rules", rule, "`ultrascale show rules` lists all.")
    if json:
        print_json({"rules": rows}, "rules", indent=1)
        return 0
    console = console_for_people()
    for row in rows:
        console.print(row["says"], style="bold", soft_wrap=True)
        console.print(f"    of {row['of']}: {', '.join(row['reads'])}", soft_wrap=True)
    return 0


command = partial(parse, show_rules, "show rules")
"""Run the verb; returns its exit code."""
