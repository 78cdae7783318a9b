"""`ultrascale measure step` as people use it, and misuse it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from api.validator import wrong
from train.small_runs import make_corpus, small_run

from ultrascale.cli.main import main
from ultrascale.cli.measure.measure_command import parse_steps
from ultrascale.config.resolve import to_toml
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Batch


@pytest.fixture(scope="module")
def run_file(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("measure")
    make_corpus(folder / "tokens")
    run = small_run(folder, batch=Batch(sequence_length=12, sequences_per_batch=4))
    (folder / "run.toml").write_text(to_toml(run))
    return folder / "run.toml"


@pytest.mark.parametrize(("text", "steps"), [("8-10", (8, 10)), ("3", (3, 3)), (" 4-4 ", (4, 4))])
def test_steps_are_one_or_two_numbers(text, steps):
    assert parse_steps(text) == steps


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("two", "must be a step"),
        ("1-3", "the first 2 are cold"),
        ("9-8", "ends before it begins"),
        ("", "must be"),
        ("100000-100001", "all steps before"),
        ("8-90", "asks for 83 steps"),
    ],
)
def test_other_steps_are_refused(text, rule):
    with pytest.raises(SpecError, match=rule):
        parse_steps(text)


def test_a_step_is_told_line_by_line_and_the_runs_folder_is_left_alone(run_file, tmp_path, capfd):
    out = tmp_path / "profile"
    assert main(["measure", "step", str(run_file), "--steps", "3", "--out", str(out), "--top", "4"]) == 0
    told = capfd.readouterr().out
    first = told.splitlines()[0].split()
    assert first == ["ms", "of", "a", "step", "planned", "measured", "difference"]
    assert [line.split("  ")[0] for line in told.splitlines() if line.startswith(("matrix products ", "step "))][-1] == "step"
    assert f"  {out}/rank-0.json.gz" in told.splitlines()
    assert {path.name for path in run_file.parent.iterdir()} == {"run.toml", "tokens.bin", "tokens.idx"}
    assert max(map(len, told.partition("\nplanned:")[0].splitlines())) <= 80


def test_the_json_of_speed_and_network_follows_its_schema(run_file, tmp_path, capfd):
    words = ["--steps", "2", "--warm", "1", "--out", str(tmp_path / "speed.json"), "--json"]
    assert main(["measure", "speed", str(run_file), *words]) == 0
    assert wrong(json.loads(capfd.readouterr().out)) == []
    assert main(["measure", "network", "--processes", "2", "--largest", "4KiB", "--kinds", "all_reduce", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["timed"] and wrong(found) == []


def test_json_is_one_object_whose_categories_sum_to_the_step(run_file, tmp_path, capfd):
    assert main(["measure", "step", str(run_file), "--steps", "3", "--out", str(tmp_path), "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert sum(report["by_category"].values()) == pytest.approx(report["step_seconds"])
    assert report["facts"]["run"] == "small" and wrong(report) == []


@pytest.mark.parametrize(
    ("words", "told"),
    [(["measure", "layer", "run.toml"], "`speed` and `network`"), (["measure", "step", "nowhere.toml"], "nowhere.toml"),
     (["measure"], "measure step")],
)  # fmt: skip
def test_mistakes_end_with_2_and_say_what_to_do(words, told, capfd):
    assert main(words) == 2
    assert told in capfd.readouterr().err
