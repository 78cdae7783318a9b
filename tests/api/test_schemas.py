"""Every JSON has a version and follows the schema that ships in the package."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest
from api.questions import CHECKS, OTHERS, PLANS, SCHEDULES, TRACES, printed
from api.validator import mistakes, wrong
from schema_documents import DOCUMENTS
from write_schemas import schema_of, text_of

import ultrascale as us
from ultrascale.api.stamp import FOLDER, SCHEMA_NAMES, VERSIONS, schema_file

ROOT = Path(__file__).parents[2]
NOT_DOCUMENTS = {"measure_network.py": 1, "show_schedule.py": 0, "train.py": 1}
"""What else a verb writes as JSON: an argument for its processes, a line of events.jsonl."""


@pytest.mark.parametrize("name", SCHEMA_NAMES)
def test_a_schema_in_the_package_is_the_one_its_description_makes(name):
    assert schema_file(name).read_text() == text_of(name), "write it anew: python .ci/write_schemas.py"


def test_every_version_is_described_and_every_file_is_of_one():
    assert set(DOCUMENTS) == set(VERSIONS)
    assert {path.name for path in FOLDER.glob("*.json")} == {schema_file(name).name for name in SCHEMA_NAMES}


@pytest.mark.parametrize("question", [*PLANS, *SCHEDULES, *TRACES, *CHECKS], ids=lambda question: question.name)
def test_a_result_follows_its_schema(question):
    assert wrong(question.call().to_dict()) == []


@pytest.mark.parametrize("words", OTHERS, ids=" ".join)
def test_what_a_verb_prints_follows_its_schema(words, capsys):
    assert wrong(printed(words, capsys)) == []


def test_a_comparison_follows_its_schema():
    found = us.compare("runs/tiny-llama-cpu.toml", us.plan("tiny-llama", "8xh100", tp=1, pp=1))
    assert wrong(found.to_dict()) == []


def test_what_was_swept_reported_and_executed_follows_its_schema(tmp_path):
    pytest.importorskip("torch")
    assert wrong(us.sweep("runs/tiny-llama-cpu.toml", layout={"dp": [2, 3]}, list=True, out=tmp_path).to_dict()) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "train/loss": 3.5, "perf/tokens_per_s": 10.0}\n')
    assert wrong(us.report(tmp_path).to_dict()) == []
    assert wrong(us.schedule("1f1b", pp=2, micro_batches=2, executed=True).to_dict()) == []


def test_a_document_with_a_key_more_or_less_or_of_another_type_is_refused():
    document = us.plan("runs/tiny-llama-cpu.toml").to_dict()
    assert wrong({**document, "more": 1}) == ["$: more is unknown"]
    assert wrong({key: value for key, value in document.items() if key != "fits"}) == ["$: fits is missing"]
    assert wrong({**document, "nodes": "one"}) == ["$.nodes: 'one' is no integer"]
    assert wrong({**document, "layout": {**document["layout"], "zero_stage": 7}}) == [
        "$.layout.zero_stage: 7 is not in [0, 1, 2, 3]"
    ]


@pytest.mark.parametrize("path", sorted((ROOT / "runs").glob("*.toml")), ids=lambda path: path.name)
def test_the_runs_of_the_repository_follow_the_schema_of_run_toml(path):
    assert mistakes(tomllib.loads(path.read_text()), schema_of("run.toml")) == []


def test_what_a_plan_saves_follows_the_schema_of_run_toml():
    for question in PLANS[:3]:
        assert mistakes(tomllib.loads(question.call().to_toml()), schema_of("run.toml")) == []


@pytest.mark.parametrize("text, told", [
    ("[layout]\nzero_stge = 3", "$.layout: zero_stge is unknown"), ("[layout]\nzero_stage = 4", "$.layout.zero_stage"),
    ('[layout]\ndp = "2"', "$.layout.dp: '2' does not match"), ("steps = 0", "$.steps: 0 is out of range"),
    ("[optimizer]\nbeta1 = 1.0", "$.optimizer.beta1: 1.0 is out of range"), ("[nothing]", "$: nothing is unknown"),
])  # fmt: skip
def test_a_mistake_in_run_toml_is_seen_by_its_schema(text, told):
    (found,) = mistakes(tomllib.loads(text), schema_of("run.toml"))
    assert found.startswith(told)


def test_what_stands_for_other_keys_follows_the_schema_of_run_toml():
    text = """
    extends = "other.toml"
    steps = "10k"
    [faults]
    hang_seconds = "2m"
    [model]
    preset = "llama-3-8b"
    rope_scaling = "none"
    [batch]
    tokens_per_batch = "4M"
    ramp = [{until_tokens = "1B", tokens_per_batch = "1M"}, {until_tokens = 2000000000, sequences_per_batch = 8}]
    [data]
    sources = ["a", {path = "b", weight = 2.0}]
    [layout]
    dp_shard = "none"
    recompute_budget = "20GiB"
    """
    assert mistakes(tomllib.loads(text), schema_of("run.toml")) == []


def test_every_json_that_a_verb_prints_is_stamped():
    bare = {}
    for path in sorted((ROOT / "src" / "ultrascale" / "cli").rglob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        printed = [node for node in calls if ast.unparse(node.func).endswith(("dumps", "print_json"))]
        unnamed = [ast.unparse(node.args[0]) for node in printed if len(node.args) == 1]
        some = [text for text in unnamed if "stamped(" not in text and ".to_dict()" not in text]
        bare |= {path.name: some} if len(some) > NOT_DOCUMENTS.get(path.name, 0) else {}
    assert bare == {"show_stacks.py": ["documents[name] if name else documents"]}
