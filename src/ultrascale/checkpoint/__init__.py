"""Training state to disk and back, any layout to any layout; see `save`, `load`, `files` and `folders` for how."""

from ultrascale.checkpoint.errors import CheckpointError
from ultrascale.checkpoint.folders import check_writable
from ultrascale.checkpoint.load import Rejected, Search, load, load_full, newest_valid, read_metadata, search, verify
from ultrascale.checkpoint.save import save
from ultrascale.checkpoint.saver import Saver

__all__ = [
    "CheckpointError",
    "Rejected",
    "Saver",
    "Search",
    "check_writable",
    "load",
    "load_full",
    "newest_valid",
    "read_metadata",
    "save",
    "search",
    "verify",
]
