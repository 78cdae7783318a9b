"""TensorBoard's event files, through torch's writer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ultrascale.trackers.tracker import RunFacts, new_id


class TensorboardRun:
    """A folder of event files. They are not read back: the run's folder records the last step."""

    last_step = None

    def __init__(self, facts: RunFacts, known: str | None):
        from torch.utils.tensorboard import SummaryWriter

        settings, self.id = facts.run.log.tensorboard, known or new_id(facts.run.name)
        place = facts.folder / "tensorboard"
        if settings.project is not None:
            place = Path(settings.project, settings.group or "", self.id)
        elif settings.group is not None:
            place /= settings.group
        self.writer = SummaryWriter(str(place))
        if known is None:
            lines = [f"{key} = {value}" for key, value in facts.flat().items()]
            lines += ["", *settings.tags] if settings.tags else []
            self.writer.add_text("run", "\n".join(f"    {line}" for line in lines), 0)

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        for key, value in values.items():
            self.writer.add_scalar(key, value, step, walltime=seconds)
        self.writer.flush()

    def close(self, ending: str) -> None:
        self.writer.close()
