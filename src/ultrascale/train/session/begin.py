"""The start of a session: builds data, trainer and metrics, restores the newest checkpoint, logs to the run's folder.

Observers that every run needs are here too. After its first step a rank waits for others only as long as configured; each step
gets its row of metrics and its console line; replicas are compared every `faults.digest_every_steps`, and before a save that
they may have corrupted; after an anomalous step the run goes back to the newest checkpoint (`faults.on_anomaly = "rewind"`).
`join_run` is the context of it all: the ranks are joined, and own the run's folder, until all of them leave.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from ultrascale import heartbeat
from ultrascale.checkpoint import CheckpointSearch, Saver, check_writable, search
from ultrascale.config.resolve import to_toml
from ultrascale.config.rules.run_rules import run_notes
from ultrascale.config.rules.time_limits import grace_notes
from ultrascale.data.loader import Loader
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.launch.events import longest_seconds
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.parallel.time_limits import START_SECONDS
from ultrascale.plan.report import plan_run
from ultrascale.run_rows import document
from ultrascale.train.corpora import build_loader, expect_one_tokenizer, repeat_lines, validation_loaders, vocabulary_notes
from ultrascale.train.evaluate import HeldOut, evaluation_lines
from ultrascale.train.folder.export import keep_tokenizer
from ultrascale.train.folder.lost_folder import CheckpointPlace
from ultrascale.train.folder.resume import begin_islands, changes_since, restore_newest, shards_for, tensors_of
from ultrascale.train.folder.run_folder import VERSIONS, RunFolder, environment
from ultrascale.train.folder.run_store import RunStore, opened_store
from ultrascale.train.folder.saves import Saves
from ultrascale.train.observers.anomalies import AnomalousStepError, CorruptStateError
from ultrascale.train.observers.digests import compare
from ultrascale.train.observers.metrics import Metrics, console_line
from ultrascale.train.observers.performance import Performance
from ultrascale.train.observers.refused_steps import RefusalLines
from ultrascale.train.observers.stragglers import Stragglers
from ultrascale.train.session.moments import LoopObserver, Outcome, Session, StepDone
from ultrascale.train.start.agreement import expect_same_run
from ultrascale.train.start.attempts import attempt
from ultrascale.train.start.chosen_kernels import choose_kernels
from ultrascale.train.start.chosen_recompute import choose_recomputation
from ultrascale.train.start.compiled import KeptCompiled, load_compiled
from ultrascale.train.start.data_check import DataCheck
from ultrascale.train.start.deterministic import deterministic, deterministic_line
from ultrascale.train.start.fit import cluster_of, expect_fits, memory_bytes, smallest_bytes, traced_by_first
from ultrascale.train.trainer import Trainer
from ultrascale.train.watch.deadline import Deadline, LeftInTime
from ultrascale.train.watch.out_of_memory import explained_out_of_memory
from ultrascale.train.watch.signs_of_life import has_launcher, slow_part, started_by_torchrun, watched


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
    """Build everything, resume from the newest checkpoint, and log the start in the run's folder. Collective."""
    loader, validation = build_loader(run, run.data.sources), validation_loaders(run)
    expect_one_tokenizer(run, loader, validation)
    corpora = [corpus for split_loader in (loader, *validation.values()) for corpus in split_loader.corpora]
    data_check = DataCheck(corpora, ranks, folder, allow_changes=allow_changes)
    data_lines = data_check.before_first_step()
    if run.compile:
        load_compiled(folder.compiled)
    trainer = Trainer(run, ranks, loader, kernels=kernels)
    with slow_part(trainer, "looking for a checkpoint", max(START_SECONDS, run.collective_timeout_seconds)):
        # Inside, because all ranks leave `slow_part` together: a rank that lost another one while searching checkpoints
        # raises there, and does not start at step 0 as if there were none.
        where = search if store is None else partial(store.search, reads=partial(shards_for, trainer))
        newest = restore_newest(trainer, folder.checkpoints, allow_changes=allow_changes, search=where)
        island_line = begin_islands(trainer)
    late_lines: list[str] = []
    if ranks.is_first and trainer.steps_done <= run.steps:
        folder.write_text("run.toml", to_toml(run))
        keep_tokenizer(run)
        now = document("environment", environment())
        late_lines += _changed_versions(folder.read_json("environment.json"), now) if newest.folder is not None else []
        folder.write_json("environment.json", now)
        folder.write_json("plan.json", document("plan", plan_run(run, cluster_of(run, ranks.device)).to_json()))
        kept = folder.set_metrics_aside() if trainer.steps_done == 0 else ""
        last = folder.forget_metrics_from(trainer.steps_done)
        late_lines += _repeated_steps(folder, newest, trainer.steps_done + 1, last, kept)
    metrics = Metrics(run, folder, first_step=trainer.steps_done, writes=ranks.is_first)
    metrics.has_console = ranks.island == 0  # each has its log.txt
    lines = [f"note: {note}" for note in vocabulary_notes(run, loader) if newest.folder is None]
    lines += [*data_lines, *repeat_lines(run, loader), *evaluation_lines(run, loader, validation)]
    lines += [island_line] * bool(island_line)
    _write_start(trainer, folder, metrics, newest, lines)
    metrics.lines(late_lines)
    saver = Saver(
        folder.checkpoints,
        keep=run.checkpoint.keep,
        keep_every_steps=run.checkpoint.keep_every_steps,
        asynchronous=run.checkpoint.asynchronous,
        process_group=ranks.host_group,
        published=None if store is None else store.upload_later,
        spared=tuple if store is None else store.spared,
        disks=None if store is None else store.disks,
    )
    if store is not None:
        store.write_node_event("start", trainer.steps_done)
        store.catch_up(newest.folder)
    saved_at = trainer.steps_done if newest.folder is not None else -1
    saves = Saves(saver, run.checkpoint, partial(metrics.problem, "save failed"), saved_at, run.steps)
    place = CheckpointPlace(run, folder, saves, ranks, partial(metrics.problem, "checkpoints lost"))
    session = Session(run, ranks, folder, trainer, saves, place, metrics, store, [])
    session.observers += _observers(session, validation, data_check, leave_by)
    return session


def _observers(
    session: Session, validation: dict[str, Loader], data_check: DataCheck, leave_by: float | None
) -> list[LoopObserver]:
    """Observers that this run asks for, in the order of their calls: those that add to a step's row come before its writer."""
    run, ranks, metrics, faults = session.run, session.ranks, session.metrics, session.run.faults
    builders: list[tuple[object, Callable[[], LoopObserver]]] = [
        (True, FirstStep),
        (run.compile, KeptCompiled),
        (faults.on_anomaly != "stop", RefusalLines),
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
    return [*stored, *(build() for is_enabled, build in builders if is_enabled)]


def _write_start(trainer: Trainer, folder: RunFolder, metrics: Metrics, newest: CheckpointSearch, lines: list[str]) -> None:
    """Log where the run starts, and the findings of the search for checkpoints."""
    run, resumed = trainer.run, None if newest.folder is None else newest.folder.name
    damaged = [rejected.folder.name for rejected in newest.rejected]
    ranks = {"world": trainer.ranks.world, "layout": _layout_words(run.layout)}
    metrics.event("start", step=trainer.steps_done, **ranks, checkpoint=resumed, damaged=damaged)
    metrics.lines(f"note: {note}" for note in (*run_notes(run), *grace_notes(run, os.environ)))
    for rescued in folder.rescued() if newest.folder is None else ():
        metrics.line(f"note: starting anew, though {rescued} holds what was saved when a folder at {folder.path} was lost")
    metrics.lines(lines)
    for rejected in newest.rejected:
        metrics.line(f"damaged checkpoint passed over: {rejected.folder}: {rejected.reason}")
    if newest.folder is not None:
        metrics.line(f"resumed from {newest.folder} at step {trainer.steps_done}")
        metrics.lines(changes_since(newest.folder, run))
    if trainer.steps_done >= run.steps:
        metrics.line(f"complete: all {run.steps} steps are done; --steps N for more")


def _changed_versions(before: Any, now: dict[str, Any]) -> list[str]:
    """Versions that the run did not have at its last start, as `torch: 2.13.0 (was 2.12.1)`; `before`: its environment.json,
    which has no device if the run trained on CPUs."""
    if not isinstance(before, dict) or not before:
        return []
    versions = ((key, now.get(key) or "none", before.get(key) or "none") for key in VERSIONS)
    return [f"{key}: {new} (was {old})" for key, new, old in versions if new != old]


def _repeated_steps(folder: RunFolder, newest: CheckpointSearch, first: int, last: int, kept: str) -> list[str]:
    """Lines about steps that were logged and are trained again, from step `first` to `last`; none if that is 0. `kept`: file
    of their metrics. A run whose checkpoints are gone must not start over unnoticed."""
    if last == 0:
        return []
    steps = f"steps {first:,} to {last:,} were done before, and are done again"
    stay = f"; metrics of these steps stay in {kept}" if kept else ""
    if newest.folder is not None:
        return [f"{steps}{stay}"]
    remedy = "If the run had saved, and its checkpoints are elsewhere, stop it and bring them back"
    return [f"WARNING: {steps}: no checkpoint is in {folder.checkpoints}{stay}. {remedy}"]


def _layout_words(layout: Layout) -> list[str]:
    """The layout in the words in which the pictures describe a change of layout; always the same parts."""
    recompute = " + ".join(layout.recompute_blocks) or layout.recompute
    axes = layout.axes_words or "one rank"
    return [axes, layout.zero_words, f"micro-batch {layout.micro_batch_size}", f"recompute {recompute}", layout.precision]


class FirstStep(LoopObserver):
    """Ends the longer time limits of the start, and records that steps were done."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Shorten time limits, once."""
        if not session.has_stepped:
            session.has_stepped = True
            session.trainer.share.mesh.limit_waits(session.ranks, session.run.collective_timeout_seconds)
            session.metrics.event("stepped", step=session.trainer.steps_done)


class Recorded(LoopObserver):
    """Writes the values that earlier observers added for a step.

    The row is written before the step is saved, so that a kill during the save cannot lose it. The time that training waited
    for a save is therefore in the row of the next step.
    """

    def __init__(self) -> None:
        self.save_seconds: float | None = None

    def after_step(self, session: Session, done: StepDone) -> None:
        """Write the row, if it is due."""
        run, steps_done = session.run, session.trainer.steps_done
        self._write_island_lines(session)
        if done.is_recorded or session.is_due(run.log.every_steps) or session.is_complete:
            done.values["perf/save_s"], self.save_seconds = self.save_seconds, None
            balance = done.result.gradients.expert_balance
            tables = None if balance is None else {"moe/load": balance.load.tolist()}
            session.metrics.row(steps_done, done.values, tables=tables)
            session.metrics.line(console_line(run, done.values, steps_done))
        session.metrics.advance(steps_done)

    def saved(self, session: Session, seconds: float) -> None:
        """Keep the seconds for the next row."""
        self.save_seconds = seconds

    def ended(self, session: Session, outcome: Outcome) -> None:
        """Log how the run ended."""
        self._write_island_lines(session)
        if outcome.stopped:
            session.metrics.line(f"stopped at step {outcome.steps_done}: saved; the same command goes on from here")
        session.metrics.event("stop" if outcome.stopped else "end", step=outcome.steps_done)

    def _write_island_lines(self, session: Session) -> None:
        """Log which islands joined and left."""
        session.metrics.lines(() if session.trainer.outer is None else session.trainer.outer.lines())


class ComparedReplicas(LoopObserver):
    """Raises CorruptStateError on every rank if ranks that must hold the same bits do not."""

    def after_step(self, session: Session, done: StepDone) -> None:
        """Compare, if a comparison is due or the step will be saved."""
        is_saved = session.is_complete or session.saves.is_due(session.trainer.steps_done)
        if is_saved or session.is_due(session.run.faults.digest_every_steps):
            self.before_stop(session)

    def before_stop(self, session: Session) -> None:
        """Compare."""
        comparison = compare(tensors_of(session.trainer), session.ranks)
        if comparison.blamed:
            problem = f"{comparison.text(session.trainer.steps_done)}: memory or arithmetic failed there"
            remedy = 'Go on from the newest checkpoint, without that machine; faults.on_anomaly = "rewind" goes back by itself.'
            raise CorruptStateError(f"{problem}. {remedy}")


MOST_REWINDS = 3
"""Most rewinds to a checkpoint because of the same step, before the run fails."""


class Rewind(LoopObserver):
    """Goes back to the newest checkpoint, if there is one."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        """Steps done at each rewind."""

    def failed(self, session: Session, error: AnomalousStepError | CorruptStateError) -> bool:
        """Go back. Collective; raises `error` if the checkpoint no longer exists."""
        trainer, saves = session.trainer, session.saves
        step = trainer.steps_done
        if saves.saved_at < 0 or self.steps.count(step) >= MOST_REWINDS:
            return False
        if isinstance(error, AnomalousStepError) and step in self.steps:
            trainer.to_pass_over.add(step)  # the retry failed too, so the machine is not to blame
        self.steps.append(step)
        trainer.optimizer.zero_grad(set_to_none=True)
        with slow_part(trainer, "going back to a checkpoint", session.run.collective_timeout_seconds):
            saves.settle(step)
            session.place.settle(step)
            if session.place.loss is not None or saves.saved_at < 0:
                raise error
            store = session.store if session.store is not None and not session.store.disks.are_shared else None
            where = search if store is None else partial(store.search, reads=partial(shards_for, trainer))
            restore_newest(trainer, session.folder.checkpoints, allow_changes=True, search=where)
        if session.ranks.is_first:
            session.folder.forget_metrics_from(trainer.steps_done)
        heartbeat.steps_done(trainer.steps_done)
        saves.restored(trainer.steps_done)
        session.has_stepped = False
        session.metrics.line(f"{error} Back to step {trainer.steps_done}.")
        session.metrics.event("rewind", step=step, to=trainer.steps_done, cause=str(error))
        return True


@contextmanager
def join_run(
    run: Run,
    owning: ExitStack,
    *,
    allow_changes: bool,
    rendezvous: str,
    ignore_memory: bool,
    leave_by: float | None,
    apart: tuple[int, str] | None,
) -> Iterator[Session]:
    """A session of `run`, restored, with all its ranks; `owning` holds the run's folder. Arguments as in `train.loop.train`."""
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
            if not has_launcher():  # a launcher already holds the folder
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
        session.metrics.lines([*deterministic_line(run), *chosen.lines, *([] if fits is None else [fits])])
        leaving.callback(session.saves.saver.close)
        leaving.callback(session.metrics.close)
        yield session
