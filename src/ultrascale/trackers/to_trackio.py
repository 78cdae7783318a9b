"""Trackio. It identifies a run by its name, which is therefore made unique among earlier runs."""

from __future__ import annotations

import os
from collections.abc import Mapping

from ultrascale.trackers.tracker import RunFacts, new_id


class TrackioRun:
    """A run of Trackio. Local data show the last step; for a space the run's folder records it."""

    def __init__(self, facts: RunFacts, known: str | None):
        settings, self.id = facts.run.log.trackio, known or new_id(facts.run.name)
        if settings.offline:
            os.environ["TRACKIO_DIR"] = str(facts.folder.resolve() / "trackio")
        import trackio  # pyright: ignore[reportMissingImports]
        from trackio.sqlite_storage import SQLiteStorage  # pyright: ignore[reportMissingImports]

        space = None if settings.offline else settings.entity
        has = SQLiteStorage.get_max_step_for_run(settings.project, self.id) if space is None else None
        self.session = trackio.init(
            project=settings.project,
            name=self.id,
            group=settings.group,
            space_id=space,
            config=facts.flat() | ({"tags": ", ".join(settings.tags)} if settings.tags else {}),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.last_step = None if space else -1 if has is None else has

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self.session.log(dict(values), step=step)

    def close(self, ending: str) -> None:
        self.session.finish()
