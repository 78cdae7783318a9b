"""Message tags, in one table: gloo groups are shared between axes, and two messages in flight between the same ranks must not
be confused. (NCCL has no tags: there the order of calls matches them.)

Pipeline messages use the numbers of `schedules.messages`: no other axis has the same ranks, and a step's messages have all
arrived before the embedding's gradient is sent.
"""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Tag(IntEnum):
    """Kinds of messages. In a backward pass a gather and a sum over tp are in flight at once, and so are two messages over
    cp."""

    PARAMETERS = 1
    GRADIENTS = 2
    SEQUENCE_PARTS = 3
    SEQUENCE_SUMS = 4
    TIED_EMBEDDING = 5
    WARM_UP = 6
    MIRROR = 7
    KEYS = 11
    KEY_GRADIENTS = 12
    SWAP = 13
    TARGETS = 14

    @property
    def what(self) -> str:
        """Name in words, for error messages."""
        return _WORDS[self]


_WORDS = {
    Tag.PARAMETERS: "the gather of a bucket's parameters",
    Tag.GRADIENTS: "the sum of a bucket's gradients",
    Tag.SEQUENCE_PARTS: "a gather over tp",
    Tag.SEQUENCE_SUMS: "a sum over tp",
    Tag.TIED_EMBEDDING: "the sum of a tied embedding's gradients",
    Tag.MIRROR: "the sum of gradients over two ranks with the same stages",
    Tag.WARM_UP: "the first message between two ranks",
    Tag.KEYS: "an exchange of keys over cp",
    Tag.KEY_GRADIENTS: "an exchange of keys' gradients over cp",
    Tag.SWAP: "a swap of sequence for heads over cp",
    Tag.TARGETS: "an exchange of targets over cp",
}
