"""Storms of faults: what is drawn, what is told of it, and a short one for real."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path

import pytest
import torch
from api.validator import wrong
from train.small_runs import at_step, make_corpus, small_run, state, train_here

from ultrascale.api.stamp import stamped
from ultrascale.checkpoint import Slice, load_full, newest_valid, save
from ultrascale.cli.main import main
from ultrascale.cli.soak import table, to_json
from ultrascale.description.run import Run
from ultrascale.launch.restarts import RestartAccount
from ultrascale.soak import story, worker
from ultrascale.soak.storm import KINDS, ON_RANK_0, Planted, draw, fire, fired
from ultrascale.soak.story import StormOutcome, same_bits, same_state, soak, strikes_of
from ultrascale.train.trainer import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "faults.md"
NO_HANG_SECONDS = 12.0
"""A machine that is busy keeps no rank from its next beat for so long."""


def drawn(seed: int = 0, count: int = 200, **options) -> list[Planted]:
    kinds = options.pop("kinds", tuple(KINDS))
    return list(islice(draw(seed, kinds, world=4, mean_gap=12.0, interval=10), count))


def test_a_seed_decides_the_storm_and_every_kind_comes_as_often_as_every_other():
    assert drawn(3) == drawn(3) != drawn(4)
    counts = Counter(one.kind for one in drawn(count=10 * len(KINDS)))
    assert set(counts.values()) == {10} and counts.keys() == KINDS.keys()


def test_every_kind_of_fault_is_done_once_and_has_its_row_of_the_page():
    """A kind without code would end its rank by a KeyError, and count as an exception that the run survived."""
    done = [*worker._AT_ONCE, *worker._AT_A_MOMENT]
    assert sorted(done) == sorted(KINDS)
    assert {kind for kind in KINDS if KINDS[kind].strikes_save} <= {*worker._AT_ONCE}
    rows = {line.split("|")[1].strip() for line in PAGE.read_text().splitlines() if line.startswith("| ")}
    assert {str(kind.row) for kind in KINDS.values()} <= rows


def test_faults_come_one_after_the_other_and_kills_in_a_save_in_steps_that_save():
    faults = drawn()
    assert all(before.step < after.step for before, after in pairwise(faults))
    in_save = [one for one in faults if KINDS[one.kind].strikes_save]
    assert len({one.kind for one in in_save}) == 4 and {(one.step + 1) % 10 for one in in_save} == {0}
    assert {one.rank for one in in_save if one.moment in ON_RANK_0 and one.kind == "kill-in-save"} == {0}
    assert all(after.step > before.step + KINDS[before.kind].steps for before, after in pairwise(faults))
    assert {one.rank for one in faults} == {0, 1, 2, 3}


def test_a_fault_strikes_once(tmp_path):
    fault = drawn(count=1)[0]
    assert [fire(tmp_path, fault), fire(tmp_path, fault)] == [True, False]
    assert list(fired(tmp_path, drawn(count=3))) == [0]


@pytest.mark.parametrize("minutes", ["nan", "inf", "0"])
def test_a_storm_without_an_end_is_refused(tmp_path, capsys, minutes):
    assert main(["soak", "--minutes", minutes, "--folder", str(tmp_path / "soak")]) == 2
    assert "must be above 0 and finite" in capsys.readouterr().err and not (tmp_path / "soak").exists()


def test_a_kind_that_there_is_not_is_refused_with_those_there_are(tmp_path, capsys):
    assert main(["soak", "--faults", "earthquake", "--folder", str(tmp_path / "soak")]) == 2
    assert "'earthquake' is no fault" in capsys.readouterr().err
    assert main(["soak", "--processes", "3"]) == 2
    (tmp_path / "thesis.tex").touch()
    assert main(["soak", "--folder", str(tmp_path)]) == 2
    assert (tmp_path / "thesis.tex").exists()


def event(time: float, kind: str, step: int | None, **more: object) -> dict:
    return {"time": time, "event": kind, "step": step, **more}


def test_under_torchrun_no_fault_strikes_a_launcher_of_ours(tmp_path, capsys):
    assert main(["soak", "--torchrun", "--faults", "kill,terminate", "--folder", str(tmp_path / "soak")]) == 2
    said = capsys.readouterr().err
    assert "'terminate' strikes the launcher of `ultrascale train`, and with --torchrun there is none" in said
    assert "There are kill, kill-in-save, raise, " in said and not (tmp_path / "soak").exists()


def test_what_became_of_a_fault_is_read_from_the_events_of_the_run():
    events = [
        event(0.0, "start", 0),
        event(1.0, "stepped", 1),
        event(10.5, "failure", 17, cause="hang: no sign of life in step 17: ..."),
        event(12.0, "start", 10),
        event(13.0, "stepped", 11),
    ]
    fault = Planted(0, "stop", 17, 1, "forward")
    (strike,) = strikes_of([(fault, 5.0)], events)
    assert (strike.detected_by, strike.detect_seconds, strike.recover_seconds, strike.steps_lost) == ("watchdog", 5.5, 8.0, 7)
    (cut,) = strikes_of([(fault, 5.0)], [*events[:2], *events[3:], event(99.0, "stop", 50)])
    assert (cut.detected_by, cut.detect_seconds, cut.recover_seconds) == ("the command given again", None, 8.0)
    (lost,) = strikes_of([(fault, 14.0)], events)
    assert lost.recover_seconds is None
    outcome = StormOutcome([strike], 20, True, True, RestartAccount(), 20.0)
    assert outcome.holds and to_json(outcome)["kinds"]["stop"]["recover_seconds"] == {"median": 8.0, "max": 8.0}
    assert wrong(stamped("soak", to_json(outcome) | {"processes": 2, "seed": 0})) == []
    assert not replace(outcome, strikes=[strike, lost]).holds
    assert not replace(outcome, equal_state=False).holds


@pytest.mark.catalogue(2, 3)
def test_control_a_restart_without_the_moments_is_told_from_the_calm(tmp_path):
    make_corpus(tmp_path / "tokens")
    stormy, calm = (small_run(tmp_path, name=name, steps=6) for name in ("stormy", "calm"))
    train_here(calm)
    train_here(stormy, before_step=at_step(3, Trainer.request_stop))
    saved = newest_valid(tmp_path / "stormy" / "checkpoints")
    assert saved is not None
    tensors, facts = load_full(saved)
    forgotten = {name: torch.zeros_like(one) if ".exp_avg." in name else one for name, one in tensors.items()}
    save(saved.parent, 3, forgotten, facts)
    train_here(stormy)
    assert story._curve(stormy) != story._curve(calm) and not same_state(stormy, calm)


@pytest.mark.catalogue(2, 3)
def test_control_one_bit_of_one_moment_is_seen_in_the_comparison_with_the_calm(tmp_path):
    make_corpus(tmp_path / "tokens")
    runs = [small_run(tmp_path, name=name, steps=2) for name in ("stormy", "calm")]
    for run in runs:
        train_here(run)
    assert same_state(*runs)
    spoil(runs[0])
    assert not same_state(*runs)


def test_bits_are_compared_and_not_values():
    zero, nan = torch.zeros(3), torch.full((3,), float("nan"))
    assert torch.equal(zero, -zero) and not same_bits(zero, -zero)
    assert same_bits(nan, nan.clone()) and same_bits(zero, zero.clone()) and not same_bits(zero, zero.to(torch.int32))
    assert same_bits(torch.tensor(1.5, dtype=torch.bfloat16), torch.tensor(1.5, dtype=torch.bfloat16))


def test_a_fault_without_effect_does_not_count_as_survived_by_the_restart_after_the_next():
    events = [
        event(0.0, "start", 0),
        event(1.0, "stepped", 1),
        event(9.0, "failure", 17, cause="rank 1 was ended by SIGKILL"),
        event(12.0, "start", 10),
        event(13.0, "stepped", 11),
    ]
    idle, kill = Planted(0, "stop", 12, 1, "forward"), Planted(1, "kill", 17, 1, "forward")
    first, second = strikes_of([(idle, 5.0), (kill, 8.0)], events)
    assert (first.had_effect, first.is_survived, first.recover_seconds) == (False, False, None)
    assert (second.is_survived, second.recover_seconds) == (True, 5.0)
    outcome = StormOutcome([first, second], 20, True, True, RestartAccount(), 20.0)
    assert outcome.holds
    assert {kind: (one["survived"], one["without_effect"]) for kind, one in to_json(outcome)["kinds"].items()} == {
        "kill": (1, 0),
        "stop": (0, 1),
    }
    assert "1 of 2 faults survived, 1 without effect, in 20 s and 20 steps" in table(outcome)


def test_a_fault_that_the_run_goes_over_is_told_with_who_saw_it_and_when_it_was_over():
    disk, slow, still = (
        Planted(0, "full-disk", 9, 1, "x"),
        Planted(1, "slow", 15, 0, "forward"),
        Planted(2, "stall", 50, 1, "x"),
    )
    events = [event(5.5, "save failed", 10, cause="full"), event(9.0, "straggler", 30, rank=0, cause="slow")]
    found = strikes_of([(disk, 5.0), (slow, 7.0), (still, 20.0)], events, {0: 6.0, 1: 12.0, 2: 22.0})
    assert [(one.detected_by, one.detect_seconds, one.recover_seconds) for one in found] == [
        ("the save, again a step later", 0.5, 1.0),
        ("the comparison of ranks", 2.0, 5.0),
        ("patience", None, 2.0),
    ]
    assert all(one.is_survived and one.steps_lost == 0 for one in found)
    assert strikes_of([], events) == []
    (never,) = strikes_of([(disk, 5.0)], events, {})
    assert never.had_effect and not never.is_survived


@pytest.mark.catalogue(20, 21, 25, 32, 33)
def test_disks_that_are_full_or_fail_or_are_slow_and_ranks_that_are_need_no_restart_and_leave_no_trace(tmp_path):
    kinds = ("full-disk", "flaky-disk", "slow-disk", "stall", "slow")
    storm = {"kinds": kinds, "num_faults": 5, "mean_gap": 2.0, "seed": 1, "hang_seconds": NO_HANG_SECONDS}
    outcome = soak(tmp_path / "soak", processes=2, say=lambda line: None, **storm)
    assert outcome.holds and len(outcome.strikes) == 5 and all(one.is_survived for one in outcome.strikes)
    met = {one.fault.kind: one.detected_by for one in outcome.strikes}
    assert met["full-disk"] == "the save, again a step later" and met["flaky-disk"] == "the write, done again"
    assert outcome.steps > 60


def spoil(run: Run) -> None:
    tensors = {name: tensor.clone() for name, tensor in state(run).items()}
    moment = tensors["optimizer.exp_avg.norm.weight"]
    moment.view(torch.int32)[3] ^= 1
    cut = {name: Slice(tensor, tuple(tensor.shape), (0,) * tensor.dim()) for name, tensor in tensors.items()}
    save(Path(run.folder) / run.name / "checkpoints", 3, cut, {"steps_done": 3})


@pytest.mark.catalogue(2)
@pytest.mark.parametrize("torchrun", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["train", "torchrun"])
def test_a_run_survives_kills_of_random_ranks_at_random_moments_to_the_same_bits(tmp_path, torchrun):
    storm = {"kinds": ("kill",), "num_faults": 3, "mean_gap": 4.0, "seed": 1, "hang_seconds": 90.0}
    outcome = soak(tmp_path / "soak", processes=2, say=lambda line: None, torchrun=torchrun, **storm)
    assert outcome.holds and len(outcome.strikes) == 3
    assert {one.detected_by for one in outcome.strikes} == {"agent"}
    assert max(one.steps_lost for one in outcome.strikes) <= 10
    assert len(outcome.account.restarts) == 3
    rows = [json.loads(line) for line in (tmp_path / "soak" / "stormy" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, outcome.steps + 1))


@pytest.mark.nightly
@pytest.mark.catalogue(1, 2, 3, 6, 7, 10, 17, 18, 19, 20, 21, 24, 25, 27, 28, 32, 33)
@pytest.mark.timeout(3600)  # 42 faults, a quarter of an hour where many share a machine, and as many steps in the calm
@pytest.mark.parametrize("processes", [2, 4])
def test_a_storm_of_every_kind_leaves_no_trace(tmp_path, processes):
    outcome = soak(tmp_path / "soak", processes=processes, num_faults=2 * len(KINDS), say=lambda line: None)
    assert outcome.holds
