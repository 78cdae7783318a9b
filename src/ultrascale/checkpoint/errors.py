"""The errors of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or must not be loaded.

    The message names the file or tensor, what was expected and found, and what to do. In a distributed job every rank raises
    it."""


class SaveFailedError(CheckpointError):
    """The disk refused a checkpoint. Earlier checkpoints are intact, and a later save may succeed."""


class UnknownVersionError(CheckpointError):
    """A checkpoint has a format that this release does not know. It may well be intact: it is neither skipped in favour of an
    older one, nor removed."""

    WORDS = "another release wrote it"
    """Phrase in every such message: ranks report failures to each other as text alone."""


class LostContactError(CheckpointError):
    """Another rank exited, or did not respond, while checkpoints were saved or read. Does not mean that the checkpoint is
    damaged."""
