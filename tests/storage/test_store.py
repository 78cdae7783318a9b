"""Both kinds of store keep the same promises; what is special to buckets is asked of a real S3 server."""

import base64
import hashlib
import os
import threading
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from s3_server import SECRET, Answer, Proxy

from ultrascale.storage import (
    ConflictError,
    DamagedError,
    MissingError,
    StorageError,
    Store,
    checksum,
    crc_of,
    download_files,
    open_store,
    read_parts,
    upload_file,
    url_of,
)
from ultrascale.storage.files import FileStore
from ultrascale.storage.location import url_problem
from ultrascale.storage.parts import STREAMS


def test_what_is_written_is_read(store: Store):
    store.write("a/b/one", b"first")
    store.write("a/b/one", b"second")
    assert store.read("a/b/one") == b"second"
    assert store.read_range("a/b/one", 1, 4) == b"eco"
    assert store.size("a/b/one") == 6


def test_an_empty_object_is_there(store: Store):
    store.write("empty", b"")
    assert store.read("empty") == b"" and store.size("empty") == 0


def test_what_is_not_there_is_missing(store: Store):
    store.write("a/one", b"1")
    for ask in (store.read, store.size, store.read_version, lambda key: store.read_range(key, 0, 1)):
        with pytest.raises(MissingError, match="a/none is not there"):
            ask("a/none")


def test_listing_is_by_prefix(store: Store):
    for key in ("a/one", "a/two", "a/deep/three", "ab/four"):
        store.write(key, key.encode())
    objects, folders = store.names("a")
    assert [(one.key, one.bytes) for one in objects] == [("one", 5), ("two", 5)] and folders == ["deep"]
    assert sorted(one.key for one in store.walk("a")) == ["a/deep/three", "a/one", "a/two"]
    assert store.names("none") == ([], [])


def test_what_is_removed_is_gone_and_twice_is_no_error(store: Store):
    store.write("a/one", b"1")
    store.write("a/two", b"2")
    store.remove(["a/one", "a/never"])
    store.remove(["a/one"])
    assert [one.key for one in store.walk("")] == ["a/two"]


def test_publish_makes_what_is_not_there_and_replaces_what_was_seen(store: Store):
    first = store.publish("m", b"1", replacing=None)
    second = store.publish("m", b"2", replacing=first)
    assert store.read_version("m") == (b"2", second)
    with pytest.raises(ConflictError):
        store.publish("m", b"3", replacing=None)
    with pytest.raises(ConflictError):
        store.publish("m", b"3", replacing=first)
    assert store.read("m") == b"2"
    store.remove(["m"])
    with pytest.raises(ConflictError):
        store.publish("m", b"3", replacing=second)


def test_publishing_the_same_again_succeeds(store: Store):
    assert store.publish("m", b"1", replacing=None) == store.publish("m", b"1", replacing=None)


def test_of_many_that_publish_at_once_one_wins(store: Store):
    won: list[bytes] = []
    barrier = threading.Barrier(6)

    def publish(data: bytes) -> None:
        barrier.wait()
        try:
            store.publish("m", data, replacing=None)
            won.append(data)
        except ConflictError:
            pass

    threads = [threading.Thread(target=publish, args=(bytes([i]),)) for i in range(6)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert won == [store.read("m")]


def test_a_whole_file_goes_there(store: Store, tmp_path: Path):
    content = os.urandom(3 << 20)
    (tmp_path / "file").write_bytes(content)
    store.write_file("big", tmp_path / "file")
    assert store.read("big") == content


def test_a_file_goes_through_parts_and_comes_back(store: Store, tmp_path: Path, part_bytes: Callable[[int], None]):
    part_bytes(1000)
    content = os.urandom(12_345)
    (tmp_path / "file").write_bytes(content)
    made = upload_file(store, tmp_path / "file", "p/file")
    assert sum(part.bytes for part in made) == len(content) and crc_of(made) == zlib.crc32(content)
    assert b"".join(store.read(part.key("p/file", i)) for i, part in enumerate(made)) == content
    download_files(store, {tmp_path / "back": ("p/file", made)})
    assert (tmp_path / "back").read_bytes() == content


class Late(FileStore):
    """Reads from the memory that it was given only when everything has been sent."""

    def write(self, key: str, data: bytes | memoryview) -> None:
        late[key] = memoryview(data)


late: dict[str, memoryview] = {}


def test_memory_that_a_connection_still_reads_from_is_not_used_for_the_next_part(
    tmp_path: Path, part_bytes: Callable[[int], None]
):
    part_bytes(1000)
    content = os.urandom(1000 * 4 * STREAMS + 500)  # a thread of the pool has several parts, one after the other
    (tmp_path / "file").write_bytes(content)
    made = upload_file(Late(tmp_path / "store"), tmp_path / "file", "p")
    assert b"".join(late[part.key("p", i)] for i, part in enumerate(made)) == content


@pytest.mark.parametrize("combine", [checksum.combine_crc32, checksum._combine])
def test_the_checksum_of_two_pieces_is_that_of_both_end_to_end(combine: Callable[[int, int, int], int]):
    content = os.urandom(5000)
    for cut in (0, 1, 77, 4096, 5000):
        first, second = content[:cut], content[cut:]
        assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(content)


@pytest.mark.parametrize("harm", ["flipped", "short", "missing"])
def test_a_part_that_is_not_what_was_sent_is_found(store: Store, tmp_path: Path, part_bytes: Callable[[int], None], harm: str):
    part_bytes(1000)
    (tmp_path / "file").write_bytes(os.urandom(3000))
    made = upload_file(store, tmp_path / "file", "p/file")
    key = made[1].key("p/file", 1)
    data = bytearray(store.read(key))
    data[500] ^= 1
    if harm == "missing":
        store.remove([key])
    else:
        store.write(key, bytes(data if harm == "flipped" else data[:999]))
    with pytest.raises(DamagedError, match=made[1].key("p/file", 1)):
        download_files(store, {tmp_path / "back": ("p/file", made)})
    assert not (tmp_path / "back").exists()


def test_an_upload_that_was_cut_off_sends_only_what_is_missing(proxy: Proxy, tmp_path: Path, part_bytes: Callable[[int], None]):
    part_bytes(1000)
    store = open_store("s3://bucket/cut-off", patience_seconds=5)
    (tmp_path / "file").write_bytes(os.urandom(10_000))
    made = upload_file(store, tmp_path / "file", "p/file")
    store.remove([made[3].key("p/file", 3)])
    proxy.seen.clear()
    upload_file(store, tmp_path / "file", "p/file", resuming=True)
    assert [one.path for one in proxy.seen if one.method == "PUT"] == [f"/bucket/cut-off/{made[3].key('p/file', 3)}"]
    assert read_parts(store, made, "p/file") == (tmp_path / "file").read_bytes()


def test_parts_are_sent_with_a_checksum_that_the_server_compares(proxy: Proxy, tmp_path: Path):
    """S3's own, so that what is harmed on the way there is refused there."""
    open_store("s3://bucket/sums", patience_seconds=5).write("x", b"123")
    expected = base64.b64encode(hashlib.sha256(b"123").digest()).decode()
    assert [one.headers["x-amz-checksum-sha256"] for one in proxy.seen] == [expected]


SENTENCES = {
    "no bucket": ("s3://no-such-bucket/x", None, "there is no such bucket"),
    "read-only": ("s3://bucket/x", Answer(status=403, code="AccessDenied"), "was refused (403 Forbidden, AccessDenied)"),
    "expired": ("s3://bucket/x", Answer(status=400, code="ExpiredToken"), "the credentials have expired"),
    "skewed": ("s3://bucket/x", Answer(status=403, code="RequestTimeTooSkewed"), "refuses this machine's clock"),
    "full": ("s3://bucket/x", Answer(status=507, code="XMinioStorageFull"), "the store is full"),
    "quota": ("s3://bucket/x", Answer(status=403, code="QuotaExceeded"), "the store is full"),
    "down": ("s3://bucket/x", Answer(status=503, code="SlowDown"), "does not answer as it should (503 Service Unavailable"),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_a_store_that_cannot_be_used_is_told_in_one_sentence(proxy: Proxy, name: str):
    place, answer, told = SENTENCES[name]
    proxy.rule = lambda request: answer if request.method == "PUT" else None
    with pytest.raises(StorageError) as caught:
        open_store(place, patience_seconds=1).expect_usable(".probe")
    text = str(caught.value)
    assert told in text and place.removesuffix("/x") in text
    assert "\n" not in text and len(text) < 300


def test_no_error_quotes_a_credential_or_a_request(proxy: Proxy):
    for _, answer, _ in SENTENCES.values():
        proxy.rule = lambda request, answer=answer: answer
        with pytest.raises(StorageError) as caught:
            open_store("s3://bucket/x", patience_seconds=0.5).read("key") if answer else open_store("s3://none/x").read("key")
        chain = [caught.value, caught.value.__cause__]
        for text in map(str, chain):
            assert SECRET not in text and "AKIATEST" not in text and "Signature=" not in text and "http://" not in text


def test_a_bucket_that_can_be_used_is_left_as_it_was(url: str):
    store = open_store(url)
    store.expect_usable(".probe")
    assert list(store.walk("")) == []


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be"):
        open_store(tmp_path / "file" / "below").expect_usable(".probe")


def test_a_url_that_went_through_a_path_is_mended():
    assert url_of(Path("s3://bucket/runs/a")) == "s3://bucket/runs/a"
    assert url_of("gs://bucket") == "gs://bucket" and url_of(Path("file:///tmp/x")) == "file:///tmp/x"
    assert url_of("out/run") is None and url_of(Path("C")) is None


@pytest.mark.parametrize(
    ("place", "told"),
    [("ftp://x/y", "is none of"), ("hf://a", "names no repository"), ("s3://key:secret@bucket/x", "no credentials"),
     ("s3:///", "names no bucket"), ("", "is empty"), ("gs://bucket/../other/x", "'..'")],
)  # fmt: skip
def test_what_cannot_be_a_store_is_refused_without_asking(place: str, told: str):
    assert told in (url_problem(place) or "")


def test_a_store_that_lacks_its_account_says_which_variables(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("obstore")
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    with pytest.raises(StorageError, match=r"az://c/x cannot be opened .*AZURE_STORAGE_\.\.\."):
        open_store("az://c/x")


def test_profiles_of_the_shared_file_are_read(tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "credentials"
    file.write_text(f"[lab]\naws_access_key_id = A\naws_secret_access_key = B\nregion = us-east-1\nendpoint_url = {server}\n")
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    monkeypatch.setenv("AWS_PROFILE", "lab")
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    store = open_store("s3://bucket/profile", patience_seconds=2)
    store.write("x", b"1")
    assert store.read("x") == b"1"
