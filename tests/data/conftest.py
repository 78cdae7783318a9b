"""What the tests of preparing start from."""

from __future__ import annotations

import json

import pytest
from data.little_text import lines

from ultrascale.data.tokenizer import train_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([" ".join(lines()[:50])], 300).save(str(path))
    return path


@pytest.fixture
def source(tmp_path):
    """A folder of text files, JSONL and compressed JSONL."""
    folder = tmp_path / "source"
    folder.mkdir()
    texts = lines()
    for number in range(20):
        (folder / f"{number:02d}.txt").write_text(texts[number])
    for name, part in (("many.jsonl", texts[20:300]), ("more.jsonl", texts[300:])):
        (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return folder
