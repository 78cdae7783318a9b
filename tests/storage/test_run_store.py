"""A run kept in a store: uploaded behind training, gone on with on a machine whose disk is empty, to the same bits."""

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from s3_server import Answer, Proxy
from train.small_runs import curve, make_corpus, same, small_run, state, stop_at, train_here

from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.stored.fetch import stored_checkpoints, verify_stored
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run
from ultrascale.storage import open_store
from ultrascale.train.folder import run_store
from ultrascale.train.folder.claim import take_over
from ultrascale.train.folder.run_folder import RunFolder


@pytest.fixture(autouse=True)
def small_parts(part_bytes: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Many parts of a small checkpoint, and a store that is given up on soon."""
    part_bytes(10_000)
    monkeypatch.setattr(run_store, "open_store", partial(open_store, patience_seconds=2))


def stored_run(folder: Path, url: str, **checkpoint: Any) -> Run:
    """The small run, saved every 3 steps, and kept at `url`."""
    folder.mkdir(exist_ok=True)
    if not (folder / "tokens.bin").exists():
        make_corpus(folder / "tokens")
    run = small_run(folder)
    return replace(run, checkpoint=replace(run.checkpoint, **{"every_steps": 3, "store": url} | checkpoint))


def steps_in(url: str) -> list[int]:
    """Steps of the store's checkpoints, all of which verify."""
    store = open_store(f"{url}/small", to_write=True)
    found = stored_checkpoints(store)
    for one in found:
        assert one.index is not None, one.problem
        verify_stored(store, one.index)
    return [one.step for one in found]


@pytest.fixture
def straight(tmp_path: Path) -> Run:
    """The same run without a store and without an end before its last step."""
    folder = tmp_path / "straight"
    folder.mkdir()
    make_corpus(folder / "tokens")
    run = small_run(folder)
    train_here(run)
    return run


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_machine_with_an_empty_disk_goes_on_to_the_same_bits(tmp_path: Path, url: str, straight: Run, asynchronous: bool):
    first = stored_run(tmp_path / "first", url, asynchronous=asynchronous)
    assert train_here(first, before_step=stop_at(7)).stopped
    assert steps_in(url)[0] == 7
    shutil.rmtree(tmp_path / "first")
    second = stored_run(tmp_path / "second", url, asynchronous=asynchronous)
    train_here(second)
    assert "resumed from" in (tmp_path / "second/small/log.txt").read_text()
    assert same(state(second), state(straight)) and curve(second) == curve(straight)
    assert steps_in(url)[0] == 12


@pytest.mark.parametrize("vendor", ["azure_url", "google_url", "hub_url"])
def test_a_bucket_of_another_vendor_does_the_same(tmp_path: Path, request: pytest.FixtureRequest, straight: Run, vendor: str):
    url = request.getfixturevalue(vendor)
    first = stored_run(tmp_path / "first", url, asynchronous=True)
    assert train_here(first, before_step=stop_at(7)).stopped
    assert steps_in(url)[0] == 7
    second = stored_run(tmp_path / "second", url)
    train_here(second)
    assert "resumed from" in (tmp_path / "second/small/log.txt").read_text()
    assert same(state(second), state(straight)) and curve(second) == curve(straight)


def test_a_folder_as_a_store_does_the_same(tmp_path: Path, straight: Run):
    first = stored_run(tmp_path / "first", str(tmp_path / "shared"))
    train_here(first, before_step=stop_at(5))
    second = stored_run(tmp_path / "second", str(tmp_path / "shared"))
    train_here(second)
    assert same(state(second), state(straight))


def test_the_last_copy_on_disk_is_used_without_asking_for_a_part(tmp_path: Path, proxy: Proxy, straight: Run):
    run = stored_run(tmp_path / "first", "s3://bucket/local-copy")
    train_here(run, before_step=stop_at(7))
    proxy.seen.clear()
    train_here(run)
    before_saving = [one for one in proxy.seen if one.is_part and one.method == "GET"]
    assert before_saving == [] and same(state(run), state(straight))


def test_old_ones_are_removed_there_as_on_disk_and_nothing_is_left_over(tmp_path: Path, url: str):
    train_here(stored_run(tmp_path / "run", url, keep=2))
    steps = steps_in(url)
    assert steps[0] == 12 and len(steps) == 2
    store = open_store(f"{url}/small")
    named = {key for one in stored_checkpoints(store) if one.index for key in one.index.part_keys()}
    assert {one.key for one in store.walk("checkpoints") if not one.key.endswith(".json")} == named


def test_a_damaged_copy_on_disk_is_replaced_by_the_stores(tmp_path: Path, url: str, straight: Run):
    run = stored_run(tmp_path / "run", url)
    train_here(run, before_step=stop_at(7))
    for shard in (tmp_path / "run/small/checkpoints").glob("step-*/rank-*.safetensors"):
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        shard.write_bytes(data)
    train_here(run)
    assert f"step 7 came from {url}" in (tmp_path / "run/small/log.txt").read_text()
    assert same(state(run), state(straight))


def test_a_step_waits_for_no_upload(tmp_path: Path, proxy: Proxy):
    """Uploads hang until the last step is done; all steps are done all the same."""
    released = threading.Event()

    def rule(request: Any) -> Answer | None:
        if request.is_part and request.method == "PUT" and not released.is_set():
            return Answer(delay=0.2, status=503)
        return None

    proxy.rule = rule
    run = stored_run(tmp_path / "run", "s3://bucket/slow")
    steps: list[int] = []

    def look(trainer: Any) -> None:
        steps.append(trainer.steps_done)
        if trainer.steps_done == 11:
            released.set()

    train_here(run, before_step=look)
    assert steps == list(range(12)) and steps_in("s3://bucket/slow")[0] == 12
    assert "on disk only for now" in (tmp_path / "run/small/log.txt").read_text()


def test_a_store_that_fails_is_told_and_training_goes_on(tmp_path: Path, proxy: Proxy, straight: Run):
    failing = True

    def rule(request: Any) -> Answer | None:
        return Answer(status=507, code="XMinioStorageFull") if failing and request.is_part else None

    proxy.rule = rule
    run = stored_run(tmp_path / "run", "s3://bucket/full")
    with pytest.raises(CheckpointError, match=r"is whole, but is not in s3://bucket/full/small: .*the store is full"):
        train_here(run)
    assert same(state(run), state(straight))
    failing = False
    train_here(run)
    assert steps_in("s3://bucket/full") == [12]


def test_a_store_of_another_run_is_refused_before_anything_is_written(tmp_path: Path, url: str):
    train_here(stored_run(tmp_path / "one", url), before_step=stop_at(4))
    before = {one.key: one.bytes for one in open_store(url).walk("")}
    other = stored_run(tmp_path / "two", url)
    other = replace(other, model=replace(other.model, hidden_size=32))
    with pytest.raises(CheckpointError, match="holds another run: its model is not this one's"):
        train_here(other)
    train_here(replace(stored_run(tmp_path / "three", url), checkpoint=small_run(tmp_path).checkpoint))
    with pytest.raises(CheckpointError, match="holds another run than"):
        train_here(stored_run(tmp_path / "three", url))
    assert {one.key: one.bytes for one in open_store(url).walk("")} == before


def test_of_two_starts_the_later_one_owns_the_run(tmp_path: Path, url: str):
    """The first finds that out before it publishes again, and ends with its state on disk."""
    first, second = stored_run(tmp_path / "one", url), stored_run(tmp_path / "two", url)
    run_here = []

    def other_start(trainer: Any) -> None:
        if trainer.steps_done == 7 and not run_here:
            run_here.append(True)
            train_here(second)

    with pytest.raises(CheckpointError, match="was taken over by another start of this run"):
        train_here(first, before_step=other_start)
    assert steps_in(url)[0] == 12
    assert same(state(second), state(first))


def test_the_history_of_a_run_that_went_on_elsewhere_is_brought_and_ones_own_end_is_kept(tmp_path: Path):
    store, run = open_store(tmp_path / "store"), small_run(tmp_path)
    first, second = RunFolder(tmp_path / "one/small"), RunFolder(tmp_path / "two/small")
    take_over(store, run, first)
    first.write_text("log.txt", "a\nlong and never uploaded\n")
    store.write("log.txt", b"a\n")
    take_over(store, run, second)
    assert (second.path / "log.txt").read_text() == "a\n"
    store.write("log.txt", b"a\nb\n")
    take_over(store, run, first)
    assert (first.path / "log.txt").read_text() == "a\nb\n"
    first.write_text("log.txt", "a\nredone\n")
    take_over(store, run, first)  # nobody else was there meanwhile
    assert (first.path / "log.txt").read_text() == "a\nredone\n"
    first.write_text("log.txt", "a\nb\nc\n")
    take_over(store, run, second)  # which uploads nothing
    take_over(store, run, first)
    assert (first.path / "log.txt").read_text() == "a\nb\nc\n"


def test_the_export_is_there_too(tmp_path: Path, url: str):
    train_here(stored_run(tmp_path / "run", url, export=True))
    local = tmp_path / "run/small/export"
    store = open_store(f"{url}/small/export")
    assert {one.key: store.read(one.key) for one in store.walk("")} == {
        path.name: path.read_bytes() for path in local.iterdir()
    }


def test_a_run_is_gone_on_with_by_its_url_alone(tmp_path: Path, url: str):
    train_here(stored_run(tmp_path / "one", url), before_step=stop_at(4))
    folder = run_store.fetch_run(f"{url}/small", tmp_path / "fresh")
    assert folder == tmp_path / "fresh/small" and (folder / "run.toml").exists()
    assert run_store.fetch_run(f"{url}/small", tmp_path / "fresh") == folder
    (tmp_path / "other/small").mkdir(parents=True)
    with pytest.raises(SpecError, match="is not the run that"):
        run_store.fetch_run(f"{url}/small", tmp_path / "other")
    with pytest.raises(SpecError, match="holds no run"):
        run_store.fetch_run(f"{url}/none", tmp_path / "fresh")


def test_no_credential_is_in_any_file(tmp_path: Path, url: str):
    train_here(stored_run(tmp_path / "run", url, export=True))
    from s3_server import SECRET

    texts = [path.read_bytes() for path in (tmp_path / "run/small").rglob("*") if path.is_file()]
    texts += [open_store(url).read(one.key) for one in open_store(url).walk("")]
    assert texts and not any(SECRET.encode() in text or b"AKIATEST" in text for text in texts)
    assert json.loads(open_store(f"{url}/small").read("run.json")).keys() == {"run_id", "writer"}
