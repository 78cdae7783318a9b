"""Fifty faults of a bucket, on three vendors' servers: nothing is lost beyond the last save, and no half is ever loaded.

A writer saves steps 1 to 3 on disk and uploads each; something goes wrong meanwhile. Then `whole` asks what a reader with an
empty disk gets: one whole checkpoint, not older than the last one whose upload was said to be done. Every tensor of it tells
its step, so that a mixture shows. A last test plants three bugs and sees them caught.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from azure_server import CONTAINER, azure_at
from gcs_server import BUCKET as GOOGLE_BUCKET
from gcs_server import gcs_at
from s3_server import BUCKET, Answer, Proxy, Request, proxied, reached_at

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.disk.files import read_manifest
from ultrascale.checkpoint.stored.fetch import fetch, stored_checkpoints, summarize_stored
from ultrascale.checkpoint.stored.index import NEWEST, Index, key_of
from ultrascale.checkpoint.stored.publish import (
    collect_leftovers,
    files_of,
    prune_stored,
    publish_stored,
    published_version,
    upload_files,
)
from ultrascale.failpoints import VARIABLE
from ultrascale.storage import DamagedError, StorageError, Store, open_store
from ultrascale.storage.store import READS

LAST = 3
Rule = Callable[[Request], Answer | None]


@pytest.fixture(autouse=True)
def small_parts(part_bytes: Callable[[int], None]) -> None:
    part_bytes(700)


VENDORS = {
    "s3": ("server", reached_at, f"s3://{BUCKET}"),
    "google": ("google", gcs_at, f"gs://{GOOGLE_BUCKET}"),
    "azure": ("azure", azure_at, f"az://{CONTAINER}"),
}
"""The fixture that has the server's address, what leads there, and its bucket."""


@pytest.fixture(params=["s3", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("google", "azure"))])
def vendor(request: pytest.FixtureRequest) -> str:
    """The three vendors' servers in turn; moto's alone by day."""
    return request.param


@pytest.fixture
def place(vendor: str) -> str:
    """A prefix of the vendor's bucket that nothing is under yet."""
    return f"{VENDORS[vendor][2]}/{uuid.uuid4().hex}"


@pytest.fixture(params=["s3", "hub", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("google", "azure"))])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The same, with the environment leading to the server; and a folder of a repository of the Hub's stand-in."""
    if request.param == "hub":
        yield request.getfixturevalue("hub_url")
        return
    fixture, reached, bucket = VENDORS[request.param]
    with reached(request.getfixturevalue(fixture)):
        yield f"{bucket}/{uuid.uuid4().hex}"


@pytest.fixture
def proxy(request: pytest.FixtureRequest, vendor: str) -> Iterator[Proxy]:
    """A proxy before the vendor's server, to which the environment leads."""
    fixture, reached, _ = VENDORS[vendor]
    with proxied(request.getfixturevalue(fixture)) as between, reached(between.address):
        yield between


def save(root: Path, step: int, version: int | None = None) -> Path:
    """A checkpoint of several parts whose every number is its version."""
    number = step if version is None else version
    tensors = {f"w{i}": torch.full((20, 10), float(number)) for i in range(4)}
    return checkpoint.save(root, step, tensors, {"version": number})


def upload(store: Store, folder: Path, *, keep: int = 0) -> Index:
    """As a run does it: parts, index, removal of old ones, collection of leftovers."""
    manifest = checkpoint.verify(folder)
    files = upload_files(store, folder, files_of(manifest), resuming=True)
    before, _ = published_version(store, manifest.step)
    index = publish_stored(store, read_manifest(folder), files, before=before)
    prune_stored(store, manifest.step, keep=keep, keep_every_steps=None, verified=set())
    collect_leftovers(store, busy=(index.save_id,))
    return index


def write(store: Store, root: Path, *, keep: int = 0) -> int:
    """Save and upload steps 1 to 3; the last step whose upload was not refused. What fails is tried again with the next."""
    done = 0
    for step in range(1, LAST + 1):
        folder = save(root, step)
        try:
            upload(store, folder, keep=keep)
            done = step
        except (StorageError, CheckpointError):
            pass
    return done


def whole(store: Store, root: Path) -> int:
    """The version of the checkpoint that a reader with an empty disk gets; 0 if there is none. Fails if it is a mixture."""
    shutil.rmtree(root, ignore_errors=True)
    for one in stored_checkpoints(store):
        try:
            if one.index is None:
                raise CheckpointError(one.problem)
            folder = fetch(store, one.index, root)
        except (CheckpointError, DamagedError):
            assert not (root / f"step-{one.step:08d}").exists()
            continue
        tensors, metadata = checkpoint.load_full(folder)
        versions = {number for tensor in tensors.values() for number in tensor.flatten().tolist()} | {metadata["version"]}
        assert len(versions) == 1, f"a mixture of {versions}"
        return int(versions.pop())
    return 0


def opened(place: str, seconds: float = 8) -> Store:
    return open_store(place, patience_seconds=seconds, to_write=True)


def first(count: int, which: Callable[[Request], bool], answer: Answer, *, of_a_path: int | None = None) -> Rule:
    """`answer` to the first so many requests of a kind, and to no more than `of_a_path` of one path."""
    answered: Counter[str] = Counter()

    def rule(request: Request) -> Answer | None:
        if which(request) and answered.total() < count and answered[request.path] < (of_a_path or count):
            answered[request.path] += 1
            return answer
        return None

    return rule


def put_part(request: Request) -> bool:
    return request.method == "PUT" and request.is_part


def put_index(request: Request) -> bool:
    return request.method == "PUT" and request.is_index


def get_part(request: Request) -> bool:
    return request.method == "GET" and request.is_part


def any_request(request: Request) -> bool:
    return True


# 1 to 15: killed at every point that an upload, a removal and a fetch pass

WRITER = """
import sys
from pathlib import Path
from storage.test_faults import opened, save, upload
from ultrascale.storage import parts
parts.PART_BYTES = 700
store, root = opened(sys.argv[1]), Path(sys.argv[2])
for step in range(1, 4):
    upload(store, save(root, step), keep=2)
    print(step, flush=True)
"""
READER = """
import sys
from pathlib import Path
from storage.test_faults import opened, whole
from ultrascale.storage import parts
parts.PART_BYTES = 700
print(whole(opened(sys.argv[1]), Path(sys.argv[2])), flush=True)
"""
KILLS = ["upload.start:0:2", "upload.part:0:1", "upload.part:0:4", "upload.part:0:17", "upload.file:0:1", "upload.file:0:3",
         "store.before:0:1", "store.before:0:2", "store.published:0:2", "store.newest:0:2", "store.prune:0:1",
         "store.unnamed:0:1"]  # fmt: skip


def run_script(script: str, place: str, root: Path, failpoint: str | None) -> tuple[int, list[int]]:
    """What a process that may be killed came to: its exit code and the numbers it printed."""
    tests = Path(__file__).parents[1]
    own = {name: value for name, value in os.environ.items() if name != VARIABLE}
    own |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(tests), *sys.path])}
    own |= {} if failpoint is None else {VARIABLE: failpoint}
    done = subprocess.run(
        [sys.executable, "-c", script, place, str(root)], env=own, capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (0, -signal.SIGKILL), done.stderr
    return done.returncode, [int(line) for line in done.stdout.split()]


def killed_while_writing(place: str, tmp_path: Path, failpoint: str) -> None:
    code, done = run_script(WRITER, place, tmp_path / "disk", failpoint)
    assert code == -signal.SIGKILL, f"{failpoint} is never passed"
    store = opened(place)
    found = whole(store, tmp_path / "fresh")
    assert found in (len(done), len(done) + 1), f"{done} was said to be there, found {found}"
    folder = tmp_path / "disk" / f"step-{LAST:08d}"
    upload(store, folder if folder.exists() else save(tmp_path / "disk", LAST), keep=2)
    assert whole(store, tmp_path / "fresh") == LAST
    named = {key for one in stored_checkpoints(store) if one.index for key in one.index.part_keys()}
    assert {one.key for one in store.walk("checkpoints") if not one.key.endswith(".json")} == named, "something is left over"


@pytest.mark.nightly
@pytest.mark.parametrize("failpoint", KILLS)
def test_killed_at_a_point_of_writing(url: str, tmp_path: Path, failpoint: str):
    killed_while_writing(url, tmp_path, failpoint)


def test_killed_between_the_last_part_and_the_index(url: str, tmp_path: Path):
    killed_while_writing(url, tmp_path, "store.before:0:2")


@pytest.mark.nightly
@pytest.mark.parametrize("failpoint", ["download.part:0:3", "fetch.files:0:1", "fetch.done:0:1"])
def test_killed_while_fetching(url: str, tmp_path: Path, failpoint: str):
    store = opened(url)
    assert write(store, tmp_path / "disk") == LAST
    code, _ = run_script(READER, url, tmp_path / "fresh", failpoint)
    assert code == -signal.SIGKILL
    is_there = failpoint.startswith("fetch.done")
    assert (checkpoint.newest_valid(tmp_path / "fresh") is not None) == is_there
    with checkpoint.Saver(tmp_path / "fresh") as saver:
        assert len(saver.swept) == (0 if is_there else 1)
    assert whole(store, tmp_path / "fresh") == LAST


# 16 to 30: servers and connections that fail for a while; the work is done all the same

PASSING: dict[str, Rule | partial[Rule]] = {
    "a storm of 503 on parts": partial(first, 12, put_part, Answer(status=503)),
    "a storm of 503 on everything": lambda request: Answer(status=503) if request.number % 3 == 0 else None,
    "500 on the index": partial(first, 2, put_index, Answer(status=500, code="InternalError")),
    "429, slow down": partial(first, 6, any_request, Answer(status=429, code="TooManyRequests")),
    "connections dropped before a part arrives": partial(first, 5, put_part, Answer(drop_before=True)),
    "the answer to a part is lost": partial(first, 5, put_part, Answer(drop_after=True)),
    "the answer to the index is lost": partial(first, 2, put_index, Answer(drop_after=True)),
    "the index does not arrive": partial(first, 1, put_index, Answer(drop_before=True)),
    "answers cut in their middle": partial(first, 6, get_part, Answer(cut=0.5), of_a_path=READS - 1),
    "parts come truncated, as if whole": partial(first, 2, get_part, Answer(truncate=0.5)),
    "a bit flips on the way": partial(first, 2, get_part, Answer(flip=True)),
    "an empty answer": partial(first, 2, get_part, Answer(body=b"")),
    "a slow connection": lambda request: Answer(bytes_per_second=40_000) if get_part(request) else None,
    "every answer late": lambda request: Answer(delay=0.03),
    "the note of the newest is torn": partial(first, 9, lambda r: r.method == "GET" and NEWEST in r.path, Answer(truncate=0.4)),
}
"""Rules, or how to make one that counts: anew for each test."""


@pytest.mark.parametrize("name", PASSING)
def test_what_passes_is_got_over(proxy: Proxy, place: str, tmp_path: Path, name: str):
    rule = PASSING[name]
    proxy.rule = rule() if isinstance(rule, partial) else rule
    store = opened(place, seconds=20)
    assert write(store, tmp_path / "disk", keep=2) == LAST
    assert whole(store, tmp_path / "fresh") == LAST
    assert all(one.problem is None for one in summarize_stored(store, read_all=True))


# 31 to 43: what stays; the last good one is found, and the fault is told

STAYING: dict[str, tuple[Rule, str]] = {
    "the store is full": (
        lambda r: Answer(status=507, code="InsufficientStorage") if put_part(r) else None,
        "the store is full",
    ),
    "the credentials expire": (lambda r: Answer(status=400, code="ExpiredToken") if r.method == "PUT" else None, "expired"),
    "they expire, as Google says it": (
        lambda r: Answer(status=401, code="AuthenticationRequired") if r.method == "PUT" else None,
        "ive credentials",
    ),
    "they expire, as Azure says it": (
        lambda r: Answer(status=403, code="AuthenticationFailed") if r.method == "PUT" else None,
        "ive credentials",
    ),
    "the clock is wrong": (lambda r: Answer(status=403, code="RequestTimeTooSkewed") if r.method != "HEAD" else None, "clock"),
    "the bucket turns read-only": (lambda r: Answer(status=403, code="AccessDenied") if r.method == "PUT" else None, "refused"),
    "503 without an end": (lambda r: Answer(status=503) if r.method == "PUT" else None, "does not answer as it should"),
    "every connection is cut": (lambda r: Answer(drop_before=True), "does not answer as it should"),
}


@pytest.mark.parametrize("name", STAYING)
def test_what_stays_is_told_and_what_was_there_is_found(proxy: Proxy, place: str, tmp_path: Path, name: str):
    store = opened(place, seconds=1)
    upload(store, save(tmp_path / "disk", 1))
    proxy.rule, told = STAYING[name]
    with pytest.raises((StorageError, CheckpointError), match=told):
        upload(store, save(tmp_path / "disk", 2))
    proxy.rule = lambda request: None
    assert whole(store, tmp_path / "fresh") == 1
    upload(store, tmp_path / "disk/step-00000002")
    assert whole(store, tmp_path / "fresh") == 2


def harmed(data: bytes, harm: str) -> bytes:
    middle = len(data) // 2
    return data[:middle] if harm == "truncated" else data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


@pytest.mark.parametrize("what", ["part truncated", "part flipped", "part missing", "index truncated", "index flipped"])
def test_what_is_damaged_in_the_store_is_passed_over(url: str, tmp_path: Path, what: str):
    store = opened(url)
    assert write(store, tmp_path / "disk") == LAST
    newest = stored_checkpoints(store)[0].index
    assert newest is not None
    target, harm = what.split()
    key = key_of(LAST) if target == "index" else newest.part_keys()[2]
    if harm == "missing":
        store.remove([key])
    else:
        store.write(key, harmed(store.read(key), harm))
    assert whole(store, tmp_path / "fresh") == LAST - 1
    problems = [one.problem for one in summarize_stored(store, read_all=True)]
    assert problems[0] and not any(problems[1:])
    upload(store, save(tmp_path / "disk", LAST))  # the same step, once more
    assert whole(store, tmp_path / "fresh") == LAST


# the rest: tags, listings, and others who write


def test_a_wrong_tag_keeps_an_object_from_being_replaced_and_nothing_else(proxy: Proxy, place: str, tmp_path: Path):
    store = opened(place)
    upload(store, save(tmp_path / "disk", 1, version=1))
    proxy.rule = lambda request: Answer(tag="0" * 32) if request.method == "GET" and request.is_index else None
    with pytest.raises(StorageError):
        upload(store, save(tmp_path / "disk", 1, version=2))
    assert whole(store, tmp_path / "fresh") == 1
    proxy.rule = lambda request: None
    upload(store, tmp_path / "disk/step-00000001")
    assert whole(store, tmp_path / "fresh") == 2


def listing(keys: list[str]) -> bytes:
    """As S3 writes one."""
    item = (
        "<Contents><Key>{}</Key><Size>10</Size><LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>e</ETag></Contents>"
    )
    return f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(map(item.format, keys))}</ListBucketResult>".encode()


@pytest.mark.parametrize("shows", ["nothing", "only the first", "what is gone"])
def test_a_listing_that_lags_behind_hides_nothing_and_shows_nothing_that_is_gone(
    proxy: Proxy, place: str, tmp_path: Path, shows: str
):
    if place.startswith("az://"):
        pytest.skip("Azure writes listings in another form; none of its lags behind")
    store = opened(place)
    prefix = place.rpartition("/")[2]
    keys = {"nothing": [], "only the first": [key_of(1)], "what is gone": [key_of(1), key_of(77), key_of(2)]}[shows]
    body = listing([f"{prefix}/{key}" for key in keys])
    proxy.rule = lambda request: Answer(body=body) if request.is_listing else None
    assert write(store, tmp_path / "disk") == LAST
    assert whole(store, tmp_path / "fresh") == LAST


def test_of_two_writers_of_one_step_one_is_there_whole(url: str, tmp_path: Path):
    """Both have seen nothing of the step when they publish it."""
    store = opened(url)
    folders = [save(tmp_path / name, 1, version=version) for name, version in (("a", 1), ("b", 2))]
    sent = [upload_files(store, folder, files_of(checkpoint.verify(folder))) for folder in folders]
    publish_stored(store, read_manifest(folders[0]), sent[0], before=None)
    with pytest.raises(StorageError, match="was written by somebody else"):
        publish_stored(store, read_manifest(folders[1]), sent[1], before=None)
    assert whole(store, tmp_path / "fresh") == 1


def test_a_step_that_is_replaced_is_the_old_or_the_new_one_whole(proxy: Proxy, place: str, tmp_path: Path):
    """A reader looks after every single request of the writer."""
    store, reader = opened(place), opened(place)
    upload(store, save(tmp_path / "disk", 1, version=1))
    versions: list[int] = []

    def rule(request: Request) -> Answer | None:
        return None

    proxy.rule = rule
    write_part = store.write

    def write_and_look(key: str, data: bytes | memoryview) -> None:
        write_part(key, data)
        versions.append(whole(reader, tmp_path / f"fresh-{uuid.uuid4().hex}"))

    store.write = write_and_look  # pyright: ignore[reportAttributeAccessIssue]
    upload(store, save(tmp_path / "disk", 1, version=2))
    assert set(versions[:-1]) == {1} and whole(reader, tmp_path / "fresh") == 2
    assert not re.search("step-", str(list(store.names("checkpoints")[1][1:])))


def test_a_shard_that_changed_on_disk_is_not_published(url: str, tmp_path: Path):
    store = opened(url)
    upload(store, save(tmp_path / "disk", 1))
    folder = save(tmp_path / "disk", 2)
    shard = folder / "rank-00000.safetensors"
    shard.write_bytes(harmed(shard.read_bytes(), "flipped"))
    with pytest.raises(CheckpointError, match="its bytes have changed since it was saved"):
        upload_files(store, folder, ["rank-00000.safetensors"])
    assert whole(store, tmp_path / "fresh") == 1


# The claims can fail: three planted bugs


def test_an_index_that_is_published_before_its_parts_is_caught(proxy: Proxy, place: str, tmp_path: Path):
    store = opened(place, seconds=1)
    folder = save(tmp_path / "disk", 1)
    files = upload_files(store, folder, files_of(checkpoint.verify(folder)))
    folder = save(tmp_path / "disk", 2)
    careless = {name: made for name, made in files.items()}
    publish_stored(store, read_manifest(folder), careless, before=None)  # step 2's index, but no part of it was sent
    with pytest.raises(AssertionError):
        assert whole(store, tmp_path / "fresh") == 2


def test_removal_without_reading_the_newest_back_is_caught(url: str, tmp_path: Path):
    """The newest is damaged before older ones would go: with the reading back they stay, without it they are lost."""
    store = opened(url)
    assert write(store, tmp_path / "disk") == LAST
    index = stored_checkpoints(store)[0].index
    assert index is not None
    store.write(index.part_keys()[2], b"")
    with pytest.raises((CheckpointError, DamagedError)):
        prune_stored(store, LAST, keep=1, keep_every_steps=None, verified=set())
    assert whole(store, tmp_path / "fresh") == LAST - 1
    prune_stored(store, LAST, keep=1, keep_every_steps=None, verified={index.save_id})  # as if it had been read back
    assert whole(store, tmp_path / "fresh") == 0
