"""Weights & Biases. Its own background process samples the machine, so it does not receive this package's system metrics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ultrascale.trackers.tracker import RunFacts, new_id

INIT_SECONDS = 60.0
"""Seconds to wait for the server's response."""


class WandbRun:
    """A run of Weights & Biases. Online the server knows the last step; offline the run's folder records it."""

    def __init__(self, facts: RunFacts, known: str | None):
        import wandb  # pyright: ignore[reportMissingImports]

        settings, self.id = facts.run.log.wandb, known or new_id(facts.run.name)
        options: dict[str, Any] = {"console": "off", "silent": True, "init_timeout": INIT_SECONDS}
        if settings.url is not None:
            options["base_url"] = settings.url
        if not facts.run.log.system_metrics:
            options["x_disable_stats"] = True
        self.session = wandb.init(
            project=settings.project,
            entity=settings.entity,
            group=settings.group,
            tags=list(settings.tags) or None,
            id=self.id,
            name=facts.run.name,
            resume="allow",
            mode="offline" if settings.offline else "online",
            dir=str(facts.folder),
            config={**facts.settings, "plan": facts.plan},
            settings=wandb.Settings(**options),
        )
        self.last_step = None if settings.offline else self.session.step - 1

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self.session.log({**values, "_timestamp": seconds}, step=step)

    def close(self, ending: str) -> None:
        self.session.finish(exit_code=int(ending == "crash"))
