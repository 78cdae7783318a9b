"""Text to ids. Any `tokenizer.json`, or byte-level BPE (Sennrich et al. 2016; Radford et al. 2019) trained on the input.

A document that spells a special token ("<|endoftext|>") gets the ids of its characters, so that it cannot forge the end of a
document. Truncation and padding settings of a `tokenizer.json` are switched off.

Very long documents are tokenized in overlapping windows: a window's first and last 4,096 characters are context, and only
tokens that begin between them are kept. A token that depends on no more than the context is the same as in the whole document.
At each border the tokens of both windows are compared, and a border where they differ (a run of thousands of characters without
any place to cut) is counted.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from ultrascale.data.files import DataCommandError, DataError
from ultrascale.data.manifest import TokenizerFacts
from ultrascale.description.architecture.special_tokens import END_OF_DOCUMENT, ENDS

WINDOW, CONTEXT = 1 << 18, 1 << 12
SMALLEST_VOCABULARY, LARGEST_VOCABULARY = 257, 1_000_000
LONG_TEXT = 4 * WINDOW
"""Characters from which a document is tokenized in windows."""
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
_ONE_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A space, and a byte that is no token's character, in a tokenizer made by SentencePiece."""
Token = tuple[int, int, int]  # id, and the characters it begins and ends at


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads a `tokenizer.json`, set to encode all of a text without additions. Raises DataError if it cannot be read."""
    if not Path(path).is_file():
        rule = "is no file" if Path(path).exists() else "is not there"
        raise DataCommandError(str(path), rule, "Give a tokenizer.json with --tokenizer, or use --train-tokenizer.")
    try:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.encode("a \N{SNOWMAN}")  # some invalid files are detected only here
    except Exception as error:  # the library raises bare Exception
        raise DataError(str(path), f"is not a tokenizer.json: {error}", "Copy it again from its model.") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # type: ignore[assignment] (adds nothing; keeps offsets)
    return tokenizer


def bytes_by_id(path: Path) -> dict[int, int]:
    """Bytes of UTF-8 text that each id of a `tokenizer.json` stands for; 0 for special tokens. A space that a tokenizer puts
    before a document counts. Empty for a tokenizer that is neither byte-level nor of SentencePiece's kind."""
    tokenizer = load_tokenizer(path)
    added = tokenizer.get_added_tokens_decoder()
    is_byte_level = "ByteLevel" in f"{tokenizer.decoder} {tokenizer.pre_tokenizer}"  # a character of a token is a byte
    if not is_byte_level and _SPACE not in f"{tokenizer.decoder} {tokenizer.pre_tokenizer} {tokenizer.normalizer}":
        return {}
    sizes = {
        number: len(token) if is_byte_level else 1 if _ONE_BYTE.fullmatch(token) else len(token.replace(_SPACE, " ").encode())
        for token, number in tokenizer.get_vocab(with_added_tokens=False).items()
    }
    return sizes | {number: 0 if token.special else len(token.content.encode()) for number, token in added.items()}


def tokenizer_facts(path: Path, eod: str | None = None) -> TokenizerFacts:
    """Fingerprint, vocabulary size and end-of-document token (`eod`, or the first of the usual ones in the vocabulary).

    Raises DataError if it has none of them.
    """
    vocabulary = load_tokenizer(path).get_vocab(with_added_tokens=True)
    for token in [eod] if eod else ENDS:
        if token in vocabulary:
            fingerprint = hashlib.sha256(path.read_bytes()).hexdigest()
            return TokenizerFacts(fingerprint, max(vocabulary.values()) + 1, token, vocabulary[token])
    problem = f"has no token {eod!r}" if eod else f"has none of the usual end-of-document tokens {', '.join(ENDS)}"
    raise DataCommandError(str(path), problem, "Name one of its tokens with --eod.")


def loses_characters(path: str | Path) -> bool:
    """True if the tokenizer has no tokens for rare characters: it leaves them out, or has one token for all that it does not
    know."""
    first, second = encode_all(load_tokenizer(path), ["\N{SNOWMAN}", "\N{EGYPTIAN HIEROGLYPH D010}"])
    return first == second


def vocabulary_problem(vocab_size: int) -> DataError | None:
    """Error for a vocabulary size that cannot be trained: too small for 256 bytes and the end-of-document token, or far too
    large."""
    if SMALLEST_VOCABULARY <= vocab_size <= LARGEST_VOCABULARY:
        return None
    rule = (
        f"must be at least {SMALLEST_VOCABULARY}"
        if vocab_size < SMALLEST_VOCABULARY
        else f"must be at most {LARGEST_VOCABULARY:,}"
    )
    return DataError("--train-tokenizer", f"{rule}, is {vocab_size}", "8192 suits a small model.")


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Trains byte-level BPE with `<|endoftext|>` as id 0. Deterministic for the same texts.

    The vocabulary is smaller if the texts do not suffice. Raises DataError as in `vocabulary_problem`.
    """
    if problem := vocabulary_problem(vocab_size):
        raise problem
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode_all(tokenizer: Tokenizer, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without special tokens."""
    return [encoding.ids for encoding in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


class LongEncoder:
    """Tokenizes one document that is too long to be tokenized at once, in windows of `window` characters, each with `context`
    before and after it."""

    def __init__(self, tokenizer: Tokenizer, *, window: int = WINDOW, context: int = CONTEXT):
        self._tokenizer = tokenizer
        self._window, self._context = window, context
        self.inexact_cuts = 0
        """Borders at which neighbouring windows disagreed: ids may differ there from those of the whole document."""

    def encode(self, pieces: Iterable[str]) -> Iterator[list[int]]:
        """The ids of the document, given as `pieces`, window by window."""
        size, context = self._window, self._context
        source, buffer, ended = iter(pieces), "", False
        done = 0  # in the buffer: where the last token kept ends
        kept_from = 0  # in the buffer: tokens that begin before this are done; the text before it is context
        expected: list[Token] | None = None
        while True:
            while not ended and len(buffer) < kept_from + size + context:
                piece = next(source, None)
                buffer, ended = (buffer, True) if piece is None else (buffer + piece, False)
            final = ended and len(buffer) <= kept_from + size + context
            edge = len(buffer) if final else kept_from + size
            window = self._tokenizer.encode(buffer[: edge + context], add_special_tokens=False)
            if expected is not None and (not expected or _around(window, kept_from, context // 2) != expected):
                self.inexact_cuts += 1
                buffer, kept_from, expected = buffer[done:], 0, None
                continue
            first, last = _index(window, kept_from), len(window) if final else _index(window, edge)
            yield window.ids[first:last]
            if final:
                return
            start_of_window = edge - context
            done = (_span(window, last - 1)[1] if last > first else edge) - start_of_window
            border = _around(window, edge, context // 2)
            expected = [(token, start - start_of_window, end - start_of_window) for token, start, end in border]
            buffer, kept_from = buffer[start_of_window:], context


def _index(window: Encoding, character: int) -> int:
    """Index of the first token that begins at or after a character. Reads few offsets: a list of all of them is slow."""
    return bisect_left(range(len(window)), character, key=lambda index: _span(window, index)[0])


def _around(window: Encoding, edge: int, reach: int) -> list[Token]:
    """The tokens that begin within `reach` characters of a border."""
    ids, indices = window.ids, range(_index(window, edge - reach), _index(window, edge + reach))
    return [(ids[index], *_span(window, index)) for index in indices]


def _span(window: Encoding, index: int) -> tuple[int, int]:
    """First and last character position of a token."""
    span = window.token_to_chars(index)
    assert span is not None, "every token comes from the text"
    return span[0], span[1]
