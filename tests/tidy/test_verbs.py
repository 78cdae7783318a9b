"""Every verb exists, explains itself and is in the documentation."""

from __future__ import annotations

import re
from importlib.util import find_spec

import pytest
from tidy.sources import PAGES

from ultrascale.cli.main import VERBS, main


def exit_code(words: list[str]) -> object:
    """What the command ends with, whether it returns or leaves as tyro does."""
    try:
        return main(words)
    except SystemExit as stopped:
        return stopped.code


@pytest.mark.parametrize("word", VERBS)
def test_a_verb_explains_itself_with_an_example(word, capsys):
    code = exit_code([word, "--help"])
    told = capsys.readouterr().out
    assert (code, f"ultrascale {word}" in told.partition("\n\n")[0]) == (0, True)
    assert f"ultrascale {word} " in told.partition("\n\n")[2]


@pytest.mark.parametrize("word", VERBS)
def test_an_unknown_option_of_a_verb_is_a_usage_error(word, capsys):
    assert exit_code([word, "--no-such-option-at-all", "1"]) == 2, capsys.readouterr()


def test_the_verbs_are_the_modules_of_cli():
    assert all(find_spec(f"ultrascale.cli.{verb.module}") for verb in VERBS.values())


def test_every_verb_is_used_in_the_documentation():
    text = "\n".join(page.read_text() for page in PAGES)
    assert [word for word in VERBS if not re.search(rf"ultrascale {word}\b", text)] == []
