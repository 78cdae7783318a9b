"""Order of the data: which sequence of which source has global number n. Pure functions of (seed, n), so that nothing needs to
be saved.

Blend. Numbers come in blocks of 10,000. A table gives each number of a block its source: quotas by largest remainder (a share
is within one sequence of exact in every block, and exact for weights of up to four decimals), spread evenly over the block. So
how many numbers of a source came before n is known without looking at them.

Shuffle. The k-th number of a source with m sequences is in epoch k // m at place k % m; the place goes through a permutation
of 0..m-1 keyed by (seed, source, epoch). The permutation is a Feistel network over Z_a x Z_b with a*b just above m (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"): no table, so memory does not grow with the corpus, and places outside
0..m-1 (about one in sqrt(m)) walk on along their cycle. A table (`random.permutation`) would cost 8 bytes a sequence on every
rank.
"""

from __future__ import annotations

import hashlib
from fractions import Fraction
from math import isqrt

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]
BLOCK = 10_000
ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Blend:
    """Global number -> (source, how many numbers of that source came before)."""

    def __init__(self, weights: tuple[float, ...]):
        self.quotas = np.array(block_quotas(weights), dtype=np.int64)
        turns = [((2 * turn + 1) / (2 * quota), source) for source, quota in enumerate(self.quotas) for turn in range(quota)]
        self._source = np.array([source for _, source in sorted(turns)], dtype=np.int64)
        self._turn = np.empty(BLOCK, dtype=np.int64)
        for source, quota in enumerate(self.quotas):
            self._turn[self._source == source] = np.arange(quota)

    def locate(self, numbers: Numbers) -> tuple[Numbers, Numbers]:
        """The source [N] of each global number [N], and its count within that source [N]."""
        block, place = np.divmod(numbers, BLOCK)
        source = self._source[place]
        return source, block * self.quotas[source] + self._turn[place]


def block_quotas(weights: tuple[float, ...]) -> list[int]:
    """Sequences of each source in a block of 10,000, by largest remainder; ties go to the earlier source.

    Raises ValueError, naming the source by its place, for a weight that is not positive and finite or is too small to be seen.
    """
    for place, weight in enumerate(weights):
        if not 0 < weight < float("inf"):
            raise ValueError(f"weight {weight} of source {place} is not a positive finite number")
    exact = [Fraction(str(weight)) for weight in weights]
    shares = [weight * BLOCK / sum(exact) for weight in exact]
    quotas = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda place: (quotas[place] - shares[place], place))
    for place in by_remainder[: BLOCK - sum(quotas)]:
        quotas[place] += 1
    for place, quota in enumerate(quotas):
        if quota == 0:
            raise ValueError(f"weight {weights[place]} of source {place} is below one sequence in {BLOCK}")
    return quotas


def source_key(seed: int, source: int) -> int:
    """64 bits that key the permutations of one source."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest(), "little")


def shuffled(counts: Numbers, *, size: int, key: int) -> Numbers:
    """The sequence [N] met at each count [N] of a source of `size` sequences; each once in every `size` counts."""
    epochs, places = np.divmod(counts, size)
    return permuted(places, epochs.astype(np.uint64), size=size, key=key)


def permuted(places: Numbers, epochs: npt.NDArray[np.uint64], *, size: int, key: int) -> Numbers:
    """The place [N] to which the permutation of each epoch [N] sends each place [N] of 0..size-1."""
    rows = isqrt(size - 1) + 1
    columns = -(-size // rows)
    keys = _mix(np.uint64(key) ^ _mix(epochs * _GOLDEN + _GOLDEN))  # [N]
    result = _feistel(places.astype(np.uint64), keys, rows, columns)
    while (outside := result >= size).any():
        result[outside] = _feistel(result[outside], keys[outside], rows, columns)
    return result.astype(np.int64)


def _feistel(values: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64], rows: int, columns: int) -> npt.NDArray[np.uint64]:
    """A keyed bijection of 0..rows*columns-1: each half is shifted by a hash of the other, in turn."""
    left, right = np.divmod(values, np.uint64(columns))
    for turn in range(0, ROUNDS, 2):
        left = (left + _mix(right + keys + np.uint64(turn) * _TURN) % np.uint64(rows)) % np.uint64(rows)
        right = (right + _mix(left + keys + np.uint64(turn + 1) * _TURN) % np.uint64(columns)) % np.uint64(columns)
    return left * np.uint64(columns) + right


_TURN = np.uint64(0x0D1342543DE82EF5)  # below 2^64 / ROUNDS, so that scalars do not overflow


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """splitmix64's finalizer (Steele et al. 2014): every input bit changes every output bit with odds near one half."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
