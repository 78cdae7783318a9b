"""The errors of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or must not be loaded.

    The message names the file or tensor, what was expected and found, and what to do. In a distributed job every rank raises
    it."""


class SaveFailedError(CheckpointError):
    """The disk did not take a checkpoint. What was there before is whole, and a later save may succeed."""


class UnknownVersionError(CheckpointError):
    """A checkpoint is of a format that this release does not know. It may well be whole: it is neither passed over for an older
    one, nor removed."""

    WORDS = "another release wrote it"
    """Phrase in every message: ranks report failures to each other in text alone."""


class LostContactError(CheckpointError):
    """Another rank ended, or did not answer, while checkpoints were saved or read. Says nothing of the checkpoint."""
