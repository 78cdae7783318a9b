"""A run from start to end: join, build, go on where it stopped, step, save, leave.

train(run)
  process_group      who is here
  Trainer            model cut as the layout says, optimizer, data            (trainer.py)
  restore_newest     if the run's folder has a checkpoint                     (resume.py)
  for each step      train_step, evaluate, record, save
  finish             last checkpoint, Hugging Face folder
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from shlex import quote

import torch

from ultrascale import heartbeat
from ultrascale.checkpoint import CheckpointError, Saver, check_writable
from ultrascale.data.loader import Loader
from ultrascale.launch.events import longest_seconds
from ultrascale.measure.machine import this_gpu
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.parallel.time_limits import SLOW_SECONDS, START_SECONDS
from ultrascale.plan.report import plan_run
from ultrascale.spec.cluster import Cluster, parse_cluster
from ultrascale.spec.resolve import to_toml
from ultrascale.spec.rules import run_notes
from ultrascale.spec.run import Run
from ultrascale.spec.time_limits import grace_notes
from ultrascale.spec.trainable import expect_trainable
from ultrascale.spec.units import count_of
from ultrascale.train.agreement import expect_same_run
from ultrascale.train.anomalies import AnomalousStepError, CorruptStateError
from ultrascale.train.attempts import attempt
from ultrascale.train.chosen_kernels import choose_kernels
from ultrascale.train.chosen_recompute import choose_recomputation
from ultrascale.train.compiled import load_compiled, save_compiled
from ultrascale.train.corpora import build_loader, expect_one_tokenizer, validation_loaders, with_absolute_paths
from ultrascale.train.data_check import DataCheck
from ultrascale.train.deadline import Deadline
from ultrascale.train.deterministic import deterministic, deterministic_line
from ultrascale.train.digests import compare
from ultrascale.train.evaluate import evaluate
from ultrascale.train.export import export_checkpoint, keep_tokenizer
from ultrascale.train.fit import expect_fits, smallest_bytes, traced_by_first
from ultrascale.train.lost_folder import Loss, settle_place
from ultrascale.train.metrics import Metrics, Row, console_line, expect_trackers
from ultrascale.train.out_of_memory import explained_out_of_memory
from ultrascale.train.performance import Performance
from ultrascale.train.resume import changes_since, facts_of, restore_newest, tensors_of
from ultrascale.train.run_folder import RunFolder, RunFolderLostError, environment
from ultrascale.train.saves import Saves
from ultrascale.train.signals import on_stop_signal
from ultrascale.train.signs_of_life import has_launcher, started_by_torchrun, watched
from ultrascale.train.slow_parts import slow_part
from ultrascale.train.stragglers import WINDOWS, Stragglers
from ultrascale.train.trainer import StepResult, StopRequested, Trainer

MOST_REWINDS = 3
"""Times that a run goes back to a checkpoint because of the same step, before it gives up."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    steps_done: int
    stopped: bool
    """A signal ended it before its last step."""
    last_loss: float | None


def train(
    run: Run,
    *,
    allow_changes: bool = False,
    rendezvous: str = "env://",
    ignore_memory: bool = False,
    leave_by: float | None = None,
) -> Outcome:
    """Train `run`, or go on with it, in this process and those that were started beside it, which meet at `rendezvous`.

    `ignore_memory`: start although the plan says that it does not fit its devices. `leave_by`: second of the wall clock by
    which the processes must be gone, saved.

    Raises SpecError (the run does not fit the processes, the data or the checkpoint), DataError, CheckpointError,
    NonFiniteError, RunFolderLostError.
    """
    expect_trainable(run.model, run.layout)
    expect_trackers(run)
    with ExitStack() as owning:  # until the export is written too
        return _train(
            with_absolute_paths(run), owning, allow_changes=allow_changes, rendezvous=rendezvous, ignore_memory=ignore_memory,
            leave_by=leave_by,
        )  # fmt: skip


def _train(
    run: Run, owning: ExitStack, *, allow_changes: bool, rendezvous: str, ignore_memory: bool, leave_by: float | None
) -> Outcome:
    """The same, with the run's folder held by `owning`."""
    folder = RunFolder.of(run)
    with (
        deterministic(run),
        process_group(
            run.layout,
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
        if started_by_torchrun() and ranks.world > 1:
            leaving.enter_context(attempt(folder, ranks, signs))
        with explained_out_of_memory(run, ranks.rank, folder.path / "run.toml"):
            session = Session.start(run, ranks, folder, allow_changes=allow_changes, kernels=chosen.forms)
        session.deadline = Deadline(leave_by, longest_seconds(folder.metrics, "perf/save_s"))
        for line in (*deterministic_line(run), *chosen.lines, *([] if fits is None else [fits])):
            session.metrics.line(line)
        leaving.callback(session.saves.saver.close)
        leaving.callback(session.metrics.close)
        leaving.callback(session.data_check.close)
        done = session.trainer.steps_done
        if done > run.steps:
            session.metrics.line(f"already has {count_of(done, 'step')}, steps = {run.steps}: nothing to do")
            return Outcome(done, False, None)
        with on_stop_signal(session.trainer.request_stop), folder.watched(session.trainer.request_stop):
            with explained_out_of_memory(run, ranks.rank, folder.path / "run.toml"):
                outcome = session.steps()
            session.finish(outcome)
    if run.checkpoint.export and session.ranks.is_first and not outcome.stopped:
        # After the ranks have parted: writing a large model takes longer than the others would wait for.
        target = export_checkpoint(session.folder.checkpoints, session.folder.path / "export", run=run)
        narrow = session.trainer.imported_dtype
        told = "" if narrow is None else f", in {narrow} as the one that was imported"
        session.metrics.line(f"done: {count_of(outcome.steps_done, 'step')}; Hugging Face folder in {target}{told}")
    return outcome


@dataclass
class Session:
    """One stretch of a run, from start or resume to its end or a signal."""

    run: Run
    ranks: Ranks
    folder: RunFolder
    trainer: Trainer
    saves: Saves
    metrics: Metrics
    performance: Performance
    validation: dict[str, Loader]
    """Held-out data, by the name of its metric."""
    data_check: DataCheck
    save_seconds: float | None = None
    """How long training waited for the last save. A step's row of metrics is written before the step is saved, so that a kill
    while saving cannot lose it; this number is therefore in the row of the next step."""
    has_stepped: bool = False
    """Whether a step was done since the start, or since the run last went back to a checkpoint."""
    has_evaluated: bool = False
    rewinds: list[int] = field(default_factory=list)
    """Steps done at each time that the run went back to a checkpoint."""
    loss: Loss | None = None
    """Of the run's folder."""
    deadline: Deadline = field(default_factory=lambda: Deadline(None))
    stragglers: Stragglers = field(init=False)

    def __post_init__(self) -> None:
        self.stragglers = Stragglers(self.run.layout, self.ranks, self.run.faults.straggler_steps)

    @classmethod
    def start(
        cls, run: Run, ranks: Ranks, folder: RunFolder, *, allow_changes: bool, kernels: Mapping[str, str] | None = None
    ) -> Session:
        """Build everything, go on from the newest checkpoint, and say so in the run's folder."""
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
            found = restore_newest(trainer, folder.checkpoints, allow_changes=allow_changes)
        if ranks.is_first and trainer.steps_done <= run.steps:
            folder.write_text("run.toml", to_toml(run))
            keep_tokenizer(run)
            folder.write_json("environment.json", environment())
            folder.write_json("plan.json", plan_run(run, cluster_of(run, ranks.device)).to_json())
            folder.forget_metrics_from(trainer.steps_done)
        metrics = Metrics(run, folder, first_step=trainer.steps_done, writes=ranks.is_first)
        resumed = None if found.folder is None else found.folder.name
        damaged = [one.folder.name for one in found.rejected]
        metrics.event("start", step=trainer.steps_done, world=ranks.world, checkpoint=resumed, damaged=damaged)
        for note in (*run_notes(run), *grace_notes(run, os.environ)):
            metrics.line(f"note: {note}")
        for rescued in folder.rescued() if found.folder is None else ():
            metrics.line(f"note: starting anew, though {rescued} holds what was saved when a folder at {folder.path} was lost")
        for line in data_lines:
            metrics.line(line)
        for rejected in found.rejected:
            metrics.line(f"damaged checkpoint passed over: {rejected.folder}: {rejected.reason}")
        if found.folder is not None:
            metrics.line(f"resumed from {found.folder} at step {trainer.steps_done}")
            for change in changes_since(found.folder, run):
                metrics.line(change)
        saver = Saver(
            folder.checkpoints,
            keep=run.checkpoint.keep,
            keep_every_steps=run.checkpoint.keep_every_steps,
            asynchronous=run.checkpoint.asynchronous,
            process_group=ranks.host_group,
        )
        performance = Performance(run, ranks, metrics)
        saved_at = trainer.steps_done if found.folder is not None else -1
        saves = Saves(saver, run.checkpoint, metrics.save_failed, saved_at)
        return cls(run, ranks, folder, trainer, saves, metrics, performance, validation, data_check)

    def steps(self) -> Outcome:
        """Step until the run is done or a signal came."""
        last_loss = None
        heartbeat.steps_done(self.trainer.steps_done)
        self.data_check.begin(self.trainer.request_stop)
        with self.performance.watching(self.trainer):
            while self.trainer.steps_done < self.run.steps:
                try:
                    last_loss = self._step()
                except StopRequested:
                    return Outcome(self.trainer.steps_done, True, last_loss)
                except (AnomalousStepError, CorruptStateError) as error:
                    self._rewind(error)
        return Outcome(self.trainer.steps_done, False, last_loss)

    def _step(self) -> float:
        """One step and what follows it; the loss."""
        started = time.perf_counter()
        result = self.trainer.train_step()
        seconds = time.perf_counter() - started
        heartbeat.steps_done(self.trainer.steps_done)
        if not self.has_stepped:
            self.has_stepped = True
            self.trainer.share.mesh.limit_waits(self.ranks, self.run.collective_timeout_seconds)
            self.metrics.event("stepped", step=self.trainer.steps_done)
            if self.run.compile and self.ranks.is_first:
                save_compiled(self.folder.compiled)
        if result.gradients.anomaly:
            self.metrics.line(f"step {self.trainer.steps_done} passed over: {result.gradients.anomaly}")
            self.metrics.event("skip", step=self.trainer.steps_done, cause=result.gradients.anomaly)
        for straggler in self.stragglers.after_step(seconds):
            told = straggler.text(WINDOWS * (self.run.faults.straggler_steps or 0))
            self.metrics.line(told)
            self.metrics.event("straggler", step=self.trainer.steps_done, rank=straggler.rank, cause=told)
        self._after_step(result, self.performance.after_step(result, seconds))
        self._leave_in_time(seconds)
        return result.gradients.loss

    def _leave_in_time(self, seconds: float) -> None:
        """Ask all ranks to stop if the job's time may end before another step is saved."""
        why = self.deadline.after_step(seconds, self.save_seconds)
        if why and not self.trainer.stop_requested and not self._is_complete():
            self.metrics.line(f"saving and leaving after step {self.trainer.steps_done}: {why}")
            self.trainer.request_stop()

    def _rewind(self, error: AnomalousStepError | CorruptStateError) -> None:
        """Go back to the newest checkpoint, if that is what is asked for and there is one; else raise `error`."""
        step, trainer = self.trainer.steps_done, self.trainer
        if self.run.faults.on_anomaly != "rewind" or self.saves.saved_at < 0 or self.rewinds.count(step) >= MOST_REWINDS:
            raise error
        if isinstance(error, AnomalousStepError) and step in self.rewinds:
            trainer.to_pass_over.add(step)  # it was tried again and failed again, so the machine is not to blame
        self.rewinds.append(step)
        trainer.optimizer.zero_grad(set_to_none=True)
        with slow_part(trainer, "going back to a checkpoint", self.run.collective_timeout_seconds):
            self.saves.settle(step)
            self._settle_place()
            if self.loss is not None or self.saves.saved_at < 0:
                raise error  # what was saved is not there any more
            restore_newest(trainer, self.folder.checkpoints, allow_changes=True)
        if self.ranks.is_first:
            self.folder.forget_metrics_from(trainer.steps_done)
        heartbeat.steps_done(trainer.steps_done)
        self.saves.restored(trainer.steps_done)
        self.has_stepped = False
        self.metrics.line(f"{error} Back to step {trainer.steps_done}.")
        self.metrics.event("rewind", step=step, to=trainer.steps_done, cause=str(error))

    def _compare_replicas_if_due(self, *, saving: bool) -> None:
        """Raises CorruptStateError if ranks that must hold the same bits do not."""
        every = self.run.faults.digest_every_steps
        if every is None or self.ranks.world == 1 or not (saving or _due(every, self.trainer.steps_done)):
            return
        found = compare(tensors_of(self.trainer), self.ranks)
        if found.blamed:
            told = f"{found.text(self.trainer.steps_done)}: memory or arithmetic failed there"
            remedy = 'Go on from the newest checkpoint, without that machine; faults.on_anomaly = "rewind" goes back by itself.'
            raise CorruptStateError(f"{told}. {remedy}")

    def finish(self, outcome: Outcome) -> None:
        """Keep what there is, and export it if the run is complete."""
        heartbeat.beat("waiting for a save", extra_seconds=SLOW_SECONDS)
        self.saves.settle(self.trainer.steps_done)
        self._settle_place()
        if outcome.stopped and self.saves.saved_at != self.trainer.steps_done:
            try:
                self._compare_replicas_if_due(saving=True)
            except CorruptStateError as error:
                self._rewind(error)  # and leave it at that
                outcome = replace(outcome, steps_done=self.trainer.steps_done)
        heartbeat.beat("saving the last checkpoint", extra_seconds=SLOW_SECONDS)
        if self.saves.saved_at != self.trainer.steps_done:
            self.save(last=True)
        self.saves.saver.close()
        if outcome.stopped:
            self.metrics.line(f"stopped at step {outcome.steps_done}: saved; the same command goes on from here")
        self.metrics.event("stop" if outcome.stopped else "end", step=outcome.steps_done)
        for line in self.data_check.end():
            self.metrics.line(line)

    def save(self, *, last: bool = False) -> None:
        """Save the state as it is now. Raises RunFolderLostError after that if the run's folder was lost."""
        started = time.perf_counter()
        heartbeat.beat("saving a checkpoint", extra_seconds=SLOW_SECONDS)
        self._settle_place()
        step = self.trainer.steps_done
        try:
            self.saves.save(step, tensors_of(self.trainer), facts_of(self.trainer), last=last or self.loss is not None)
        except CheckpointError as error:
            if self.loss is None:
                raise
            told = (
                f"{self.loss.what}: the run has stopped at step {step}, which could not be saved in {self.loss.refuge} either"
            )
            raise RunFolderLostError(f"{told}: {error}") from error
        heartbeat.beat("between steps")
        self.save_seconds = time.perf_counter() - started
        if self.loss is not None:
            told = f"{self.loss.what}: the run has stopped, and is saved at step {step} in {self.loss.refuge}"
            raise RunFolderLostError(f"{told}; `ultrascale train {quote(str(self.loss.refuge))}` goes on from there.")

    def _settle_place(self) -> None:
        if self.loss is None:
            self.loss = settle_place(
                self.run, self.folder, self.saves, self.ranks, self.trainer.steps_done, self._tell_of_checkpoints
            )

    def _tell_of_checkpoints(self, told: str) -> None:
        self.metrics.line(told)
        self.metrics.event("checkpoints lost", step=self.trainer.steps_done, cause=told)

    def _after_step(self, result: StepResult, values: Row) -> None:
        done, run = self.trainer.steps_done, self.run
        held_out = self._evaluate_if_due()
        if held_out or _due(run.log.every_steps, done) or done == run.steps:
            values |= held_out | {"perf/save_s": self.save_seconds}
            self.save_seconds = None
            balance = result.expert_balance
            tables = None if balance is None else {"moe/load": balance.load.tolist()}
            self.metrics.row(result.gradients.step, values, tables=tables)
            self.metrics.line(console_line(run, values, done))
        for line in self.data_check.lines():
            self.metrics.line(line)
        self.metrics.advance(done)
        saving = self.saves.is_due(done)
        self._compare_replicas_if_due(saving=saving or self._is_complete())
        if saving:
            self.save()

    def _evaluate_if_due(self) -> Row:
        every, started = self.run.evaluation.every_steps, time.perf_counter()
        if not self.validation or not (_due(every, self.trainer.steps_done) or (every and self._is_complete())):
            return {}
        sequences = self.run.evaluation.sequences
        compiles, self.has_evaluated = self.run.compile and not self.has_evaluated, True
        with slow_part(self.trainer, "evaluating", self.run.collective_timeout_seconds) if compiles else nullcontext():
            losses: Row = {name: evaluate(self.trainer, loader, sequences) for name, loader in self.validation.items()}
        return losses | {"perf/eval_s": time.perf_counter() - started}

    def _is_complete(self) -> bool:
        return self.trainer.steps_done >= self.run.steps


def cluster_of(run: Run, device: torch.device) -> Cluster:
    """The machines a run is on: those it names, or as many of this rank's device as it has ranks."""
    if run.cluster != "auto":
        return parse_cluster(run.cluster)
    here = this_gpu(device)
    return parse_cluster(f"{run.layout.world_size}x{here.name if here is not None else 'cpu'}")


def memory_bytes(run: Run, device: torch.device) -> int:
    """Of this rank's device; of a CPU an equal share of the machine's."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return int(parse_cluster(f"{run.layout.world_size}xcpu").accelerator.memory_bytes.value)


def _due(every: int | None, steps_done: int) -> bool:
    return bool(every) and steps_done % every == 0
