"""What `generate` and `export` read from: trained weights, with a word about newer ones that had to be passed over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ultrascale.spec.problems import Problem, SpecError

if TYPE_CHECKING:
    from ultrascale.train.trained import Trained


def expect_folder(path: Path) -> None:
    """Raise SpecError if there is no folder at `path`, before seconds go by with importing torch."""
    if not path.is_dir():
        raise SpecError([Problem(str(path), "is no folder", "Give a checkpoint, a run folder, or a Hugging Face folder.")])


def open_and_tell(path: Path) -> Trained:
    """`open_trained`; a line on stderr for every newer checkpoint of the run that is damaged, naming the step used instead."""
    from ultrascale.checkpoint import damaged_after
    from ultrascale.train.trained import open_trained

    trained = open_trained(path)
    named = trained.steps_done is None or trained.source == path
    for damaged in () if named else damaged_after(trained.source):
        reason = damaged.reason.replace("\n", "; ")
        line = f"ultrascale: {damaged.folder.name} is damaged, using {trained.source.name} instead: {reason}"
        print(line, file=sys.stderr)
    return trained
