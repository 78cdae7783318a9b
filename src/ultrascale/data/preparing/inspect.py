"""Content of a prepared folder or a Megatron prefix for display: facts, documents and sequences with their boundaries."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataCommandError, DataError
from ultrascale.data.indexed import prefix_paths, read_header
from ultrascale.data.preparing.verify import expect_whole

OPENING_TOKENS = 64
"""Tokens of the first document that are shown if nothing else is asked for."""


def folder_facts(path: str | Path) -> dict[str, Any]:
    """Headers and counts, JSON-able. Raises DataError if a shard is missing or has the wrong size."""
    corpus = Corpus(path)
    shards = []
    for index, prefix in enumerate(corpus.prefixes):
        header = read_header(prefix_paths(prefix)[1])
        shards.append(
            {
                "name": prefix.name,
                "dtype": header.dtype,
                "sequences": header.num_sequences,
                "documents": header.num_documents,
                "tokens": int(corpus.offsets[index + 1] - corpus.offsets[index]),
            }
        )
    facts: dict[str, Any] = {
        "path": str(path),
        "documents": corpus.num_documents,
        "tokens": corpus.num_tokens,
        "shards": shards,
    }
    if corpus.manifest:
        facts["manifest"] = corpus.manifest.summary()
    return facts


def verify_folder(path: str | Path) -> None:
    """Verifies all checksums, indexes and ids. Raises DataError at the first error, naming the shard."""
    corpus = Corpus(path)
    for index, prefix in enumerate(corpus.prefixes):
        corpus.shard(index).verify_index()
        if corpus.manifest is None:
            continue
        expect_whole(prefix, corpus.manifest.shards[index])
        corpus.shard(index).verify_ids(corpus.manifest.tokenizer.vocab_size)


def document_sample(path: str | Path, number: int) -> dict[str, Any]:
    """One document: its ids and, if there is a tokenizer, its text."""
    corpus = Corpus(path)
    try:
        ids = corpus.document(number).tolist()
    except IndexError as error:
        raise DataCommandError(str(path), str(error).removeprefix(f"{path} "), "Choose a --document in that range.") from error
    return {"document": number, "tokens": len(ids), "ids": ids, "text": _decode(corpus, ids)}


def opening(path: str | Path) -> dict[str, Any]:
    """The first tokens of the first document, as `document_sample` gives a whole one; without text if they cannot be decoded,
    with a `note` of the reason."""
    corpus = Corpus(path)
    ids = corpus.document(0)[:OPENING_TOKENS].tolist()
    sample = {"document": 0, "tokens": len(ids), "ids": ids}
    try:
        return {**sample, "text": _decode(corpus, ids)}
    except DataError as error:
        return {**sample, "text": None, "note": str(error)}


def sequence_sample(path: str | Path, number: int, sequence_length: int) -> dict[str, Any]:
    """One sequence of the stream, in stored order: the parts of documents in it, and which of them begin there."""
    corpus = Corpus(path)
    count = (corpus.num_tokens - 1) // sequence_length if sequence_length > 0 else 0
    if not 0 <= number < count:
        problem = f"has {count} sequences of length {sequence_length}, not number {number}"
        raise DataCommandError(str(path), problem, "Choose a --sequence in that range.")
    tokens = np.empty(sequence_length, np.int64)
    starts = np.zeros(sequence_length, np.bool_)
    corpus.read_into(tokens, starts, number * sequence_length)
    edges = sorted({0, *np.flatnonzero(starts).tolist(), sequence_length})
    parts = []
    for first, last in pairwise(edges):
        ids = tokens[first:last].tolist()
        begins = bool(starts[first])
        parts.append({"position": first, "tokens": last - first, "begins": begins, "ids": ids, "text": _decode(corpus, ids)})
    return {"sequence": number, "sequence_length": sequence_length, "parts": parts}


def _decode(corpus: Corpus, ids: list[int]) -> str | None:
    if corpus.tokenizer_path is None:
        return None
    from ultrascale.data.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(corpus.tokenizer_path)
    try:
        return tokenizer.decode(ids, skip_special_tokens=False)
    except OverflowError as error:
        raise DataError(str(corpus.path), "has negative ids", "`data inspect --verify` names the shard.") from error
