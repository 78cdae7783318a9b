"""One island's part of a run (DiLoCo): its folder, and what only the first island does."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

from ultrascale.description.problems import mistake
from ultrascale.description.rank_environment import env_rank
from ultrascale.description.run import Evaluation, Run
from ultrascale.storage import join_url

FOLDER = "islands"
"""Subfolder of the run's folder: the folders of the other islands by number, each with its metrics and checkpoints."""


def island_folder(run: Run, island: int | None = None) -> Path:
    """The folder of this process's island, which may not exist yet. `island`: its number, if the island was started by
    itself."""
    number, folder = _number(run, island), Path(run.folder) / run.name
    return folder / FOLDER / str(number) if number else folder


def _number(run: Run, island: int | None) -> int:
    if island is not None or run.islands.count == 1:
        return island or 0
    return bisect_right([*accumulate(run.worlds)], env_rank())


def of_island(run: Run, island: int | None) -> Run:
    """`run` as this process's island trains it. The first island uses the run's folder, evaluates and exports. Every other
    island keeps its checkpoints and metrics in `islands/N` (also in the run's store), so that islands need no shared file
    system.

    `island`: its number, if it was started by itself.
    """
    folder = island_folder(run, island)
    run = replace(run, layout=replace(run.layout, dp=run.degrees[_number(run, island)])) if run.islands.dp else run
    if folder == Path(run.folder) / run.name:
        return run
    folder.mkdir(parents=True, exist_ok=True)
    store = run.checkpoint.store
    return replace(
        run,
        folder=str(folder.parent),
        name=folder.name,
        checkpoint=replace(run.checkpoint, export=False, store=store and join_url(store, run.name, FOLDER)),
        data=replace(run.data, validation=()),
        evaluation=Evaluation(),
    )


def where_they_meet(run: Run, island: int | None) -> tuple[int, str] | None:
    """Number of an island that was started by itself, and the address where islands connect; None for islands that were started
    together. Raises SpecError if the run asks for the other way of starting."""
    if not run.islands.quorum or run.islands.count == 1:
        if island is None:
            return None
        rule = "is 0, or there is one island, so that islands live and end together, but one was started by itself (--island)"
        raise mistake("islands.quorum", rule, "Set it to the least islands that go on, or leave out --island.")
    if island is None or not 0 <= island < run.islands.count:
        given = "none was given" if island is None else f"{island} was given"
        rule = f"needs each island to be started by itself, with its number from 0 to {run.islands.count - 1}, but {given}"
        raise mistake("islands.quorum", rule, "Start each with `ultrascale train RUN.TOML --island NUMBER`.")
    return island, run.islands.meet or f"file://{Path(run.folder).absolute() / run.name / FOLDER / 'meeting'}"
