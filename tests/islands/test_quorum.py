"""Islands that die, are silent or come back: the others go on, and what they compute is what they compute if told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from islands.apart import LONGEST_SECONDS, Started, start, until
from islands.runs import ONE, island, run_of
from islands.test_equalities import EXPERTS, TOLERANCE, by_hand
from launch.families import launched
from train.small_runs import MODEL, at_step, curve, largest_error, make_corpus, rows, same, state, train_here, train_ranks

from ultrascale.checkpoint import newest_valid
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run, Source
from ultrascale.description.sections.islands import Islands
from ultrascale.islands.admission import Decision
from ultrascale.islands.link import Group
from ultrascale.islands.presence import island_of
from ultrascale.islands.quorum import Quorum
from ultrascale.islands.store import FolderStore
from ultrascale.launch import apart
from ultrascale.train.trainer import Trainer

SETTINGS = Islands(3, every_steps=3, quorum=1, silent_seconds=5.0)
BATCH = 12
"""Sequences, of three islands."""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    make_corpus(tmp_path / "tokens")
    return tmp_path


def run_at(home: Path, name: str, settings: Islands = SETTINGS, **changes: Any) -> Run:
    run = run_of(home, name, islands=settings, **changes)
    return replace(run, batch=replace(run.batch, sequences_per_batch=BATCH, ramp=()))


def told_to_skip(monkeypatch: pytest.MonkeyPatch, away: set[tuple[int, int]]) -> None:
    """Leave out these (outer step, island), though they are present: the others compute what they would had it died."""
    proposed = Quorum._proposed

    def without(quorum: Quorum, step: int, attempt: int, expected: Sequence[str], gone: dict[str, str]) -> Decision:
        islands, admission = quorum.islands, quorum.admission
        after = islands.next_outer_step(step, step + islands.every_steps)
        absent = set(range(islands.count)) - {island_of(member) for member in admission.last.members}
        returning = [number for number in absent if (step, number) in away and (after, number) not in away]
        for _ in admission.poll("for islands that come back"):
            quorum._retry_failed(step)
            if all(admission.knocking(number) is not None for number in returning):
                break
        skipped = {name: "is told to be left out" for name in expected if (step, island_of(name)) in away}
        decision = proposed(quorum, step, attempt, expected, skipped | gone)
        return replace(decision, joining=tuple(name for name in decision.joining if (after, island_of(name)) not in away))

    monkeypatch.setattr(Quorum, "_proposed", without)


def finished(started: list[Started], steps: int = 12) -> None:
    found = [one.outcome() for one in started]
    assert found == [{"steps_done": steps, "stopped": False}] * len(found)


def dies_at(step: int, *islands: int) -> Callable[[Trainer], None]:
    """Is killed before that step, if it is one of `islands`."""

    def act(trainer: Trainer) -> None:
        if trainer.steps_done == step and trainer.ranks.island in islands:
            os.kill(os.getpid(), signal.SIGKILL)

    return act


def text(run: Run, number: int = 0) -> str:
    return (Path(run.folder) / run.name / (f"islands/{number}" if number else "") / "log.txt").read_text()


def goes_on(run: Run) -> bool:
    """Whether the others have gone on without an island."""
    return (Path(run.folder) / run.name / "log.txt").exists() and "without it" in text(run)


Told = Callable[[set[tuple[int, int]], Run], Run]


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Told:
    """Trains the run like another of which islands are told to be left out although they are there; once, because several tests
    compare with the same. All end with the same weights."""
    home, done = tmp_path_factory.mktemp("told"), {}
    make_corpus(home / "tokens")

    def train(away: set[tuple[int, int]], like: Run) -> Run:
        data = replace(like.data, sources=(Source(str(home / "tokens")),))
        run = replace(like, name="told", folder=str(home), data=data)
        asked = f"{sorted(away)} {run}"
        if asked not in done:
            run = replace(run, name=f"told-{len(done)}")
            with pytest.MonkeyPatch.context() as patch:
                told_to_skip(patch, away)
                found = start(run, home)
            for one in found:
                if (12, one.island) not in away:
                    finished([one])
            done[asked] = run
        return done[asked]

    return train


def test_three_islands_started_apart_are_those_started_together(home: Path) -> None:
    together, alone = run_at(home, "together", replace(SETTINGS, quorum=0)), run_at(home, "alone")
    assert not any("error" in one for one in train_ranks(together))
    finished(start(alone, home))
    for number in range(3):
        assert same(state(island(alone, number) if number else alone), state(island(together, number) if number else together))
    assert curve(alone) == curve(together)
    assert (
        rows(alone, "outer/steps", "outer/sent_bytes", "outer/islands")[-1]
        == rows(together, "outer/steps", "outer/sent_bytes", "outer/islands")[-1]
    )


def test_an_island_with_another_learning_rate_is_refused(home: Path) -> None:
    run = run_at(home, "rates", replace(SETTINGS, count=2))
    other = replace(run, optimizer=replace(run.optimizer, warmup_steps=1))
    started = [Started(one, number, home / "processes", None) for number, one in enumerate((run, other))]
    for found in [one.outcome() for one in started]:
        assert found.get("error") == "SpecError" and "another model, batch, optimizer" in found["text"]


def test_islands_go_on_without_one_that_is_killed_as_if_told_to(home: Path, told: Told) -> None:
    run = run_at(home, "killed")
    first, second, third = start(run, home, before_step=dies_at(4, 1))
    finished([first, third])
    assert second.outcome() == {"exit": -signal.SIGKILL}
    assert "island 1 was silent for 5 s at the outer step after step 6: 2 of 3 islands go on" in text(run)
    assert [row[0] for row in rows(run, "outer/islands")] == [3, 3, 3, 3, 3] + [2] * 7
    all_the_same(told, {(6, 1), (9, 1), (12, 1)}, run, 0, 2)


def waits_for(step: int, number: int) -> Callable[[Trainer], None]:
    """Is held up before that step until this island has come back and asks to be let in."""

    def act(trainer: Trainer) -> None:
        if trainer.steps_done == step and trainer.ranks.island != number:
            assert trainer.outer is not None and trainer.outer.quorum is not None
            admission = trainer.outer.quorum.admission
            until(lambda: admission.knocking(number), f"island {number} to knock")

    return act


def both(*acts: Callable[[Trainer], None]) -> Callable[[Trainer], None]:
    def act(trainer: Trainer) -> None:
        for one in acts:
            one(trainer)

    return act


def in_exchange(monkeypatch: pytest.MonkeyPatch, which: int, number: int, does: signal.Signals) -> None:
    """Send the process of an island a signal between the two rounds of messages of its outer step number `which`."""
    gather, counted = Group._gather, [0]

    def interrupted(group: Group, row: torch.Tensor) -> torch.Tensor:
        if row.dtype == torch.uint8 and group.island == number:
            counted[0] += 1
            if counted[0] == which:
                # To this thread: after os.kill another thread may take the signal, and this one sends its messages meanwhile.
                signal.pthread_kill(threading.get_ident(), does)
        return gather(group, row)

    monkeypatch.setattr(Group, "_gather", interrupted)


def all_the_same(told: Told, away: set[tuple[int, int]], run: Run, *who: int) -> None:
    """These islands have ended with the state that they end with where they are told who is left out when."""
    expected = told(away, run)
    for number in who:
        assert same(state(island(run, number) if number else run), state(island(expected, number) if number else expected))
    if 0 in who:
        assert curve(run) == curve(expected)


HARD = replace(SETTINGS, every_steps=4, fragments=2, overlap_steps=1, dtype="int4")
"""Momentum, residuals, and fragments under way at most steps: outer steps after every second one."""


@pytest.mark.parametrize(("settings", "dies", "away", "optimizer"), [
    (SETTINGS, 4, {(6, 1), (9, 1)}, "adamw"), (HARD, 5, {(6, 1), (8, 1)}, "adamw"),
    (SETTINGS, 4, {(6, 1), (9, 1)}, "adamw-8bit"),
])  # fmt: skip
def test_an_island_that_comes_back_takes_the_state_of_another(
    home: Path, told: Told, settings: Islands, dies: int, away: set[tuple[int, int]], optimizer: Any
) -> None:
    run = run_at(home, "returns", settings)
    run = replace(run, optimizer=replace(run.optimizer, name=optimizer))
    hold = max(step for step, _ in away) - 1
    first, second, third = start(run, home, before_step=both(dies_at(dies, 1), waits_for(hold, 1)))
    assert second.outcome() == {"exit": -signal.SIGKILL}
    until(lambda: goes_on(run), "island 1 to be left out")
    again = Started(run, 1, home / "processes", None)
    finished([first, again, third])
    assert "island 1 took the state of island 0, at step" in text(run, 1)
    assert rows(run, "outer/islands")[-1] == (3,)
    all_the_same(told, away, run, 0, 1, 2)


@pytest.mark.parametrize(("settings", "which", "away"), [
    (SETTINGS, 2, {(6, 1), (9, 1), (12, 1)}), (HARD, 3, {(6, 1), (8, 1), (10, 1), (12, 1)}),
])  # fmt: skip
def test_an_outer_step_in_which_an_island_is_killed_is_done_again(
    home: Path, monkeypatch: pytest.MonkeyPatch, told: Told, settings: Islands, which: int, away: set[tuple[int, int]]
) -> None:
    run = run_at(home, "amid", settings)
    in_exchange(monkeypatch, which, 1, signal.SIGKILL)
    first, second, third = start(run, home)
    monkeypatch.undo()
    assert second.outcome() == {"exit": -signal.SIGKILL}
    finished([first, third])
    assert "is done again from the same deltas" in text(run)
    all_the_same(told, away, run, 0, 2)


def test_moves_are_averaged_over_the_islands_that_are_there(home: Path, told: Told) -> None:
    run = told({(step, 2) for step in (6, 9, 12)}, run_at(home, "fewer"))
    found = {name: tensor for name, tensor in state(run).items() if name.startswith("model.")}
    assert largest_error(found, by_hand(replace(run, islands=replace(run.islands, quorum=0)), {2: 6})) < TOLERANCE


OTHER_SIZES = replace(SETTINGS, dp=(1, 2, 1))


def test_moves_of_islands_that_differ_count_by_the_dp_of_those_that_are_there(home: Path, told: Told) -> None:
    run = run_at(home, "sizes", OTHER_SIZES, layout=replace(ONE, zero_stage=3))
    run = told({(step, 2) for step in (6, 9, 12)}, run)
    found = {name: tensor for name, tensor in state(run).items() if name.startswith("model.")}
    alone = replace(run, layout=ONE, islands=replace(run.islands, quorum=0))
    assert largest_error(found, by_hand(alone, {2: 6})) < TOLERANCE


@pytest.mark.parametrize(("settings", "layout", "model", "away"), [
    (replace(HARD, dp=(1, 2, 1)), replace(ONE, zero_stage=3), MODEL, {(6, 1), (8, 1)}),
    (replace(OTHER_SIZES, count=2, dp=(2, 1)), replace(ONE, tp=2, ep=2), EXPERTS, {(6, 1), (9, 1)}),
])  # fmt: skip
def test_an_island_of_another_dp_is_killed_and_comes_back_as_if_told_to(
    home: Path, told: Told, settings: Islands, layout: Layout, model: Model, away: set[tuple[int, int]]
) -> None:
    """All of its state, experts over other ranks too, comes from an island whose ranks hold other parts of it."""
    run = run_at(home, "other", settings, layout=replace(layout, dp=settings.dp[0]), model=model)
    hold = max(step for step, _ in away) - 1
    started = start(run, home, before_step=both(dies_at(5, 1), waits_for(hold, 1)))
    assert started[1].outcome() == {"exit": -signal.SIGKILL}
    until(lambda: goes_on(run), "island 1 to be left out")
    started[1] = Started(run, 1, home / "processes", None)
    finished(started)
    assert "island 1 took the state of island 0, at step" in text(run, 1)
    all_the_same(told, away, run, *range(settings.count))


@pytest.mark.parametrize(("settings", "killed"), [
    (SETTINGS, 1), (replace(SETTINGS, dp=(2, 1, 1)), 0),
    pytest.param(replace(SETTINGS, dp=(2, 1, 1)), 1, marks=pytest.mark.nightly),
])  # fmt: skip
def test_others_go_on_where_one_is_killed_amid_giving_or_taking_a_state(
    home: Path, monkeypatch: pytest.MonkeyPatch, told: Told, settings: Islands, killed: int
) -> None:
    """After the outer step after step 9 island 0 gives its state to island 1."""
    run = run_at(home, "hands-over", settings, layout=replace(ONE, dp=(settings.dp or (1,))[0], zero_stage=3))
    hand, counted = Group.broadcast, [0]

    def interrupted(group: Group, tensor: torch.Tensor, index: int) -> None:
        counted[0] += group.island == killed
        if counted[0] == 9:  # amid the tensors
            os.kill(os.getpid(), signal.SIGKILL)
        hand(group, tensor, index)

    monkeypatch.setattr(Group, "broadcast", interrupted)
    first, second, third = start(run, home, before_step=both(dies_at(4, 1), waits_for(8, 1)))
    assert second.outcome() == {"exit": -signal.SIGKILL}
    until(lambda: "without it" in text(run, 2), "island 1 to be left out")
    again = Started(run, 1, home / "processes", None)
    monkeypatch.undo()
    finished([third] if killed == 0 else [first, third])
    assert again.outcome() == {"exit": -signal.SIGKILL} if killed == 1 else "error" in again.outcome()
    away = {(6, 1), (9, 1), (12, 1)} | ({(12, 0)} if killed == 0 else set())
    all_the_same(told, away, run, *((2,) if killed == 0 else (0, 2)))


def test_moves_of_an_island_that_dies_before_it_has_the_mean_are_not_in_it(
    home: Path, monkeypatch: pytest.MonkeyPatch, told: Told
) -> None:
    run, says, counted = run_at(home, "almost"), FolderStore.set, [0]

    def interrupted(store: FolderStore, name: str, word: str) -> None:
        if "/done/1-" in name:
            counted[0] += 1
            if counted[0] == 2:  # the others have its deltas, and the mean
                os.kill(os.getpid(), signal.SIGKILL)
        says(store, name, word)

    monkeypatch.setattr(FolderStore, "set", interrupted)
    first, _, third = start(run, home)
    monkeypatch.undo()
    finished([first, third])
    all_the_same(told, {(6, 1), (9, 1), (12, 1)}, run, 0, 2)


def test_two_of_three_islands_die_one_after_the_other(home: Path, told: Told) -> None:
    run = run_at(home, "dwindles")
    first, second, third = start(run, home, before_step=both(dies_at(4, 0), dies_at(7, 2)))
    finished([second])
    assert first.outcome() == third.outcome() == {"exit": -signal.SIGKILL}
    all_the_same(told, {(6, 0), (9, 0), (12, 0), (9, 2), (12, 2)}, run, 1)


def test_one_island_goes_on_where_all_others_die_at_once_and_comes_below_its_quorum(home: Path, told: Told) -> None:
    run = run_at(home, "alone", HARD)
    first, second, third = start(run, home, before_step=dies_at(5, 0, 1))
    finished([third])
    assert first.outcome() == second.outcome() == {"exit": -signal.SIGKILL}
    all_the_same(told, {(step, i) for step in (6, 8, 10, 12) for i in (0, 1)}, run, 2)
    two = run_at(home, "two", replace(SETTINGS, quorum=2))
    first, second, third = start(two, home, before_step=dies_at(4, 0, 1))
    expected = "island 2 ends, because 1 of 3 islands are there at the outer step after step 6, and islands.quorum is 2."
    assert third.outcome()["text"].startswith(expected)
    again = start(two, home)
    finished(again)


@pytest.mark.parametrize("amid", [False, True])
def test_an_island_that_was_stopped_finds_itself_left_out_and_comes_back(
    home: Path, monkeypatch: pytest.MonkeyPatch, told: Told, amid: bool
) -> None:
    run = run_at(home, "silent")
    stops = at_step_of(4, 1, lambda: None if amid else os.kill(os.getpid(), signal.SIGSTOP))
    if amid:
        in_exchange(monkeypatch, 2, 1, signal.SIGSTOP)
    first, second, third = start(run, home, before_step=both(stops, waits_for(8, 1)))
    monkeypatch.undo()
    until(lambda: goes_on(run), "island 1 to be left out")
    second.kill(signal.SIGCONT)
    finished([first, second, third])
    assert "island 1 was left out of the outer step after step 6: it was silent for 5 s" in text(run, 1)
    all_the_same(told, {(6, 1), (9, 1)}, run, 0, 1, 2)


def at_step_of(step: int, number: int, act: Callable[[], None]) -> Callable[[Trainer], None]:
    return lambda trainer: act() if (trainer.steps_done, trainer.ranks.island) == (step, number) else None


def test_an_island_of_several_ranks_dies_with_one_of_them_and_comes_back(home: Path, told: Told) -> None:
    run = run_at(home, "ranks", replace(SETTINGS, count=2), layout=replace(ONE, dp=2, zero_stage=3))

    def dies(trainer: Trainer) -> None:
        if (trainer.steps_done, trainer.ranks.island, trainer.ranks.rank) == (4, 1, 1):
            os.kill(os.getpid(), signal.SIGKILL)

    first, second = start(run, home, before_step=both(dies, waits_for(8, 1)))
    assert second.outcome()["error"] == "LostRankError"
    until(lambda: goes_on(run), "island 1 to be left out")
    again = Started(run, 1, home / "processes", None)
    finished([first, again])
    all_the_same(told, {(6, 1), (9, 1)}, run, 0, 1)


def test_islands_that_are_all_stopped_go_on_as_if_they_had_not_been(home: Path) -> None:
    calm, stopped = run_at(home, "calm", HARD), run_at(home, "stopped", HARD)
    finished(start(calm, home))
    found = start(stopped, home, before_step=at_step(7, lambda trainer: os.kill(os.getpid(), signal.SIGTERM)))
    assert [one.outcome() for one in found] == [{"steps_done": 7, "stopped": True}] * 3
    finished(start(stopped, home))
    assert same(state(stopped), state(calm))
    assert curve(stopped) == curve(calm)


def test_others_go_on_without_an_island_that_is_asked_to_stop(home: Path) -> None:
    run = run_at(home, "leaves")
    first, second, third = start(run, home, before_step=at_step_of(4, 1, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    finished([first, third])
    assert second.outcome() == {"steps_done": 4, "stopped": True}
    assert "island 1 has left at the outer step after step 6" in text(run)
    late = Started(run, 1, home / "processes", None)
    assert late.outcome() == {"steps_done": 4, "stopped": True}
    assert "the others have finished the run without island 1: it stops at step 4" in text(run, 1)


def test_islands_end_with_the_server_that_they_meet_at_and_go_on_with_another(home: Path) -> None:
    run = run_at(home, "served", replace(SETTINGS, quorum=2))
    with served() as (server, url):
        run = replace(run, islands=replace(run.islands, meet=url))

        def ends(trainer: Trainer) -> None:
            if trainer.steps_done == 7 and trainer.ranks.island == 0:
                os.kill(server.pid, signal.SIGKILL)

        for one in start(run, home, before_step=ends):
            assert one.outcome()["text"].startswith(
                f"islands cannot agree any more, because the server at {url} (islands.meet)"
            )
    with served() as (server, url):
        finished(start(replace(run, islands=replace(run.islands, meet=url)), home))


@contextmanager
def served() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of words, and where it is."""
    words = [sys.executable, "-m", "ultrascale.islands.store", "127.0.0.1", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        yield server, server.stdout.readline().split()[-1]
        server.kill()


@pytest.mark.parametrize("degrees", [(), (1, 2)])
def test_a_killed_island_of_a_command_comes_back_and_a_stop_saves_all(home: Path, degrees: tuple[int, ...]) -> None:
    run = run_at(home, "commanded", replace(SETTINGS, count=2, silent_seconds=10.0, dp=degrees), steps=100_000)
    log, other = home / "commanded" / "log.txt", home / "commanded" / "islands" / "1" / "log.txt"
    with launched(run) as command:
        until(lambda: log.exists() and "step 5/" in log.read_text(), "the first steps")
        islands = [one for one in psutil.Process(command.pid).children() if one.cmdline()[-1] == "1"]
        ranks = [one for server in islands[0].children(recursive=True) for one in server.children()]
        assert len(ranks) == run.worlds[1]
        ranks[-1].kill()
        until(lambda: "has the state of island 0" in log.read_text(), "island 1 to come back")
        until(lambda: "\nstep" in other.read_text().partition("took the state")[2], "its next step")
        command.terminate()
        said, _ = command.communicate(timeout=LONGEST_SECONDS)
        assert command.returncode == 0, said
    assert "island 1 was started again at the outer step" in log.read_text() or "was silent" in log.read_text()
    assert {json.loads(line)["outer/islands"] for line in (log.parent / "metrics.jsonl").read_text().splitlines()} >= {2}
    assert all(newest_valid(one.parent / "checkpoints") is not None for one in (log, other))


def test_islands_with_a_quorum_are_started_apart(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_at(home, "refused", replace(SETTINGS, count=2))
    with pytest.raises(SpecError, match=r"islands\.quorum: needs each island to be started by itself, with its number"):
        train_here(run)
    monkeypatch.setattr(apart, "_devices", lambda: ["0"])
    with pytest.raises(SpecError, match=r"2 islands of 1 \+ 1 ranks need 2 GPUs, and it has 1\. Start some"):
        apart.launch_islands("", replace(run, device="auto"), ())
    with pytest.raises(SpecError, match=r"islands\.quorum: is 0, or there is one island, so that islands live"):
        train_here(replace(run, islands=replace(run.islands, quorum=0)), island=1)
