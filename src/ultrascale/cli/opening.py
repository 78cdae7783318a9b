"""What `generate` and `export` read from: trained weights, with a word about newer ones that had to be passed over."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ultrascale.train.trained import Trained


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
