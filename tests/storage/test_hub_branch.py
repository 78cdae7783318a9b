"""A run on a branch of the Hub's stand-in, by the real huggingface_hub: commits, their condition, limits, refusals, and a run
of two ranks that goes on elsewhere. `test_store` and `test_faults` ask of it what they ask of buckets."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hub_server import COMMIT, REPO, SILENCE_SECONDS, Hub
from storage.test_cli import TRAIN, final_state, ultrascale, write_run
from storage.test_faults import LAST, save, upload, whole, write
from storage.test_run_store import steps_in, stored_run
from train.small_runs import same, stop_at, train_here, train_ranks

from ultrascale import checkpoint
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.stored.fetch import stored_checkpoints
from ultrascale.checkpoint.stored.publish import files_of, publish_stored, upload_files
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.storage import ConflictError, StorageError, Store, hub, hub_branch, open_store
from ultrascale.storage.errors import RefusedError
from ultrascale.train.folder import run_store
from ultrascale.train.folder.claim import take_over
from ultrascale.train.folder.run_folder import RunFolder

KEY = "hf_right"


@pytest.fixture(autouse=True)
def small_parts(part_bytes: Callable[[int], None]) -> None:
    part_bytes(700)


def branch(url: str, seconds: float = 5) -> Store:
    return open_store(url, patience_seconds=seconds, to_write=True)


def once(hub: Hub, work) -> None:
    """Have `work` done by somebody else right before the next commit arrives."""

    def before() -> None:
        hub.before_commit = lambda: None
        work()

    hub.before_commit = before


def test_parts_of_all_ranks_and_the_index_are_one_commit(hub_here: Hub, hub_url: str, tmp_path: Path):
    folder = save(tmp_path / "disk", 1)
    names = files_of(checkpoint.verify(folder))
    first, second = branch(hub_url), branch(hub_url)
    files = upload_files(first, folder, names[:1])
    files |= upload_files(second, folder, names[1:])
    assert not hub_here.files and sum(map(len, files.values())) > 5
    first.add_pending(json.loads(json.dumps(second.take_pending())))
    publish_stored(first, read_manifest(folder), files, before=None)
    assert len(hub_here.commits) == 1 and second.take_pending() == {}
    assert whole(second, tmp_path / "fresh") == 1


def test_a_save_costs_one_commit_and_two_for_each_that_goes(hub_here: Hub, hub_url: str, tmp_path: Path):
    store = branch(hub_url)
    counts = []
    for step in range(1, LAST + 1):
        upload(store, save(tmp_path / "disk", step), keep=1)
        store.flush()
        counts.append(len(hub_here.commits))
    assert counts == [1, 4, 7], hub_here.commits
    assert whole(branch(hub_url), tmp_path / "fresh") == LAST


def test_a_save_of_very_many_parts_is_several_commits_and_the_index_is_in_the_last(
    hub_here: Hub, hub_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_branch, "COMMIT_FILES", 4)
    assert write(branch(hub_url), tmp_path / "disk") == LAST
    kinds = [title.split()[0] for title in hub_here.commits]
    assert kinds[:3] == ["Write", "Write", "Publish"] and kinds.count("Publish") == LAST, hub_here.commits
    states = [*hub_here.history.values(), hub_here.files]
    assert max(len(now.keys() - before.keys()) for before, now in pairwise(states)) <= 4
    assert whole(branch(hub_url), tmp_path / "fresh") == LAST


def test_the_hub_is_not_asked_for_more_files_in_a_folder_nor_lines_of_gitattributes_than_it_takes(
    hub_here: Hub, hub_url: str, tmp_path: Path
):
    hub_here.most_in_folder = 10
    hub_here.most_large = len(hub_here.large)
    store = branch(hub_url)
    assert write(store, tmp_path / "disk", keep=2) == LAST
    assert max(len(found) for one in stored_checkpoints(store) if one.index for found in one.index.files.values()) > 5
    assert whole(open_store(hub_url), tmp_path / "fresh") == LAST
    assert {one.key for one in store.walk("checkpoints") if not one.key.endswith(".json")} == {
        key for one in stored_checkpoints(open_store(hub_url)) if one.index for key in one.index.part_keys()
    }


def test_what_waits_is_read_here_and_elsewhere_once_it_is_flushed(hub_here: Hub, hub_url: str):
    here, there = branch(hub_url), branch(hub_url)
    here.write("a/one", b"1")
    here.write("b/two", b"2")
    assert not hub_here.commits and there.names("a") == ([], [])
    assert here.size("a/one") == 1 and len(hub_here.commits) == 1
    here.write("b/two", b"3")
    assert here.names("a")[0][0].key == "one" and len(hub_here.commits) == 1
    here.flush()
    assert there.read("b/two") == b"3" and len(hub_here.commits) == 2


def test_a_commit_of_somebody_else_in_between_is_got_over(hub_here: Hub, hub_url: str):
    store, other = branch(hub_url), branch(hub_url)
    first = store.publish("m", b"1", replacing=None)
    once(hub_here, lambda: (other.write("else", b"x"), other.flush()))
    store.publish("m", b"2", replacing=first)
    once(hub_here, lambda: (other.write("more", b"x"), other.flush()))
    store.remove(["else"])
    assert store.read("m") == b"2" and [one.key for one in store.names("")[0]] == ["m", "more"]


def test_of_two_that_replace_one_object_the_first_is_there(hub_here: Hub, hub_url: str):
    store, other = branch(hub_url), branch(hub_url)
    seen = store.publish("m", b"1", replacing=None)
    once(hub_here, lambda: other.publish("m", b"theirs", replacing=seen))
    store.write("part", b"p")
    with pytest.raises(ConflictError, match="m was written by somebody else"):
        store.publish("m", b"ours", replacing=seen)
    assert other.read("m") == b"theirs" and [one.key for one in other.names("")[0]] == ["m"]


def test_many_writers_of_one_branch_each_publish_their_own(hub_here: Hub, hub_url: str):
    failures = []

    def work(number: int) -> None:
        try:
            store, seen = branch(hub_url, seconds=60), None
            for round in range(3):
                store.write(f"{number}/part-{round}", bytes([number]))
                seen = store.publish(f"{number}/m", str(round).encode(), replacing=seen)
        except StorageError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    store = branch(hub_url)
    assert not failures and len(hub_here.commits) == 12 and len(list(store.walk(""))) == 16
    assert {store.read(f"{number}/m") for number in range(4)} == {b"2"}


def test_a_commit_whose_answer_is_lost_is_not_taken_for_somebody_elses(hub_here: Hub, hub_url: str):
    store = branch(hub_url)
    store.write("part", b"p")
    hub_here.lost_answers = 1
    first = store.publish("m", b"1", replacing=None)
    assert store.publish("m", b"2", replacing=first) and store.read("part") == b"p"
    hub_here.lost_answers = 1
    store.remove(["m"])
    assert [one.key for one in store.names("")[0]] == ["part"]


@pytest.mark.parametrize(
    ("part", "status"), [("/commit/", 503), ("/commit/", 409), ("/lfs/", 500), ("/api/", 503), ("/commit/", 429)]
)
def test_a_storm_passes_and_nothing_is_lost(hub_here: Hub, hub_url: str, tmp_path: Path, part: str, status: int):
    hub_here.refuse, hub_here.refusals_left = {part: status}, 3
    warned, told = logging.getLogger("huggingface_hub"), io.StringIO()
    listener = logging.StreamHandler(told)
    warned.addHandler(listener)
    try:
        store = branch(hub_url, seconds=30)
        assert write(store, tmp_path / "disk") == LAST and hub_here.refusals_left == 0
        assert whole(branch(hub_url), tmp_path / "fresh") == LAST
    finally:
        warned.removeHandler(listener)
    assert not told.getvalue(), "an upload's address, which is signed, is in the log"


@pytest.mark.parametrize("told_by", ["Retry-After", "RateLimit"])
def test_a_limit_that_lasts_is_told_at_once_and_the_next_save_brings_what_waited(
    hub_here: Hub, hub_url: str, tmp_path: Path, told_by: str
):
    store = branch(hub_url, seconds=20)
    upload(store, save(tmp_path / "disk", 1))
    hub_here.refuse = {"/commit/": 429}
    if told_by == "RateLimit":
        hub_here.limit = '"api";r=0;t=1800'
    else:
        hub_here.retry_after = "1800"
    begun, refusals = time.monotonic(), hub_here.refusals_left
    with pytest.raises(StorageError, match=r"status 429\), and asks to wait 1800 s.*checkpoint.every_steps"):
        upload(store, save(tmp_path / "disk", 2))
    assert hub_here.refusals_left == refusals - 1 and time.monotonic() - begun < 100, "asked again, or waited"
    assert whole(branch(hub_url), tmp_path / "fresh") == 1
    hub_here.refuse = {}
    upload(store, save(tmp_path / "disk", 3))
    assert whole(branch(hub_url), tmp_path / "fresh") == 3
    named = {key for one in stored_checkpoints(store) if one.index for key in one.index.part_keys()}
    assert {one.key for one in store.walk("checkpoints") if not one.key.endswith(".json")} == named, "something is left over"


@pytest.mark.parametrize("part", ["/revision/", "/tree/", "/preupload/", "/lfs/", "/resolve/", "/auth-check/", "/commit/"])
def test_a_hub_that_falls_silent_is_given_up(hub_here: Hub, hub_url: str, monkeypatch: pytest.MonkeyPatch, part: str):
    branch(hub_url, seconds=30).publish("m", b"1", replacing=None)
    store = branch(hub_url, seconds=1)
    monkeypatch.setitem(hub.LIMITS, "read", 0.3)
    hub_here.silent = part
    begun = time.monotonic()
    with pytest.raises(StorageError, match="does not answer as it should"):
        store.expect_usable("probe")
        store.read("m")
        store.write("part", b"\0")
        store.flush()
    assert time.monotonic() - begun < SILENCE_SECONDS / 2


def test_a_commit_that_takes_longer_than_requests_are_repeated_is_sent_again(
    hub_here: Hub, hub_url: str, monkeypatch: pytest.MonkeyPatch
):
    store = branch(hub_url, seconds=3)
    monkeypatch.setitem(hub.LIMITS, "read", 4.0)
    hub_here.silent, hub_here.silences_left = "/commit/", 1
    store.publish("m", b"1", replacing=None)
    assert hub_here.silences_left == 0 and store.read("m") == b"1"


def test_an_upload_that_the_hub_puts_off_for_long_is_told_at_once(hub_here: Hub, hub_url: str):
    hub_here.refuse, hub_here.limit = {"/preupload/": 429}, '"api";r=0;t=200'
    begun, refusals = time.monotonic(), hub_here.refusals_left
    with pytest.raises(StorageError, match="asks to wait 200 s"):
        branch(hub_url).write("part", b"1")
    assert hub_here.refusals_left == refusals - 1 and time.monotonic() - begun < 100, "asked again, or waited"


def test_a_save_that_is_refused_does_not_keep_the_next_ones_out(hub_here: Hub, hub_url: str, tmp_path: Path, part_bytes):
    part_bytes(10_000)
    hub_here.refused_name = "step-00000003"
    train_here(stored_run(tmp_path / "one", hub_url))
    assert steps_in(hub_url)[0] == 12 and not any(hub_here.refused_name in path for path in hub_here.files)


def test_a_commit_that_is_refused_tells_why_without_addresses_and_keys(hub_here: Hub, hub_url: str):
    store = branch(hub_url)
    hub_here.refused_name = "part"
    store.write("part", b"1")
    with pytest.raises(RefusedError) as caught:
        store.flush()
    assert str(caught.value).endswith("(status 400). It says: Your push was rejected: see ...")


def test_what_another_server_says_is_not_told(hub_here: Hub, hub_url: str):
    hub_here.refuse, hub_here.kind = {"/lfs/": 400}, "application/xml"
    with pytest.raises(StorageError) as caught:
        branch(hub_url).write("part", b"\0")
    assert str(caught.value).endswith("(status 400).")


def test_a_start_that_was_superseded_shows_nothing_more(hub_here: Hub, hub_url: str):
    first, second = branch(hub_url), branch(hub_url)
    held = first.publish("run.json", b"first", replacing=None)
    first.hold("run.json", held)
    first.publish("a", b"1", replacing=None)
    first.write("log", b"first")
    first.flush()
    for show in (lambda: first.publish("m", b"1", replacing=None), first.flush, lambda: first.remove(["a"])):
        first.take_pending()
        first.write("log", b"first's")
        now, version = second.read_version("run.json")
        once(hub_here, lambda now=now, version=version: second.publish("run.json", now + b".", replacing=version))
        with pytest.raises(ConflictError, match=r"run\.json was written by somebody else"):
            show()
        first.hold("run.json", second.read_version("run.json")[1])
    assert second.read("log") == b"first" and sorted(one.key for one in second.names("")[0]) == ["a", "log", "run.json"]


def test_a_start_that_takes_the_run_over_ends_the_commits_of_the_one_before(hub_here: Hub, hub_url: str, tmp_path: Path):
    run, stores = stored_run(tmp_path / "run", hub_url), [branch(f"{hub_url}/small") for _ in range(2)]
    for number, store in enumerate(stores):
        take_over(store, run, RunFolder(tmp_path / f"{number}/small"))
    for store in stores:
        store.write("log.txt", b"late")
    with pytest.raises(ConflictError):
        stores[0].flush()
    stores[1].flush()


def test_a_branch_of_any_name_is_written_and_read(hub_here: Hub):
    hub_here.branch = "tries/v#1+x"
    store = branch(f"hf://{REPO}@tries%2Fv#1+x/runs")
    store.write("part", b"\0")
    store.publish("m", b"1", replacing=None)
    assert store.read("m") == b"1" and store.read("part") == b"\0"


def test_what_the_repository_ignores_is_uploaded_and_does_not_wait_in_memory(hub_here: Hub, hub_url: str):
    hub_here.ignored = "*"
    store = branch(hub_url)
    store.write("part", b"\0" * 1000)
    assert len(hub_here.objects) == 1 and len(json.dumps(store.take_pending())) < 300


def test_what_is_removed_is_gone_from_the_branch_in_one_commit_and_stays_in_its_history(hub_here: Hub, hub_url: str):
    store = branch(hub_url)
    for name in ("a/one", "a/two", "b"):
        store.write(name, name.encode())
    store.flush()
    before = hub_here.commit_now
    store.remove(["a/one", "a/two", "a/never", "c/never"])
    store.remove(["a/one"])
    assert len(hub_here.commits) == 2 and [one.key for one in store.walk("")] == ["b"]
    assert open_store(f"hf://{REPO}@{before}/{hub_url.rpartition('/')[2]}").read("a/one") == b"a/one"


def test_data_are_read_at_one_commit_while_a_run_is_kept_beside_them(hub_here: Hub):
    hub_here.files["data/x"] = b"first"
    data, run = open_store(f"hf://{REPO}/data"), branch(f"hf://{REPO}")
    assert data.read("x") == b"first"
    run.write("data/x", b"second")
    run.publish("runs/m", b"1", replacing=None)
    assert data.read("x") == b"first" and data.read_version("x")[1].tag == COMMIT and run.read("data/x") == b"second"


REFUSED = {
    "no repository": "there is no such repository, or not for this key (status 401). Make the repository first",
    "may only read": "the Hub lets this key write nothing there (status 403). Give HF_TOKEN one that may write",
    "wrong key": "there is no such repository, or not for this key (status 401)",
    "no branch": "the repository has no revision 'none'. Make the branch first",
    "a tag": "'v1' is a tag",
    "no such name": "names no repository, by huggingface_hub's rules",
    "away": "does not answer as it should (",
}


@pytest.mark.parametrize("trouble", REFUSED)
def test_a_branch_that_cannot_be_used_is_told_in_one_sentence_before_anything_is_written(
    hub_here: Hub, monkeypatch: pytest.MonkeyPatch, trouble: str
):
    revision = {"no branch": "@none", "a tag": "@v1"}.get(trouble, "")
    store = branch(f"hf://{REPO}{revision}/runs", seconds=1)
    hub_here.tags = ["v1"]
    hub_here.has_repository, hub_here.may_write = trouble != "no repository", trouble != "may only read"
    if trouble == "wrong key":
        monkeypatch.setenv("HF_TOKEN", "hf_wrong")
        hub_here.only_with_key = True
    elif trouble == "no such name":
        monkeypatch.setattr(store, "_repo", f"{REPO}--")
    elif trouble == "away":
        hub_here.shutdown()
        hub_here.server_close()
    with pytest.raises(StorageError) as caught:
        store.expect_usable(".probe")
    text = str(caught.value)
    assert REFUSED[trouble] in text and REPO in text and not hub_here.commits
    assert "\n" not in text and KEY not in text and "http" not in text and len(text) < 300


def test_a_branch_that_can_be_used_gets_no_commit_for_the_question(hub_here: Hub, hub_url: str):
    branch(hub_url).expect_usable(".probe")
    assert not hub_here.commits and not hub_here.files


@pytest.mark.timeout(900)  # two trainings, each with processes of its own
def test_two_ranks_onto_a_branch_and_on_from_it_elsewhere(hub_here: Hub, hub_url: str, tmp_path: Path):
    """Trained to step 6 here, and on an empty disk to the end: the bits of a run that was not moved. No key is in any file."""
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    run = write_run(here, layout=Layout(dp=2, micro_batch_size=2), optimizer=Optimizer(learning_rate=5e-3, schedule="constant"))
    train_ranks(replace(run, folder=str(here / "straight")))
    first = ultrascale("", here, *TRAIN, "--checkpoint.store", hub_url, "--steps", "6")
    assert first.returncode == 0, first.stderr
    published = [title for title in hub_here.commits if "step-" in title]
    assert len(published) == 2, hub_here.commits
    second = ultrascale("", there, "train", f"{hub_url}/small", "--steps", "12")
    assert second.returncode == 0, second.stderr + second.stdout
    assert "resumed from" in second.stdout
    assert same(final_state(there / "out"), final_state(here / "straight"))
    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()] + [*hub_here.files.values()]
    assert not any(KEY.encode() in text for text in texts)
    assert not any(KEY in done.stdout + done.stderr for done in (first, second))
    listed = ultrascale("", there, "checkpoint", "verify", f"{hub_url}/small")
    assert listed.returncode == 0 and "step-00000012" in listed.stdout, listed.stderr


def test_a_run_removes_exports_and_is_gone_on_with_by_its_url(hub_here: Hub, hub_url: str, tmp_path: Path, part_bytes):
    part_bytes(10_000)
    train_here(stored_run(tmp_path / "one", hub_url, keep=2, export=True), before_step=stop_at(10))
    assert len(steps_in(hub_url)) == 2
    folder = run_store.fetch_run(f"{hub_url}/small", tmp_path / "fresh")
    assert (folder / "run.toml").exists()
    train_here(stored_run(tmp_path / "two", hub_url, keep=2, export=True))
    assert steps_in(hub_url) == [12, 10]
    local = tmp_path / "two/small/export"
    store = branch(f"{hub_url}/small/export")
    assert {one.key: store.read(one.key) for one in store.walk("")} == {
        path.name: path.read_bytes() for path in local.iterdir()
    }
