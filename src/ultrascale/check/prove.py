"""The proof: N processes run the trainer, one runs the reference, and every number is compared.

Both compute in float64, where correct layouts agree to about 1e-15 and every classic bug stands out; in bf16 the same bugs are
smaller than the rounding error. The proof uses the run's own model (or, if that is too large for a laptop, a small model of the
same kind), axes, schedule, recomputation and optimizer, over several steps, with documents of very uneven length.

Cases share one set of processes (`Pool`), which are restarted only if one of them fails. Rank 0 writes each verdict at once: a
later failure does not lose it. The case that failed is repeated alone, since the other ranks may have been ahead of rank 0 when
one of them failed.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor

from ultrascale.check.compare import Verdict, judge
from ultrascale.check.faults.all_faults import planted
from ultrascale.check.oracle.documents import RandomDocuments
from ultrascale.check.oracle.gathered import bias_parts, gather, moment_parts, parts
from ultrascale.check.oracle.messages import Watch
from ultrascale.check.oracle.reference import Reference, StepFacts, rows_together
from ultrascale.check.small import Case, shrink_model
from ultrascale.description.layout import Layout
from ultrascale.description.run import Run
from ultrascale.launch.forked import RankFailed, run_forked
from ultrascale.launch.scratch import scratch_folder
from ultrascale.models.initialise import shard_boxes
from ultrascale.parallel.mesh import Ranks, process_group
from ultrascale.torch_private import load_compiler
from ultrascale.train.optimizers.optimizer import MOMENTS, set_steps_done
from ultrascale.train.trainer import Trainer
from ultrascale.work.sharding.places import WeightShard

if TYPE_CHECKING:
    from ultrascale.check.oracle.transformers_loop import TransformersLoop

__all__ = ["TOLERANCE", "Case", "prove", "prove_all", "shrink_model"]

TOLERANCE = 1e-11
CLIP_SHARES = (0.8, 1.25)
"""Clipping thresholds as shares of the reference's gradient norm, alternating over steps: the first step is clipped, the second
is not. A run's `clip_grad_norm` may lie far above or far below the norms of a small model.
"""

STEP_SECONDS, SECONDS_A_RANK = 30.0, 4.0
"""Time limit in seconds of a wait for another rank within a step of a small model: a constant, plus a time per rank, because
ranks share few cores.
"""


def prove(case: Case, *, steps: int = 3) -> Verdict:
    """Run `case` on its processes and on one, and compare. Raises RankFailed if a rank does."""
    return prove_all([case], steps=steps)[0]


def prove_all(
    todo: list[Case],
    *,
    steps: int = 3,
    go_on: bool = False,
    on_verdict: Callable[[Verdict], None] | None = None,
    against: Literal["transformers"] | None = None,
    tolerance: float | None = None,
    step_seconds: float | None = None,
) -> list[Verdict]:
    """Prove cases. Cases with the same number of processes run together, so that these start once. Verdicts are in the order of
    `todo`.

    `on_verdict` is called with each verdict, in the process of rank 0. Raises RankFailed if a rank does, unless `go_on`, which
    continues with the next case and records the failure in the verdict. `against`: compare with
    `check.oracle.transformers_loop` instead of the reference. `step_seconds`: limit of a wait for another rank in a step.
    """
    verdicts: dict[int, Verdict] = {}
    tolerance = TOLERANCE if tolerance is None else tolerance
    for world in sorted({case.run.layout.world_size for case in todo}):
        places = [place for place, case in enumerate(todo) if case.run.layout.world_size == world]
        pool = Pool(world, _Proving(steps, tolerance, against, step_seconds), on_verdict, go_on=go_on, tolerance=tolerance)
        verdicts |= dict(zip(places, pool.prove([todo[place] for place in places]), strict=True))
    return [verdicts[place] for place in range(len(todo))]


@dataclass
class _Proving:
    """Work of each rank on one case after another. Rank 0 caches the facts of the last reference."""

    steps: int
    tolerance: float
    against: Literal["transformers"] | None
    step_seconds: float | None

    def __post_init__(self) -> None:
        self.expected: dict[str, list[StepFacts]] = {}

    def __call__(self, case: Case, ranks: Ranks) -> Verdict | None:
        """The verdict on rank 0; None on other ranks."""
        loader = _documents(case.run)
        expected = self._expected(case.run, loader) if ranks.is_first else []
        trainer = Trainer(case.run, ranks, loader)
        if self.against is None:  # transformers may choose the other of two that are equal
            _tie_experts(trainer.share.named())
            set_steps_done(trainer.optimizer, 0)
        expected_norms = torch.tensor([facts.norm for facts in expected] or [0.0] * self.steps, dtype=torch.float64)
        norms = ranks.sum(expected_norms).tolist()  # waits for the reference
        observed, watch = [], Watch()
        with planted(case.fault, trainer), watch.on(), _limited(trainer, ranks, self.step_seconds):
            for step, norm in enumerate(norms):
                facts = trainer_step(_clipped(trainer, step, norm))
                messages = "\n".join(ranks.gather_text("\n".join(watch.settle()))).split("\n")
                observed.append(replace(facts, messages=tuple(filter(None, messages))))
        return judge(case.name, observed, expected, self.tolerance) if ranks.is_first else None

    def _expected(self, run: Run, loader: RandomDocuments) -> list[StepFacts]:
        """Facts of each step of `run` by the reference; kept for the next case if that has the same reference."""
        key = _decided_by(run, loader)
        if key not in self.expected:
            reference = self._reference(run, loader)
            shares = [None if run.optimizer.clip_grad_norm is None else CLIP_SHARES[step % 2] for step in range(self.steps)]
            self.expected = {key: list(map(reference.train_step, shares))}  # one at a time: it may be large
        return self.expected[key]

    def _reference(self, run: Run, loader: RandomDocuments) -> Reference | TransformersLoop:
        if self.against is None:
            reference = Reference(run, loader)
            _tie_experts(reference.named_weights().items())
            return reference
        from ultrascale.check.oracle.transformers_loop import TransformersLoop

        return TransformersLoop(run, loader)


@contextmanager
def _limited(trainer: Trainer, ranks: Ranks, seconds: float | None) -> Iterator[None]:
    """Context in which waits for other ranks have a shorter limit than during the start."""
    if ranks.timeout is not None:
        trainer.share.mesh.limit_waits(ranks, seconds or STEP_SECONDS + SECONDS_A_RANK * ranks.world)
    yield
    if ranks.timeout is not None:
        trainer.share.mesh.limit_waits(ranks, ranks.timeout.total_seconds())


def _clipped(trainer: Trainer, step: int, norm: float) -> Trainer:
    """`trainer`, set to clip its next step at a share of the reference's `norm`, if the run clips at all."""
    optimizer = trainer.run.optimizer
    if optimizer.clip_grad_norm is not None:
        trainer.run = replace(trainer.run, optimizer=replace(optimizer, clip_grad_norm=CLIP_SHARES[step % 2] * norm))
    return trainer


@torch.no_grad()
def _tie_experts(named: Iterable[tuple[str, Tensor]]) -> None:
    """Give the first two experts of each layer the same score, 0, for every token, until the first update: exact ties."""
    for name, parameter in named:
        if name.endswith("router.weight"):
            for (first, _), rows in shard_boxes(parameter, WeightShard((0, 0), tuple(parameter.shape))):
                rows[: max(0, 2 - first)] = 0


def trainer_step(trainer: Trainer) -> StepFacts:
    """Run one step of `trainer`; returns all its results on rank 0. Collective."""
    result = trainer.compute_gradients()
    share, settings = trainer.share, trainer.run.optimizer
    gradients = parts(share, lambda p: p.grad if p.grad is not None else torch.zeros_like(p))
    gradients = gather(share, {"gradients": gradients})["gradients"]
    balance = trainer.apply(result).gradients.expert_balance
    of_moments = {moment: moment_parts(share, trainer.optimizer, settings, moment) for moment in MOMENTS}
    updated = gather(share, {"weights": parts(share, lambda p: p.detach()), "biases": bias_parts(share)} | of_moments)
    weights, biases, moments = updated["weights"], updated["biases"], {moment: updated[moment] for moment in MOMENTS}
    experts = {}
    if balance is not None:
        load = {f"load.{layer}": counts.double() for layer, counts in enumerate(balance.load)}
        experts = load | biases.whole | {"auxiliary": torch.tensor(balance.auxiliary_loss, dtype=torch.float64)}
    differing = {f"gradient of {name}" for name in gradients.differing} | {f"weight {name}" for name in weights.differing}
    differing |= {f"{name} of experts" for name in biases.differing}
    named = {f"{moment}.{name}": value for moment, gathered in moments.items() for name, value in gathered.whole.items()}
    return StepFacts(result.loss, result.norm, gradients.whole, weights.whole, named, experts, tuple(sorted(differing)))


def _documents(run: Run) -> RandomDocuments:
    return RandomDocuments(
        sequence_length=run.batch.sequence_length, vocab_size=run.model.vocab_size, seed=run.seed,
        document_mask=run.data.document_mask, vocab_parts=run.layout.tp,
    )  # fmt: skip


def _decided_by(run: Run, loader: RandomDocuments) -> str:
    """Everything that determines the reference's results: of the layout only how many sequences a balance loss covers."""
    return f"{replace(run, layout=Layout(), name='')} {rows_together(run)} {loader.fingerprint()}"


TIMEOUT_SECONDS = 300
"""Time limit in seconds of a collective: one that takes longer hangs."""


@dataclass
class Pool:
    """`world` processes that prove one case after another."""

    world: int
    prove_case: Callable[[Any, Ranks], Verdict | None]
    on_verdict: Callable[[Verdict], None] | None
    go_on: bool
    """True to continue with the next case after a failure."""
    tolerance: float

    def prove(self, todo: Sequence[Any]) -> list[Verdict]:
        """The verdict of each case. Raises RankFailed if a rank does and the pool does not go on."""
        done: list[Verdict] = []
        alone = False
        while len(done) < len(todo):
            remaining = todo[len(done) : len(done) + 1] if alone else todo[len(done) :]
            verdicts, failure = self._run_batch(remaining)
            done += verdicts
            if failure is None:
                alone = False
            elif not self.go_on:
                raise RankFailed(f"{remaining[len(verdicts)].name}: {failure}") from failure
            elif alone:
                done.append(self._failed(todo[len(done)], failure))
                alone = False
            else:
                alone = True
        return done

    def _run_batch(self, todo: Sequence[Any]) -> tuple[list[Verdict], RankFailed | None]:
        """The verdicts on the first cases of `todo`, and what ended them early."""
        failure = None
        load_compiler()
        with scratch_folder("proof") as folder:
            file = folder / "verdicts"
            try:
                run_forked(self.world, self._rank_main, list(todo), file)
            except RankFailed as error:
                failure = error
            lines = file.read_text().splitlines() if file.exists() else []
        return [Verdict.from_json(json.loads(line)) for line in lines], failure

    def _rank_main(self, rendezvous: str, todo: list[Any], file: Path) -> None:
        torch.set_num_threads(1)
        layout = todo[0].run.layout
        with (
            process_group(layout, device="cpu", timeout_seconds=TIMEOUT_SECONDS, rendezvous=rendezvous) as ranks,
            # A group has connections, and threads that wake a hundred times a second; cases share those of few grids.
            patch.object(dist, "new_group", _cached_groups(dist.new_group)),
        ):
            for case in todo:
                verdict = self.prove_case(case, ranks)
                if verdict is not None:
                    with file.open("a") as out:
                        out.write(json.dumps(verdict.to_json()) + "\n")
                    if self.on_verdict is not None:
                        self.on_verdict(verdict)
            ranks.barrier()  # rank 0 compares long after the others are done; connections end together

    def _failed(self, case: Any, failure: RankFailed) -> Verdict:
        verdict = Verdict(case.name, self.tolerance, {}, (), failure=str(failure).strip())
        if self.on_verdict is not None:
            self.on_verdict(verdict)
        return verdict


def _cached_groups(make: Callable[..., Any]) -> Callable[..., Any]:
    """`dist.new_group` as `Mesh` calls it, which remembers the groups of each list of ranks."""
    groups: dict[tuple[int, ...], Any] = {}

    def call(ranks: list[int], **options: Any) -> Any:
        key = tuple(ranks)
        if key not in groups:
            groups[key] = make(ranks, **options)
        return groups[key]

    return call
