"""The page's one function says what the command line says: the same numbers, and the same sentence to nonsense."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from page.dropped import LLAMA, RUN

import ultrascale as us
from ultrascale.cli.main import main
from ultrascale.cli.plan.page import planned, question
from ultrascale.config.failures import problem_list
from ultrascale.page.controls import CONTROLS, words_of
from ultrascale.page.ranked import TOP, ranking
from ultrascale.plan.search.search import distinct

SMALL = {"model": "llama-3-8b", "count": "8", "machine": "h100-sxm", "seq_len": "4096", "tokens_per_batch": "512k"}


def told(words, capsys):
    """(exit code, stdout, stderr) of a command."""
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    found = capsys.readouterr()
    return code, found.out, found.err


def without_its_own_time(text):
    """The text of the JSON, without what the search took."""
    shorter, count = re.subn(r'"seconds": [0-9.e-]+,?\n', "", text.rstrip("\n"), count=1)
    assert count == ("search" in json.loads(text))
    return shorter


EXAMPLES = 200 if os.environ.get("ULTRASCALE_NIGHTLY") == "1" else 20
DRAWN = st.fixed_dictionaries(
    {
        "model": st.sampled_from(
            ["llama-3-8b", "gpt2", "llama-3.2-1b", "mixtral-8x7b", "qwen3-30b-a3b", "deepseek-v2-lite", "smollm2-135m"]
        ),
        "count": st.sampled_from(["1", "8", "16", "64"]),
        "machine": st.sampled_from(["h100-sxm", "a100-80", "b200", "mi300x", "v100-32"]),
        "seq_len": st.sampled_from(["512", "1024", "4096", "8192"]),
        "tokens_per_batch": st.sampled_from(["", "64k", "1M"]),
    },
    optional={
        "zero_stage": st.sampled_from(["0", "1", "2", "3"]),
        "tp": st.sampled_from(["1", "2", "3", "2,4"]),
        "pp": st.sampled_from(["1", "2"]),
        "micro_batch_size": st.sampled_from(["1", "2"]),
        "recompute": st.sampled_from(["none", "selective", "full"]),
        "stack": st.sampled_from(["ultrascale", "megatron", "torchtitan"]),
        "precision": st.sampled_from(["bf16", "fp8"]),
    },
)


@given(asked=DRAWN)
@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True)
def test_answers_are_those_of_the_command_line(asked, capsys, tmp_path):
    answer = question(asked)
    code, out, err = told(["plan", *words_of(asked, tmp_path), "--json"], capsys)
    if "error" in answer:
        assert (code, answer["error"] in err) == (2, True)
    else:
        assert without_its_own_time(answer["json"]) == without_its_own_time(out)
        assert code == (answer["verdict"]["kind"] == "bad")


@given(asked=DRAWN)
@settings(
    max_examples=EXAMPLES // 4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)
def test_the_server_answers_the_same(asked, link):
    body = json.dumps(asked).encode()
    with urlopen(Request(f"{link}answer", body, {"Content-Type": "application/json"})) as reply:
        assert json.load(reply) == question(asked)


def test_reasons_are_those_of_explain(capsys, tmp_path):
    asked = SMALL | {"why": 1}
    answer = question(asked)
    _, out, _ = told(["plan", *words_of(asked, tmp_path), "--json"], capsys)
    assert without_its_own_time(answer["json"]) == without_its_own_time(out)
    assert len(answer["scaling"]) == len(json.loads(answer["json"])["search"]["explanation"]["scaling"]) > 3
    assert [one["title"] for one in answer["why"]][1] == "What makes it fit"


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", json.dumps(LLAMA)), ("run.toml", RUN)], ids=["config.json", "run.toml"]
)
def test_a_dropped_file_is_planned_as_the_command_line_plans_it(name, text, capsys, tmp_path):
    asked = {"file": {"name": name, "text": text}}
    asked |= {} if name == "run.toml" else {"count": "8", "machine": "h100-sxm", "seq_len": "1024"}
    answer = question(asked)
    _, out, _ = told(["plan", *words_of(asked, tmp_path), "--json"], capsys)
    assert without_its_own_time(answer["json"]) == without_its_own_time(out)


STUPID = {
    "unknown model": {"model": "lama-3-8b"},
    "no model": {"model": ""},
    "negative devices": {"count": "-8"},
    "no devices": {"count": "0"},
    "a million million devices": {"count": "1000000000000"},
    "half a device": {"count": "1.5"},
    "unknown machine": {"machine": "h1000"},
    "negative sequence": {"seq_len": "-1"},
    "no sequence": {"seq_len": "0"},
    "a sequence of 10^12": {"seq_len": "1000000000000"},
    "a sequence in words": {"seq_len": "long"},
    "a batch in words": {"tokens_per_batch": "many"},
    "a batch of nothing": {"tokens_per_batch": "0"},
    "a batch below a sequence": {"tokens_per_batch": "1k"},
    "tp that does not divide": {"tp": "3"},
    "tp of 0": {"tp": "0"},
    "negative pp": {"pp": "-2"},
    "experts that are not there": {"ep": "4"},
    "unknown schedule": {"pp": "2", "schedule": "gpiep"},
    "ZeRO 4": {"zero_stage": "4"},
    "a micro-batch of 10^12": {"micro_batch_size": "1000000000000"},
    "unknown recomputation": {"recompute": "some"},
    "unknown precision": {"precision": "int3"},
    "unknown trainer": {"stack": "megatorn"},
    "unknown optimizer": {"optimizer": "adam"},
    "tokens in words": {"tokens": "lots"},
    "flags in a value": {"model": "--save=x"},
    "devices in words": {"count": "many"},
    "devices in powers of ten": {"count": "1e3"},
    "a sequence with a fraction": {"seq_len": "8192.5"},
    "a negative batch": {"tokens_per_batch": "-4M"},
    "a batch of 10^15": {"tokens_per_batch": "1000T"},
    "negative tokens": {"tokens": "-1T"},
    "cp of 0": {"cp": "0"},
    "ep in words": {"ep": "all"},
    "tp of 10^12": {"tp": "1000000000000"},
    "tp with a hole": {"tp": "2,,4"},
    "pp and a half": {"pp": "1.5"},
    "a schedule without a pipeline": {"pp": "1", "schedule": "1f1b"},
    "ZeRO -1": {"zero_stage": "-1"},
    "no micro-batch": {"micro_batch_size": "0"},
    "a dtype the device has not": {"machine": "v100-32", "precision": "fp8"},
}


@pytest.mark.parametrize("asked", STUPID.values(), ids=STUPID.keys())
def test_nonsense_gets_the_sentence_of_the_command_line(asked, capsys):
    asked = {name: value for name, value in (SMALL | asked).items() if value}
    answer = question(asked)
    gpus = f"{asked.pop('count')}x{asked.pop('machine')}"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in (asked | {"gpus": gpus}).items()]
    code, _, err = told(["plan", *words], capsys)
    assert code == 2
    assert " ".join(answer["error"].split()).replace("(flag) ", "") in " ".join(err.split()).replace("(flag) ", "")


@pytest.mark.parametrize("name", STUPID)
def test_nonsense_in_python_gets_the_same_rule(name):
    """Of what is no word of a flag: those a parser refuses have the type in front of them."""
    asked = {key: value for key, value in (SMALL | STUPID[name]).items() if value}
    gpus = f"{asked.pop('count')}x{asked.pop('machine')}"
    plan: Any = us.plan
    with pytest.raises(us.SpecError) as error:
        plan(asked.pop("model", None), gpus, **asked)
    told, here = question(SMALL | STUPID[name])["error"], problem_list(error.value.problems)
    if "Error parsing" not in told:
        assert " ".join(here.split()) == " ".join(told.split())


FILES = {
    "no JSON": ("config.json", "{", "config.json"),
    "a list": ("config.json", "[]", "config.json"),
    "keys that are missing": ("config.json", '{"hidden_size": 512}', "model_type"),
    "weights": ("model.safetensors", "x" * 1_000_001, "at most 1,000,000 are read"),
    "no TOML": ("run.toml", "[[[", "run.toml"),
    "another file's model": ("run.toml", '[model]\npath = "/etc"', "model.path"),
    "another file's schedule": ("run.toml", RUN + 'schedule = "a.csv"', "layout.schedule"),
    "another file's machines": ("run.toml", RUN.replace("8xh100", "2x/etc/machine.toml"), "cluster"),
}


@pytest.mark.parametrize(("name", "text", "says"), FILES.values(), ids=FILES.keys())
def test_a_bad_file_is_refused_with_a_reason(name, text, says):
    told = question(SMALL | {"file": {"name": name, "text": text}})["error"]
    assert says in told
    assert "/tmp" not in told


@pytest.mark.parametrize("name", [one.name for one in CONTROLS if one.name not in ("count", "tokens")])
def test_no_control_reads_a_file(name, tmp_path, monkeypatch):
    """Whether a file or folder is there makes no difference."""
    monkeypatch.chdir(tmp_path)
    here = tmp_path / "config.json"
    here.write_text(json.dumps(LLAMA))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "config.json").write_text(json.dumps(LLAMA))
    values = [str(here), "config.json", "./folder", "../folder", "x.csv", "x.toml", "folder", "~"]
    there = [question(SMALL | {name: value})["error"] for value in values]
    shutil.rmtree(tmp_path / "folder")
    here.unlink()
    assert there == [question(SMALL | {name: value})["error"] for value in values]


def test_a_key_that_is_no_control_is_refused():
    assert "save" in question(SMALL | {"save": "x.toml"})["error"]


def test_the_rows_marked_as_tied_are_those_that_the_note_counts():
    planned_search = planned(words_of(SMALL, Path())).result
    assert planned_search is not None
    shown = ranking(planned_search)
    tied = distinct(planned_search.ranked[: planned_search.num_tied])[:TOP]
    assert [row["tied"] for row in shown["rows"]] == [row < len(tied) for row in range(len(shown["rows"]))]
    assert f"{planned_search.num_tied}, with those that differ only in details, are within 2%" in shown["note"]


def test_memory_is_drawn_for_each_zero_stage_and_its_parts_sum_up():
    memory = question(SMALL | {"tp": "2", "pp": "2", "micro_batch_size": "1", "zero_stage": "1"})["memory"]
    assert [bar["zero_stage"] for bar in memory["bars"]] == [0, 1, 2, 3]
    assert [bar["chosen"] for bar in memory["bars"]] == [False, True, False, False]
    for bar in memory["bars"]:
        assert sum(part["value"] for part in bar["parts"]) == pytest.approx(bar["value"], rel=1e-6)
    assert [one["label"] for one in memory["ranks"]] == ["rank 0", "rank 1"]


def test_a_layout_that_does_not_fit_is_not_shown_as_one_that_runs():
    answer = question(SMALL | {"model": "llama-3.1-405b", "count": "32"})
    facts = {fact["name"]: fact["text"] for fact in answer["facts"]}
    assert {"Step, if it fitted", "Tokens a second, if it fitted", "MFU, if it fitted"} <= facts.keys()
    assert facts["ultrascale train"] == "would run out of memory"
    assert answer["sufficient"].startswith("112 GPUs would do")


def test_operations_and_what_is_beside_them_sum_to_the_compute_of_the_step():
    answer = question(SMALL)
    account = answer["roofline"]["account"]
    (compute,) = [part["value"] for part in answer["waterfall"] if part["name"] == "compute"]
    assert account["value"] == compute == pytest.approx(sum(part["value"] for part in account["parts"]), rel=2e-3)
    first = account["parts"][0]
    assert first["value"] == pytest.approx(sum(row["seconds"] for row in answer["roofline"]["rows"]))
    assert first["value"] < 0.995 * compute


def test_the_waterfall_sums_to_the_step_and_the_schedule_is_the_planners():
    answer = question(SMALL | {"pp": "4", "schedule": "1f1b", "micro_batch_size": "1"})
    seconds = json.loads(answer["json"])["time"]["seconds_per_step"]
    assert sum(part["value"] for part in answer["waterfall"]) == pytest.approx(seconds)
    first = answer["schedule"]["ranks"][0]["actions"]
    assert [name for name, _, _ in first[:5]] == ["0F0", "0F1", "0F2", "0F3", "0B0"]


@pytest.mark.parametrize(
    ("cluster", "changed", "gpus"),
    [
        ("16xh200", {"count": "32"}, "32xh200"), ("16xh200", {"machine": "h100"}, "16xh100"),
        ("2xdgx-h100", {"count": "32"}, "32xh100-sxm"), ("2xdgx-h100", {"machine": "h200"}, "16xh200"),
        ("auto", {"count": "8"}, "8"), ("128xgb200/64", {"count": "64"}, "64xgb200/64"),
    ],
)  # fmt: skip
def test_a_control_beside_a_dropped_run_changes_its_accelerators_and_nothing_else(cluster, changed, gpus, tmp_path):
    text = f'cluster = "{cluster}"\n[model]\npreset = "gpt2"\n'
    words = words_of(changed | {"file": {"name": "run.toml", "text": text}}, tmp_path)
    assert [word for word in words if word.startswith("--gpus")] == [f"--gpus={gpus}"]
