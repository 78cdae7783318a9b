"""A manifest can say anything; what is not exactly right raises CheckpointError and nothing else."""

import copy
import json
import zlib
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ultrascale import checkpoint
from ultrascale.checkpoint import CheckpointError
from ultrascale.checkpoint.disk.dtypes import DTYPES
from ultrascale.checkpoint.manifest import ITEM_BYTES, Manifest, decode, encode, overlapping_boxes

FILE = {"bytes": 264, "checksum": "crc32:00000000"}
HALVES = [
    {"offsets": [0, 0], "sizes": [2, 3], "file": "a.safetensors", "begin": 64},
    {"offsets": [2, 0], "sizes": [2, 3], "file": "b.safetensors", "begin": 8},
]
GOOD: dict[str, Any] = {
    "format": "ultrascale-checkpoint",
    "version": 1,
    "save_id": "0123456789abcdef" * 2,
    "step": 7,
    "shards": {"a.safetensors": FILE, "b.safetensors": FILE},
    "tensors": {
        "w": {"dtype": "F64", "shape": [4, 3], "chunks": HALVES},
        "n": {"dtype": "I64", "shape": [], "chunks": [{"offsets": [], "sizes": [], "file": "a.safetensors", "begin": 112}]},
    },
    "metadata": {"loss": 1.5},
}


def with_checksum(content: Any) -> bytes:
    rest = json.dumps(content)[1:].encode()
    return b'{"checksum":"crc32:%08x",\n' % zlib.crc32(rest) + rest


def paths(value: Any, at: tuple = ()) -> list[tuple]:
    """Every place inside nested JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, item in inner for path in paths(item, (*at, key)))]


def replaced(at: tuple, value: Any) -> dict[str, Any]:
    content = copy.deepcopy(GOOD)
    place: Any = content
    for key in at[:-1]:
        place = place[key]
    place[at[-1]] = value
    return content


def test_sizes_of_dtypes_are_torchs():
    assert {name: dtype.itemsize for name, dtype in DTYPES.items()} == ITEM_BYTES


def test_the_manifest_of_this_test_is_good_and_survives_the_way_there_and_back():
    manifest = decode(with_checksum(GOOD), "here")
    assert manifest.tensors["w"].chunks[1].offsets == (2, 0)
    assert manifest.tensors["w"].bytes == 96
    assert decode(encode(manifest), "here") == manifest


@pytest.mark.catalogue(31)
@pytest.mark.parametrize(
    ("at", "value", "told"),
    [
        (("version",), 2, "version 1, which this release reads"),
        (("version",), True, "version 1, which this release reads"),
        (("step",), -1, "step is -1, expected an integer"),
        (("step",), 2**63, "step is 9223372036854775808"),
        (("shards", "a.safetensors", "bytes"), 1e3, "bytes of a.safetensors is 1000.0"),
        (("shards", "../up"), FILE, "shard name is '../up'"),
        (("tensors", "w", "dtype"), "F65", "dtype of 'w' is 'F65'"),
        (("tensors", "w", "dtype"), ["F64"], "dtype of 'w' is"),
        (("tensors", "w", "shape"), [4, 4], "number of stored elements of 'w' is 12, expected 16"),
        (("tensors", "w", "shape"), [10**15, 3], "elements of 'w' is 12"),
        (("tensors", "w", "shape"), [1] * 65, "at most 64"),
        (("tensors", "w", "chunks", 1, "offsets"), [1, 0], "every element stored once"),
        (("tensors", "w", "chunks", 1, "offsets"), [3, 0], "a box inside shape"),
        (("tensors", "w", "chunks", 1, "offsets"), [2], "a list of 2 integers"),
        (("tensors", "w", "chunks", 1, "begin"), 2**62, "a range inside its 264 bytes"),
        (("tensors", "w", "chunks", 1, "begin"), 0, "begin of a chunk of 'w' is 0"),
        (("tensors", "w", "chunks", 1, "file"), "c.safetensors", "one of the 2 shards"),
        (("tensors", "n", "chunks", 0, "begin"), 100, "shared by 'w' and 'n'"),
        (("tensors", "bad\nname"), GOOD["tensors"]["n"], "cannot name a tensor"),
        (("tensors", "w", "stride"), 1, "an object with keys"),
        (("metadata",), [], "metadata is"),
    ],
)
def test_each_lie_is_told_by_field_value_and_expectation(at, value, told):
    with pytest.raises(CheckpointError) as caught:
        decode(with_checksum(replaced(at, value)), "here")
    assert told in str(caught.value)


@pytest.mark.catalogue(31)
def test_a_key_given_twice_is_refused():
    rest = b'"step":1,"step":2}'
    with pytest.raises(CheckpointError, match="a key occurs twice"):
        decode(b'{"checksum":"crc32:%08x",\n' % zlib.crc32(rest) + rest, "here")


@pytest.mark.catalogue(31)
@pytest.mark.parametrize("rest", [b"[" * 200000, b'"a":' + b"9" * 5000 + b"}", b'"a":NaN}', b'"a":"\xff"}', b""])
def test_hostile_json_raises_our_error(rest):
    with pytest.raises(CheckpointError, match="not JSON that we wrote"):
        decode(b'{"checksum":"crc32:%08x",\n' % zlib.crc32(rest) + rest, "here")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(-3, 300) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.catalogue(31)
@settings(max_examples=1000, deadline=None)
@given(at=st.sampled_from(paths(GOOD)[1:]), value=JSON)
def test_a_thousand_changed_manifests_are_read_soundly_or_refused(at, value):
    try:
        manifest = decode(with_checksum(replaced(at, value)), "here")
    except CheckpointError:
        return
    assert isinstance(manifest, Manifest)
    for entry in manifest.tensors.values():
        assert entry.bytes <= sum(shard.bytes for shard in manifest.shards.values())


@pytest.mark.catalogue(31)
@settings(max_examples=300, deadline=None)
@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data):
    with pytest.raises(CheckpointError):
        decode(data, "here")


@settings(max_examples=300, deadline=None)
@given(boxes=st.lists(st.tuples(st.tuples(*[st.integers(0, 4)] * 2), st.tuples(*[st.integers(0, 3)] * 2)), max_size=6))
def test_overlap_is_found_exactly_when_an_element_is_in_two_boxes(boxes):
    hits = torch.zeros(8, 8, dtype=torch.int64)
    for (row, column), (rows, columns) in boxes:
        hits[row : row + rows, column : column + columns] += 1
    assert (overlapping_boxes(boxes) is not None) == bool((hits > 1).any())


@pytest.mark.catalogue(31)
def test_a_manifest_that_claims_more_than_its_files_hold_is_refused_before_memory_is_taken(tmp_path):
    folder = checkpoint.save(tmp_path, 1, {"w": torch.ones(4)}, {})
    content = json.loads((folder / "manifest.json").read_text())
    del content["checksum"]
    huge = 10**15
    content["shards"]["rank-00000.safetensors"]["bytes"] = huge * 5
    content["tensors"]["w"] |= {"shape": [huge]}
    content["tensors"]["w"]["chunks"][0]["sizes"] = [huge]
    (folder / "manifest.json").write_bytes(with_checksum(content))
    with pytest.raises(CheckpointError, match=f"bytes long, expected {huge * 5}"):
        checkpoint.load_full(folder)
