"""What a run does whose folder is removed, moved or replaced while it trains.

    rank 0 looks      every second, and all ranks before each save: does the path still lead to the folder that is held open?
    the run stops     before its next step, as at SIGTERM, and saves once more: in the folder where that is now if it was moved,
                      else in a new one beside its path, NAME-rescued-TIME. Nothing is written at the old path, where another
                      run may have begun
    it says so        in one sentence that names the place, with exit code 1; nobody starts its ranks again

Where only the folder of the checkpoints was removed or replaced, in a folder that is still the run's own, that is told, and
the next ones are saved in the one that is there, or in a new one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from ultrascale.checkpoint.coordination import coordinating
from ultrascale.parallel.mesh import Ranks
from ultrascale.spec.problems import SpecError
from ultrascale.spec.resolve import to_toml
from ultrascale.spec.run import Run
from ultrascale.train.export import keep_tokenizer
from ultrascale.train.run_folder import RunFolder
from ultrascale.train.saves import Saves


@dataclass(frozen=True)
class Loss:
    """The loss of a run's folder."""

    what: str
    """`out/run was removed while the run trained in it`."""
    refuge: Path
    """Where the run is saved instead."""


def settle_place(
    run: Run, folder: RunFolder, saves: Saves, ranks: Ranks, step: int, tell: Callable[[str], None]
) -> Loss | None:
    """Give the saves of `run` another place if the folder they go to is no longer what it was; the loss, if that was the run's
    whole folder. Collective.

    Raises CheckpointError on every rank if there is no other place.
    """

    def look() -> tuple[str, str]:
        if what := folder.lost():
            return what, str(_prepared(folder.refuge(), run))
        return saves.saver.fate(), ""

    with coordinating(ranks.host_group) as everybody:
        what, refuge = everybody.on_rank_0(f"looking after {folder.path}", look)
    if not what:
        return None
    saves.settle(step)
    saves.saver.use(Path(refuge) / "checkpoints" if refuge else folder.checkpoints)
    saves.restored(-1)
    if refuge:
        return Loss(f"{folder.path} {what} while the run trained in it", Path(refuge))
    tell(f"WARNING: {folder.checkpoints} {what} while the run trained: what was saved is not there; saving in it goes on")
    return None


def _prepared(refuge: Path, run: Run) -> Path:
    """`refuge` with what `ultrascale train` needs beside a checkpoint to go on there."""
    moved = replace(run, folder=str(refuge.parent), name=refuge.name)
    RunFolder(refuge).write_text("run.toml", to_toml(moved))
    with suppress(OSError, SpecError):  # the data has it, too
        keep_tokenizer(moved)
    return refuge
