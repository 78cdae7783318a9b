"""What a run does where its file says nothing: a warm-up, and a look at the held-out text that was made."""

from __future__ import annotations

from pathlib import Path

import pytest

from ultrascale.config.resolve import resolve
from ultrascale.config.usual import usual


@pytest.fixture
def corpus(tmp_path) -> Path:
    (tmp_path / "text" / "validation").mkdir(parents=True)
    return tmp_path / "text"


def chosen(corpus: Path, *words: str):
    return usual(resolve(None, ["--model.preset", "tiny-llama", "--steps", "200", "--data.sources", str(corpus), *words]))


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
