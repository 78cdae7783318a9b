"""A rank that has no memory left in the middle of a run: what is told, and how the ranks end."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train.small_runs import at_step, small_run, train_here

from ultrascale.catalogue.models.model_presets import preset
from ultrascale.config.failures import explained
from ultrascale.description.layout import Layout
from ultrascale.description.run import Faults, Run
from ultrascale.launch.forked import run_forked
from ultrascale.train.loop import train
from ultrascale.train.session import begin as joined
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch import out_of_memory
from ultrascale.train.watch.out_of_memory import OutOfDeviceMemory
from ultrascale.train.worker import run_or_explain

SIZE = r"([\d.]+) MiB"


def run_out() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nGPU 0 has a total capacity of nothing")


def without_memory_in_step_3(rendezvous: str, run: Run, failure: Path) -> int:
    """A rank as the launcher starts it; its exit code. Rank 1 runs out in the forward pass of the third step."""
    torch.set_num_threads(1)
    train_step, plant = Trainer.train_step, at_step(2, break_forward, rank=1)
    Trainer.train_step = lambda trainer: [plant(trainer), train_step(trainer)][1]  # pyright: ignore[reportAttributeAccessIssue]
    return run_or_explain(lambda: train(run, rendezvous=rendezvous), failure)


def break_forward(trainer: Trainer) -> None:
    trainer.passes.forward = lambda batch, **at: run_out()  # type: ignore[method-assign]


@pytest.mark.catalogue(15)
def test_a_run_in_which_a_rank_has_no_memory_left_compares_what_was_planned_traced_and_measured_and_ends(home, capfd):
    run = small_run(home, model=preset("tiny-llama"), layout=Layout(dp=2, zero_stage=1, precision="bf16"))
    run = replace(run, faults=Faults(hang_seconds=300.0))  # a busy machine traces slowly
    failure = home / "failure.json"
    assert run_forked(2, without_memory_in_step_3, run, failure) == [1, 1]
    told = json.loads(failure.read_text())
    assert (told["rank"], told["exit_code"]) == (1, 1)  # it would happen again: the launcher does not start it again
    lines = told["message"].splitlines()
    assert lines[0] == "rank 1 ran out of memory (CUDA out of memory. Tried to allocate 20.00 MiB.)"
    assert lines[1].split()[0] == "measured"
    planned = re.fullmatch(rf"  planned   {SIZE} at the peak, in the \w+ pass", lines[2])
    traced = re.fullmatch(rf"  traced    {SIZE} at the peak, [\d.]+ MiB reserved; most: .*", lines[3])
    assert planned and traced and float(traced[1]) == pytest.approx(float(planned[1]), rel=0.03)
    assert f"`ultrascale trace {home / 'small' / 'run.toml'} --rank 1 --explain-oom`" in lines[4]
    assert f"ultrascale: error on rank 1: {explained(told['message'], 'train')[1]}" in capfd.readouterr().err
    rows = (home / "small" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [1, 2]


def test_memory_that_is_gone_before_the_first_step_is_told_in_the_same_way(home, monkeypatch):
    """Weights are made and moved to the device then; nothing has been written yet, and a trace needs no file of the run."""
    monkeypatch.setattr(out_of_memory, "_traced", lambda run, rank: "7 GiB")
    monkeypatch.setattr(joined, "begin", lambda *given, **options: run_out())
    with pytest.raises(OutOfDeviceMemory, match=r"rank 0 ran out of memory(.|\n)*traced    7 GiB"):
        train_here(small_run(home))


def test_a_trace_ends_before_ranks_that_wait_for_this_one_take_it_for_hanging(home, monkeypatch):
    given = []

    def slow(words, *, timeout, **options):
        given.append(timeout)
        raise subprocess.TimeoutExpired(words, timeout)

    monkeypatch.setattr(subprocess, "run", slow)
    for seconds in (30.0, 9000.0, None):
        run = replace(small_run(home), faults=Faults(hang_seconds=seconds))
        text = str(out_of_memory.out_of_memory(run, 0, out_of_memory.Measured(1, 1), home, torch.OutOfMemoryError("full")))
        assert f"traced    no: it took longer than {given[-1]:.0f} s" in text
    assert given == [20.0, 180.0, 180.0]
