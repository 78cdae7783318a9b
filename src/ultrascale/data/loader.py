"""Global sequence number -> sequence. A pure function of (sources' content, seed, number), so there is no state to save.

A source is one stream, its documents in stored order, cut every S tokens; each sequence reads one token more than it has
inputs, so every token but the stream's first is predicted once an epoch. At most S tokens at the stream's end are left over.
Any split of a step's numbers over ranks and micro-batches therefore gives the same global batch, and a run resumes at any step
by reading that step's numbers (`description.progress.step_span`).

With `document_mask`, documents packed into one sequence are separated: `document_ids` masks attention, `positions` restart, and
the last token of a document has no target.

The source and sequence with global number n are a pure function of (seed, n):

Blend. Numbers come in blocks of 10,000. A table gives each number of a block its source: quotas by largest remainder (a share
is within one sequence of exact in every block, and exact for weights of up to four decimals), spread evenly over the block. So
the count of a source's numbers before n is known in closed form.

Shuffle. The k-th number of a source with m sequences is in epoch k // m at index k % m; the index goes through a permutation of
0..m-1 keyed by (seed, source, epoch). The permutation is a Feistel network over Z_a x Z_b with a*b just above m (Black and
Rogaway 2002, "Ciphers with arbitrary finite domains"): no table, so memory does not grow with the corpus, and values outside
0..m-1 (about one in sqrt(m)) are permuted again until they fall inside (cycle walking). A table (`random.permutation`) would
cost 8 bytes a sequence on every rank.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

import numpy as np
import numpy.typing as npt

from ultrascale.data.corpus import Corpus
from ultrascale.data.files import DataError
from ultrascale.description.run import Source
from ultrascale.failpoints import failpoint

BLOCK_TOKENS = 1 << 20
IGNORED = -100
"""Target of a position without a prediction; torch's `ignore_index`."""
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Sequences:
    """Sequences as model inputs: int64 arrays [N, S]."""

    tokens: Integers
    targets: Integers
    """The next token, or -100."""
    positions: Integers
    """Position in the sequence, or in the document with `document_mask`."""
    document_ids: Integers
    """0, 1, 2, ... within a sequence; all 0 without `document_mask`."""
    numbers: Integers
    """The global number of each sequence, [N]."""


class Loader:
    """Reads sequences by their global numbers.

    The constructor raises DataError if there is no source, one is missing, damaged or shorter than one sequence, has another
    tokenizer than the first one, has more ids than `vocab_size`, or with `document_mask` has no token that is ever predicted.
    """

    def __init__(
        self,
        sources: tuple[Source, ...],
        *,
        sequence_length: int,
        vocab_size: int,
        seed: int,
        document_mask: bool = True,
    ):
        if not sources:
            raise DataError("data.sources", "names no source", "Give at least one folder made by `ultrascale data prepare`.")
        if sequence_length < 1:
            raise ValueError(f"sequence_length must be at least 1, is {sequence_length}")
        self.sources, self.sequence_length, self.vocab_size = sources, sequence_length, vocab_size
        self.document_mask = document_mask
        self.corpora = tuple(Corpus(source.path) for source in sources)
        failpoint("data.opened")
        _expect_one_tokenizer(self.corpora, vocab_size)
        self.sequences_per_epoch = tuple(_count_sequences(corpus, sequence_length) for corpus in self.corpora)
        for corpus in self.corpora if document_mask else ():
            _expect_a_target(corpus)
        try:
            self._blend = Blend(tuple(source.weight for source in sources))
        except ValueError as error:
            raise DataError("data.sources", str(error), "Raise the weight, or leave the source out.") from error
        self._keys = tuple(source_key(seed, place) for place in range(len(sources)))

    def locate(self, numbers: Iterable[int]) -> tuple[Integers, Integers]:
        """The source [N], and the sequence within it [N], of each global number."""
        wanted = np.fromiter(numbers, np.int64)
        if wanted.size and wanted.min() < 0:
            raise ValueError(f"sequences are numbered from 0, got {wanted.min()}")
        source, counts = self._blend.locate(wanted)
        inside = np.empty_like(counts)
        for place, size in enumerate(self.sequences_per_epoch):
            in_source = source == place
            if in_source.any():
                inside[in_source] = shuffled(counts[in_source], size=size, key=self._keys[place])
        return source, inside

    def epochs(self, num_sequences: int) -> list[float]:
        """Number of times that the first `num_sequences` numbers read each source, to a sequence."""
        return (num_sequences * self._blend.quotas / BLOCK / self.sequences_per_epoch).tolist()

    def read(self, numbers: Iterable[int]) -> Sequences:
        """The sequences with these global numbers, in the order given; int64 arrays [N, S].

        Raises DataError, with shard and offset, if an id is outside the vocabulary; ValueError for a negative number.
        """
        numbers = np.fromiter(numbers, np.int64)
        source, inside = self.locate(numbers)
        self.expect(numbers)
        s = self.sequence_length
        tokens = np.empty((len(source), s + 1), np.int64)
        starts = np.zeros(tokens.shape, np.bool_)
        for row, (place, sequence) in enumerate(zip(source.tolist(), inside.tolist(), strict=True)):
            self.corpora[place].read_into(tokens[row], starts[row], sequence * s)
        self._check_ids(tokens, source, inside)
        failpoint("data.read")
        return _sequences(tokens, starts, numbers, self.document_mask)

    def expect(self, numbers: Iterable[int]) -> None:
        """Start fetching the sequences with these global numbers from a store, for a read soon after."""
        if all(corpus.streamed is None for corpus in self.corpora):
            return
        source, inside = self.locate(numbers)
        for place, sequence in zip(source.tolist(), inside.tolist(), strict=True):
            self.corpora[place].expect(sequence * self.sequence_length, self.sequence_length + 1)

    def fingerprint(self) -> str:
        """Fingerprint of the sources' content and weights, so that a resumed run on other data can be refused. Independent of
        paths.

        With foreign prefixes a second digest of samples follows after a plus sign; older releases wrote the first alone.
        """
        prints = [corpus.fingerprint().partition("+") for corpus in self.corpora]
        parts = [f"{first}:{source.weight!r}" for (first, _, _), source in zip(prints, self.sources, strict=True)]
        samples = "".join(sample for _, _, sample in prints)
        digests = [hashlib.sha256(text.encode()).hexdigest() for text in ("\n".join(parts), samples) if text]
        return "+".join(digests)

    def _check_ids(self, tokens: Integers, source: Integers, inside: Integers) -> None:
        if tokens.size == 0 or (tokens.min() >= 0 and tokens.max() < self.vocab_size):
            return
        for place, sequence in zip(source.tolist(), inside.tolist(), strict=True):
            corpus = self.corpora[place]
            for index, first, last in corpus.pieces(sequence * self.sequence_length, self.sequence_length + 1):
                corpus.shard(index).check_ids(first, last, self.vocab_size)


def _sequences(tokens: Integers, starts: npt.NDArray[np.bool_], numbers: Integers, document_mask: bool) -> Sequences:
    """Targets, positions and document ids from tokens and document starts, both [N, S+1]."""
    n, s = tokens.shape[0], tokens.shape[1] - 1
    places = np.broadcast_to(np.arange(s), (n, s))
    inputs, targets = tokens[:, :-1].copy(), tokens[:, 1:].copy()  # copies: one row's slices are contiguous and would overlap
    if not document_mask:
        return Sequences(inputs, targets, np.ascontiguousarray(places), np.zeros((n, s), np.int64), numbers)
    targets[starts[:, 1:]] = IGNORED
    begins = starts[:, :-1]
    begins[:, 0] = True  # a document cut by the sequence's start begins anew there
    document_ids = np.cumsum(begins, axis=1, dtype=np.int64) - 1
    first = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
    return Sequences(inputs, targets, places - first, document_ids, numbers)


def _count_sequences(corpus: Corpus, sequence_length: int) -> int:
    count = (corpus.num_tokens - 1) // sequence_length
    if count < 1:
        problem = f"holds {corpus.num_tokens} tokens, a sequence needs {sequence_length + 1}"
        shorter = "lower batch.sequence_length (of `evaluate` --sequence-length)"
        remedy = f'Prepare more text, or {shorter}; evaluation.every_steps = "none" reads no held-out text.'
        raise DataError(str(corpus.path), problem, remedy)
    return count


def _expect_a_target(corpus: Corpus) -> None:
    """Raises DataError if every token begins a document, so that no token is predicted from the previous one."""
    if corpus.num_documents < corpus.num_tokens:
        return
    for first in range(1, corpus.num_tokens, BLOCK_TOKENS):
        tokens = np.empty(min(BLOCK_TOKENS, corpus.num_tokens - first), np.int64)
        starts = np.zeros(tokens.shape, np.bool_)
        corpus.read_into(tokens, starts, first)
        if not starts.all():
            return
    problem = "has only documents of one token, so that with data.document_mask no token is ever predicted"
    raise DataError(str(corpus.path), problem, "Prepare longer documents, or set data.document_mask = false.")


def _expect_one_tokenizer(corpora: tuple[Corpus, ...], vocab_size: int) -> None:
    first: Corpus | None = None
    for corpus in corpora:
        if corpus.tokenizer is None:
            continue
        if corpus.tokenizer.vocab_size > vocab_size:
            problem = f"its tokenizer has ids up to {corpus.tokenizer.vocab_size - 1}, the model {vocab_size} (vocab_size)"
            raise DataError(str(corpus.path), problem, f"Set model.vocab_size to {corpus.tokenizer.vocab_size} or more.")
        first = first or corpus
        if first.tokenizer and corpus.tokenizer.fingerprint != first.tokenizer.fingerprint:
            problem = f"was prepared with another tokenizer than {first.path}"
            raise DataError(str(corpus.path), problem, "Prepare all sources with the same tokenizer.json.")


BLOCK = 10_000
ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Blend:
    """Global number -> (source, count of that source's numbers before it)."""

    def __init__(self, weights: tuple[float, ...]):
        self.quotas = np.array(block_quotas(weights), dtype=np.int64)
        turns = [((2 * turn + 1) / (2 * quota), source) for source, quota in enumerate(self.quotas) for turn in range(quota)]
        self._source = np.array([source for _, source in sorted(turns)], dtype=np.int64)
        self._turn = np.empty(BLOCK, dtype=np.int64)
        for source, quota in enumerate(self.quotas):
            self._turn[self._source == source] = np.arange(quota)

    def locate(self, numbers: Integers) -> tuple[Integers, Integers]:
        """The source [N] of each global number [N], and its count within that source [N]."""
        block, place = np.divmod(numbers, BLOCK)
        source = self._source[place]
        return source, block * self.quotas[source] + self._turn[place]


def block_quotas(weights: tuple[float, ...]) -> list[int]:
    """Sequences of each source in a block of 10,000, by largest remainder; ties go to the earlier source.

    Raises ValueError, naming the source by its index, for a weight that is not positive and finite or is too small to count.
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
    """64-bit key of the permutations of one source."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{source}".encode(), digest_size=8).digest(), "little")


def shuffled(counts: Integers, *, size: int, key: int) -> Integers:
    """The sequence [N] at each count [N] of a source of `size` sequences; each occurs once in every `size` counts."""
    epochs, places = np.divmod(counts, size)
    return permuted(places, epochs.astype(np.uint64), size=size, key=key)


def permuted(places: Integers, epochs: npt.NDArray[np.uint64], *, size: int, key: int) -> Integers:
    """The index [N] to which the permutation of each epoch [N] maps each index [N] of 0..size-1."""
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
