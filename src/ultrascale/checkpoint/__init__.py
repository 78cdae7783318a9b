"""Training state saved to disk and loaded again, from any layout to any layout; see `saving`, `loading`, `files` and `folders`.

Names are imported on first use, so that listing checkpoints needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ultrascale.checkpoint.disk.folders import check_writable
    from ultrascale.checkpoint.errors import CheckpointError, LostContactError, SaveFailedError, UnknownVersionError
    from ultrascale.checkpoint.loading import (
        CheckpointSearch,
        Rejected,
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
    "CheckpointSearch",
    "LostContactError",
    "Rejected",
    "SaveFailedError",
    "Saver",
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

_MODULES = ("errors", "disk.folders", "slices", "loading", "saving", "saver")
"""Modules that have these names, those without torch first."""


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in _MODULES:
            if hasattr(source := import_module(f"{__name__}.{module}"), name):
                return globals().setdefault(name, getattr(source, name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
