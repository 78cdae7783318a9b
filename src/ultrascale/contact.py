"""Meaning of the errors of gloo and NCCL when they lose another rank. Their words name ports and files of theirs."""

from __future__ import annotations

from collections.abc import Sequence

_MEANINGS = {
    ("Timed out", "timeout", "Timeout"): "it did not come in time (collective_timeout_seconds)",
    ("reset by peer", "closed by peer", "Broken pipe", "Connection closed"): "it has ended",
    ("refused", "connectFullMesh", "No route", "unreachable"): "it cannot be reached",
    ("Message truncated", "preamble", "op.nbytes"): "it sent a message of another size",
}
"""Parts of their messages."""
MOST_NAMED = 8


def meaning_of(error: BaseException) -> str:
    """Meaning of an error of gloo or NCCL, in our words; theirs stand in the traceback (ULTRASCALE_TRACEBACK=1)."""
    text = str(error)
    for words, meaning in _MEANINGS.items():
        if any(word in text for word in words):
            return meaning
    return "the connection failed"


def names(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 1, 2`, or the first few of many."""
    more = f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else ""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks[:MOST_NAMED]))}{more}"
