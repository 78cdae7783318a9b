"""Megatron's .bin/.idx."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from ultrascale.data.files import DataError
from ultrascale.data.indexed import IndexedShard, ShardWriter, best_dtype, read_header


def write_shard(prefix, documents, dtype="uint16"):
    writer = ShardWriter(prefix, dtype)
    for document in documents:
        writer.append(document)
        writer.end_document()
    return writer.finish()


def write_foreign(prefix, lengths, documents, *, code=4, dtype="<i4", ids=None):
    """As Megatron writes it: struct by struct, independent of our writer."""
    ids = np.arange(sum(lengths)) if ids is None else ids
    size = np.dtype(dtype).itemsize
    pointers = [size * sum(lengths[:k]) for k in range(len(lengths))]
    content = b"MMIDIDX\x00\x00" + struct.pack("<Q", 1) + struct.pack("<B", code)
    content += struct.pack("<QQ", len(lengths), len(documents))
    content += struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(pointers)}q", *pointers)
    content += struct.pack(f"<{len(documents)}q", *documents)
    prefix.with_name(prefix.name + ".idx").write_bytes(content)
    prefix.with_name(prefix.name + ".bin").write_bytes(np.asarray(ids, dtype).tobytes())


def test_the_bytes_are_those_of_megatrons_format(tmp_path):
    write_shard(tmp_path / "ours", [[5, 6, 0], [7, 0]], "int32")
    write_foreign(tmp_path / "theirs", [3, 2], [0, 1, 2], ids=[5, 6, 0, 7, 0])
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"ours{suffix}").read_bytes() == (tmp_path / f"theirs{suffix}").read_bytes()


def test_documents_come_back(tmp_path):
    documents = [[1, 2, 3], [4], [5, 6]]
    write_shard(tmp_path / "x", documents)
    shard = IndexedShard(tmp_path / "x")
    assert [shard.document(k).tolist() for k in range(shard.num_documents)] == documents


def test_checksums_are_those_of_the_files_even_after_a_document_was_taken_back(tmp_path):
    writer = ShardWriter(tmp_path / "x", "uint16")
    writer.add_documents([1, 2, 3], [2, 1])
    writer.append([9] * 100_000)
    writer.append([8])
    writer.abandon_document()
    writer.append([4])
    writer.end_document()
    written = writer.finish()
    assert IndexedShard(tmp_path / "x").tokens.tolist() == [1, 2, 3, 4]
    assert written.bin_sha256 == hashlib.sha256((tmp_path / "x.bin").read_bytes()).hexdigest()
    assert written.idx_sha256 == hashlib.sha256((tmp_path / "x.idx").read_bytes()).hexdigest()


def test_nothing_has_its_name_before_the_end(tmp_path):
    writer = ShardWriter(tmp_path / "x", "uint16")
    writer.add_documents([1], [1])
    assert not (tmp_path / "x.bin").exists()
    writer.discard()
    assert list(tmp_path.iterdir()) == []


def test_documents_of_several_sequences_begin_at_their_first(tmp_path):
    write_foreign(tmp_path / "x", [2, 3, 1, 4], [0, 2, 4])
    shard = IndexedShard(tmp_path / "x")
    assert shard.document(0).tolist() == [0, 1, 2, 3, 4]
    assert shard.document(1).tolist() == [5, 6, 7, 8, 9]
    assert shard.document_starts(0, 10).tolist() == [0, 5]
    assert shard.document_starts(1, 5).tolist() == []


def test_an_empty_shard_can_be_written_and_read(tmp_path):
    write_shard(tmp_path / "x", [])
    assert IndexedShard(tmp_path / "x").num_tokens == 0


def test_dtype_follows_megatrons_rule():
    assert [best_dtype(65499), best_dtype(65500)] == ["uint16", "int32"]


@pytest.mark.catalogue(57)
def test_ids_beyond_the_dtype_are_never_wrapped(tmp_path):
    with pytest.raises(OverflowError):
        ShardWriter(tmp_path / "x", "uint16").append([70000])


@pytest.mark.catalogue(57)
def test_an_id_past_the_vocabulary_is_named_with_its_place(tmp_path):
    write_shard(tmp_path / "x", [[1, 2], [3, 99, 4]])
    with pytest.raises(DataError, match=r"x\.bin, token 3 \(byte 6\): id 99 is not in 0 to 50"):
        IndexedShard(tmp_path / "x").verify_ids(51)


@pytest.mark.catalogue(57)
def test_a_negative_id_is_refused(tmp_path):
    write_foreign(tmp_path / "x", [2], [0, 1], ids=[1, -5])
    with pytest.raises(DataError, match=r"token 1 .*id -5"):
        IndexedShard(tmp_path / "x").verify_ids(51)


def corrupt(content, at, replacement):
    return content[:at] + replacement + content[at + len(replacement) :]


@pytest.mark.catalogue(57, 58)
@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (lambda b, i: (b[:-2], i), r"x\.bin: is 8 bytes, its index promises 10"),
        (lambda b, i: (b + b"\0\0", i), r"x\.bin: is 12 bytes, its index promises 10"),
        (lambda b, i: (b[:-1], i), r"x\.bin: is 9 bytes, which is no number of uint16 ids"),
        (lambda b, i: (b"", i), r"x\.bin: is 0 bytes, its index promises 10"),
        (lambda b, i: (b, i[:-1]), r"x\.idx: is \d+ bytes, its header promises"),
        (lambda b, i: (b, b""), r"x\.idx: is not a Megatron index"),
        (lambda b, i: (b, b"TNTIDX\x00\x00" + i[8:]), r"x\.idx: is not a Megatron index"),
        (lambda b, i: (b, corrupt(i, 9, struct.pack(">Q", 1))), r"version \d+ \(big-endian\), expected 1"),
        (lambda b, i: (b, corrupt(i, 17, b"\x07")), r"dtype code 7 \(float32\)"),
        (lambda b, i: (b, corrupt(i, 17, b"\x63")), r"dtype code 99 \(unknown\)"),
        (
            lambda b, i: (b, corrupt(i, len(i) - 8, struct.pack("<q", 9))),
            "over sequences 0 to 9, expected 0 to 2",
        ),
        (lambda b, i: (b, corrupt(i, 18, struct.pack("<Q", 2**60))), "its header promises"),
    ],
)
def test_damage_is_named(tmp_path, damage, expected):
    write_shard(tmp_path / "x", [[1, 2, 3], [4, 5]])
    content, index = damage((tmp_path / "x.bin").read_bytes(), (tmp_path / "x.idx").read_bytes())
    (tmp_path / "x.bin").write_bytes(content)
    (tmp_path / "x.idx").write_bytes(index)
    with pytest.raises(DataError, match=expected):
        IndexedShard(tmp_path / "x")


@pytest.mark.catalogue(58)
def test_a_missing_half_is_named(tmp_path):
    write_shard(tmp_path / "x", [[1]])
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin: cannot be read"):
        IndexedShard(tmp_path / "x")


def test_sequences_that_do_not_follow_each_other_are_named(tmp_path):
    write_shard(tmp_path / "x", [[1, 2, 3], [4, 5]])
    index = (tmp_path / "x.idx").read_bytes()
    (tmp_path / "x.idx").write_bytes(corrupt(index, 34, struct.pack("<i", 2)))
    with pytest.raises(DataError, match=r"x\.idx, sequence 1"):
        IndexedShard(tmp_path / "x").verify_index()


def test_the_header_says_what_is_there(tmp_path):
    write_shard(tmp_path / "x", [[1, 2, 3], [4, 5]])
    header = read_header(tmp_path / "x.idx")
    assert (header.dtype, header.num_sequences, header.num_documents) == ("uint16", 2, 2)
