"""One form of errors: whichever verb or rank has met them, and whether they came with their parts or as one sentence."""

from __future__ import annotations

import pytest

from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.config.failures import explained
from ultrascale.data.files import DataError
from ultrascale.description.problems import mistake

DAMAGED = "a run/step-2/manifest.json: checksum is ab, expected cd: it is damaged. Use another checkpoint."


@pytest.mark.parametrize(
    "text, parts",
    [
        (DAMAGED, "a run/step-2/manifest.json|checksum is ab, expected cd: it is damaged|Use another checkpoint."),
        ("verifying a/b: a/b/shard: is cut. Copy it.", "a/b/shard|is cut|Copy it."),
        ("rank 1 was ended by SIGKILL. What is saved is in out.", "rank 1|was ended by SIGKILL|What is saved is in out."),
        ("rank 0 waited for rank 1 in broadcast: closed", "rank 0|waited for rank 1 in broadcast: closed"),
        ("s3://b/k was written by somebody else.", "s3://b/k|was written by somebody else"),
        ("s3://b: there is no such bucket. Make it first.", "s3://b|there is no such bucket|Make it first."),
        ("ended unsaved (hang: rank 1 (x)). See out.", "train|ended unsaved (hang: rank 1 (x))|See out."),
        ("the command did not stop within 5.5 s", "train|the command did not stop within 5.5 s"),
        ("out: none is whole. Bring it.\n  step-2: x. Use y.", "out|none is whole\n      step-2: x. Use y.|Bring it."),
        ("rank 1 ran out (A. B)\n  measured 1\n`trace` says what", "rank 1|ran out (A. B)\n      measured 1|`trace` says what"),
        ("it ended early:\na\nb: c", "train|it ended early:\n    a\n    b: c"),
    ],
)  # fmt: skip
def test_a_sentence_is_told_by_key_rule_and_remedy(text, parts):
    key, rule, *remedy = parts.split("|")
    arrow = f"\n    -> {remedy[0]}" if remedy else ""
    assert explained(CheckpointError(text), "train") == (1, f"cannot go on:\n\n  {key}\n    {rule}{arrow}")


def test_lines_that_each_name_a_file_are_as_many_mistakes():
    told = explained("a/x: is cut. Copy it.\na/y: is cut. Copy it.", "train")[1]
    assert told == "cannot go on, 2 mistakes:\n\n  a/x\n    is cut\n    -> Copy it.\n\n  a/y\n    is cut\n    -> Copy it."


def test_whose_fault_it_is_stands_in_head_and_exit_code():
    found = [explained(error, "train") for error in (
        mistake("layout.dp", "must be 2", "Say 2."), mistake("--top", "must be 2", "Say 2."),
        DataError("--workers", "must be 1", "Say 1."), DataError("text.jsonl:3", "is not JSON", "Repair it."),
    )]  # fmt: skip
    heads = [(code, told.partition(":\n")[0]) for code, told in found]
    assert heads == [(2, "invalid configuration"), (2, "invalid arguments"), (2, "invalid arguments"), (1, "cannot go on")]
