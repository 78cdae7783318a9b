"""How fast a run is and what memory it takes, beside what was planned."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.mesh import Ranks
from ultrascale.spec.progress import tokens_after
from ultrascale.spec.run import Run
from ultrascale.train.metrics import Metrics, Row
from ultrascale.train.run_folder import RunFolder
from ultrascale.train.trainer import StepResult, Trainer

GIB = 2**30


class Performance:
    """Turns steps into metrics. During the first steps of a new run on the CPU it also counts live memory, tensor by tensor,
    which slows them; their speed is not reported."""

    def __init__(self, run: Run, ranks: Ranks, folder: RunFolder, metrics: Metrics):
        self.run, self.ranks, self.folder, self.metrics = run, ranks, folder, metrics
        self.memory: LiveMemory | None = None
        self._watching = ExitStack()

    @contextmanager
    def watching(self, trainer: Trainer) -> Iterator[None]:
        """Count live memory over the first `log.memory_steps` steps of a run."""
        with self._watching:
            yield

    def after_step(self, result: StepResult, seconds: float) -> Row:
        """The values of a step that took `seconds`."""
        gradients, run = result.gradients, self.run
        tokens = gradients.num_sequences * run.batch.sequence_length
        return {
            "train/loss": gradients.loss,
            "train/grad_norm": gradients.norm,
            "train/lr": result.learning_rate,
            "progress/tokens": tokens_after(run.batch, gradients.step + 1),
            "progress/sequences_per_batch": gradients.num_sequences,
            "train/noise_scale_tokens": gradients.noise_scale_tokens,
            "perf/step_s": seconds,
            "perf/data_wait_s": gradients.data_seconds,
            "perf/tokens_per_s": tokens / seconds,
            "perf/tokens_per_s_per_gpu": tokens / seconds / self.ranks.world,
        }
