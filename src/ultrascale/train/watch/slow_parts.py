"""Parts of a run that may take longer than any step: who waits for another rank meanwhile does so patiently, and the watchdog
does not take it for a hang (`parallel.time_limits`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ultrascale import heartbeat
from ultrascale.parallel.time_limits import SLOW_SECONDS
from ultrascale.train.trainer import Trainer


@contextmanager
def slow_part(trainer: Trainer, doing: str, then_seconds: float) -> Iterator[None]:
    """While inside, what ranks wait for may take SLOW_SECONDS; afterwards `then_seconds`. All come in and leave together."""
    mesh, ranks = trainer.share.mesh, trainer.ranks
    with heartbeat.patient(doing, SLOW_SECONDS):
        mesh.limit_waits(ranks, SLOW_SECONDS)
        try:
            yield
            ranks.barrier()
        finally:
            mesh.limit_waits(ranks, then_seconds)
