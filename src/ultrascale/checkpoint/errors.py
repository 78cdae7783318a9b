"""The one error of this package."""


class CheckpointError(RuntimeError):
    """A checkpoint could not be saved or must not be loaded.

    The message names the file or tensor, what was expected and found, and what to do. In a distributed job every rank raises
    it."""
