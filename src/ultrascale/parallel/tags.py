"""Tags of messages between two ranks, in one table: gloo groups are shared between axes, and two messages that are under way
between the same ranks must not be taken for one another. (NCCL knows no tags: there the order of calls tells.)

A pipeline's messages have the numbers of `schedules.messages`: no other axis has the same ranks, and a step's messages are all
there before the embedding's gradient is sent.
"""

from __future__ import annotations

from enum import IntEnum, unique


@unique
class Tag(IntEnum):
    """Kinds of messages. A gather and a sum over tp are under way at once in a backward pass, and so are two over cp."""

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
        """Name in words, for errors."""
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
