"""Files of text, tokens, tokenizers and weights, as a bad disk or a stranger may leave them."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
import torch
import zstandard
from drawn import initial_value
from fuzz.confined import HUGE, changed, confined, damaged, examples, read_confined, sound
from hypothesis import given
from train.small_runs import MODEL, make_corpus

from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.checkpoint import load_full
from ultrascale.checkpoint import save as save_checkpoint
from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.loader import Loader
from ultrascale.data.preparing.prepare import Recipe, prepare
from ultrascale.data.reading.documents import PartReader
from ultrascale.data.reading.inputs import cut_shards, find_files
from ultrascale.data.tokenizer import load_tokenizer, tokenizer_facts, train_tokenizer
from ultrascale.description.architecture.weights import weights
from ultrascale.description.run import Source
from ultrascale.models.files.huggingface import export_folder, import_folder
from ultrascale.models.files.tokenizer_files import special_tokens

pytestmark = pytest.mark.draws
LINES = b"".join(json.dumps({"text": f"line {n} \u00e9\u2028", "id": n}).encode() + b"\n" for n in range(20))
ODD_LINES = (
    b'{"text": ' + b"[" * 100_000, b'{"text": ' + b"9" * 5000 + b"}", b'{"text": "\\ud800"}', b'{"text": NaN}',
    b'{"text": "a", "text": "b"}', b'\xef\xbb\xbf{"text": "a"}', b'{"text": "a\x01"}', b'{"text": "a"}\r', b'{"text": null}',
    b'{"text": ["a"]}', b'{"text": "\\u0000"}',
)  # fmt: skip


def pack(data: bytes, suffix: str) -> bytes:
    return {"": lambda b: b, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)


@pytest.mark.catalogue(55, 56)
@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_every_line_of_jsonl_is_a_text_or_an_error_that_names_its_place(tmp_path, suffix):
    path = tmp_path / f"lines.jsonl{suffix}"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        count = 0
        for parts in sound(lambda: cut_shards(find_files([path]), 1 << 30)) or []:
            for part in parts:
                for item in PartReader(part, field="text", spool=tmp_path):
                    count += 1
                    assert str(path) in (str(item) if isinstance(item, DataError) else item.where)
                    if not isinstance(item, DataError):
                        sound(lambda item=item: (item.text or "".join(item.pieces or ())).encode())
        # No line goes missing in silence: as many items come out as there are lines that are not empty.
        if not suffix:
            assert count >= sum(bool(line.strip()) for line in data.split(b"\n")), (count, data)

    odd = [*(pack(line + b"\n" + LINES, suffix) for line in ODD_LINES), pack(b"\0" * (64 << 20), suffix)]
    read_confined(read, damaged(pack(LINES, suffix)), count=150, also=odd)


def read_corpus(path: Path) -> None:
    loader = sound(lambda: Loader((Source(str(path)),), sequence_length=8, vocab_size=MODEL.vocab_size, seed=0))
    if loader is not None:
        for first in range(0, min(64, loader.sequences_per_epoch[0]), 8):
            found = sound(lambda first=first: loader.read(range(first, first + 8)))
            assert found is None or (found.tokens.min() >= 0 and found.tokens.max() < MODEL.vocab_size)


@pytest.mark.catalogue(57, 58)
@pytest.mark.parametrize("ending", ["idx", "bin"])
def test_an_index_and_its_tokens_are_read_right_or_refused(tmp_path, ending):
    prefix = make_corpus(tmp_path / "tokens")
    path = Path(f"{prefix}.{ending}")
    good = path.read_bytes()

    def read(data: bytes) -> None:
        path.write_bytes(data)
        read_corpus(prefix)

    lies = [good[:at] + (2**62).to_bytes(8, "little") + good[at + 8 :] for at in (9, 18, 26, 34, len(good) - 8)]
    read_confined(read, damaged(good), count=300, also=lies)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer(["some words of a small text"], 260).save(str(path))
    return path


@pytest.fixture
def prepared(tmp_path, tokenizer) -> Path:
    (tmp_path / "a.txt").write_text("some words of a text " * 40)
    prepare([tmp_path / "a.txt"], output=tmp_path / "prepared", recipe=Recipe(tokenizer=tokenizer), workers=1)
    return tmp_path / "prepared"


@pytest.mark.catalogue(57, 58)
@pytest.mark.parametrize("file", ["manifest.json", "idx"])
def test_a_prepared_folder_is_read_right_or_refused(prepared, file):
    path = next(prepared.glob(f"*{file}"))
    good = path.read_bytes()

    @examples(250)
    @given(data=changed(json.loads(good)) | damaged(good) if file == "manifest.json" else damaged(good))
    def work(data: bytes) -> None:
        path.write_bytes(data)
        read_corpus(prepared)
        sound(lambda: Corpus(prepared).document(0) if Corpus(prepared).num_documents else None)

    confined(work)


@pytest.mark.catalogue(59)
def test_a_tokenizer_json_is_a_tokenizer_or_an_error(tmp_path, tokenizer):
    good = json.loads(tokenizer.read_text())
    small = good | {"model": good["model"] | {"vocab": dict(list(good["model"]["vocab"].items())[:8]), "merges": []}}
    path = tmp_path / "tokenizer.json"

    def read(data: bytes) -> None:
        path.write_bytes(data)
        sound(lambda: tokenizer_facts(path))
        sound(lambda: special_tokens(path))
        sound(lambda: load_tokenizer(path).encode("some words").ids)

    read_confined(read, changed(small) | damaged(json.dumps(small).encode()), count=200)


@pytest.mark.catalogue(48)
@pytest.mark.parametrize("file", ["model.safetensors", "model.safetensors.index.json", "tokenizer_config.json"])
def test_a_folder_of_weights_is_read_right_or_refused(tmp_path, file):
    model = PRESETS["tiny-llama"]
    state = {weight.name: initial_value(weight, 0) for weight in weights(model)}
    folder = export_folder(state, model, tmp_path / "export", dtype=torch.bfloat16)
    path = folder / file
    index = {"metadata": {}, "weight_map": {"model.norm.weight": "model.safetensors"}}
    whole = path.read_bytes() if path.exists() else json.dumps(index).encode()
    end = 8 + int.from_bytes(whole[:8], "little") if file == "model.safetensors" else len(whole)
    header = json.loads(whole[8:end]) if file == "model.safetensors" else json.loads(whole)

    def read(data: bytes) -> None:
        path.write_bytes(data)
        sound(lambda: import_folder(folder))

    def framed(text: bytes) -> bytes:
        return len(text).to_bytes(8, "little") + text + whole[end:] if file == "model.safetensors" else text

    @examples(40)
    @given(text=changed(header) | damaged(whole[8 if file == "model.safetensors" else 0 : end]))
    def work(text: bytes) -> None:
        read(framed(text))

    def all_of_it() -> None:
        work()
        lengths = [n.to_bytes(8, "little") + whole[8:] for n in (0, 1, 2**31, 2**63 - 1, 2**64 - 1)]
        for data in (*map(framed, HUGE), *lengths, whole[:4], whole[: end + 3]):
            read(data)

    confined(all_of_it)


@pytest.mark.catalogue(31)
def test_a_checkpoint_of_any_bytes_is_read_right_or_refused(tmp_path):
    folder = save_checkpoint(tmp_path, 1, {"w": torch.arange(12.0).reshape(3, 4)}, {"note": "x"})
    spare = tmp_path / "spare"
    shutil.copytree(folder, spare)

    @examples(60)
    @given(data=damaged((folder / "manifest.json").read_bytes()))
    def manifest(data: bytes) -> None:
        (folder / "manifest.json").write_bytes(data)
        sound(lambda: load_full(folder))

    @examples(60)
    @given(data=damaged((folder / "rank-00000.safetensors").read_bytes()))
    def shard(data: bytes) -> None:
        shutil.copyfile(spare / "manifest.json", folder / "manifest.json")
        (folder / "rank-00000.safetensors").write_bytes(data)
        found = sound(lambda: load_full(folder))
        assert found is None or torch.equal(found[0]["w"], torch.arange(12.0).reshape(3, 4))

    def all_of_it() -> None:
        manifest()
        shard()

    confined(all_of_it)


def test_control_a_traceback_a_death_and_too_much_memory_are_seen():
    def careless(data: str) -> None:
        json.loads(data)

    for work, said in (
        (lambda: sound(lambda: careless("[" * 100_000)), "RecursionError"),
        (lambda: sound(lambda: bytearray(1 << 34)), "MemoryError"),
        (lambda: shutil.os._exit(3), "exit code 3"),  # pyright: ignore[reportAttributeAccessIssue]
    ):
        with pytest.raises(AssertionError, match=said):
            confined(work)


def test_control_a_hang_is_seen_and_ended():
    """For an hour, or for good: the limit is what does not matter beside either."""

    def for_good() -> None:
        while True:
            sound(lambda: json.loads("[]"))

    before = multiprocessing.active_children()
    for work in (lambda: time.sleep(3600), for_good):
        with pytest.raises(AssertionError, match="took too long: a hang"):
            confined(work, seconds=0.5)
    assert set(multiprocessing.active_children()) <= set(before)
