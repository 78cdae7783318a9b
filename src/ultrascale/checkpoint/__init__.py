"""Training state to disk and back, any layout to any layout; see `saving`, `loading`, `files` and `folders` for how."""

from ultrascale.checkpoint.disk.folders import check_writable
from ultrascale.checkpoint.errors import CheckpointError, LostContactError, SaveFailedError, UnknownVersionError
from ultrascale.checkpoint.loading import (
    Rejected,
    Search,
    damaged_after,
    load,
    load_full,
    newest_valid,
    read_metadata,
    search,
    verify,
)
from ultrascale.checkpoint.saver import Saver
from ultrascale.checkpoint.saving import save
from ultrascale.checkpoint.slices import Slice, Tensors

__all__ = [
    "CheckpointError",
    "LostContactError",
    "Rejected",
    "SaveFailedError",
    "Saver",
    "Search",
    "Slice",
    "Tensors",
    "UnknownVersionError",
    "check_writable",
    "damaged_after",
    "load",
    "load_full",
    "newest_valid",
    "read_metadata",
    "save",
    "search",
    "verify",
]
