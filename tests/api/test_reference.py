"""The reference of all keys: on a terminal, and docs/reference.md."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultrascale.api.report import Report
from ultrascale.cli.show.show_command import command
from ultrascale.cli.show.show_keys import as_markdown
from ultrascale.config.reference import keys
from ultrascale.config.rules.run_rules import RULES, TRAINING_RULES
from ultrascale.config.rules.trainable import LAYOUT_RULES
from ultrascale.config.schema import leaves
from ultrascale.description.problems import SpecError

PAGE = Path(__file__).parents[2] / "docs" / "reference.md"


def test_the_page_is_what_is_generated():
    assert PAGE.read_text() == as_markdown(keys()) + "\n", "ultrascale show keys --markdown > docs/reference.md"


def test_every_key_of_a_run_is_there_with_words():
    found = {one.key: one for one in keys()}
    assert set(leaves()) <= set(found)
    assert [key for key, one in found.items() if len(one.about) < 8] == []


def test_a_key_has_type_unit_default_and_range():
    (length,) = keys("batch.sequence_length")
    assert (length.kind, length.unit, length.default, length.allowed) == ("whole number", "tokens", "1024", "at least 1")
    (stage,) = keys("zero_stage")
    assert (stage.kind, stage.default, stage.allowed) == ("choice", "0", "0, 1, 2, 3")
    (wait,) = keys("hang_seconds")
    assert (wait.unit, wait.default, wait.allowed) == ("seconds", "90", "above 0, at most 2,000,000")


def test_a_word_finds_keys_by_name_and_else_by_what_they_are(capsys):
    assert command(["keys", "hang"]) == 0
    assert capsys.readouterr().out.startswith("faults.hang_seconds  number of seconds; default 90; above 0")
    assert [one.key for one in keys("--zero-stage")] == ["layout.zero_stage"]
    assert [one.key for one in keys("--tensor-model-parallel-size")] == ["layout.tp"]
    assert "optimizer.learning_rate" in [one.key for one in keys("lr")]
    assert "optimizer.beta1" in [one.key for one in keys("mean of gradients")]
    assert command(["keys", "hang", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["keys"][0]["key"] == "faults.hang_seconds"


def test_rules_are_printed_from_the_tables_that_check_them(capsys):
    assert command(["rules", "mlp_chunks", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["rules"]
    assert [one["of"] for one in told] == ["any run", "a run that trains"]
    assert all("layout.mlp_chunks" in one["reads"] and one["says"].endswith(".") for one in told)
    assert command(["rules"]) == 0
    text = capsys.readouterr().out
    assert all(rule.says and rule.says in text for rule in (*RULES, *TRAINING_RULES, *LAYOUT_RULES))


NOT_THERE = [
    (["keys", "qqq"], "has none with 'qqq'"), (["rules", "qqq"], "has none with 'qqq'"), (["keys", "a", "b"], "one word more"),
    (["schema", "plam"], "Did you mean plan"), (["schema", "a", "b"], "one word more"),
]  # fmt: skip


@pytest.mark.parametrize("words, told", NOT_THERE)
def test_a_word_that_finds_nothing_is_told(words, told):
    with pytest.raises(SpecError, match=told):
        command(words)


def test_a_schema_is_printed_and_all_are_listed(capsys):
    assert command(["schema", "plan"]) == 0
    assert json.loads(capsys.readouterr().out)["$id"] == "ultrascale/plan/2"
    assert command(["schema"]) == 0
    listed = dict(line.split() for line in capsys.readouterr().out.splitlines())
    assert all(Path(path).is_file() for path in listed.values()) and "run.toml" in listed


def test_the_page_of_the_api_names_a_command_for_each_function_and_what_a_report_has_for_rows():
    text = (PAGE.parent / "api.md").read_text()
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| `us.")]
    assert len(table) == 8 and all("`ultrascale " in command for _, command, _ in table)
    assert hasattr(Report, "rows") or "of a `Report` `metrics()`" in text
