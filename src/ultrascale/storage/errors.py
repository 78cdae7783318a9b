"""The errors of this package. Each message is a sentence that names the store and the key, and never a credential."""


class StorageError(RuntimeError):
    """A store could not be reached, or refused. What was published before is intact, and a later attempt may succeed."""


class MissingError(StorageError):
    """The object does not exist, although the store does."""


class ConflictError(StorageError):
    """Another writer has created or replaced the object first; its version is untouched."""


class DamagedError(StorageError):
    """An object does not hold the bytes that were written."""


class RefusedError(StorageError):
    """The store responds with a refusal: a retry would not help."""
