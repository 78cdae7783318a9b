"""`ultrascale` whose steps wait half a second before they compute: for a run that only has to last until its time is over."""

from __future__ import annotations

import sys
import time

from ultrascale.cli.main import main
from ultrascale.train.step import StepResult
from ultrascale.train.trainer import Trainer

if __name__ == "__main__":
    train_step = Trainer.train_step

    def slow_step(trainer: Trainer) -> StepResult:
        time.sleep(0.5)
        return train_step(trainer)

    Trainer.train_step = slow_step  # pyright: ignore[reportAttributeAccessIssue]
    sys.exit(main())
