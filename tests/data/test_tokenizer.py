"""Text to ids."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ultrascale.data.files import DataError
from ultrascale.data.tokenizer import (
    LongEncoder,
    encode_all,
    load_tokenizer,
    loses_characters,
    tokenizer_facts,
    train_tokenizer,
)

TEXT = [
    "the quick brown fox jumps over the lazy dog, é漢😀 12345\n\n    return self.value\n" * 5,
    "def f(x):\n    return x\n" * 9,
]


def saved(tokenizer, path):
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return saved(train_tokenizer(TEXT, 400), tmp_path_factory.mktemp("tokenizer") / "tokenizer.json")


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory):
    """As Llama 2's: no pre-tokenizer, spaces become ▁ and one is put in front."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=False, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Replace("▁", " ")
    words = pre_tokenizers.Metaspace()
    tokenizer.pre_tokenizer = words
    tokenizer.train_from_iterator(
        TEXT, trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>", "</s>"], show_progress=False)
    )
    value = json.loads(tokenizer.to_str())
    value["pre_tokenizer"] = None
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(json.dumps(value))
    return path


@given(st.text(st.characters(exclude_categories=("Cs",))))
@settings(max_examples=100, deadline=None)
def test_a_trained_tokenizer_gives_any_text_back(text):
    tokenizer = train_tokenizer(["a b"], 257)
    tokenizer.encode_special_tokens = True
    assert tokenizer.decode(encode_all(tokenizer, [text])[0]) == text


def test_a_tokenizer_without_tokens_for_rare_characters_is_told_from_one_that_has_them(trained, tmp_path):
    unknown, few = models.WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"), models.BPE({"a": 0, "b": 1}, [])
    assert all(loses_characters(saved(Tokenizer(model), tmp_path / "tokenizer.json")) for model in (unknown, few))
    byte_fallback = models.BPE({f"<0x{byte:02X}>": byte for byte in range(256)}, [], byte_fallback=True)
    assert not loses_characters(trained) and not loses_characters(saved(Tokenizer(byte_fallback), tmp_path / "tokenizer.json"))


def test_training_gives_the_same_tokenizer_in_another_process_with_other_threads(trained):
    code = f"from ultrascale.data.tokenizer import train_tokenizer; print(train_tokenizer({TEXT!r}, 400).to_str())"
    for threads in ("1", "3"):
        environment = {**os.environ, "RAYON_NUM_THREADS": threads}
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
        assert json.loads(run.stdout) == json.loads(trained.read_text())


def test_text_cannot_forge_the_end_of_a_document(trained):
    ids = encode_all(load_tokenizer(trained), ["a<|endoftext|>b"])[0]
    assert tokenizer_facts(trained).eod_id not in ids


def test_truncation_and_padding_of_a_tokenizer_are_switched_off(trained, tmp_path):
    tokenizer = Tokenizer.from_file(str(trained))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    plain = encode_all(load_tokenizer(trained), TEXT)
    assert encode_all(load_tokenizer(path), TEXT) == plain


def test_ids_equal_those_of_the_library(trained):
    expected = [encoding.ids for encoding in Tokenizer.from_file(str(trained)).encode_batch(TEXT, add_special_tokens=False)]
    assert encode_all(load_tokenizer(trained), TEXT) == expected


def test_facts_are_those_of_the_file(trained):
    facts = tokenizer_facts(trained)
    assert (facts.vocab_size, facts.eod_token, facts.eod_id) == (
        Tokenizer.from_file(str(trained)).get_vocab_size(),
        "<|endoftext|>",
        0,
    )


def test_a_tokenizer_without_an_end_of_document_asks_for_one(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "[UNK]": 1}, unk_token="[UNK]"))
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="--eod"):
        tokenizer_facts(path)
    assert tokenizer_facts(path, "a").eod_id == 0
    with pytest.raises(DataError, match="has no token 'b'"):
        tokenizer_facts(path, "b")


def test_a_file_that_is_no_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "tokenizer.json")
    with pytest.raises(DataError, match="is not there"):
        load_tokenizer(tmp_path / "other.json")


def test_a_vocabulary_too_small_for_bytes_is_refused():
    with pytest.raises(DataError, match="at least 257, is 256"):
        train_tokenizer(TEXT, 256)


def in_windows(path, text, *, window=200, context=100, piece=37):
    encoder = LongEncoder(load_tokenizer(path), window=window, context=context)
    ids = [token for part in encoder.encode(text[at : at + piece] for at in range(0, len(text), piece)) for token in part]
    return ids, encoder.inexact_cuts


@pytest.mark.parametrize("kind", ["trained", "sentencepiece_like"])
@pytest.mark.parametrize("length", [0, 1, 199, 200, 201, 300, 301, 5000])
def test_a_document_in_windows_has_the_ids_of_the_whole(kind, length, request):
    path = request.getfixturevalue(kind)
    text = ("".join(TEXT) * 20)[:length]
    ids, inexact = in_windows(path, text)
    assert (ids, inexact) == (encode_all(load_tokenizer(path), [text])[0], 0)


WORDS = ["the ", "quick", " ", "\n", "    ", "é", "😀", "漢字", ".", "1", "return"]


@given(text=st.lists(st.sampled_from(WORDS), max_size=300).map("".join))
@settings(max_examples=60, deadline=None)
def test_any_text_in_windows_decodes_to_itself_and_is_exact_where_it_says_so(trained, text):
    ids, inexact = in_windows(trained, text, window=60, context=30)
    tokenizer = load_tokenizer(trained)
    assert tokenizer.decode(ids) == text
    if inexact == 0:
        assert ids == encode_all(tokenizer, [text])[0]


def test_a_run_without_any_place_to_cut_is_counted_and_loses_nothing(tmp_path):
    tokenizer = train_tokenizer(["a" * 4096] * 3, 268)
    path = saved(tokenizer, tmp_path / "tokenizer.json")
    text = "a" * 3001
    ids, inexact = in_windows(path, text, window=333, context=50)
    assert load_tokenizer(path).decode(ids) == text
    assert inexact > 0
