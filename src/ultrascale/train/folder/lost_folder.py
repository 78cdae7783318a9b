"""Response to a run's folder that is removed, moved or replaced while the run trains.

    rank 0 looks      every second, and all ranks before each save: does the path still lead to the folder that is held open?
    the run stops     before its next step, as at SIGTERM, and saves once more: in the moved folder if it was moved, else in a
                      new one beside its path, NAME-rescued-TIME. Nothing is written at the old path, where another run may
                      have begun
    error             one sentence that names the place, with exit code 1; ranks are not restarted

If only the folder of the checkpoints was removed or replaced, and the run's folder is still in place, the run reports that and
saves the next checkpoints in the folder that is there, or in a new one. The disks of other nodes are handled the same way.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import Any

from ultrascale.checkpoint import CheckpointError, Tensors
from ultrascale.checkpoint.coordination import coordinating
from ultrascale.config.resolve import to_toml
from ultrascale.description.problems import SpecError
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import Ranks
from ultrascale.train.folder.export import keep_tokenizer
from ultrascale.train.folder.run_folder import RunFolder, RunFolderLostError
from ultrascale.train.folder.saves import Saves


@dataclass(frozen=True)
class Loss:
    """The loss of a run's folder."""

    problem: str
    """`out/run was removed while the run trained in it`."""
    refuge: Path
    """Folder in which the run is saved instead."""


@dataclass
class CheckpointPlace:
    """Destination of a run's checkpoints: its folder, or a refuge once the folder is lost."""

    run: Run
    folder: RunFolder
    saves: Saves
    ranks: Ranks
    report: Callable[[int, str], None]
    """Called with the step and a message about the lost folder of the checkpoints."""
    loss: Loss | None = None
    """Loss of the run's whole folder; None while the run owns it."""

    def save(self, step: int, tensors: Tensors, facts: dict[str, Any], *, last: bool = False) -> None:
        """As `Saves.save`. Collective; then raises RunFolderLostError if the run's folder was lost."""
        self.settle(step)
        try:
            self.saves.save(step, tensors, facts, last=last or self.loss is not None)
        except CheckpointError as error:
            if self.loss is None:
                raise
            problem = f"the run has stopped at step {step}, which could not be saved in {self.loss.refuge} either"
            raise RunFolderLostError(f"{self.loss.problem}: {problem}: {error}") from error
        if self.loss is not None:
            problem = f"{self.loss.problem}: the run has stopped, and is saved at step {step} in {self.loss.refuge}"
            raise RunFolderLostError(f"{problem}; `ultrascale train {quote(str(self.loss.refuge))}` goes on from there.")

    def settle(self, step: int) -> None:
        """Redirect saves to another place if their folder was removed or replaced. Collective.

        Raises CheckpointError on every rank if there is no other place.
        """
        if self.loss is not None:
            return
        with coordinating(self.ranks.host_group) as everybody:
            run_fate, refuge = everybody.on_rank_0(f"looking after {self.folder.path}", self._fate_and_refuge)
            fates = everybody.failures(self.saves.saver.fate() or None)  # on each disk
        if not run_fate and not fates:
            return
        self.saves.settle(step)
        self.saves.saver.use(Path(refuge) / "checkpoints" if refuge else self.folder.checkpoints)
        self.saves.restored(-1)
        if refuge:
            self.loss = Loss(f"{self.folder.path} {run_fate} while the run trained in it", Path(refuge))
            return
        rank, fate = next(iter(fates.items()))
        where = f"{self.folder.checkpoints} on rank {rank}'s node" if rank else f"{self.folder.checkpoints}"
        lost = f"{where} {fate} while the run trained"
        self.report(step, f"WARNING: {lost}: what was saved is not there; saving in it goes on")

    def _fate_and_refuge(self) -> tuple[str, str]:
        """Pair: event by which the folder was lost, and the refuge; empty strings if it was not lost."""
        if fate := self.folder.lost():
            return fate, str(_prepared(self.folder.refuge(), self.run))
        return "", ""


def _prepared(refuge: Path, run: Run) -> Path:
    """`refuge`, with the files beside a checkpoint that `ultrascale train` needs to resume there."""
    moved = replace(run, folder=str(refuge.parent), name=refuge.name)
    RunFolder(refuge).write_text("run.toml", to_toml(moved))
    with suppress(OSError, SpecError):  # the tokenizer is also with the data
        keep_tokenizer(moved)
    return refuge
