"""A prepared folder in a bucket: the same order and bits as on a disk, within a bounded cache, and fetched ahead."""

import io
import json
import os
import time
import uuid
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.request import Request, urlopen

import numpy as np
import pytest
from data.little_text import lines, recipe
from data.test_samples import arrow_of, mds_of, tar_of
from hub_server import REPO
from ranks import run_ranks
from s3_server import BUCKET, Answer, Proxy
from s3_server import Request as Asked
from train.small_runs import MODEL, curve, same, small_run, state, train_here

from ultrascale.cli.terminal.stores import uploaded
from ultrascale.data.corpus import BLOCK_BYTES, BlockCache, Corpus, StreamedTokens
from ultrascale.data.files import DataError
from ultrascale.data.loader import Loader
from ultrascale.data.preparing import prepare as preparation
from ultrascale.data.preparing.fetch import MARK, locked
from ultrascale.data.preparing.prepare import prepare
from ultrascale.data.tokenizer import load_tokenizer, train_tokenizer
from ultrascale.description.run import Data, Source
from ultrascale.failpoints import VARIABLE
from ultrascale.storage import Store, open_store
from ultrascale.storage.files import FileStore
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.start.data_check import DataCheck


def put(store: Store, folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_file():
            store.write(path.name, path.read_bytes())


def loader(path: str | Path, *, length: int = 24) -> Loader:
    return Loader((Source(str(path)),), sequence_length=length, vocab_size=400, seed=5)


def test_sequences_are_those_of_the_folder_bit_for_bit(url: str, prepared: Path, small_blocks: None):
    put(open_store(url), prepared)
    here, there = loader(prepared), loader(url)
    assert here.fingerprint() == there.fingerprint() and here.sequences_per_epoch == there.sequences_per_epoch
    numbers = list(range(2 * here.sequences_per_epoch[0] + 3))
    for at in range(0, len(numbers), 7):
        left, right = here.read(numbers[at : at + 7]), there.read(numbers[at : at + 7])
        for name, value in vars(left).items():
            assert np.array_equal(value, getattr(right, name)), name


def test_documents_and_counts_are_those_of_the_folder(url: str, prepared: Path):
    put(open_store(url), prepared)
    here, there = Corpus(prepared), Corpus(url)
    assert (here.num_tokens, here.num_documents, here.num_bytes) == (there.num_tokens, there.num_documents, there.num_bytes)
    assert str(there.path) == url and there.tokenizer == here.tokenizer and there.tokenizer_path is not None
    for number in (0, 57, here.num_documents - 1):
        assert np.array_equal(here.document(number), there.document(number))


def test_a_cache_holds_no_more_than_it_may_and_still_gives_the_same(url: str, prepared: Path, small_blocks: None):
    put(open_store(url), prepared)
    here, there = loader(prepared), loader(url)
    corpus = there.corpora[0]
    assert corpus.streamed is not None
    corpus.streamed.cache = BlockCache(1024)
    for number in range(60):
        assert np.array_equal(here.read([number]).tokens, there.read([number]).tokens)
    assert 0 < len(corpus.streamed.cache._blocks) <= 4


def test_what_is_expected_is_there_when_it_is_read(proxy: Proxy, prepared: Path, small_blocks: None):
    """Each range takes 0.2 s: read one after the other, 32 sequences would take seconds; expected before, next to nothing."""
    put(open_store("s3://bucket/ahead"), prepared)
    there = loader("s3://bucket/ahead")
    for index in range(len(there.corpora[0].prefixes)):
        there.corpora[0].shard(index)
    there.expect(range(32))
    deadline = time.monotonic() + 60
    cache = there.corpora[0].streamed.cache  # pyright: ignore[reportOptionalMemberAccess]
    while not all(block.done() for block in list(cache._blocks.values())) and time.monotonic() < deadline:
        time.sleep(0.01)
    asked = len(proxy.seen)
    proxy.rule = lambda request: Answer(delay=0.2)
    there.read(range(32))
    assert len(proxy.seen) == asked


class Short(FileStore):
    """Gives all of the first block of an object, and of the second one byte too few."""

    def read_range(self, key: str, begin: int, end: int) -> bytes:
        return super().read_range(key, begin, end)[: BLOCK_BYTES - 1 if begin == BLOCK_BYTES else None]


def test_a_block_that_came_short_is_refused(tmp_path: Path):
    store = Short(tmp_path)
    store.write("ids", bytes(4 * BLOCK_BYTES))
    tokens = StreamedTokens(store, "ids", np.uint16, 4 * BLOCK_BYTES, BlockCache())
    assert len(tokens[: BLOCK_BYTES // 2]) == BLOCK_BYTES // 2
    with pytest.raises(DataError, match="and was longer when it was opened"):
        tokens[BLOCK_BYTES // 2 - 1 : BLOCK_BYTES + 1]


def test_connections_that_break_are_got_over(proxy: Proxy, prepared: Path, small_blocks: None):
    put(open_store("s3://bucket/breaks"), prepared)
    proxy.rule = lambda request: (
        Answer(status=503) if request.number % 4 == 0 else Answer(cut=0.5) if request.number % 7 == 0 else None
    )
    there = loader("s3://bucket/breaks")
    assert np.array_equal(loader(prepared).read(range(12)).tokens, there.read(range(12)).tokens)


@pytest.mark.parametrize("harm", ["no manifest", "no index", "index changed", "ids changed", "ids cut short"])
def test_what_is_not_what_was_prepared_is_refused(url: str, prepared: Path, harm: str):
    store = open_store(url)
    put(store, prepared)
    name = json.loads((prepared / "manifest.json").read_text())["shards"][0]["name"]
    ids, index = store.read(f"{name}.bin"), store.read(f"{name}.idx")
    if harm == "no manifest":
        store.remove(["manifest.json"])
    elif harm == "no index":
        store.remove([f"{name}.idx"])
    elif harm == "index changed":
        store.write(f"{name}.idx", index[:-1] + b"\x7f")
    else:
        store.write(f"{name}.bin", bytes([ids[0] ^ 1]) + ids[1:] if harm == "ids changed" else ids[:-2])
    with pytest.raises(DataError) as caught:
        loader(url).corpora[0].shard(0)
    assert url in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_that_have_found_other_data_in_a_store_do_not_begin(prepared: Path, tmp_path: Path):
    corpus = Corpus(f"file://{prepared}")
    ranks = Mock(rank=1, world=3, gather_json=lambda value: [value, value, value if value is None else ["another"]])
    check = DataCheck([corpus], ranks, RunFolder(tmp_path), allow_changes=False)
    with pytest.raises(DataError, match=f"^file://{prepared}: was changed while .* rank 2 has found other data .* than rank 0"):
        check.before_first_step()


def test_a_place_without_data_is_told(url: str):
    with pytest.raises(DataError, match=r"holds no manifest\.json, so it is no prepared folder"):
        Corpus(url)


def test_a_run_trains_from_a_bucket_to_the_same_bits(url: str, prepared: Path, tmp_path: Path):
    put(open_store(url), prepared)
    runs = []
    for name, path in (("disk", str(prepared)), ("bucket", url)):
        run = small_run(tmp_path / name, data=Data(sources=(Source(path),)), model=replace(MODEL, vocab_size=400), steps=8)
        train_here(run)
        runs.append(run)
    assert same(state(runs[0]), state(runs[1])) and curve(runs[0]) == curve(runs[1])
    assert (tmp_path / "bucket/small/tokenizer.json").exists()
    assert "data: of 1 source in a store" in (tmp_path / "bucket/small/log.txt").read_text()


TEXT = {"a/one.jsonl": 0, "a/two.jsonl": 1, "b.jsonl": 2, "skipped/three.jsonl": 3, "notes.md": 4}


@pytest.mark.parametrize("whole", [True, False], ids=["a folder", "a file"])
def test_text_in_a_bucket_is_prepared_as_on_a_disk(url: str, tmp_path: Path, whole: bool):
    store = open_store(url)
    for name, place in TEXT.items():
        (tmp_path / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(json.dumps({"text": line}) for line in lines()[place::5])
        (tmp_path / "text" / name).write_text(text)
        store.write(name, text.encode())
    trained = tmp_path / "tokenizer.json"
    train_tokenizer([" ".join(lines()[:50])], 300).save(str(trained))
    asked = recipe(trained, glob="*.jsonl", exclude=("skipped",), validation_fraction=0.2)
    end = "" if whole else "/a/one.jsonl"
    shards: list[dict[str, bytes]] = []
    for place, name in ((tmp_path / "text", "here"), (url, "there")):
        prepare([f"{place}{end}"], output=tmp_path / name, recipe=asked, workers=1)
        found = (tmp_path / name).rglob("shard-*")
        shards.append({str(path.relative_to(tmp_path / name)): path.read_bytes() for path in found})
    assert shards[0] == shards[1] and len(shards[0]) > (10 if whole else 3)
    assert not (tmp_path / "there.inputs").exists()


def test_shards_of_every_format_in_a_bucket_are_prepared_as_on_a_disk(url: str, tmp_path: Path):
    """WebDataset, MosaicML Streaming and what `datasets` saves, with the files that stand beside them, and Parquet."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    several = [lines()[place::4] for place in range(4)]
    held = io.BytesIO()
    parquet.write_table(pyarrow.table({"text": several[3]}), held)
    files = {
        "web/000.tar": tar_of({f"{number}.txt": text.encode() for number, text in enumerate(several[0])}),
        "mosaic/shard.00000.mds": mds_of(several[1]), "mosaic/index.json": b'{"shards": [], "version": 2}',
        "saved/data-00000-of-00001.arrow": arrow_of(several[2]), "saved/dataset_info.json": b"{}", "saved/state.json": b"{}",
        "part.parquet": held.getvalue(),
    }  # fmt: skip
    store = open_store(url)
    for name, content in files.items():
        (tmp_path / "shards" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "shards" / name).write_bytes(content)
        store.write(name, content)
    train_tokenizer([" ".join(lines()[:50])], 300).save(str(tmp_path / "tokenizer.json"))
    made = {}
    for place, name in ((tmp_path / "shards", "here"), (url, "there")):
        prepare([place], output=tmp_path / name, recipe=recipe(tmp_path / "tokenizer.json"), workers=1)
        made[name] = {path.name: path.read_bytes() for path in (tmp_path / name).rglob("shard-*")}
    assert made["here"] == made["there"] and sorted(documents(tmp_path / "there")) == sorted(lines())


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """A folder with two files of text; beside it a tokenizer, and `OUTPUT.inputs` is `there.inputs`."""
    train_tokenizer([" ".join(lines()[:50])], 300).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "texts").mkdir()
    for name, place in (("one.jsonl", 0), ("two.jsonl", 1)):
        text = "\n".join(json.dumps({"text": line}) for line in lines(40)[place::2])
        (tmp_path / "texts" / name).write_text(text)
    return tmp_path / "texts"


def prepare_there(texts: Path, *inputs: str, **options: Any) -> Path:
    """The folder that was made of the inputs, else of `texts`, as URLs."""
    given = [f"file://{texts}{end}" for end in inputs or [""]]
    there = texts.parent / "there"
    prepare(given, output=there, recipe=recipe(texts.parent / "tokenizer.json", **options), workers=1)
    return there


def prepare_on_a_rank(rank: int, texts: Path, *inputs: str) -> None:
    prepare_there(texts, *inputs)


def killed(texts: Path, *inputs: str) -> Path:
    """`OUTPUT.inputs` as a preparation leaves it that is killed at its first document, once it has everything."""
    at = {VARIABLE: "shard.document:0:1"}
    (outcome,) = run_ranks(1, prepare_on_a_rank, texts, *inputs, environment=at, failures="return")
    assert outcome.kind == "died"
    return texts.parent / "there.inputs"


def documents(folder: Path) -> list[str]:
    corpus = Corpus(folder)
    assert corpus.tokenizer_path is not None
    tokenizer = load_tokenizer(corpus.tokenizer_path)
    return [tokenizer.decode(corpus.document(number).tolist()) for number in range(corpus.num_documents)]


def test_a_folder_of_the_users_is_neither_written_nor_removed(texts: Path):
    own = texts.parent / "there.inputs"
    own.mkdir()
    (own / "notes").write_text("mine")
    with pytest.raises(DataError, match=r"there\.inputs: is there already, .*Move it, or choose another --output"):
        prepare_there(texts)
    prepare([texts], output=texts.parent / "there", recipe=recipe(texts.parent / "tokenizer.json"), workers=1)
    assert [path.name for path in own.iterdir()] == ["notes"] and (own / "notes").read_text() == "mine"


def test_what_was_brought_from_elsewhere_is_not_taken(texts: Path):
    killed(texts, "/two.jsonl")
    there = prepare_there(texts, "/one.jsonl")
    assert len(documents(there)) == 20 and not (texts.parent / "there.inputs").exists()
    assert [file["file"] for file in Corpus(there).manifest.request["inputs"]] == [f"file://{texts}/one.jsonl"]  # pyright: ignore


@pytest.mark.parametrize("change", ["removed", "replaced", "folder", "none"])
def test_what_has_changed_in_the_store_is_brought_again(texts: Path, change: str):
    own, two = killed(texts), texts / "two.jsonl"
    (held,) = own.rglob("two.jsonl")
    (held.parent / "left.jsonl.partial").write_text("{")
    content = two.read_text()
    two.unlink() if change in ("removed", "folder") else None
    if change == "replaced":
        two.write_text(content.replace("document", "replaced"))
        os.utime(two, (1, 1))
    elif change == "folder":
        two.mkdir()
        (two / "in.jsonl").write_text(content)
    for path in own.rglob("*.jsonl"):  # what is not brought again is told by its text
        mark_as_kept(path)
    found = Counter(text.split()[0] for text in documents(prepare_there(texts)))
    assert found == {
        "removed": {"kept-as-": 20}, "replaced": {"kept-as-": 20, "replaced": 20},
        "folder": {"kept-as-": 20, "document": 20}, "none": {"kept-as-": 40},
    }[change]  # fmt: skip


def mark_as_kept(path: Path) -> None:
    """Change the text of a file, and neither its length nor its time."""
    times = path.stat()
    path.write_text(path.read_text().replace("document", "kept-as-"))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_a_finished_output_is_not_that_of_a_store_that_has_changed(texts: Path):
    prepare_there(texts)
    prepare_there(texts)
    os.utime(texts / "one.jsonl", (1, 1))
    with pytest.raises(DataError, match=rf"^file://{texts}/one.jsonl: is new or has changed"):
        prepare_there(texts)


@pytest.mark.parametrize("times", [2, 99])
def test_what_comes_cut_short_is_asked_for_again_or_refused(proxy: Proxy, texts: Path, times: int):
    url, asked = f"s3://{BUCKET}/{uuid.uuid4().hex}", Counter[str]()
    put(open_store(url), texts)

    def cut(request: Asked) -> Answer | None:
        name = request.path.rpartition("/")[2] if request.method == "GET" else ""
        asked[name] += 1
        return Answer(truncate=0.5) if name == "one.jsonl" and asked[name] <= times else None

    proxy.rule = cut
    preparing = partial(
        prepare, [url], output=texts.parent / "there", recipe=recipe(texts.parent / "tokenizer.json"), workers=1
    )
    if times == 2:
        preparing()
        assert len(documents(texts.parent / "there")) == 40
    else:
        with pytest.raises(DataError, match=r"one\.jsonl came as [\d,]+ bytes, expected") as caught:
            preparing()
        assert ".." not in str(caught.value).replace("...", "") and not list(texts.parent.rglob("there.inputs/*/one.jsonl"))
    assert asked["one.jsonl"] == 3


def test_markers_of_folders_are_no_text_and_stand_in_no_ones_way(server: str, url: str, texts: Path):
    """Consoles keep an empty object `folder/` for a folder that was made by hand."""
    place = url.removeprefix("s3://")
    for name in (f"{place}/", f"{place}/sub/", f"{place}/sub/deep/"):
        urlopen(Request(f"{server}/{name}", data=b"", method="PUT")).close()
        with uploaded(Path(f"{url}/{name.removeprefix(place).strip('/')}".rstrip("/")), overwrite=False) as there:
            assert there.name == "export"
    for path, key in zip(sorted(texts.iterdir()), ("one.jsonl", "sub/deep/two.jsonl"), strict=True):
        open_store(url).write(key, path.read_bytes())
    prepare([url], output=texts.parent / "there", recipe=recipe(texts.parent / "tokenizer.json"), workers=1)
    assert len(documents(texts.parent / "there")) == 40


MISTAKES = {
    "tokenizer": "none.json",
    "recipe": "--field: is 'body', but .* was begun with 'text'",
    "inputs": "texts/one.jsonl: is no longer among the inputs",
    "output": "there: is a file, and text is prepared into a folder",
    "lock": "is being prepared by another process",
}


@pytest.mark.parametrize("trouble", MISTAKES)
def test_what_is_wrong_here_is_told_before_anything_is_brought(texts: Path, trouble: str):
    there, options, inputs = texts.parent / "there", {}, []
    with ExitStack() as held:
        if trouble == "output":
            there.write_text("")
        elif trouble == "tokenizer":
            options["tokenizer"] = texts / "none.json"
        else:
            prepare_there(texts)
            options = {"field": "body"} if trouble == "recipe" else {}
            inputs = ["/two.jsonl"] if trouble == "inputs" else []
            if trouble == "lock":
                held.enter_context(locked(there / ".lock", there))
        with pytest.raises(DataError, match=MISTAKES[trouble]):
            prepare_there(texts, *inputs, **options)
    assert not (texts.parent / "there.inputs").exists()  # where it would be left


def test_bytes_that_are_brought_are_told(texts: Path):
    told: list[preparation.Progress] = []
    wanted = recipe(texts.parent / "tokenizer.json")
    prepare([f"file://{texts}"], output=texts.parent / "there", recipe=wanted, workers=1, on_progress=told.append)
    total = sum(path.stat().st_size for path in texts.iterdir())
    bringing = [one for one in told if one.stage == "bringing"]
    assert bringing and bringing == told[: len(bringing)] and bringing[-1].done_bytes == bringing[-1].total_bytes == total


@pytest.mark.parametrize("fixture, place", [("hub_here", f"hf://{REPO}"), ("url", f"s3://{BUCKET}")])
def test_a_place_that_holds_nothing_asked_for_is_told(texts: Path, request: pytest.FixtureRequest, fixture: str, place: str):
    """A whole repository, and a whole bucket: nothing above them could hold a file of their name."""
    request.getfixturevalue(fixture)
    open_store(place, to_write=True).publish("text.jsonl", b"{}", replacing=None)
    with pytest.raises(DataError, match=rf"^{place}: holds no file that is asked for \(--glob '\*\.none'\)\. Give another"):
        prepare(
            [place], output=texts.parent / "there", recipe=recipe(texts.parent / "tokenizer.json", glob="*.none"), workers=1
        )
    assert not (texts.parent / "there.inputs").exists()


def test_one_preparation_brings_at_a_time(texts: Path):
    own = killed(texts)
    with locked(own / MARK, texts), pytest.raises(DataError, match="there: is being prepared by another process"):
        prepare_there(texts)
    assert len(documents(prepare_there(texts))) == 40


def test_text_that_is_not_in_the_bucket_is_told(url: str, tmp_path: Path):
    trained = tmp_path / "tokenizer.json"
    train_tokenizer([" ".join(lines()[:50])], 300).save(str(trained))
    with pytest.raises(DataError, match="holds no file that is asked for"):
        prepare([f"{url}/none.jsonl"], output=tmp_path / "there", recipe=recipe(trained), workers=1)
    assert not (tmp_path / "there").exists()
