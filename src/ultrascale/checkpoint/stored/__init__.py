"""Checkpoints in a store: how one appears there, is found, comes back to a disk, and goes away.

    checkpoints/step-00000120.json                             names every part of every file; there since the put that made it
    checkpoints/step-00000120/SAVE/rank-00000.safetensors.00000-1a2b3c4d   a part: its place in the file, and its checksum
    checkpoints/newest.json                                    steps as last published, where a listing may lag behind

A save's parts are written first, under a name of their own (SAVE). Then `step-*.json` is put on the condition that it is not
there, or still is what was last seen there: that instant publishes the checkpoint, or replaces another of the same step whole.
"""

from ultrascale.checkpoint.stored.fetch import (
    StoredCheckpoint,
    fetch,
    stored_checkpoint,
    stored_checkpoints,
    stored_manifest,
    summarize_stored,
    verify_stored,
)
from ultrascale.checkpoint.stored.index import Index
from ultrascale.checkpoint.stored.publish import collect_leftovers, prune_stored, publish_stored, upload_files
from ultrascale.checkpoint.stored.unfinished import saves_on, whole_saves

__all__ = [
    "Index",
    "StoredCheckpoint",
    "collect_leftovers",
    "fetch",
    "prune_stored",
    "publish_stored",
    "saves_on",
    "stored_checkpoint",
    "stored_checkpoints",
    "stored_manifest",
    "summarize_stored",
    "upload_files",
    "verify_stored",
    "whole_saves",
]
