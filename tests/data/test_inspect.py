"""Looking into prepared folders."""

from __future__ import annotations

import numpy as np
import pytest
from data.little_text import lines, recipe

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.data.preparing.inspect import document_sample, folder_facts, sequence_sample, verify_folder
from ultrascale.data.preparing.prepare import prepare


def test_inspection_tells_headers_documents_and_boundaries(tmp_path, source, tokenizer):
    out = tmp_path / "out"
    made = prepare([source], output=out, recipe=recipe(tokenizer), workers=1).manifest
    facts = folder_facts(out)
    assert (facts["documents"], facts["tokens"], len(facts["shards"])) == (400, made.tokens, len(made.shards))
    assert document_sample(out, 3)["text"] == lines()[3] + "<|endoftext|>"
    parts = sequence_sample(out, 1, 100)["parts"]
    assert [parts[0]["begins"], *{part["begins"] for part in parts[1:]}] == [False, True]
    whole = np.concatenate([Corpus(out).document(number) for number in range(40)])[100:200]
    assert [token for part in parts for token in part["ids"]] == whole.tolist()


def test_inspection_finds_one_flipped_bit(tmp_path, source, tokenizer):
    out = tmp_path / "out"
    prepare([source], output=out, recipe=recipe(tokenizer), workers=1)
    content = bytearray((out / "shard-00002.bin").read_bytes())
    content[5] ^= 1
    (out / "shard-00002.bin").write_bytes(content)
    with pytest.raises(DataError, match=r"shard-00002\.bin: has another checksum"):
        verify_folder(out)


@pytest.mark.parametrize("ask", [lambda out: document_sample(out, 400), lambda out: sequence_sample(out, 10**9, 8)])
def test_a_sample_that_is_not_there_is_refused(tmp_path, source, tokenizer, ask):
    prepare([source], output=tmp_path / "out", recipe=recipe(tokenizer), workers=1)
    with pytest.raises(DataError, match="not"):
        ask(tmp_path / "out")
