"""Documents out of files, good and bad."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import get_args

import pyarrow
import pyarrow.parquet
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ultrascale.cli.data import prepare
from ultrascale.data.files import DataError
from ultrascale.data.reading import documents
from ultrascale.data.reading.documents import Document, PartReader
from ultrascale.data.reading.inputs import COMPRESSIONS, KINDS, FilePart, InputFile, Kind, cut_shards, find_files
from ultrascale.data.tokenizer import train_tokenizer

PREPARE_AND_MEASURE = """
import sys
from pathlib import Path
from ultrascale.data.preparing.prepare import Recipe, prepare

def kib(name):
    return int(next(line for line in open("/proc/self/status") if line.startswith(name)).split()[1])

source, output, tokenizer = map(Path, sys.argv[1:])
before = kib("VmRSS")
made = prepare([source], output=output, recipe=Recipe(tokenizer=tokenizer), workers=1)
assert made.manifest.tokens > 1_000_000
print(kib("VmHWM") - before)
"""


def read_all(path, *, field="text", line_numbers=False, shard_bytes=1 << 30):
    """Texts and errors of a file, in order."""
    items = []
    for parts in cut_shards(find_files([path]), shard_bytes):
        for part in parts:
            for item in PartReader(part, field=field, spool=path.parent, line_numbers=line_numbers):
                items.append(whole(item))
    return items


def whole(item):
    """The text of a document, or the error it gives."""
    if isinstance(item, DataError):
        return item
    if item.text is not None:
        return item.text
    try:
        return "".join(item.pieces)
    except DataError as error:
        return error


def write(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    return path


@pytest.mark.catalogue(55)
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a', "broken_json"),
        (b'{"text": "a"} x', "broken_json"),
        (b"[1, 2]", "broken_json"),
        (b'"text"', "broken_json"),
        (b'{"other": "a"}', "missing_field"),
        (b'{"text": null}', "not_text"),
        (b'{"text": 5}', "not_text"),
        (b'{"text": ["a"]}', "not_text"),
        (b'{"text": ""}', "empty"),
        (b"", "empty_line"),
        (b"  \r", "empty_line"),
        (b'{"text": "a\\ud800b"}', "lone_surrogate"),
        (b'{"text": "a\\u0000b"}', "nul"),
        (b'{"text": "a\x00b"}', "broken_json"),
        (b'{"text": "\xff"}', "invalid_utf8"),
        ('{"text": "é"}'.encode("latin-1"), "invalid_utf8"),
        ('{"text": "a"}'.encode("utf-16"), "invalid_utf8"),
        (b'{"text": "a", "x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "broken_json"),
        (b'{"text": "a", "x": ' + b"9" * 5000 + b"}", "broken_json"),
        (b'{"text": "a", "x": NaN}', "broken_json"),
        (b'{"text": "a", "text": "b"}', "broken_json"),
        (b'{"text": "tab\there"}', "broken_json"),
        (b'\xef\xbb\xbf{"text": "a"}', "broken_json"),
    ],
)
def test_a_bad_line_is_named_by_reason_line_and_byte_and_its_neighbours_are_read(tmp_path, line, reason):
    path = write(tmp_path, "x.jsonl", b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n')
    before, bad, after = read_all(path)
    assert (before, bad.reason, after) == ("before", reason, "after")
    assert bad.where == f"{path}:2 (byte 19)"


@pytest.mark.catalogue(55)
def test_lines_end_at_newline_bytes_only(tmp_path):
    text = "a\u2028b\u2029c\x85d\x0be\x0cf\rg\r\nh"
    path = write(tmp_path, "x.jsonl", json.dumps({"text": text}, ensure_ascii=False).encode() + b"\r\n")
    assert read_all(path) == [text]


@pytest.mark.catalogue(55)
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_a_byte_order_mark_at_the_start_is_dropped(tmp_path, name):
    content = b'{"text": "a"}' if name == "x.jsonl" else b"a"
    assert read_all(write(tmp_path, name, b"\xef\xbb\xbf" + content)) == ["a"]


@pytest.mark.catalogue(55)
def test_the_last_line_needs_no_newline_but_must_be_whole(tmp_path):
    assert read_all(write(tmp_path, "a.jsonl", b'{"text": "a"}')) == ["a"]
    assert read_all(write(tmp_path, "c.jsonl", b'{"text": "a"}\n{"text": "b"}')) == ["a", "b"]
    (cut,) = read_all(write(tmp_path, "b.jsonl", b'{"text": "a"'))
    assert cut.reason == "broken_json"


def test_a_text_file_is_one_document_with_its_line_ends_kept(tmp_path):
    assert read_all(write(tmp_path, "x.txt", "a\r\nb\n\u2028é".encode())) == ["a\r\nb\n\u2028é"]


@pytest.mark.catalogue(56)
@pytest.mark.parametrize("size", [0, documents.PIECE_BYTES - 1, documents.PIECE_BYTES, 3 * documents.PIECE_BYTES + 7])
def test_invalid_utf8_in_a_text_file_is_named_by_its_byte(tmp_path, size):
    (bad,) = read_all(write(tmp_path, "x.txt", b"a" * size + b"\xc3(" + b"b" * 9))
    assert bad.reason == "invalid_utf8"
    assert f"at byte {size}" in str(bad)


def test_a_character_cut_by_the_end_of_a_file_is_invalid(tmp_path):
    (bad,) = read_all(write(tmp_path, "x.txt", b"a" * documents.PIECE_BYTES + "é".encode()[:1]))
    assert f"at byte {documents.PIECE_BYTES}" in str(bad)


def test_long_text_comes_in_pieces_that_cut_no_character(tmp_path):
    text = "aé漢😀" * 400_000
    assert read_all(write(tmp_path, "x.txt", text.encode())) == [text]


@pytest.mark.catalogue(56)
@pytest.mark.parametrize(("name", "reason"), [("x.txt", "empty"), ("x.jsonl", "empty_file")])
def test_an_empty_file_is_bad(tmp_path, name, reason):
    (bad,) = read_all(write(tmp_path, name, b""))
    assert bad.reason == reason


@given(
    texts=st.lists(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1), min_size=1),
    shard_bytes=st.integers(1, 60),
    ascii_only=st.booleans(),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_cut_of_a_file_into_parts_gives_every_line_once(tmp_path, texts, shard_bytes, ascii_only):
    lines = [json.dumps({"text": text}, ensure_ascii=ascii_only) for text in texts]
    path = write(tmp_path, "x.jsonl", "\n".join(lines).encode())
    assert read_all(path, shard_bytes=shard_bytes) == texts


def test_a_line_in_a_later_part_is_told_by_number_on_request(tmp_path):
    path = write(tmp_path, "x.jsonl", b'{"text": "ok"}\n' * 99 + b"{\n")
    (bad,) = [item for item in read_all(path, shard_bytes=100, line_numbers=True) if isinstance(item, DataError)]
    assert bad.where == f"{path}:100 (byte 1485)"
    (bad,) = [item for item in read_all(path, shard_bytes=100) if isinstance(item, DataError)]
    assert bad.where == f"{path}, line at byte 1485"


LINES = b"".join(json.dumps({"text": f"document {number}"}).encode() + b"\n" for number in range(3000))
COMPRESS = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress}


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_lines_are_read(tmp_path, suffix):
    half = len(LINES) // 2
    content = COMPRESS[suffix](LINES[:half]) + COMPRESS[suffix](LINES[half:])  # several members or frames
    assert read_all(write(tmp_path, f"x.jsonl.{suffix}", content)) == [f"document {number}" for number in range(3000)]


@pytest.mark.catalogue(56)
@pytest.mark.parametrize("suffix", ["gz", "zst"])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_a_truncated_compressed_file_is_bad(tmp_path, suffix, name):
    content = COMPRESS[suffix](os.urandom(1 << 20).hex().encode().replace(b"0", b"\n"))
    items = read_all(write(tmp_path, f"{name}.{suffix}", content[: len(content) // 2]))
    assert (items[-1].reason, "middle of its compressed data" in str(items[-1])) == ("damaged_file", True)


@pytest.mark.catalogue(56)
@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_a_file_that_is_not_compressed_as_named_is_bad(tmp_path, suffix):
    (bad,) = read_all(write(tmp_path, f"x.jsonl.{suffix}", LINES))
    assert bad.reason == "damaged_file"


@pytest.mark.catalogue(56)
@pytest.mark.parametrize(("suffix", "kind"), [("gz", "gzip"), ("zst", "zstd")])
@pytest.mark.parametrize("name", ["x.jsonl", "x.txt"])
def test_a_compressed_file_without_its_suffix_is_bad(tmp_path, suffix, kind, name):
    (bad,) = read_all(write(tmp_path, name, COMPRESS[suffix](LINES)))
    assert (bad.reason, f"holds {kind} data" in str(bad)) == ("wrong_name", True)


def parquet(tmp_path, columns, **options):
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
    return path


@pytest.mark.parametrize("kind", [pyarrow.string(), pyarrow.large_string()])
def test_parquet_rows_are_documents_in_any_cut_into_row_groups(tmp_path, kind):
    texts = [f"text {number} é" for number in range(500)]
    path = parquet(tmp_path, {"text": pyarrow.array(texts, kind), "n": list(range(500))}, row_group_size=70)
    assert read_all(path) == texts
    assert read_all(path, shard_bytes=1) == texts


def test_a_bad_parquet_row_is_named_by_group_and_row(tmp_path):
    path = parquet(tmp_path, {"text": ["a", "b", None, ""]}, row_group_size=2)
    assert [item if isinstance(item, str) else (item.reason, item.where) for item in read_all(path)] == [
        "a", "b", ("not_text", f"{path}, row group 1, row 0"), ("empty", f"{path}, row group 1, row 1"),
    ]  # fmt: skip


def test_invalid_utf8_in_parquet_is_bad(tmp_path):
    raw = pyarrow.array([b"ok", b"\xff"], pyarrow.binary())
    path = parquet(tmp_path, {"text": raw.view(pyarrow.string())})
    good, bad = read_all(path)
    assert (good, bad.reason) == ("ok", "invalid_utf8")


@pytest.mark.parametrize(("column", "reason"), [({"other": ["a"]}, "missing_field"), ({"text": [1]}, "not_text")])
def test_a_parquet_file_without_text_is_bad(tmp_path, column, reason):
    (bad,) = read_all(parquet(tmp_path, column))
    assert bad.reason == reason


def test_a_parquet_file_that_is_none_is_refused_by_name(tmp_path):
    with pytest.raises(DataError, match=r"x\.parquet: is not a Parquet file"):
        read_all(write(tmp_path, "x.parquet", b"PAR1 but no more"))


@pytest.mark.parametrize("package", ["zstandard", "pyarrow"])
def test_a_missing_package_says_what_to_install(tmp_path, package, monkeypatch):
    for module in (package, f"{package}.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    path = write(tmp_path, "x.jsonl.zst" if package == "zstandard" else "x.parquet", b"")
    with pytest.raises(DataError, match=rf"{package}: .* pip install 'ultrascale\[data\]'"):
        read_all(path)


LONG_TEXTS = ['quote " backslash \\ newline \n tab \t', "é漢😀\u2028", "\\\\\\", "\u0001", "x" * 5]


@pytest.fixture
def little_memory(monkeypatch) -> None:
    """For a line of 100 kB at most, in place of 4 MiB: reading some of those takes seconds."""
    monkeypatch.setattr(documents, "LONGEST_LINE", 100_000)


@pytest.mark.catalogue(56)
@pytest.mark.parametrize("ascii_only", [True, False])
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_too_long_for_memory_gives_the_same_text(tmp_path, little_memory, ascii_only, suffix):
    text = "".join(LONG_TEXTS) * 20_000
    value = {"a": {"text": "inner"}, "other": "y" * 300_000, "text": text, "z": [1, {"k": "w" * 90_000}]}
    line = json.dumps(value, ensure_ascii=ascii_only).encode()
    content = b'{"text": "before"}\n' + line + b'\n{"text": "after"}\n'
    path = write(tmp_path, f"x.jsonl{suffix}", COMPRESS[suffix[1:]](content) if suffix else content)
    assert read_all(path) == ["before", text, "after"]


@given(piece=st.integers(1, 9), text=st.text(st.sampled_from('a"\\\n😀é'), min_size=1, max_size=60), ascii_only=st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_long_string_cut_anywhere_decodes_the_same(piece, text, ascii_only):
    import io

    from ultrascale.data.reading import long_lines

    line = json.dumps({"n": 1, "text": text}, ensure_ascii=ascii_only).encode()
    short = long_lines.shorten(io.BytesIO(line), 10_000, long_string=4, piece_bytes=piece)
    assert short is not None
    found = json.loads(short[0])["text"]
    if (mark := long_lines.marked(found)) is not None:
        found = "".join(long_lines.string_pieces(io.BytesIO(line), *short[1][mark], piece_bytes=piece))
    assert found == text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b'"' + b"x" * 300_000 + b"\xff" + b'"', "invalid_utf8"),
        (b'"' + b"x" * 300_000 + b"\\q" + b'"', "broken_json"),
        (b'"' + b"x" * 300_000 + b"\\ud800 " + b"x" * 300_000 + b'"', "lone_surrogate"),
        (b'"' + b"x" * 300_000 + b"\\u0000" + b'"', "nul"),
        (b'"' + b"x" * 300_000 + b"\n", "broken_json"),
        (b'"' + b"x" * 300_000, "broken_json"),
        (b"[" + b"1," * 300_000 + b"1]", "broken_json"),
        (b'"a", "x": "' + b"x" * 300_000 + b'"]', "broken_json"),
        (b'"a", "x": nope, "y": "' + b"x" * 300_000 + b'"', "broken_json"),
        (b'"", "x": "' + b"x" * 300_000 + b'"', "empty"),
    ],
)
def test_a_bad_line_too_long_for_memory_is_named_by_reason(tmp_path, little_memory, value, reason):
    path = write(tmp_path, "x.jsonl", b'{"text": ' + value + b'}\n{"text": "after"}\n')
    found = [item if isinstance(item, str) else item.reason for item in read_all(path)]
    assert found[0] == reason
    assert found[-1] == "after"


@pytest.mark.catalogue(56)
@pytest.mark.parametrize("name", ["x.txt", "x.jsonl", "x.jsonl.gz", "x.jsonl.zst"])
def test_memory_stays_flat_for_a_long_document(tmp_path, name):
    text = os.urandom(14 << 20).hex().encode().replace(b"ab", b" \\n ")  # 28 MiB
    content = text if name == "x.txt" else b'{"text": "' + text + b'"}\n'
    suffix = name.rsplit(".", 1)[-1]
    path = write(tmp_path, name, COMPRESS[suffix](content) if suffix in COMPRESS else content)
    size = len(content)
    del text, content
    file = find_files([path])[0]
    tracemalloc.start()
    length = 0
    for item in PartReader(FilePart(file, 0, file.size, file.size), field="text", spool=tmp_path):
        assert isinstance(item, Document)
        length += sum(len(piece) for piece in item.pieces or [])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert length > size * 0.9  # escapes are shorter once decoded
    assert peak < size / 2


@pytest.mark.catalogue(56)
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_document_in_one_long_line_is_prepared_in_flat_resident_memory(tmp_path):
    """Resident, and in a process of its own: what the allocator keeps of the tokenizer's freed memory is no block of Python's.

    Nine windows of 262,144 characters: the process grew by 385 MiB over them, and by 14 MiB with every further one.
    """
    units = random.Random(1).choices(["\\n", '\\"', "\\u00e9", "a", "b "], k=2_000_000)
    source = write(tmp_path, "x.jsonl", f'{{"text": "{"".join(units)}"}}\n'.encode())
    tokenizer = tmp_path / "tokenizer.json"
    train_tokenizer(["".join(units[:50_000]).replace("\\", " ")], 400).save(str(tokenizer))
    prepare = [sys.executable, "-c", PREPARE_AND_MEASURE, str(source), str(tmp_path / "out"), str(tokenizer)]
    grown_kib = int(subprocess.run(prepare, capture_output=True, text=True, check=True).stdout)
    assert grown_kib < 200 << 10


def test_files_come_in_order_of_name_without_what_is_excluded(tmp_path):
    for name in ("b.py", "a/z.py", "a/skip/x.py", "a.txt", "a/c.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    assert [file.name for file in find_files([tmp_path], glob="*.py", exclude=("skip",))] == ["a/c.py", "a/z.py", "b.py"]


def test_linked_folders_are_read_once_and_hidden_names_are_not_read(tmp_path):
    for name in ("in/a.txt", "in/.git/config", "in/.notes.txt", "elsewhere/b.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        (tmp_path / name).write_text("x")
    for link in ("linked", "twice"):
        (tmp_path / "in" / link).symlink_to(tmp_path / "elsewhere")
    assert [file.name for file in find_files([tmp_path / "in"], glob="*")] == ["a.txt", "linked/b.txt"]
    assert [file.name for file in find_files([tmp_path / "in"], glob=".n*")] == [".notes.txt"]
    (tmp_path / "in" / "z.txt").symlink_to("a.txt")
    (tmp_path / "in" / "linked" / "c.txt").hardlink_to(tmp_path / "elsewhere" / "b.txt")
    assert [file.name for file in find_files([tmp_path / "in"])] == ["a.txt", "linked/b.txt"]
    (tmp_path / "in" / "gone").symlink_to("nowhere")
    with pytest.raises(DataError, match=r"cannot be read: No such file.*leave it out of its folder: --exclude"):
        find_files([tmp_path / "in"])
    assert len(find_files([tmp_path / "in"], exclude=("gone",))) == 2


def test_a_file_that_a_link_names_in_another_format_is_not_read_by_either(tmp_path):
    """As in the Hub's cache, whose blobs have no suffix and come first."""
    for name in ("blobs", "snapshots"):
        (tmp_path / name).mkdir()
    blob = write(tmp_path / "blobs", "0a1b", b'{"text": "a"}\n')
    (tmp_path / "snapshots" / "train.jsonl").symlink_to(blob)
    with pytest.raises(DataError, match=r"train.jsonl: is .*0a1b by a link, and their names tell different formats"):
        find_files([tmp_path])
    assert [file.kind for file in find_files([tmp_path], exclude=("blobs",))] == ["jsonl"]


def test_a_shard_of_many_small_files_is_cut_in_a_time_linear_in_them():
    class Size(int):
        additions = 0

        def __radd__(self, other: int) -> int:
            Size.additions += 1
            return int(self) + other

    files = [InputFile(Path(f"/{number}.txt"), f"{number}.txt", "text", "", Size(9), 0) for number in range(2000)]
    shards = cut_shards(files, 9000)
    assert [len(parts) for parts in shards] == [1000, 1000] and Size.additions < 10 * len(files)


@pytest.mark.catalogue(58)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: [folder / "missing"], "missing: cannot be read: No such file"),
        (lambda folder: [folder], "holds no file that matches"),
        (lambda folder: [write(folder, "x.txt", b"x"), folder], "is given twice"),
        (lambda folder: [], "names no file"),
    ],
)
def test_inputs_that_make_no_sense_are_refused(tmp_path, make, expected):
    with pytest.raises(DataError, match=expected):
        find_files(make(tmp_path))


def test_a_row_of_a_csv_is_a_document_and_its_text_the_column_that_is_named(tmp_path):
    (tmp_path / "x.csv").write_text('id,body\n1,"one, and ""more"""\n2,"two\nlines"\n')
    (file,) = find_files([tmp_path / "x.csv"])
    (parts,) = cut_shards([file])
    found = list(PartReader(parts[0], field="body", spool=tmp_path))
    assert [one.text for one in found if not isinstance(one, DataError)] == ['one, and "more"', "two\nlines"]
    (error,) = PartReader(parts[0], field="text", spool=tmp_path)
    assert "has no column 'text', only 'id', 'body'" in str(error)


def test_a_field_that_holds_no_text_is_told_from_a_text_that_is_missing(tmp_path):
    chat, missing = (
        read_all(write(tmp_path, f"{number}.jsonl", line))[0]
        for number, line in enumerate((b'{"text": [{"role": "user", "content": "hello"}]}', b'{"text": null}'))
    )
    assert "--field (the messages of a chat are none)" in chat.remedy and "--field" not in missing.remedy


@pytest.mark.parametrize("kind", get_args(Kind))
def test_every_kind_of_file_has_a_reader(kind, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"")
    (found,) = PartReader(FilePart(InputFile(path, "file", kind, "", 0, 0), 0, 0, 0), field="text", spool=tmp_path)
    assert isinstance(found, DataError)  # nothing is there to read


def test_the_help_of_prepare_and_the_page_have_every_ending_that_is_read():
    page = (Path(__file__).parents[2] / "docs" / "data.md").read_text()
    for suffix in (*KINDS, *COMPRESSIONS):
        assert f"`{suffix}`" in page, suffix
        assert suffix in COMPRESSIONS or suffix in (prepare.__doc__ or ""), suffix
