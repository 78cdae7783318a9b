"""What a run does where its file says nothing: a warm-up, and a look at the held-out text that was made."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from ultrascale.cli import train as train_command
from ultrascale.cli.main import main
from ultrascale.config.resolve import resolve, to_toml
from ultrascale.config.train_defaults import FROM_RUN_START, ORIGIN, train_defaults
from ultrascale.description.run import Run


@pytest.fixture
def corpus(tmp_path) -> Path:
    (tmp_path / "text" / "validation").mkdir(parents=True)
    return tmp_path / "text"


def resolved(corpus: Path, *words: str, steps: int = 200):
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
    return train_defaults(resolve(None, [*found, *words]))


def chosen(corpus: Path, *words: str, steps: int = 200):
    found, lines = resolved(corpus, *words, steps=steps)
    return found.run, lines


def begin(run: Run) -> Path:
    """The folder of a run as one that has begun leaves it."""
    folder = Path(run.folder) / run.name
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.toml").write_text(to_toml(run))
    return folder


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


def test_a_written_interval_takes_the_held_out_text_too(corpus):
    run, lines = chosen(corpus, "--evaluation.every-steps", "7")
    assert [source.path for source in run.data.validation] == [str(corpus / "validation")]
    assert run.evaluation.every_steps == 7 and "every 7 steps" in lines[1]
    begin(replace(run, data=replace(run.data, validation=()), evaluation=replace(run.evaluation, every_steps=None)))
    found, _ = resolved(corpus, "--evaluation.every-steps", "7")
    assert (len(found.run.data.validation), found.provenance["evaluation.every_steps"]) == (1, "flag")


def test_without_held_out_text_nothing_is_evaluated(tmp_path):
    assert chosen(tmp_path)[0].evaluation.every_steps is None


def test_held_out_text_beside_a_source_in_a_store_is_not_left_out_in_silence(tmp_path):
    words = ["--model.preset", "tiny-llama", "--steps", "200", "--data.sources", "s3://bucket/text", "--folder", str(tmp_path)]
    found, lines = train_defaults(resolve(None, words))
    assert not found.run.data.validation and "text held out beside a source in a store is not looked for" in lines[1]
    named = train_defaults(resolve(None, [*words, "--data.validation", "s3://b/v", "--evaluation.every-steps", "9"]))
    assert named[0].run.data.validation and not any("not looked for" in line for line in named[1])


def test_a_run_that_goes_on_keeps_what_it_began_with(corpus):
    began, _ = chosen(corpus)
    folder = begin(began)
    goes_on, lines = chosen(corpus, steps=4000)
    assert (goes_on.optimizer.warmup_steps, goes_on.evaluation.every_steps) == (10, 20)
    assert goes_on.data.validation == began.data.validation and "10 of 4000" in lines[0]
    assert chosen(corpus, "--optimizer.warmup-steps", "7", steps=4000)[0].optimizer.warmup_steps == 7
    (folder / "checkpoints").rmdir()
    assert chosen(corpus, steps=4000)[0].optimizer.warmup_steps == 200


def test_a_run_that_goes_on_with_fewer_steps_than_it_warmed_up_for_warms_up_as_one_of_so_many(corpus):
    folder = begin(chosen(corpus, steps=10_000)[0])
    found, lines = resolved(corpus, steps=400)
    assert found.run.optimizer.warmup_steps == 20 and "20 of 400" in lines[0]
    assert found.provenance["optimizer.warmup_steps"] == ORIGIN
    (folder / "run.toml").write_text(to_toml(found.run))
    assert resolve(folder / "run.toml").run == found.run
    assert chosen(corpus, steps=400)[0].optimizer.warmup_steps == 20


def test_held_out_text_moves_with_its_source(corpus):
    began, _ = chosen(corpus)
    begin(began)
    moved = corpus.rename(corpus.with_name("moved"))
    found, lines = resolved(moved, steps=4000)
    assert [source.path for source in found.run.data.validation] == [str(moved / "validation")]
    assert found.run.evaluation.every_steps == 20 and str(moved / "validation") in lines[1]
    assert (found.provenance["data.validation"], found.provenance["evaluation.every_steps"]) == (ORIGIN, FROM_RUN_START)
    (moved / "validation").rmdir()
    assert chosen(moved)[0].data.validation == ()


def test_what_was_typed_as_the_run_began_is_kept_and_not_called_a_default(corpus):
    words = ["--optimizer.warmup-steps", "7", "--data.validation", "/other", "--evaluation.every-steps", "3"]
    began, _ = chosen(corpus, *words)
    begin(began)
    found, _ = resolved(corpus, steps=400)
    assert (found.run.optimizer, found.run.data, found.run.evaluation) == (began.optimizer, began.data, began.evaluation)
    for key in ("optimizer.warmup_steps", "data.validation", "evaluation.every_steps"):
        assert found.provenance[key] == "as the run began"


def test_a_run_that_began_without_evaluation_goes_on_without(corpus):
    begin(chosen(corpus, "--evaluation.every-steps", "none")[0])
    assert chosen(corpus)[0].data.validation == ()


@pytest.mark.parametrize("where", ["its own", "the run's"])
def test_an_island_started_by_itself_goes_on_with_the_warm_up_that_it_or_the_run_began_with(corpus, monkeypatch, where):
    """On another machine the folder of the first island is not there."""
    began, _ = chosen(corpus)
    begin(began if where == "the run's" else replace(began, folder=str(corpus.parent / began.name / "islands"), name="1"))
    launched = []
    monkeypatch.setattr(train_command, "expect_startable", lambda run: None)
    monkeypatch.setattr(train_command, "_launch", lambda run, *rest: launched.append(run) or 0)
    words = ["--model.preset", "tiny-llama", "--steps", "4000", "--data.sources", str(corpus), "--folder", str(corpus.parent)]
    path = corpus.parent / "islands.toml"
    path.write_text(f'name = "{began.name}"\n[islands]\ncount = 2\nquorum = 1\n')
    assert main(["train", str(path), "--island", "1", *words]) == 0
    assert launched[0].optimizer.warmup_steps == 10


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
