"""A sweep of machines that share no file system: each takes from the store what the others have measured."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
from train.small_runs import make_corpus, small_run

from ultrascale.cli.main import main
from ultrascale.config.resolve import to_toml
from ultrascale.description.run import Batch
from ultrascale.storage import open_store
from ultrascale.sweep import measured as at_work
from ultrascale.sweep.cells import CellPlace, Failure


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Command of a sweep of two cells, without the folder of the machine that it runs on."""
    make_corpus(tmp_path / "tokens")
    (tmp_path / "run.toml").write_text(to_toml(small_run(tmp_path, batch=Batch(sequence_length=12, sequences_per_batch=8))))
    return ["sweep", str(tmp_path / "run.toml"), "--layout.zero-stage", "0,3", "--steps", "1", "--warm", "1", "--json"]


def failing(places: Iterable[CellPlace], **_: object) -> None:
    for place in places:
        if place.failure is None:
            place.prepare()
            place.fail(Failure("killed", "ended by SIGKILL"))


@pytest.mark.parametrize("where", ["url", "hub_url"])
def test_a_second_machine_measures_nothing_again(
    words: list[str], tmp_path: Path, request: pytest.FixtureRequest, capfd, where: str
):
    url = request.getfixturevalue(where)
    assert main([*words, "--out", str(tmp_path / "one"), "--store", url]) == 0
    first = json.loads(capfd.readouterr().out)["measured"]
    assert {"results.csv", "memory.png"} <= {one.key for one in open_store(url).names("")[0]}
    assert main([*words, "--out", str(tmp_path / "two"), "--store", url]) == 0
    second = json.loads(capfd.readouterr().out)["measured"]
    assert [one["step_seconds"] for one in second] == [one["step_seconds"] for one in first] != []  # no two times are alike


def test_what_another_machine_measures_meanwhile_is_taken_when_its_turn_comes(
    words: list[str], tmp_path: Path, capfd, monkeypatch
):
    store = str(tmp_path / "store")
    measure_cell, measured = at_work.measure_cell, []

    def measure(place: CellPlace, **options: int) -> None:
        measured.append(place.path.name)
        if len(measured) == 1:  # before the first is measured here, the other machine has measured both
            assert main([*words, "--out", str(tmp_path / "two"), "--store", store]) == 0
        measure_cell(place, **options)

    monkeypatch.setattr(at_work, "measure_cell", measure)
    assert main([*words, "--out", str(tmp_path / "one"), "--store", store]) == 0
    assert len(measured) == 3 and measured[0] == measured[1] != measured[2]


def test_failures_are_shared_too_and_count_as_none_if_asked(words: list[str], tmp_path: Path, capfd, monkeypatch):
    store = str(tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(at_work, "measure_cell", lambda place, **_: failing([place]))
        assert main([*words, "--out", str(tmp_path / "one"), "--store", store]) == 1
    capfd.readouterr()
    assert main([*words, "--out", str(tmp_path / "two"), "--store", store]) == 1
    assert [one["outcome"] for one in json.loads(capfd.readouterr().out)["failed"]] == ["killed", "killed"]
    assert main([*words, "--out", str(tmp_path / "three"), "--store", store, "--again"]) == 0
    assert len(json.loads(capfd.readouterr().out)["measured"]) == 2
    assert not [one.key for one in open_store(store).walk("cells") if one.key.endswith("failed.json")]


def test_a_store_that_cannot_be_used_is_refused_before_anything_is_measured(words: list[str], tmp_path: Path, capfd):
    (tmp_path / "file").write_text("no folder")
    for place, code, said in (("ftp://host/x", 2, "ftp:// is none of"), (str(tmp_path / "file"), 1, "cannot be written")):
        assert main([*words, "--out", str(tmp_path / "one"), "--store", place]) == code
        told = capfd.readouterr().err
        assert said in told and "Traceback" not in told
