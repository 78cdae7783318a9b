"""Check that a run's store can be used, before ranks start and anything is written. Needs no torch."""

from __future__ import annotations

import uuid

from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.run import Run
from ultrascale.storage import join_url, open_store, url_of
from ultrascale.storage.location import url_problem

START_PATIENCE_SECONDS = 20.0
"""A server that is away for a moment is waited for; one that is not there is told soon."""


def expect_store(run: Run) -> None:
    """Write, read, list and remove an object where `run` is to be kept, if it is kept in a store.

    Raises SpecError if its name cannot be one, StorageError, in one sentence, if it cannot be used."""
    remedy = 'Name a folder of this machine there, and the store in the run\'s file: [checkpoint] store = "s3://..."'
    if url_of(run.folder) is not None:
        raise SpecError([Problem("folder", f"is {run.folder!r}, but checkpoints are on disk first", remedy)])
    if run.checkpoint.store is None:
        return
    if problem := url_problem(run.checkpoint.store, to_write=True):
        raise SpecError([Problem("checkpoint.store", problem, "For example s3://BUCKET/PREFIX, or a folder.")])
    store = open_store(join_url(run.checkpoint.store, run.name), patience_seconds=START_PATIENCE_SECONDS)
    store.expect_usable(f".probe-{uuid.uuid4().hex}")
