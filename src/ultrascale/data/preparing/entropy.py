"""Unigram entropy: the loss of a model that knows only how often each token occurs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ultrascale.data.corpus import Corpus
from ultrascale.data.errors import DataError

_BLOCK = 1 << 20


def token_counts(path: str | Path) -> np.ndarray:
    """Count of each id in a prepared folder or prefix, int64 [largest id + 1]. Reads in blocks: memory stays flat."""
    corpus = Corpus(path)
    counts = np.zeros(corpus.tokenizer.vocab_size if corpus.tokenizer else 1, np.int64)
    for start in range(0, corpus.num_tokens, _BLOCK):
        for index, first, last in corpus.pieces(start, min(_BLOCK, corpus.num_tokens - start)):
            ids = corpus.shard(index).tokens[first:last]
            if int(ids.min()) < 0:
                corpus.shard(index).check_ids(first, last, 2**31)
            here = np.bincount(ids, minlength=len(counts))
            here[: len(counts)] += counts
            counts = here
    return counts


def unigram_entropy(path: str | Path) -> float:
    """Entropy of the distribution of single tokens, -sum p ln p, in nats a token.

    It is the loss of the best model that ignores context. Raises DataError if there are no tokens.
    """
    counts = token_counts(path)
    if counts.sum() == 0:
        raise DataError(str(path), "holds no tokens", "Prepare some text first.")
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * np.log(shares)).sum())
