"""Training state saved to disk and loaded again, from any layout to any layout; see `saving`, `loading`, `files` and `folders`.

Names are imported on first use, so that listing checkpoints needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
        shards_read,
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
    "shards_read",
    "verify",
]

_MODULES = {
    "check_writable": "disk.folders", "Saver": "saver", "save": "saving",
    **dict.fromkeys(("CheckpointError", "LostContactError", "SaveFailedError", "UnknownVersionError"), "errors"),
    **dict.fromkeys(("Slice", "Tensors"), "slices"),
}  # fmt: skip
"""Module of each name; all others are in `loading`."""


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULES.get(name, 'loading')}"), name)
    globals()[name] = value
    return value
