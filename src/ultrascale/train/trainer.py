"""One rank of a run: all state that exists between steps. The step itself is `train.step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from ultrascale import heartbeat
from ultrascale.data.loader import Loader, Sequences
from ultrascale.description.progress import StepSpan, step_span
from ultrascale.description.run import Run
from ultrascale.garbage import collect_as_usual
from ultrascale.heap import keep_freed_memory
from ultrascale.islands.outer_loop import OuterLoop
from ultrascale.kernels.choice.implementation import choose
from ultrascale.models.decoder import Decoder
from ultrascale.parallel.apply import build_share
from ultrascale.parallel.mesh import Ranks
from ultrascale.parallel.share import Share
from ultrascale.schedules.actions import Action, Kind
from ultrascale.train import step
from ultrascale.train.micro_batches import MicroBatch, ReadsSequences, micro_batch, sequence_numbers
from ultrascale.train.observers.anomalies import Norms
from ultrascale.train.observers.expert_balance import BalancedExperts
from ultrascale.train.observers.noise_scale import NoiseMeasured, NoiseScale
from ultrascale.train.observers.refused_steps import RefusedSteps
from ultrascale.train.observers.repeat import RepeatedSteps, expect_repeatable
from ultrascale.train.optimizers.loss_scale import DelayedScaling, DynamicScale, LossScaling
from ultrascale.train.optimizers.optimizer import build_optimizer
from ultrascale.train.passes import Passes
from ultrascale.train.start.compiled import FreedAfterCompiling
from ultrascale.train.step import Observer, StepResult


@dataclass
class Trainer:
    """The state of one rank of a run."""

    run: Run
    ranks: Ranks
    loader: ReadsSequences
    kernels: Mapping[str, str] | None = None
    """Implementations of norm, rotary positions, SwiGLU and loss, if they were measured; else those of the run, or torch's."""
    draw_on_device: bool = False
    """Draw initial weights on the device: faster, but with other values than on the CPU, where they are the same on any
    machine."""
    share: Share = field(init=False)
    passes: Passes = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    noise_scale: NoiseScale | None = field(init=False, default=None)
    loss_scale: DynamicScale | None = field(init=False, default=None)
    """Dynamic loss scale of fp16; None for other precisions."""
    steps_done: int = field(init=False, default=0)
    skipped_steps: int = field(init=False, default=0)
    """Number of completed steps that updated nothing."""
    imported_dtype: str | None = field(init=False, default=None)
    """`bf16` or `fp16` if the run started from a Hugging Face folder in that dtype; export uses it again."""
    outer: OuterLoop | None = field(init=False, default=None)
    """Outer loop of DiLoCo; None for a single island."""
    norms: Norms = field(init=False)
    to_pass_over: set[int] = field(init=False, default_factory=set)
    """Steps to skip if they are anomalous again after a rewind, whatever `faults.on_anomaly` says."""
    stop_requested: bool = field(init=False, default=False)
    """Set by a signal handler; all ranks check it before the next step."""
    observers: list[Observer] = field(init=False)
    """Observers of steps, in the order in which they are called (`train.step`)."""
    on_phase: Callable[[str, int], None] = field(init=False, default_factory=lambda: lambda phase, step: None)
    """Called with the next phase (`forward`, `backward`, `optimizer`, `between`) and its step."""

    def __post_init__(self) -> None:
        run = self.run
        expect_repeatable(self)
        collect_as_usual()
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
        self.passes = Passes(self.share, self._notify_phase)
        if self.ranks.store is not None or self.ranks.meeting is not None:
            self.outer = OuterLoop(run, self.ranks, self.share, wants_to_stop=lambda: self.stop_requested)
        if run.log.gradient_noise_scale:
            self.noise_scale = NoiseScale()
        if run.layout.precision == "fp16":
            self.loss_scale = DynamicScale(run.loss_scale)
        self.observers = self._observers()

    def _observers(self) -> list[Observer]:
        """Observers that this run asks for; fp16's loss scale first, since an overflow is not an anomaly."""
        run, share = self.run, self.share
        kinds: list[tuple[bool, type[Observer]]] = [
            (self.loss_scale is not None, LossScaling),
            (True, RefusedSteps),
            (self.noise_scale is not None, NoiseMeasured),
            (run.faults.repeat_every_steps is not None, RepeatedSteps),
            (share.amax_history is not None, DelayedScaling),
            (bool(run.model.num_experts), BalancedExperts),
            (run.compile, FreedAfterCompiling),
        ]
        return [kind(self) for is_enabled, kind in kinds if is_enabled]

    @property
    def decoder(self) -> Decoder:
        """The model on this rank, if the rank holds one stage. Raises ValueError if it holds several."""
        return self.share.decoder

    def request_stop(self) -> None:
        """Request that all ranks stop before the next step."""
        self.stop_requested = True

    def train_step(self) -> StepResult:
        """Run the next step.

        Raises StopRequested (nothing done) if any rank received a stop request, and NonFiniteError (nothing updated) if the
        loss or a gradient is NaN or infinite.
        """
        result = self.apply(self.compute_gradients())
        if self.outer is not None:
            if not self.outer.after_step(self.steps_done):
                self.request_stop()
            result = result._replace(outer=self.outer.values())
        return result

    compute_gradients, agree_on_targets = step.compute_gradients, step.agree_on_targets
    apply, update = step.apply, step.update

    def read_micro_batches(self, span: StepSpan) -> list[Sequences]:
        """This rank's sequences of a step."""
        layout, coordinates = self.run.layout, self.share.mesh.coordinates
        sequences = [self.loader.read(numbers) for numbers in sequence_numbers(span, layout, coordinates)]
        if isinstance(self.loader, Loader):  # while this step is computed
            following = step_span(self.run.batch, self.steps_done + 1)
            for numbers in sequence_numbers(following.of_island(self.ranks.island, self.run.degrees), layout, coordinates):
                self.loader.expect(numbers)
        return sequences

    def to_device(self, sequences: Sequences) -> MicroBatch:
        """The micro-batch that this rank's forward pass reads from `sequences`."""
        return micro_batch(
            sequences,
            packed=self.run.data.document_mask,
            layout=self.run.layout,
            coordinates=self.share.mesh.coordinates,
            device=self.ranks.device,
            dropout_seed=self.run.seed if self.run.model.dropout else None,
        )

    def _notify_phase(self, action: Action) -> None:
        phase = "forward" if action.kind is Kind.FORWARD else "backward"
        heartbeat.beat(phase)
        if torch.is_grad_enabled():  # an evaluation is no phase of a step
            self.on_phase(phase, self.steps_done)

    def counted(self, losses: list[torch.Tensor]) -> torch.Tensor:
        """Contribution of this rank to the sum of losses over all ranks, 0-d fp64 on the CPU.

        Among ranks that see the same tokens, only the first adds its losses; the others add zero.
        """
        if not losses or not self.share.mesh.coordinates.leads_replica:
            return torch.zeros((), dtype=torch.float64)
        return torch.stack(losses).double().sum().cpu()
