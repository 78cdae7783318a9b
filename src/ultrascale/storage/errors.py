"""The errors of this package. Each message is a sentence that names the store and the key, and never a credential."""


class StorageError(RuntimeError):
    """A store could not be reached, or refused. What was published before is whole, and a later attempt may succeed."""


class MissingError(StorageError):
    """The object does not exist. The store itself is there."""


class ConflictError(StorageError):
    """Somebody else has written the object that was to be made or replaced; it is as they left it."""


class DamagedError(StorageError):
    """An object does not hold the bytes that were written."""


class RefusedError(StorageError):
    """The store answers, and refuses: to ask again would not help."""
