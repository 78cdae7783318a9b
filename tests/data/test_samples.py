"""Documents out of shards of WebDataset, MosaicML Streaming and `datasets`, good and bad."""

from __future__ import annotations

import base64
import gzip
import io
import json
import struct
import tarfile
import zlib
from pathlib import Path

import pyarrow
import pytest
import zstandard

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.preparing.prepare import Recipe, prepare
from ultrascale.data.reading.documents import PartReader
from ultrascale.data.reading.inputs import cut_shards, find_files
from ultrascale.data.tokenizer import load_tokenizer, train_tokenizer

TEXTS = [f"document {number} é" for number in range(4)]
WRITTEN_BY_MOSAICML = zlib.decompress(base64.b85decode(
    "c$`(wOA5j;5C-5>1>JauFzYV*a3Q^gYmpM#Xd`(@lNPb`K%T>!coHYH(l#&|GWqgDHiVEb);1s{#5!TMSRE8bHcIDQ7p4^YW+9_z5ZXaV;ckug-MShs*hj0G;-f45wc"
    "?KX?)cNqofWUa9Yd-cDTjRk>QQrR1?Fet9b8SVn8P!u()zrL*=h*zZ+u!Vg%X||q6kMVug8d_-{J4}WLh2gdDNGtXcX6uM)dRkqhNvJ3B@zCTA*Y?$qcO*D4kG>=m&j+U`h"
))  # fmt: skip
"""Four samples with id (int), meta (json) and text (str), by the writer of mosaicml-streaming 0.13.0."""


def read_all(place: Path, field: str = "text") -> list[str]:
    """Texts, and reasons of errors with what is told."""
    found = []
    for parts in cut_shards(find_files([place])):
        for part in parts:
            for item in PartReader(part, field=field, spool=place.parent):
                found.append(f"{item.reason}: {item}" if isinstance(item, DataError) else item.text)
    return found


def tar_of(files: dict[str, bytes]) -> bytes:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w", format=tarfile.PAX_FORMAT) as archive:
        folder = tarfile.TarInfo("folder")
        folder.type = tarfile.DIRTYPE
        archive.addfile(folder)
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return held.getvalue()


def mds_of(texts: list[str], *, kind: str = "str", column: str = "text") -> bytes:
    """A shard with an id of 8 bytes beside each text."""
    columns = {"column_names": ["id", column], "column_encodings": ["int", kind], "column_sizes": [8, None], "version": 2}
    head, samples = json.dumps(columns).encode(), []
    for number, text in enumerate(texts):
        samples.append(struct.pack("<Iq", len(text.encode()), number) + text.encode())
    offsets = [4 * (len(texts) + 2) + len(head)]
    for sample in samples:
        offsets.append(offsets[-1] + len(sample))
    return struct.pack(f"<I{len(offsets)}I", len(texts), *offsets) + head + b"".join(samples)


def arrow_of(texts: list[str]) -> bytes:
    held = io.BytesIO()
    table = pyarrow.table({"text": texts})
    with pyarrow.ipc.new_stream(held, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    return held.getvalue()


SAMPLES = {f"folder/{number}.txt": text.encode() for number, text in enumerate(TEXTS)}


@pytest.mark.parametrize("form", ["txt", "json", "own"])
def test_a_sample_of_an_archive_is_a_document(tmp_path: Path, form: str):
    files: dict[str, bytes] = {}
    for number, text in enumerate(TEXTS):
        name = f"{'long/' * 40}{number}"
        files[f"{name}.cls"] = b"1"
        files[f"{name}.{'body.md' if form == 'own' else form}"] = (
            json.dumps({"body": text, "text": "no"}).encode() if form == "json" else text.encode()
        )
    (tmp_path / "web.tar").write_bytes(tar_of(files))
    assert read_all(tmp_path, {"txt": "text", "json": "body", "own": "body.md"}[form]) == TEXTS


@pytest.mark.parametrize("name", ["x.tar.gz", "x.tgz", "x.tar.zst"])
def test_compressed_archives_are_read(tmp_path: Path, name: str):
    data = tar_of(SAMPLES)
    (tmp_path / name).write_bytes(zstandard.compress(data) if name.endswith("zst") else gzip.compress(data))
    assert read_all(tmp_path) == TEXTS


def test_an_archive_cut_off_or_harmed_anywhere_is_bad_and_never_shorter(tmp_path: Path):
    data = tar_of(SAMPLES)
    path = tmp_path / "x.tar"
    end = len(data.rstrip(b"\0")) // 512 * 512 + 512
    for length in (100, *range(512, end + 1, 512), end - 100):
        path.write_bytes(data[:length])
        *before, last = read_all(path)
        assert before == TEXTS[: len(before)] and last.startswith("damaged_file: ") and "cut off" in last, length
    for header in (0, *range(512, end, 1024)):
        path.write_bytes(data[: header + 3] + b"?" + data[header + 4 :])
        *before, last = read_all(path)
        assert before == TEXTS[: len(before)] and last.startswith("damaged_file: "), header


def test_a_sample_without_text_is_told_and_its_neighbours_are_read(tmp_path: Path):
    files = {**SAMPLES, "folder/5.jpg": b"", "folder/6.json": b"{", "folder/7.txt": b"\xff", "folder/8.txt": b"", "z.txt": b"z"}
    (tmp_path / "x.tar").write_bytes(tar_of(files))
    found = read_all(tmp_path)
    assert found[:4] == TEXTS and found[-1] == "z"
    assert [one.partition(":")[0] for one in found[4:-1]] == ["missing_field", "broken_json", "invalid_utf8", "empty"]
    assert "sample folder/5: has no .txt and no .json, only .jpg" in found[4]
    alone = tar_of({"1.txt": b"1"})[512:1536]  # without the folder and the end
    (tmp_path / "x.tar").write_bytes(alone + alone + bytes(1024))
    (found,) = read_all(tmp_path)
    assert found.startswith("broken_sample: ") and "has 1.txt twice" in found


def test_a_shard_that_mosaicml_wrote_is_read(tmp_path: Path):
    (tmp_path / "shard.00000.mds").write_bytes(WRITTEN_BY_MOSAICML)
    assert read_all(tmp_path) == TEXTS


@pytest.mark.parametrize("end", ["", ".zstd", ".gz"])
def test_a_folder_of_mosaicml_is_read_and_a_shard_that_its_index_names_must_be_there(tmp_path: Path, end: str):
    pack = {"": bytes, ".zstd": zstandard.compress, ".gz": gzip.compress}[end]
    names = [f"shard.0000{number}.mds" for number in range(2)]
    for name, texts in zip(names, (TEXTS[:3], TEXTS[3:]), strict=True):
        (tmp_path / f"{name}{end}").write_bytes(pack(mds_of(texts)))
    shards = [{"raw_data": {"basename": name}, "zip_data": {"basename": name + end} if end else None} for name in names]
    (tmp_path / "index.json").write_text(json.dumps({"version": 2, "shards": shards}))
    assert read_all(tmp_path) == TEXTS
    (tmp_path / f"{names[1]}{end}").unlink()
    with pytest.raises(DataError, match=r"index.json: names shard.00001.mds.*, which is not there"):
        find_files([tmp_path])
    (tmp_path / "index.json").write_text("[]")
    with pytest.raises(DataError, match="is no index of MDS shards"):
        find_files([tmp_path])


def test_a_shard_cut_off_or_harmed_anywhere_is_bad_and_never_shorter(tmp_path: Path):
    data, path = mds_of(TEXTS), tmp_path / "x.mds"
    for length in range(len(data)):
        path.write_bytes(data[:length])
        *before, last = read_all(path)
        assert before == TEXTS[: len(before)] and last.startswith("damaged_file: "), (length, last)
    path.write_bytes(data + b"x")
    assert "bytes follow its last sample" in read_all(path)[-1]
    begin = int.from_bytes(data[4:8], "little")
    for at in (*range(4 * 6), begin):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x81]) + data[at + 1 :])
        assert read_all(path)[-1].startswith("damaged_file: "), at


@pytest.mark.parametrize("sizes", [b'[8, "ab"]', b"[8, 0.50]", b"[-8,null]"])
def test_a_shard_whose_columns_have_no_sizes_is_damaged(tmp_path: Path, sizes: bytes):
    (tmp_path / "x.mds").write_bytes(mds_of(TEXTS).replace(b"[8, null]", sizes))
    assert "a size is no number of bytes" in read_all(tmp_path)[-1]


@pytest.mark.parametrize(
    ("shard", "told"),
    [
        (mds_of(TEXTS, column="body"), "missing_field: x.mds: has no column 'text', only 'id', 'body'"),
        (mds_of(TEXTS, kind="pkl"), "not_text: x.mds: column 'text' holds pkl, expected str"),
    ],
)
def test_a_shard_without_text_is_told(tmp_path: Path, shard: bytes, told: str, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "x.mds").write_bytes(shard)
    (found,) = read_all(tmp_path)
    assert found.replace(f"{tmp_path}/", "").startswith(told)


def test_a_compression_that_is_not_read_is_refused_by_name(tmp_path: Path):
    (tmp_path / "shard.00000.mds.br").write_bytes(b"")
    with pytest.raises(DataError, match="compression that is not read here"):
        find_files([tmp_path])


def test_a_folder_that_datasets_saved_is_read(tmp_path: Path):
    (tmp_path / "train").mkdir()
    for number in range(2):
        (tmp_path / f"train/data-0000{number}-of-00002.arrow").write_bytes(arrow_of(TEXTS[2 * number : 2 * number + 2]))
    for name in ("train/dataset_info.json", "train/state.json", "dataset_dict.json"):
        (tmp_path / name).write_text("{}")
    assert read_all(tmp_path) == TEXTS


def test_an_arrow_stream_cut_off_is_bad(tmp_path: Path):
    data, path = arrow_of(TEXTS), tmp_path / "x.arrow"
    for length in (0, 4, len(data) // 2, len(data) - 8, len(data) - 1):
        path.write_bytes(data[:length])
        (found,) = read_all(path)
        assert found.startswith("damaged_file: ") and "lacks the mark of an end" in found, length
    path.write_bytes(data[: len(data) // 3] + data[-8:])
    assert read_all(path)[-1].startswith("damaged_file: ")
    path.write_bytes(data)
    assert read_all(path, "body")[0].startswith("missing_field: ")


@pytest.mark.parametrize("kind", ["tar", "mds", "arrow"])
def test_samples_are_prepared_from_a_store_as_from_lines(tmp_path: Path, kind: str):
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(TEXTS * 20, 300).save(str(tokenizer))
    (tmp_path / "in").mkdir()
    made = {"tar": tar_of(SAMPLES), "mds": mds_of(TEXTS), "arrow": arrow_of(TEXTS)}[kind]
    (tmp_path / f"in/x.{kind}").write_bytes(made)
    prepare([f"file://{tmp_path}/in"], output=tmp_path / "out", recipe=Recipe(tokenizer=tokenizer), workers=1)
    corpus, decode = Corpus(tmp_path / "out"), load_tokenizer(tokenizer).decode
    assert [decode(corpus.document(number).tolist()) for number in range(corpus.num_documents)] == TEXTS
