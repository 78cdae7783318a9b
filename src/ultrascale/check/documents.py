"""Made-up sequences that are hard on a parallel layout: documents of very uneven length, so that every micro-batch and rank has
another number of valid targets."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ultrascale.data.loader import Sequences


class RandomDocuments:
    """Stands in for `data.loader.Loader`: sequence n is a pure function of (seed, n)."""

    def __init__(self, *, sequence_length: int, vocab_size: int, seed: int, document_mask: bool = True):
        self.sequence_length, self.vocab_size, self.seed, self.document_mask = sequence_length, vocab_size, seed, document_mask

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers, each array [N, S] int64."""
        numbers = np.fromiter(numbers, np.int64)
        rows = [self._sequence(number) for number in numbers.tolist()]
        tokens, targets, positions, document_ids = (np.stack(column) for column in zip(*rows, strict=True))
        return Sequences(tokens, targets, positions, document_ids, numbers)

    def fingerprint(self) -> str:
        """What decides the sequences."""
        return f"random documents, seed {self.seed}, vocabulary {self.vocab_size}, length {self.sequence_length}"

    def _sequence(self, number: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        random = np.random.default_rng((self.seed, number))
        stream = random.integers(0, self.vocab_size, self.sequence_length + 1)
        tokens, targets = stream[:-1].copy(), stream[1:].copy()
        index = np.arange(self.sequence_length)
        # From one long document to one break every two tokens, and up to half of a sequence padding: counts of valid targets
        # differ also where documents are not masked.
        breaks = random.random(self.sequence_length) < random.choice([0.0, 0.1, 0.5])
        if self.document_mask:
            targets[breaks] = -100
        targets[random.integers(self.sequence_length // 2, self.sequence_length + 1) :] = -100
        document_ids = np.concatenate([[0], np.cumsum(breaks)[:-1]])
        starts = np.concatenate([[True], breaks[:-1]])
        positions = index - np.maximum.accumulate(np.where(starts, index, 0))
        if not self.document_mask:
            document_ids, positions = np.zeros_like(index), index
        return tokens, targets, positions, document_ids
