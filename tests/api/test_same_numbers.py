"""The functions give what the command line prints: the same numbers, and the same sentences about mistakes."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from api.questions import CHECKS, PLANS, RUN, SCHEDULES, TRACES, Question, printed, without_clock
from numpy import array, int64

import ultrascale as us
from ultrascale.api.planning.plan_result import Search
from ultrascale.cli.main import main
from ultrascale.config.failures import problem_list

TINY: dict[str, Any] = {"model": "tiny-llama", "gpus": "8xh100"}
MODEL = ["plan", "--model", "tiny-llama", "--gpus", "8xh100"]
STUPID = {
    "no model": (lambda: us.plan(), ["plan"]),
    "no machines": (lambda: us.plan("llama-3-8b"), ["plan", "--model", "llama-3-8b"]),
    "unknown model": (lambda: us.plan("nope", "8xh100"), ["plan", "--model", "nope", "--gpus", "8xh100"]),
    "unknown machines": (lambda: us.plan("tiny-llama", "8xnope"), ["plan", "--model", "tiny-llama", "--gpus", "8xnope"]),
    "no GPUs": (lambda: us.plan("tiny-llama", "0xh100"), ["plan", "--model", "tiny-llama", "--gpus", "0xh100"]),
    "too many GPUs": (lambda: us.plan("tiny-llama", "1000000000000xh100"), [*MODEL[:3], "--gpus", "1000000000000xh100"]),
    "no file": (lambda: us.plan("nowhere.toml"), ["plan", "nowhere.toml"]),
    "tp of three": (lambda: us.plan(**TINY, tp=3), [*MODEL, "--tp", "3"]),
    "negative tp": (lambda: us.plan(**TINY, tp=-1), [*MODEL, "--tp=-1"]),
    "tp in letters": (lambda: us.plan(**TINY, tp="many"), [*MODEL, "--tp", "many"]),
    "no tokens": (lambda: us.plan(**TINY, seq_len=0), [*MODEL, "--seq-len", "0"]),
    "batch in letters": (lambda: us.plan(**TINY, tokens_per_batch="4q"), [*MODEL, "--tokens-per-batch", "4q"]),
    "two batches": (
        lambda: us.plan(**TINY, tokens_per_batch="4M", sequences_per_batch=5),
        [*MODEL, "--tokens-per-batch", "4M", "--sequences-per-batch", "5"],
    ),
    "top of nothing": (lambda: us.plan(**TINY, top=0), [*MODEL, "--top", "0"]),
    "top of a run": (lambda: us.plan(RUN, top=3), ["plan", RUN, "--top", "3"]),
    "no experts": (lambda: us.plan(**TINY, expert_imbalance=1.2), [*MODEL, "--expert-imbalance", "1.2"]),
    "no such precision": (lambda: us.plan(**TINY, precision="fp4"), [*MODEL, "--precision", "fp4"]),
    "unknown trainer": (lambda: us.plan(**TINY, stack="nope"), [*MODEL, "--stack", "nope"]),
    "minutes alone": (lambda: us.plan(**TINY, checkpoint_minutes=3), [*MODEL, "--checkpoint-minutes", "3"]),
    "unknown key": (lambda: us.plan(**TINY, layout={"nope": 1}), [*MODEL, "--layout.nope", "1"]),
    "file that is there": (lambda: us.plan(**TINY, save=RUN), [*MODEL, "--save", RUN]),
    "no training tokens": (lambda: us.plan(**TINY, tokens="0"), [*MODEL, "--tokens", "0"]),
    "time of a CPU": (
        lambda: us.plan("tiny-llama", "2xcpu", explain=True), ["plan", "--model", "tiny-llama", "--gpus", "2xcpu", "--explain"],
    ),
    "unknown schedule": (lambda: us.schedule("nope"), ["show", "schedule", "nope"]),
    "too long a pipeline": (lambda: us.schedule("1f1b", pp=1000), ["show", "schedule", "1f1b", "--pp", "1000"]),
    "negative cost": (lambda: us.schedule("1f1b", cost={"send": -1}), ["show", "schedule", "1f1b", "--cost.send=-1"]),
    "drawing of all": (lambda: us.schedule(svg="x.svg"), ["show", "schedules", "--svg", "x.svg"]),
    "rank that is not there": (lambda: us.trace(RUN, rank=9), ["trace", RUN, "--rank", "9"]),
    "no steps traced": (lambda: us.trace(RUN, steps=0), ["trace", RUN, "--steps", "0"]),
    "odd ending": (lambda: us.trace(RUN, out="x.gif"), ["trace", RUN, "--out", "x.gif"]),
    "nothing to prove": (lambda: us.check(), ["check"]),
    "many processes": (lambda: us.check(RUN, processes=200), ["check", RUN, "--processes", "200"]),
    "unknown fault": (lambda: us.check(plant="nope"), ["check", "--plant", "nope"]),
    "matrix of a run": (lambda: us.check(RUN, matrix=True), ["check", RUN, "--matrix"]),
    "no minutes": (lambda: us.sweep(RUN, minutes=0), ["sweep", RUN, "--minutes", "0"]),
    "value twice": (lambda: us.sweep(RUN, layout={"dp": [1, 1]}), ["sweep", RUN, "--layout.dp", "1,1"]),
    "no run's folder": (lambda: us.report("nowhere"), ["report", "nowhere"]),
    "no table of keys": (lambda: us.plan(RUN, batch={"sequence_length": -5}), ["plan", RUN, "--batch.sequence_length=-5"]),
    "half a number": (lambda: us.plan(RUN, layout={"dp": 1.5}), ["plan", RUN, "--layout.dp", "1.5"]),
    "empty model": (lambda: us.plan("", "8xh100"), ["plan", "--model", "", "--gpus", "8xh100"]),
}  # fmt: skip


@pytest.mark.parametrize("question", [*PLANS, *SCHEDULES, *TRACES, *CHECKS], ids=lambda question: question.name)
def test_a_result_is_what_the_command_line_prints(question: Question, capsys):
    assert without_clock(question.call().to_dict()) == without_clock(printed(question.words, capsys))


@pytest.mark.parametrize("question", PLANS, ids=lambda question: question.name)
def test_a_plan_names_the_command_that_prints_the_same(question: Question, capsys):
    found = question.call()
    command = (found.plan if isinstance(found, Search) else found).command
    assert without_clock(printed(shlex.split(command)[1:], capsys)) == without_clock(found.to_dict())


@pytest.mark.parametrize("name", STUPID)
def test_a_mistake_gets_the_sentence_of_the_command_line(name, capsys):
    call, words = STUPID[name]
    with pytest.raises(us.SpecError) as error:
        call()
    assert main(words) == 2
    assert capsys.readouterr().err == f"ultrascale: error: {problem_list(error.value.problems)}\n"


def test_no_model_is_not_the_run_of_this_folder(tmp_path, monkeypatch):
    (tmp_path / "run.toml").write_text(Path(RUN).read_text())
    monkeypatch.chdir(tmp_path)
    assert us.plan(".").run.model.name == "tiny-llama-4m"
    with pytest.raises(us.SpecError):
        us.plan("")


def test_a_misspelt_keyword_is_named_with_the_nearest():
    with pytest.raises(us.SpecError, match=r"--zero-stge: is no flag of plan\. Did you mean --zero-stage"):
        us.plan(**TINY, zero_stge=3)
    with pytest.raises(us.SpecError, match=r"--lr: is no flag of plan\. Did you mean --optimizer\.learning-rate"):
        us.plan(**TINY, lr=3)
    with pytest.raises(us.SpecError, match=r"--nproc: is no flag of check\. Did you mean --processes"):
        us.check(RUN, nproc=2)


LOOSE: Any = us
"""The package, for calls that a type checker refuses."""
OF_ANOTHER_KIND: dict[str, Callable[[], Any]] = {
    "model": lambda: LOOSE.plan(3, "8xh100"), "gpus": lambda: LOOSE.plan("tiny-llama", 8),
    "tp, a table": lambda: LOOSE.plan(**TINY, tp={"a": 1}), "tp, nothing": lambda: LOOSE.plan(**TINY, tp=[]),
    "tp, true": lambda: LOOSE.plan(**TINY, tp=True), "length": lambda: LOOSE.plan(**TINY, seq_len=8192.0),
    "plans": lambda: LOOSE.compare(1, 2), "run": lambda: LOOSE.check(["a"]), "costs": lambda: LOOSE.schedule("1f1b", cost=3),
    "folder": lambda: LOOSE.report(3), "no folder": lambda: LOOSE.report(None), "no run": lambda: LOOSE.sweep(None),
    "a run's search": lambda: us.search(RUN),
    "a CPU's search": lambda: us.search("tiny-llama", "2xcpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_ANOTHER_KIND)
def test_a_value_of_another_kind_is_a_mistake_and_no_traceback_of_ours(name):
    with pytest.raises(us.SpecError):
        OF_ANOTHER_KIND[name]()


def test_a_package_that_is_missing_gets_the_sentence_of_the_command_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "torch", None)
    for name in [name for name in sys.modules if name.startswith("ultrascale.trace.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ImportError) as error:
        us.trace(RUN)
    assert main(["trace", RUN]) == 1
    told = "".join(capsys.readouterr().err.split("\n")[1:])
    assert told == "  `ultrascale trace`    needs torch, which is not installed    -> pip install 'ultrascale[train]'"
    assert "`ultrascale trace` needs torch, which is not installed: pip install 'ultrascale[train]'" in str(error.value)


def test_all_wrong_keywords_are_told_at_once():
    with pytest.raises(us.SpecError) as error:
        LOOSE.plan(**TINY, top="x", explain="perhaps", nonsense=1)
    assert [problem.key for problem in error.value.problems] == ["--top", "--explain", "--nonsense"]


def test_numbers_and_lists_may_be_those_of_numpy_and_of_a_range():
    plain = LOOSE.plan(**TINY, seq_len=128, tp=[1, 2], pp=1).command
    assert LOOSE.plan(**TINY, seq_len=int64(128), tp=array([1, 2]), pp=[int64(1)]).command == plain
    assert LOOSE.plan(**TINY, seq_len=128, tp=range(1, 3), pp=1).command == plain


def test_settings_of_every_shape_reach_the_run():
    sources = [{"path": "a", "weight": 2.0}, {"path": "b"}]
    found = us.plan(RUN, data={"sources": sources}, **{"compile": True, "log.sinks": ["wandb"], "layout.dp_shard": None}).run
    assert [(one.path, one.weight) for one in found.data.sources] == [("a", 2.0), ("b", 1.0)]
    assert (found.compile, found.log.sinks, found.layout.dp_shard) == (True, ("wandb",), None)


def test_files_are_written_as_by_the_flags(tmp_path):
    found = us.plan(**TINY, pp=1, tp=1, save=tmp_path / "run.toml")
    assert us.plan(tmp_path / "run.toml").layout == found.layout
    assert (tmp_path / "run.toml").read_text() == found.to_toml()


def test_a_sweep_and_a_report_are_what_is_printed(tmp_path, capsys):
    words = ["sweep", RUN, "--layout.zero-stage", "0,1", "--list", "--out", str(tmp_path)]
    found = us.sweep(RUN, layout={"zero_stage": [0, 1]}, list=True, out=tmp_path)
    assert found.to_dict() == printed(words, capsys)
    assert len(found.grid.cells) == 2
    rows = [{"step": step, "train/loss": 3.0 - step, "perf/tokens_per_s": 10.0} for step in range(3)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert us.report(tmp_path).to_dict() == printed(["report", str(tmp_path)], capsys)
