"""A run from start to end: join, restore, step, save, leave.

train(run)
  joined             processes join the process group, build their state and restore the newest checkpoint    (session)
  steps              step after step, with a checkpoint where one is due
  finish             the last checkpoint
  export             the Hugging Face folder

Every optional feature (metrics, evaluation, stragglers, comparison of replicas, rewinding, deadlines, stores) is a
`LoopObserver`. It is called at the moments that `session.moments` defines, and exists only if the run asks for it.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from ultrascale import heartbeat
from ultrascale.config.rules.trainable import expect_trainable_run
from ultrascale.description.run import Run
from ultrascale.description.units import count_of
from ultrascale.parallel.time_limits import SLOW_SECONDS
from ultrascale.train.corpora import with_absolute_paths
from ultrascale.train.folder.export import export_checkpoint
from ultrascale.train.folder.island_folder import of_island, where_they_meet
from ultrascale.train.folder.resume import facts_of, tensors_of
from ultrascale.train.observers.anomalies import AnomalousStepError, CorruptStateError
from ultrascale.train.observers.metrics import expect_trackers
from ultrascale.train.session.begin import join_run
from ultrascale.train.session.moments import Outcome, Session, StepDone
from ultrascale.train.step import StopRequested
from ultrascale.train.watch.deadline import on_stop_signal
from ultrascale.train.watch.out_of_memory import explained_out_of_memory


def train(
    run: Run,
    *,
    allow_changes: bool = False,
    rendezvous: str = "env://",
    ignore_memory: bool = False,
    leave_by: float | None = None,
    island: int | None = None,
) -> Outcome:
    """Train `run`, or resume it, in this process and its peers, which join at `rendezvous`.

    `ignore_memory`: start even if the plan says that the run does not fit its devices. `leave_by`: wall-clock time in seconds
    by which the processes must have saved and exited. `island`: number of this island, if each island is started by itself
    (`islands.quorum`).

    Raises SpecError (the run does not fit the processes, the data or the checkpoint), DataError, CheckpointError,
    NonFiniteError, RunFolderLostError.
    """
    expect_trainable_run(run)
    expect_trackers(run)
    run = with_absolute_paths(run)
    apart = where_they_meet(run, island)
    run = of_island(run, island)
    with ExitStack() as owning:  # until the export is written too
        with join_run(
            run, owning, allow_changes=allow_changes, rendezvous=rendezvous, ignore_memory=ignore_memory, leave_by=leave_by,
            apart=apart,
        ) as session:  # fmt: skip
            done, request_stop = session.trainer.steps_done, session.trainer.request_stop
            if done > session.run.steps:
                session.metrics.line(f"already has {count_of(done, 'step')}, steps = {run.steps}: nothing to do")
                return finish(session, Outcome(done, False, None))
            with on_stop_signal(request_stop), session.folder.watched(request_stop):
                with explained_out_of_memory(session.run, session.ranks.rank, session.folder.path / "run.toml"):
                    outcome = steps(session)
                outcome = finish(session, outcome)
        if run.checkpoint.export and session.ranks.is_first and not outcome.stopped:
            # After the process group is closed: writing a large model takes longer than the other ranks would wait.
            export(session)
    return outcome


def steps(session: Session) -> Outcome:
    """Step until the run is complete or a stop signal arrives."""
    trainer, last_loss = session.trainer, None
    heartbeat.steps_done(trainer.steps_done)
    with ExitStack() as until_end:
        for observer in session.observers:
            observer.started(session, until_end)
        while not session.is_complete:
            try:
                last_loss = step(session)
            except StopRequested:
                return Outcome(trainer.steps_done, True, last_loss)
            except (AnomalousStepError, CorruptStateError) as error:
                go_back(session, error)
    return Outcome(trainer.steps_done, trainer.outer is not None and trainer.outer.owes, last_loss)


def step(session: Session) -> float:
    """One step and the observers' work after it. Returns the loss."""
    for observer in session.observers:
        observer.before_step(session)
    started = time.perf_counter()
    result = session.trainer.train_step()
    done = StepDone(result, time.perf_counter() - started)
    heartbeat.steps_done(session.trainer.steps_done)
    for observer in session.observers:
        observer.after_step(session, done)
    if session.saves.is_due(session.trainer.steps_done):
        save(session)
    return result.gradients.loss


def go_back(session: Session, error: AnomalousStepError | CorruptStateError) -> None:
    """Raise `error`, unless an observer rewinds the session to an earlier step."""
    if not any(observer.failed(session, error) for observer in session.observers):
        raise error


def save(session: Session, *, last: bool = False) -> None:
    """Save the current state. Then raises RunFolderLostError if the run's folder was lost."""
    started, trainer = time.perf_counter(), session.trainer
    heartbeat.beat("saving a checkpoint", extra_seconds=SLOW_SECONDS)
    session.place.save(trainer.steps_done, tensors_of(trainer), facts_of(trainer), last=last)
    heartbeat.beat("between steps")
    for observer in session.observers:
        observer.saved(session, time.perf_counter() - started)


def finish(session: Session, outcome: Outcome) -> Outcome:
    """Save the final state, if no checkpoint holds it yet. Returns how the run ended."""
    trainer, saves = session.trainer, session.saves
    heartbeat.beat("waiting for a save", extra_seconds=SLOW_SECONDS)
    saves.settle(trainer.steps_done)
    session.place.settle(trainer.steps_done)
    if outcome.stopped and saves.saved_at != trainer.steps_done:
        try:
            for observer in session.observers:
                observer.before_stop(session)
        except CorruptStateError as error:
            go_back(session, error)  # nothing more is done about it
            outcome = outcome._replace(steps_done=trainer.steps_done)
    heartbeat.beat("saving the last checkpoint", extra_seconds=SLOW_SECONDS)
    if saves.saved_at != trainer.steps_done:
        save(session, last=True)
    saves.saver.close()
    for observer in session.observers:
        observer.ended(session, outcome)
    return outcome


def export(session: Session) -> None:
    """Write the newest checkpoint as a Hugging Face folder, on one rank."""
    if session.store is not None:
        session.store.bring_newest()
    target = export_checkpoint(session.folder.checkpoints, session.folder.path / "export", run=session.run)
    narrow = session.trainer.imported_dtype
    suffix = "" if narrow is None else f", in {narrow} as the one that was imported"
    if session.store is not None:
        session.store.keep_export(target)
    steps_done = count_of(session.trainer.steps_done, "step")
    session.metrics.line(f"done: {steps_done}; Hugging Face folder in {target}{suffix}")
