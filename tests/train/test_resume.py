"""A run that was interrupted is the run that was not: to the bit on the same layout, to rounding on another."""

from __future__ import annotations

import json
import os
import shutil
import signal
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from train.small_runs import (
    STEPS,
    BeforeStep,
    at_step,
    curve,
    largest_error,
    rows,
    same,
    small_run,
    state,
    stop_at,
    train_here,
    train_in_turn,
    train_ranks,
)

from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.progress import sequences_after
from ultrascale.description.run import Run
from ultrascale.launch.forked import RankFailed
from ultrascale.launch.restarts import account_of
from ultrascale.parallel.share import Share
from ultrascale.train.corpora import build_loader
from ultrascale.train.session import begin
from ultrascale.train.start.trained import import_as_first_checkpoint

LAYOUTS = {
    "one process": Layout(micro_batch_size=2),
    "zero 2": Layout(dp=2, zero_stage=2, micro_batch_size=1),
    "zero 3, bf16": Layout(dp=2, zero_stage=3, micro_batch_size=2, precision="bf16", recompute="full"),
}


def test_the_small_run_ramps_and_reads_its_corpus_more_than_once(home):
    run = small_run(home)
    loader = Loader(run.data.sources, sequence_length=run.batch.sequence_length, vocab_size=61, seed=3)
    # The epoch ends inside a batch.
    assert sequences_after(run.batch, 7) < loader.sequences_per_epoch[0] < sequences_after(run.batch, 8)
    train_here(run)
    tokens = [row[0] for row in rows(run, "progress/tokens_per_batch")]
    assert tokens == [4 * 11] * 4 + [8 * 11] * 8


def test_the_seed_of_a_run_decides_the_order_of_its_sequences(home):
    first, again, other = (
        build_loader(run, run.data.sources).read(range(8)).tokens for run in (small_run(home, seed=seed) for seed in (3, 3, 4))
    )
    assert (first == again).all() and (first != other).any()


@pytest.mark.catalogue(40)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_a_run_stopped_before_any_step_goes_on_to_the_same_bits(home, layout):
    whole = small_run(home, name="whole", layout=layout)
    trainings: list[tuple[Run, BeforeStep | None]] = [(whole, None)]
    stops = range(1, STEPS, 1 if layout.world_size == 1 else 3)  # of several ranks: warm-up, ramp, an epoch's end, decay
    for stop in stops:
        run = replace(whole, name=f"stopped-{stop}")
        trainings += [(run, stop_at(stop, rank=layout.dp - 1)), (run, None)]
    outcomes = train_in_turn(trainings)
    assert [(o["steps_done"], o["stopped"]) for o in outcomes[1::2]] == [(stop, True) for stop in stops]
    assert [(o["steps_done"], o["stopped"]) for o in outcomes[::2]] == [(STEPS, False)] * (len(stops) + 1)
    for stop in stops:
        run = replace(whole, name=f"stopped-{stop}")
        assert curve(run) == curve(whole), stop
        assert same(state(run), state(whole)), stop


@pytest.mark.catalogue(41)
def test_a_run_stopped_three_times_goes_on_to_the_same_bits(home):
    layout = Layout(dp=2, zero_stage=3, micro_batch_size=1)
    whole, run = (small_run(home, name=name, layout=layout) for name in ("whole", "thrice"))
    train_ranks(whole)
    for stop in (2, 5, 6):
        train_ranks(run, before_step=stop_at(stop))
    train_ranks(run)
    assert curve(run) == curve(whole)
    assert same(state(run), state(whole))


@pytest.mark.catalogue(3)
def test_all_ranks_killed_at_once_and_started_again_by_hand_go_on_to_the_same_bits(home):
    whole, run = (small_run(home, name=name, layout=LAYOUTS["zero 2"]) for name in ("whole", "killed"))
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=4))
    train_ranks(whole)
    with pytest.raises(RankFailed, match="SIGKILL"):
        train_ranks(run, before_step=at_step(7, lambda trainer: os.kill(os.getpid(), signal.SIGKILL)))
    train_ranks(run)
    assert curve(run) == curve(whole) and same(state(run), state(whole))


def test_a_run_killed_between_checkpoints_does_its_steps_again_and_each_stands_once_in_the_metrics(home):
    whole, run = (small_run(home, name=name) for name in ("whole", "killed"))
    run = replace(run, checkpoint=replace(run.checkpoint, every_steps=4, keep=1))
    train_here(whole)

    def crash(trainer):
        if trainer.steps_done == 7:
            raise KeyError("as if killed")

    with pytest.raises(KeyError):
        train_here(run, before_step=crash)
    assert [step for step, *_ in curve(run)] == list(range(1, 8))
    with open(f"{run.folder}/{run.name}/metrics.jsonl", "a") as file:
        file.write('{"step": 7, "train/lo')  # torn by the kill
    train_here(run)
    assert curve(run) == curve(whole)
    assert "steps 5 to 7 were done before, and are done again" in (home / "killed" / "log.txt").read_text().splitlines()


@pytest.mark.parametrize("saved", ["at a stop", "on the way", "never"])
def test_a_run_whose_checkpoints_are_gone_says_that_it_starts_over_and_keeps_its_metrics(home, saved, capsys):
    """A purged scratch disk, a link to a disk that is not mounted, a copy without checkpoints."""
    run = small_run(home)
    before = replace(run, checkpoint=replace(run.checkpoint, every_steps=2 if saved == "on the way" else None))

    def leave(trainer):
        if trainer.steps_done == 4:
            raise KeyError("as if killed")

    with pytest.raises(KeyError) if saved != "at a stop" else nullcontext():
        train_here(before, before_step=stop_at(4) if saved == "at a stop" else leave)
    folder = home / "small"
    known = (folder / "metrics.jsonl").read_text()
    shutil.rmtree(folder / "checkpoints")
    capsys.readouterr()
    train_here(run)
    told = f"steps 1 to 4 were done before, and are done again: no checkpoint is in {folder / 'checkpoints'}"
    line = next(line for line in capsys.readouterr().out.splitlines() if told in line)
    kept = folder / "metrics-until-4.jsonl"
    assert line.startswith("WARNING: ") and f" stay in {kept.name}." in line and kept.read_text() == known
    train_here(run)
    assert (folder / "log.txt").read_text().count(told) == 1


def leave_at(step):
    """A kill before step `step + 1`."""

    def leave(trainer):
        if trainer.steps_done == step:
            raise KeyError("as if killed")

    return leave


@pytest.mark.parametrize("kills", [[4], [4, 6]], ids=["before the row that has the save's time", "after a resume"])
def test_checkpoints_that_are_gone_are_missed_though_no_row_names_a_save(home, kills, capsys):
    run = small_run(home)
    before = replace(run, checkpoint=replace(run.checkpoint, every_steps=4))
    for step in kills:
        with pytest.raises(KeyError):
            train_here(before, before_step=leave_at(step))
    folder, last = home / "small", kills[-1]
    known = (folder / "metrics.jsonl").read_text()
    assert "perf/save_s" not in known
    shutil.rmtree(folder / "checkpoints")
    capsys.readouterr()
    train_here(run)
    assert f"WARNING: steps 1 to {last} were done before" in capsys.readouterr().out
    assert (folder / f"metrics-until-{last}.jsonl").read_text() == known


def test_metrics_of_a_run_that_starts_over_again_and_again_replace_none_that_were_kept(home):
    run, folder = small_run(home), home / "small"
    train_here(run, before_step=stop_at(4))
    known = [(folder / "metrics.jsonl").read_text()]
    shutil.rmtree(folder / "checkpoints")
    for _ in range(2):
        with pytest.raises(KeyError):
            train_here(run, before_step=leave_at(4))
        known.append((folder / "metrics.jsonl").read_text())
    train_here(run)
    names = [f"metrics-until-4{suffix}.jsonl" for suffix in ("", "-2", "-3")]
    assert sorted(path.name for path in folder.glob("metrics-until-*")) == sorted(names)
    assert [(folder / name).read_text() for name in names] == known
    told = (folder / "log.txt").read_text()
    assert [told.count(f" stay in {name}.") for name in names] == [1, 1, 1]


def test_an_imported_run_killed_before_its_first_save_is_not_said_to_have_no_checkpoint(home):
    trained, run = small_run(home, name="trained"), small_run(home)
    train_here(replace(trained, checkpoint=replace(trained.checkpoint, export=True)))
    import_as_first_checkpoint(home / "trained" / "export", run)
    with pytest.raises(KeyError):
        train_here(run, before_step=leave_at(3))
    train_here(run)
    told = (home / "small" / "log.txt").read_text()
    assert told.count(f"resumed from {home / 'small' / 'checkpoints' / 'step-00000000'} at step 0") == 2
    line = "steps 1 to 3 were done before, and are done again; metrics of these steps stay in metrics-until-3.jsonl"
    assert line in told.splitlines() and "no checkpoint is in" not in told


def test_versions_that_changed_since_the_last_start_are_said(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    kept = home / "small" / "environment.json"
    now = json.loads(kept.read_text())
    kept.write_text(json.dumps(now | {"torch": "2.0.1", "platform": "another node"}))
    train_here(run, before_step=stop_at(6))
    train_here(run)
    told = (home / "small" / "log.txt").read_text().splitlines()
    assert [line for line in told if "(was " in line] == [f"torch: {now['torch']} (was 2.0.1)"]


@pytest.mark.parametrize("before", [{}, {"device": "NVIDIA H100", "cuda": "12.8"}], ids=["CPU", "GPU"])
@pytest.mark.parametrize("now", [{}, {"device": "NVIDIA H200", "cuda": "12.8"}], ids=["CPU", "GPU"])
def test_a_gpu_that_came_went_or_changed_since_the_last_start_is_said(before, now):
    keys = [key for key in ("cuda", "device") if before.get(key) != now.get(key)]
    told = [f"{key}: {now.get(key, 'none')} (was {before.get(key, 'none')})" for key in keys]
    versions = {"ultrascale": "1.0", "python": "3.12.1", "torch": "2.12.1"}
    assert begin._changed_versions(versions | before, versions | now) == told
    assert begin._changed_versions(None, versions | now) == begin._changed_versions({}, versions | now) == []


@pytest.mark.catalogue(13, 46)
def test_a_run_that_changes_its_layout_three_times_stays_the_same_to_rounding(home):
    fp64 = Layout(micro_batch_size=1, precision="fp64")
    whole = small_run(home, name="whole", layout=fp64)
    train_here(whole)
    stretches = [
        (3, fp64),
        (6, replace(fp64, dp=2, zero_stage=3)),
        (9, replace(fp64, dp=4, zero_stage=2, dp_shard=2)),
        (None, replace(fp64, zero_stage=1)),
    ]
    for stop, layout in stretches:
        run = small_run(home, name="moved", layout=layout)
        outcome = train_ranks(run, before_step=None if stop is None else stop_at(stop))[0]
        assert outcome["steps_done"] == (stop or STEPS)
    found, expected = (np.array(rows(r, "train/loss", "train/grad_norm")) for r in (run, whole))
    assert np.abs(found / expected - 1).max() < 1e-11
    assert largest_error(state(run), state(whole)) < 1e-11


def test_a_finished_run_started_again_changes_nothing(home):
    run = small_run(home)
    train_here(run)
    before, files = state(run), curve(run)
    assert train_here(run).steps_done == STEPS
    assert same(state(run), before) and curve(run) == files


@pytest.mark.catalogue(43)
def test_what_changed_since_the_checkpoint_is_said_line_by_line(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(4))
    optimizer = replace(run.optimizer, learning_rate=0.003, decay_steps=None)
    train_here(replace(run, steps=8, optimizer=optimizer))
    told = (home / "small" / "log.txt").read_text().splitlines()
    start = next(place for place, line in enumerate(told) if line.startswith("resumed from"))
    assert told[start + 1 : start + 4] == [
        "optimizer.decay_steps: none (was 4)",
        "optimizer.learning_rate: 0.003 (was 0.005)",
        "steps: 8 (was 12)",
    ]
    assert " (was " not in "".join(told[start + 4 :])


def test_a_run_with_more_steps_done_than_asked_for_is_left_as_it_is(home):
    run = small_run(home)
    train_here(run)
    described = (home / "small" / "run.toml").read_text()
    assert train_here(replace(run, steps=7, checkpoint=replace(run.checkpoint, export=True))).steps_done == STEPS
    assert "already has 12 steps, steps = 7: nothing to do" in (home / "small" / "log.txt").read_text()
    assert (home / "small" / "run.toml").read_text() == described and not (home / "small" / "export").exists()
    train_here(run)
    events = [json.loads(line) for line in (home / "small" / "events.jsonl").read_text().splitlines() if line]
    assert account_of(events).restarts == ()  # every one of the three has ended in order


def test_what_is_known_of_weights_is_forgotten_when_others_are_loaded(home, monkeypatch):
    """Scales of weights that are gathered in fp8: after going back to a checkpoint they would be those of the lost steps."""
    forgotten: list[Share] = []
    monkeypatch.setattr(Share, "expect_other_weights", lambda share: forgotten.append(share))
    run = small_run(home)
    train_here(run, before_step=stop_at(5))
    forgotten.clear()
    counts: list[int] = []
    train_here(run, before_step=lambda trainer: counts.append(len(forgotten)))
    assert counts[0] == 1


def test_the_count_of_updates_is_restored(home):
    run = small_run(home)
    train_here(run, before_step=stop_at(5))
    counts = []
    train_here(run, before_step=lambda t: counts.append({float(s["step"]) for s in t.optimizer.state.values()}))
    assert counts == [{float(step)} for step in range(5, STEPS)]
