"""The start of a session: data, trainer and metrics built, the newest checkpoint restored, the run's folder told."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from ultrascale.checkpoint import Saver, Search, search
from ultrascale.config.resolve import to_toml
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.config.rules.time_limits import grace_notes
from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.launch.events import longest_seconds
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.time_limits import START_SECONDS
from ultrascale.plan.report import plan_run
from ultrascale.run_rows import document
from ultrascale.train.corpora import build_loader, expect_one_tokenizer, validation_loaders
from ultrascale.train.evaluate import HeldOut
from ultrascale.train.folder.export import keep_tokenizer
from ultrascale.train.folder.lost_folder import Place
from ultrascale.train.folder.resume import begin_islands, changes_since, restore_newest
from ultrascale.train.folder.run_folder import RunFolder, environment
from ultrascale.train.folder.run_store import RunStore
from ultrascale.train.folder.saves import Saves
from ultrascale.train.observers.metrics import Metrics
from ultrascale.train.observers.performance import Performance
from ultrascale.train.observers.refused_steps import ToldRefusals
from ultrascale.train.observers.stragglers import Stragglers
from ultrascale.train.session.first_step import FirstStep
from ultrascale.train.session.moments import LoopObserver, Session
from ultrascale.train.session.recorded import Recorded
from ultrascale.train.session.replicas import ComparedReplicas
from ultrascale.train.session.rewind import Rewind
from ultrascale.train.start.compiled import KeptCompiled, load_compiled
from ultrascale.train.start.data_check import DataCheck
from ultrascale.train.start.fit import cluster_of
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch.deadline import Deadline, LeftInTime
from ultrascale.train.watch.slow_parts import slow_part


def begin(
    run: Run,
    ranks: Ranks,
    folder: RunFolder,
    *,
    allow_changes: bool,
    kernels: Mapping[str, str] | None = None,
    store: RunStore | None = None,
    leave_by: float | None = None,
) -> Session:
    """Build everything, go on from the newest checkpoint, and say so in the run's folder. Collective."""
    loader, validation = build_loader(run, run.data.sources), validation_loaders(run)
    expect_one_tokenizer(run, loader, validation)
    corpora = [corpus for one in (loader, *validation.values()) for corpus in one.corpora]
    data_check = DataCheck(corpora, ranks, folder, allow_changes=allow_changes)
    data_lines = data_check.before_first_step()
    if run.compile:
        load_compiled(folder.compiled)
    trainer = Trainer(run, ranks, loader, kernels=kernels)
    with slow_part(trainer, "looking for a checkpoint", max(START_SECONDS, run.collective_timeout_seconds)):
        # Inside, because all ranks leave `slow_part` together: one that lost another rank while it looked for checkpoints
        # raises there, and does not begin at step 0 as if there were none.
        where = search if store is None else store.search
        found = restore_newest(trainer, folder.checkpoints, allow_changes=allow_changes, search=where)
        joined = begin_islands(trainer)
    if ranks.is_first and trainer.steps_done <= run.steps:
        folder.write_text("run.toml", to_toml(run))
        keep_tokenizer(run)
        folder.write_json("environment.json", document("environment", environment()))
        folder.write_json("plan.json", document("plan", plan_run(run, cluster_of(run, ranks.device)).to_json()))
        folder.forget_metrics_from(trainer.steps_done)
    metrics = Metrics(run, folder, first_step=trainer.steps_done, writes=ranks.is_first)
    metrics.has_console = ranks.island == 0  # each has its log.txt
    _tell(trainer, folder, metrics, found, [*data_lines, *[joined] * bool(joined)])
    saver = Saver(
        folder.checkpoints,
        keep=run.checkpoint.keep,
        keep_every_steps=run.checkpoint.keep_every_steps,
        asynchronous=run.checkpoint.asynchronous,
        process_group=ranks.host_group,
        published=None if store is None else store.offer,
        spared=tuple if store is None else store.spared,
    )
    if store is not None:
        store.catch_up(found.folder)
    saves = Saves(saver, run.checkpoint, metrics.save_failed, trainer.steps_done if found.folder is not None else -1)
    place = Place(run, folder, saves, ranks, metrics.checkpoints_lost)
    session = Session(run, ranks, folder, trainer, saves, place, metrics, store, [])
    session.observers += _observers(session, validation, data_check, leave_by)
    return session


def _observers(
    session: Session, validation: dict[str, Loader], data_check: DataCheck, leave_by: float | None
) -> list[LoopObserver]:
    """Observers that this run asks for, in the order of their calls: those that add to a step's row before its writer."""
    run, ranks, metrics, faults = session.run, session.ranks, session.metrics, session.run.faults
    found: list[tuple[object, Callable[[], LoopObserver]]] = [
        (True, FirstStep),
        (run.compile, KeptCompiled),
        (faults.on_anomaly != "stop", ToldRefusals),
        (faults.straggler_steps and ranks.world > 1, lambda: Stragglers(run.layout, ranks, faults.straggler_steps or 1)),
        (True, lambda: Performance(run, ranks, metrics)),
        (validation and run.evaluation.every_steps, lambda: HeldOut(validation)),
        (True, Recorded),
        (True, lambda: data_check),
        (faults.digest_every_steps and ranks.world > 1, ComparedReplicas),
        (leave_by, lambda: LeftInTime(Deadline(leave_by, longest_seconds(metrics.folder.metrics, "perf/save_s")))),
        (faults.on_anomaly == "rewind", Rewind),
    ]
    stored = [] if session.store is None else [session.store]
    return [*stored, *(build() for is_asked, build in found if is_asked)]


def _tell(trainer: Trainer, folder: RunFolder, metrics: Metrics, found: Search, lines: list[str]) -> None:
    """Say where the run begins, and what was found on the way there."""
    run, resumed = trainer.run, None if found.folder is None else found.folder.name
    damaged = [one.folder.name for one in found.rejected]
    ranks = {"world": trainer.ranks.world, "layout": _layout_words(run.layout)}
    metrics.event("start", step=trainer.steps_done, **ranks, checkpoint=resumed, damaged=damaged)
    for note in (*run_notes(run), *grace_notes(run, os.environ)):
        metrics.line(f"note: {note}")
    for rescued in folder.rescued() if found.folder is None else ():
        metrics.line(f"note: starting anew, though {rescued} holds what was saved when a folder at {folder.path} was lost")
    for line in lines:
        metrics.line(line)
    for rejected in found.rejected:
        metrics.line(f"damaged checkpoint passed over: {rejected.folder}: {rejected.reason}")
    if found.folder is not None:
        metrics.line(f"resumed from {found.folder} at step {trainer.steps_done}")
        for change in changes_since(found.folder, run):
            metrics.line(change)


def _layout_words(layout: Layout) -> list[str]:
    """The layout as pictures tell a change of it; each time the same parts."""
    recompute = " + ".join(layout.recompute_blocks) or layout.recompute
    axes = layout.axes_words or "one rank"
    return [axes, layout.zero_words, f"micro-batch {layout.micro_batch_size}", f"recompute {recompute}", layout.precision]
