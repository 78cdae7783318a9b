"""Synthetic sequences with the edge cases of a parallel layout: documents of very uneven length, so that every micro-batch and
rank has another number of valid targets, and ids and document ends at the borders of ranks' parts.

    sequence number, modulo 6     content
    0, 4, 5                       one document that fills it and continues after it: it is cut at every border of ranks
    1                             documents of 1 and 2 tokens, and documents that end where halves, thirds and quarters of the
                                  sequence do; all begin with the same token, so that experts' scores of these are ties
    2, 3                          from one document to one every two tokens, and up to half of it padding

Every second token is the first or the last id of a rank's part of the vocabulary, one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ultrascale.data.loader import Sequences
from ultrascale.work.sharding.places import even_part

PERIOD, WHOLE, AT_BORDERS = 6, (0, 4, 5), 1
"""Sequences 4 and 5 are alike so that they also are as one micro-batch of two."""
PARTS = (2, 3, 4, 8)
"""Parts of the vocabulary whose edges are drawn whatever the layout, so that layouts share what the reference computes."""


@dataclass
class RandomDocuments:
    """Stands in for `data.loader.Loader`: sequence n is a pure function of (seed, n)."""

    sequence_length: int
    vocab_size: int
    seed: int
    document_mask: bool = True
    vocab_parts: int = 1

    def __post_init__(self) -> None:
        self.edges = vocabulary_edges(self.vocab_size, dict.fromkeys((*PARTS, self.vocab_parts)))

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers, each array [N, S] int64."""
        numbers = np.fromiter(numbers, np.int64)
        rows = [self._sequence(number) for number in numbers.tolist()]
        tokens, targets, positions, document_ids = (np.stack(column) for column in zip(*rows, strict=True))
        return Sequences(tokens, targets, positions, document_ids, numbers)

    def fingerprint(self) -> str:
        """Text of everything that the sequences depend on: seed, vocabulary, its edges, and sequence length."""
        drawn = f"seed {self.seed}, vocabulary {self.vocab_size}, edges {self.edges.tolist()}, length {self.sequence_length}"
        return f"random documents, {drawn}"

    def _sequence(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        random, length = np.random.default_rng((self.seed, number)), self.sequence_length
        stream = random.integers(0, self.vocab_size, length + 1)
        second = stream[1::2]
        second[:] = self.edges[(number * len(second) + np.arange(len(second))) % len(self.edges)]
        kind, index = number % PERIOD, np.arange(length)
        ends, first_ignored = np.zeros(length, np.bool_), length
        if kind == AT_BORDERS:
            ends[_border_ends(length)] = True
            stream[:-1][_starts(ends)] = stream[0]
        elif kind not in WHOLE:
            ends = random.random(length) < random.choice([0.0, 0.1, 0.5])
        if kind not in WHOLE and not (kind == AT_BORDERS and self.document_mask):
            first_ignored = random.integers(length // 2, length)  # counts differ also where documents are not masked
        tokens, targets, starts = stream[:-1].copy(), stream[1:].copy(), _starts(ends)
        targets[first_ignored:] = -100
        if not self.document_mask:
            return tokens, targets, index, np.zeros_like(index)
        targets[ends] = -100
        return tokens, targets, index - np.maximum.accumulate(np.where(starts, index, 0)), np.cumsum(starts) - 1


def vocabulary_edges(vocab_size: int, parts: Iterable[int]) -> np.ndarray:
    """The first and the last id of each part of a vocabulary cut into n parts, for each n of `parts` in turn."""
    spans = [even_part(vocab_size, count, part) for count in parts for part in range(count)]
    return np.array(list(dict.fromkeys(edge for first, length in spans if length for edge in (first, first + length - 1))))


def _border_ends(length: int) -> list[int]:
    """Last positions of documents of 1, 1 and 2 tokens, of those that end with a part of the sequence, and of one of 1."""
    borders = {sum(even_part(length, count, part)) - 1 for count in (2, 3, 4) for part in range(count)}
    return sorted(end for end in {0, 1, 3, length - 2, length - 1} | borders if 0 <= end < length)


def _starts(ends: np.ndarray) -> np.ndarray:
    """Boolean mask [S] of first tokens of documents, from the mask [S] of last ones."""
    return np.concatenate([[True], ends[:-1]])
