"""What a run does where its file says nothing: a warm-up, and a look at the held-out text that was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve
from ultrascale.config.run_toml import to_toml
from ultrascale.config.usual import ORIGIN, usual


@pytest.fixture
def corpus(tmp_path) -> Path:
    (tmp_path / "text" / "validation").mkdir(parents=True)
    return tmp_path / "text"


def chosen(corpus: Path, *words: str, steps: int = 200):
    found = [
        "--model.preset",
        "tiny-llama",
        "--steps",
        str(steps),
        "--data.sources",
        str(corpus),
        "--folder",
        str(corpus.parent),
    ]
    resolved, lines = usual(resolve(None, [*found, *words]))
    return resolved.run, lines


def test_held_out_text_that_was_made_is_read_and_the_rate_warms_up(corpus):
    run, lines = chosen(corpus)
    assert [source.path for source in run.data.validation] == [str(corpus / "validation")]
    assert (run.evaluation.every_steps, run.optimizer.warmup_steps) == (20, 10)
    assert len(lines) == 2 and "optimizer.warmup_steps = 0 for none" in lines[0] and str(corpus / "validation") in lines[1]


@pytest.mark.parametrize("words", [["--optimizer.warmup-steps", "0"], ["--optimizer.warmup-steps", "3"]])
def test_a_warm_up_that_is_written_is_kept(corpus, words):
    assert chosen(corpus, *words)[0].optimizer.warmup_steps == int(words[1])


def test_an_evaluation_that_is_switched_off_stays_off(corpus):
    run, _ = chosen(corpus, "--evaluation.every-steps", "none")
    assert run.data.validation == () and run.evaluation.every_steps is None


def test_without_held_out_text_nothing_is_evaluated(tmp_path):
    assert chosen(tmp_path)[0].evaluation.every_steps is None


def test_a_run_that_goes_on_keeps_what_it_began_with(corpus):
    began, _ = chosen(corpus)
    folder = corpus.parent / began.name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(began))
    goes_on, lines = chosen(corpus, steps=4000)
    assert (goes_on.optimizer.warmup_steps, goes_on.evaluation.every_steps) == (10, 20)
    assert goes_on.data.validation == began.data.validation and "10 of 4000" in lines[0]
    assert chosen(corpus, "--optimizer.warmup-steps", "7", steps=4000)[0].optimizer.warmup_steps == 7
    (folder / "checkpoints").rmdir()
    assert chosen(corpus, steps=4000)[0].optimizer.warmup_steps == 200


def test_show_says_what_train_will_take(corpus, tmp_path, capsys):
    path = tmp_path / "run.toml"
    path.write_text(f'steps = 200\n[model]\npreset = "tiny-llama"\n[data]\nsources = ["{corpus}"]\n')
    assert main(["show", str(path), "--folder", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"]["optimizer"]["warmup_steps"], told["run"]["evaluation"]["every_steps"]) == (10, 20)
    keys = ("optimizer.warmup_steps", "evaluation.every_steps", "data.validation")
    assert {told["provenance"][key] for key in keys} == {ORIGIN}
    assert main(["show", str(path), "--folder", str(tmp_path)]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.split("\n") if line.endswith(ORIGIN)] == [
        "data.validation", "optimizer.warmup_steps", "evaluation.every_steps",
    ]  # fmt: skip
