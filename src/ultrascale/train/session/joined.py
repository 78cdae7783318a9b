"""Ranks that have met, and own the run's folder, until all of them leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ultrascale.checkpoint import check_writable
from ultrascale.description.run import Run
from ultrascale.parallel.mesh import process_group
from ultrascale.parallel.time_limits import START_SECONDS
from ultrascale.train.folder.run_folder import RunFolder
from ultrascale.train.folder.run_store import opened_store
from ultrascale.train.session.begin import begin
from ultrascale.train.session.moments import Session
from ultrascale.train.start.agreement import expect_same_run
from ultrascale.train.start.attempts import attempt
from ultrascale.train.start.chosen_kernels import choose_kernels
from ultrascale.train.start.chosen_recompute import choose_recomputation
from ultrascale.train.start.deterministic import deterministic, deterministic_line
from ultrascale.train.start.fit import cluster_of, expect_fits, memory_bytes, smallest_bytes, traced_by_first
from ultrascale.train.watch.out_of_memory import explained_out_of_memory
from ultrascale.train.watch.signs_of_life import has_launcher, started_by_torchrun, watched


@contextmanager
def joined(
    run: Run,
    owning: ExitStack,
    *,
    allow_changes: bool,
    rendezvous: str,
    ignore_memory: bool,
    leave_by: float | None,
    apart: tuple[int, str] | None,
) -> Iterator[Session]:
    """A session of `run`, restored, with all its ranks; the run's folder is held by `owning`. As `train.loop.train`."""
    folder = RunFolder.of(run)
    with (
        deterministic(run),
        process_group(
            run.layout,
            worlds=run.worlds,
            apart=apart,
            device=run.device,
            rendezvous=rendezvous,
            timeout_seconds=max(START_SECONDS, run.collective_timeout_seconds),
        ) as ranks,
        ExitStack() as leaving,
    ):
        signs = leaving.enter_context(watched(run, ranks))
        expect_same_run(run, ranks)
        if ranks.is_first:  # before anything is written
            if not has_launcher():  # a launcher holds the folder already
                owning.enter_context(folder.commanded())
            folder = owning.enter_context(folder.owned())
        store = leaving.enter_context(opened_store(run, ranks, folder, allow_changes=allow_changes))
        chosen = choose_kernels(run, ranks, folder)
        run = chosen.run
        run = choose_recomputation(run, ranks, folder, cluster_of(run, ranks.device), memory_bytes(run, ranks.device))
        fits = None
        if ranks.device.type == "cuda":
            smallest = smallest_bytes(ranks, memory_bytes(run, ranks.device))
            fits = expect_fits(run, smallest, anyway=ignore_memory, trace=traced_by_first(run, ranks))
        if ranks.is_first:
            check_writable(folder.checkpoints)
        ranks.barrier()
        if started_by_torchrun() and ranks.world > 1 and ranks.store is None:
            leaving.enter_context(attempt(folder, ranks, signs))
        with explained_out_of_memory(run, ranks.rank, folder.path / "run.toml"):
            session = begin(
                run, ranks, folder, allow_changes=allow_changes, kernels=chosen.forms, store=store, leave_by=leave_by
            )
        signs.has_begun = True
        for line in (*deterministic_line(run), *chosen.lines, *([] if fits is None else [fits])):
            session.metrics.line(line)
        leaving.callback(session.saves.saver.close)
        leaving.callback(session.metrics.close)
        yield session
