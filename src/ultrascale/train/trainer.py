"""One rank of a run: everything that exists between steps, and the step.

1. read this rank's sequences of the step, and count its valid targets
2. agree with the other ranks on the count and on whether to stop
3. play the actions of `schedules.accumulate`: forward, backward, forward, backward, ...
4. gradient norm, and stop before the update if it is not finite; in fp16 go on without it (`train.loss_scale`)
5. clip, update, forget the gradients
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import inf, isfinite, nan

import torch

from ultrascale import heartbeat
from ultrascale.data.loader import Sequences
from ultrascale.heap import keep_freed_memory, return_free_memory
from ultrascale.kernels.implementation import choose
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import Share
from ultrascale.schedules.actions import Action, Kind
from ultrascale.spec.progress import StepSpan, step_span
from ultrascale.spec.run import Run
from ultrascale.train.anomalies import AnomalousStepError, Norms
from ultrascale.train.expert_balance import ExpertBalance, balance_experts, forget_load
from ultrascale.train.gradients import (
    NonFiniteError,
    clip_gradients,
    name_bad_gradients,
    watched_gradients,
)
from ultrascale.train.learning_rate import learning_rate
from ultrascale.train.loss_scale import DynamicScale, unscale
from ultrascale.train.micro_batches import MicroBatch, ReadsSequences, micro_batch, sequence_numbers
from ultrascale.train.noise_scale import NoiseScale
from ultrascale.train.optimizer import build_optimizer, create_state, set_learning_rate
from ultrascale.train.passes import Passes
from ultrascale.train.repeat import expect_repeatable, is_due, played_twice

NO_TARGET = "no token is a valid target, so there is no loss to train on"


@dataclass(frozen=True)
class Gradients:
    """What is known of a step before its update; equal on every rank."""

    step: int
    loss: float
    """Mean over the valid targets of the global batch, in nats; NaN if there is none."""
    norm: float
    """2-norm of the whole gradient, before clipping."""
    num_sequences: int
    num_targets: int
    """Valid targets of the global batch."""
    data_seconds: float
    noise_scale_tokens: float | None
    loss_scale: float | None = None
    """By which the loss was multiplied; None: by nothing. `norm` is of the gradient without it."""

    anomaly: str = ""
    """What is wrong with the step, which is passed over."""

    @property
    def overflowed(self) -> bool:
        """Whether the scaled gradient was too large for fp16."""
        return not isfinite(self.norm) and not self.anomaly

    @property
    def is_passed_over(self) -> bool:
        """Whether the step must not update anything."""
        return self.overflowed or bool(self.anomaly)


@dataclass(frozen=True)
class StepResult:
    """A step that is done."""

    gradients: Gradients
    learning_rate: float
    expert_balance: ExpertBalance | None = None
    """Of models with experts, in a step that updated."""
    skipped_steps: int = 0
    """Of the run so far: their gradients overflowed, and they updated nothing."""


class StopRequested(Exception):
    """Some rank was asked to stop; raised on all of them before the same step."""


@dataclass
class Trainer:
    """The state of one rank of a run."""

    run: Run
    ranks: Ranks
    loader: ReadsSequences
    kernels: Mapping[str, str] | None = None
    """Forms of norm, rotary positions, SwiGLU and loss, where they were measured; else what the run says, or torch's."""
    draw_on_device: bool = False
    """Draw initial weights where they live: faster, and other numbers than the CPU's, which are the same everywhere."""
    share: Share = field(init=False)
    passes: Passes = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    noise_scale: NoiseScale | None = field(init=False, default=None)
    loss_scale: DynamicScale | None = field(init=False, default=None)
    """Of fp16."""
    steps_done: int = field(init=False, default=0)
    skipped_steps: int = field(init=False, default=0)
    """Of these, the ones that updated nothing."""
    imported_dtype: str | None = field(init=False, default=None)
    """`bf16` or `fp16` if the run began with a Hugging Face folder in it, which export then writes again."""
    norms: Norms = field(init=False)
    to_pass_over: set[int] = field(init=False, default_factory=set)
    """Steps that update nothing if they are anomalous again, whatever `faults.on_anomaly` says: going back did not help."""
    stop_requested: bool = field(init=False, default=False)
    """Set by a signal handler; all ranks act on it before the next step."""
    on_phase: Callable[[str, int], None] = field(init=False, default_factory=lambda: lambda phase, step: None)
    """Told what comes next (`forward`, `backward`, `optimizer`, `between`) and of which step."""

    _just_compiled: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        run = self.run
        self._just_compiled = run.compile
        expect_repeatable(self)
        self.norms = Norms(run.faults)
        if self.ranks.device.type == "cpu":
            keep_freed_memory()
        choose(self.kernels or ("torch" if run.kernels == "auto" else run.kernels), self.ranks.device)
        self.share = build_share(
            run.model,
            run.layout,
            self.ranks,
            seed=run.seed,
            sequence_length=run.batch.sequence_length,
            compile_blocks=run.compile,
            draw_on_device=self.draw_on_device,
        )
        self.optimizer = build_optimizer(self.share, run.optimizer, seed=run.seed)
        create_state(self.optimizer, 0)
        self.passes = Passes(self.share, self._tell_phase)
        if run.log.gradient_noise_scale:
            self.noise_scale = NoiseScale()
        if run.layout.precision == "fp16":
            self.loss_scale = DynamicScale(run.loss_scale)

    @property
    def decoder(self) -> Decoder:
        """The model on this rank, where that is one stage. Raises ValueError if it is several."""
        return self.share.decoder

    def request_stop(self) -> None:
        """Stop before the next step, with all ranks."""
        self.stop_requested = True

    def train_step(self) -> StepResult:
        """Do the next step.

        Raises StopRequested (nothing done) if any rank was asked to stop, and NonFiniteError (nothing updated) if the loss or a
        gradient is NaN or infinite.
        """
        result = self.apply(self.compute_gradients())
        if self._just_compiled:
            self._just_compiled = False
            return_free_memory()
        return result

    def apply(self, gradients: Gradients) -> StepResult:
        """The rest of a step, after `compute_gradients`: update the weights, and move the biases that balance experts.

        If the gradients overflowed or are anomalous, neither.
        """
        if self.loss_scale is not None and not gradients.anomaly:
            self.loss_scale.after_step(overflowed=gradients.overflowed)
        if gradients.anomaly:
            self.norms.pass_over(gradients.step + 1, gradients.anomaly)
        if gradients.is_passed_over:
            return StepResult(gradients, self._skip(), skipped_steps=self.skipped_steps)
        rate = self.update(gradients.norm)
        balance = balance_experts(self.share, self.ranks, gradients.num_targets)
        return StepResult(gradients, rate, balance, self.skipped_steps)

    def compute_gradients(self) -> Gradients:
        """Everything of the next step up to and including the norm of its gradient, which is left in the parameters."""
        span = step_span(self.run.batch, self.steps_done)
        started = time.perf_counter()
        heartbeat.beat("reading data")
        micro_batches = [self.to_device(s) for s in self.read_micro_batches(span)]
        data_seconds = time.perf_counter() - started
        num_targets = self._agree_on_targets(micro_batches)
        scale = self.passes.loss_scale = 1.0 if self.loss_scale is None else self.loss_scale.value
        with ExitStack() as watching:
            if self.noise_scale is not None:
                watching.enter_context(watched_gradients(self.share.stages.values(), self.noise_scale.see))
            own = self._reduced_gradients(micro_batches, num_targets)
        if self.loss_scale is not None:
            unscale(self.share.parameters(), scale)
        norm = float(self.share.gradient_norm())
        loss_sum, *small = self.ranks.sum(own.clone()).tolist()  # `small`: three sums for the noise scale
        may_skip = self.loss_scale is not None and not self.loss_scale.is_lowest
        overflowed = isfinite(loss_sum) and not isfinite(norm) and may_skip
        loss = loss_sum / num_targets if num_targets else nan
        anomaly = NO_TARGET if num_targets == 0 else "" if overflowed else self.norms.judge(loss, norm)
        if anomaly and self.run.faults.on_anomaly != "skip" and self.steps_done not in self.to_pass_over:
            raise self._anomalous(anomaly, span, micro_batches, num_targets)
        return Gradients(
            step=self.steps_done,
            loss=loss,
            norm=norm,
            num_sequences=span.num_sequences,
            num_targets=num_targets,
            data_seconds=data_seconds,
            noise_scale_tokens=self._update_noise_scale(*small, norm=inf if anomaly else norm, num_targets=num_targets),
            loss_scale=None if self.loss_scale is None else scale,
            anomaly=anomaly,
        )

    def update(self, norm: float) -> float:
        """Clip by the gradient's `norm`, update the weights, forget the gradients. Returns the learning rate used."""
        heartbeat.beat("optimizer")
        self.on_phase("optimizer", self.steps_done)
        clip_gradients(self.share.parameters(), norm, self.run.optimizer.clip_grad_norm)
        rate = learning_rate(self.run.optimizer, self.steps_done, self.run.steps)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        self.norms.accept(norm)
        if self.share.amax_history is not None:
            self.share.amax_history.accept()
        self._end_step()
        return rate

    def _skip(self) -> float:
        """Go on without an update. The step counts: its sequences were read, and its learning rate, returned, is used up."""
        forget_load(self.share)
        if self.share.amax_history is not None:
            self.share.amax_history.forget()
        self.skipped_steps += 1
        rate = learning_rate(self.run.optimizer, self.steps_done, self.run.steps)
        self._end_step()
        return rate

    def _end_step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        self.on_phase("between", self.steps_done)
        self.steps_done += 1

    def read_micro_batches(self, span: StepSpan) -> list[Sequences]:
        """This rank's sequences of a step."""
        return [self.loader.read(numbers) for numbers in sequence_numbers(span, self.run.layout, self.share.mesh.at)]

    def to_device(self, sequences: Sequences) -> MicroBatch:
        """`sequences` as this rank's forward pass sees them."""
        return micro_batch(
            sequences,
            packed=self.run.data.document_mask,
            layout=self.run.layout,
            at=self.share.mesh.at,
            device=self.ranks.device,
            dropout_seed=self.run.seed if self.run.model.dropout else None,
        )

    def _tell_phase(self, action: Action) -> None:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        heartbeat.beat(phase)
        self.on_phase(phase, self.steps_done)

    def _agree_on_targets(self, micro_batches: list[MicroBatch]) -> int:
        at = self.share.mesh.at
        own = sum(batch.num_targets for batch in micro_batches) if at.pp == 0 and at.leads_replica else 0
        targets, stop = self.ranks.sum(torch.tensor([own, int(self.stop_requested)])).tolist()
        if stop:
            raise StopRequested
        return targets

    def _reduced_gradients(self, micro_batches: list[MicroBatch], num_targets: int) -> torch.Tensor:
        """Leave the gradient of all ranks in the parameters; returns what `_forward_backward` does."""

        def play() -> torch.Tensor:
            own = self._forward_backward(micro_batches, num_targets)
            self.share.finish_gradients()
            return own

        return played_twice(self, play) if is_due(self) else play()

    def _forward_backward(self, micro_batches: list[MicroBatch], num_targets: int) -> torch.Tensor:
        """Play the step's actions. Returns this rank's summed loss and, for the noise scale, three sums over its micro-batches:
        their number, 1 / targets, and the squared norm of the gradient of their own mean. Float64 on the CPU, [4]."""
        small = torch.zeros(3, dtype=torch.float64)

        def take_small(micro_batch: int) -> None:
            if self.noise_scale is not None:
                square, targets = self.noise_scale.take_small_square(), micro_batches[micro_batch].num_targets
                if targets:
                    factor = num_targets / targets / self.passes.loss_scale
                    small.add_(torch.tensor([1, 1 / targets, square * factor**2], dtype=torch.float64))

        self.passes.after_backward = take_small
        losses = self.passes.train(micro_batches, num_targets)
        return torch.cat([self.counted(losses)[None], small])

    def counted(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """What this rank adds to the sum of the losses over all ranks, 0-d fp64 on the CPU.

        Of the ranks that see the same tokens only the first adds its losses; the others add zero.
        """
        if not losses or not self.share.mesh.at.leads_replica:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(losses).double().sum().cpu()

    def _update_noise_scale(
        self, count: float, inverse_targets: float, squares: float, *, norm: float, num_targets: int
    ) -> float | None:
        if self.noise_scale is None or count == 0 or not isfinite(norm):
            return None
        return self.noise_scale.update(
            small_square=squares / count, small_tokens=count / inverse_targets, big_square=norm**2, big_tokens=num_targets
        )

    def _anomalous(self, reason: str, span: StepSpan, micro_batches: list[MicroBatch], num_targets: int) -> RuntimeError:
        """The error for a step that must not update."""
        if reason != NO_TARGET and "times the usual" not in reason:
            return self._not_finite(span, micro_batches, num_targets)
        self.optimizer.zero_grad(set_to_none=True)
        what, numbers = f"step {self.steps_done + 1}", span.numbers
        if reason != NO_TARGET:
            return AnomalousStepError(f"{what}: {reason}. Nothing was updated (faults.spike_factor).")
        remedy = 'Look at the data with `ultrascale data inspect`, or pass over such steps with faults.on_anomaly = "skip"'
        return AnomalousStepError(f"{what}, sequences {numbers[0]} to {numbers[-1]}: {reason}. Nothing was updated. {remedy}.")

    def _not_finite(self, span: StepSpan, micro_batches: list[MicroBatch], num_targets: int) -> NonFiniteError:
        """The error for this step. The reduced gradient does not tell where it went wrong, so the step is done once more."""
        reduced = name_bad_gradients(self.share.named())
        self.optimizer.zero_grad(set_to_none=True)
        bad: dict[str, None] = {}  # in the order of the backward pass: the first is where it began

        def see(name: str, gradient: torch.Tensor) -> None:
            if not gradient.isfinite().all():
                bad[name] = None

        history = self.share.amax_history
        if history is not None:
            history.forget()
        with watched_gradients(self.share.stages.values(), see):
            own = self._forward_backward(micro_batches, num_targets)
        self.optimizer.zero_grad(set_to_none=True)
        told = [] if isfinite(float(own[0])) else [f"loss {float(own[0])}"]
        told += [f"gradient of {name}" for name in list(bad)[:3]] + ([f"and of {len(bad) - 3} more"] if len(bad) > 3 else [])
        told += [] if history is None or told else history.infinite()[:1]
        reports = self.ranks.gather_text(", ".join(told))
        culprits = [f"rank {rank}: {report}" for rank, report in enumerate(reports) if report]
        where = "; ".join(culprits) or (
            f"gradient of {', '.join(reduced[:3]) or 'no parameter, only the norm'}; not so when the step was done once more, "
            "so suspect the machine"
        )
        numbers = span.numbers
        return NonFiniteError(
            f"step {self.steps_done + 1}, sequences {numbers[0]} to {numbers[-1]}: not finite: {where}. Nothing was updated "
            f"and nothing saved. {self._lowest_scale()}Lower optimizer.learning_rate, or look at the data with "
            "`ultrascale data inspect`."
        )

    def _lowest_scale(self) -> str:
        """What to add of fp16, whose scale did not help."""
        if self.loss_scale is None:
            return ""
        return f'fp16 at loss scale {self.loss_scale.value:g}: layout.precision = "bf16" has the range of fp32. '
