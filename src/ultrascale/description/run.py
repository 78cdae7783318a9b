"""A run: everything that decides what a training run computes, as plain data.

Read from one TOML by `config.resolve`; the field names here are its keys, section by section.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.sections.islands import Islands
from ultrascale.description.sections.trackers import Log


@dataclass(frozen=True)
class RampStage:
    """A stretch of the run with its own batch size."""

    until_tokens: int
    """The stretch ends when this many tokens have been trained on (the step that reaches it is the last)."""
    sequences_per_batch: int


@dataclass(frozen=True)
class Batch:
    """The global batch: what one optimizer step sees, whatever the layout."""

    sequence_length: int = 1024
    """Tokens of a sequence that are predicted (one more is read)."""
    sequences_per_batch: int = 8
    """Sequences in one step over all ranks and micro-batches. In TOML and flags `tokens_per_batch` may stand instead."""
    ramp: tuple[RampStage, ...] = ()
    """Smaller batches first (GPT-3, Llama 3, DeepSeek): stretches in order of `until_tokens`, then `sequences_per_batch`."""


@dataclass(frozen=True)
class Source:
    """One prepared corpus and its share of the batch."""

    path: str
    """Folder made by `ultrascale data prepare`, or a Megatron prefix (`x` for `x.bin` and `x.idx`)."""
    weight: float = 1.0
    """Share of the sequences, relative to the other sources."""


@dataclass(frozen=True)
class Data:
    """Training and validation data. The order of sequences is a pure function of (seed, step)."""

    sources: tuple[Source, ...] = ()
    """Corpora to train on, each with its share of the sequences."""
    validation: tuple[Source, ...] = ()
    """Held-out corpora for `evaluation`; measured separately, weights unused. Not written: see `evaluation.every_steps`."""
    document_mask: bool = True
    """Documents packed into one sequence do not see each other: attention stays inside a document, positions restart, and the
    last token of a document predicts nothing. False: one stream of tokens."""
    tokenizer: str | None = None
    """`tokenizer.json` kept with checkpoints and exports. None: the one in the first source's folder, if there."""


@dataclass(frozen=True)
class Optimizer:
    """Optimizer, learning rate schedule, and gradient clipping."""

    name: Literal["adamw", "adamw-bf16", "adamw-8bit", "muon"] = "adamw"
    """adamw: Loshchilov and Hutter 2019. adamw-bf16, adamw-8bit: its moments kept in bf16, or in 8 bits with a scale for every
    256, rounded stochastically. muon: hidden matrices by Jordan et al. 2024, all else by adamw."""
    learning_rate: float = 3e-4
    """The peak."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """After warm-up: cosine or linear down to `min_learning_rate_ratio`; wsd stays at the peak and goes down linearly over the
    last `decay_steps`; constant stays."""
    warmup_steps: int = 0
    """The learning rate rises from 0 to its peak over so many steps. Where neither this nor `decay_steps` is written, `train`
    takes a twentieth of the run, at most 2000."""
    decay_steps: int | None = None
    """wsd: steps of the final decay. None: a tenth of the run."""
    min_learning_rate_ratio: float = 0.1
    """The learning rate at the end, as a share of the peak."""
    momentum: float = 0.95
    """Momentum of Muon, for hidden matrices. Read only if name = "muon"."""
    beta1: float = 0.9
    """Decay rate of AdamW's running mean of gradients (first moment)."""
    beta2: float = 0.95
    """Decay rate of AdamW's running mean of squared gradients (second moment)."""
    eps: float = 1e-8
    """Added to the root of AdamW's mean of squares."""
    weight_decay: float = 0.1
    """Applied to matrices, not to norms and biases."""
    clip_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global 2-norm. None: no clipping."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale (`train.optimizers.loss_scale`). Read only if layout.precision = "fp16"."""

    initial: float = 65536.0
    """At the first step. This and the two factors are powers of two, so that scaling rounds nothing."""
    growth_steps: int = 2000
    """Updates without an overflow after which the scale grows."""
    growth_factor: float = 2.0
    """Factor by which the scale grows."""
    backoff_factor: float = 0.5
    """On the scale after an overflow, whose step updates nothing."""
    lowest: float = 1.0
    """An overflow that asks for less ends the run: its gradients are not small but wrong."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints: when they are saved, where, and how many stay."""

    every_steps: int | None = 100
    """Save after each multiple of this many steps. None: only at the end and on SIGTERM or Ctrl-C."""
    keep: int = 2
    """Newest valid checkpoints that stay; older ones are removed. 0 keeps all."""
    keep_every_steps: int | None = None
    """Checkpoints of these steps stay for ever."""
    asynchronous: bool = False
    """Copy to memory, train on, write in the background."""
    store: str | None = None
    """Keep the run here too: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `hf://USER/NAME`, `file://` or a folder. Each checkpoint
    is uploaded behind training once it is on disk under `folder`, and a machine whose disk is empty goes on from here.
    Credentials come from the environment. None: on disk only."""
    failures_allowed: int = 10
    """Saves in a row that the disk may refuse and the run goes on, told and tried again after a tenth of `every_steps`. 0: the
    first ends it."""
    export: bool = True
    """Write a Hugging Face folder at the end of the run."""


@dataclass(frozen=True)
class Evaluation:
    """Loss on held-out text."""

    every_steps: int | None = None
    """None: never. Where neither this nor `data.validation` is written and `data prepare` held text out, `train` takes a tenth
    of the run."""
    sequences: int = 32
    """Sequences of each validation source, always the same ones."""


@dataclass(frozen=True)
class Faults:
    """Detection of hangs, anomalies, corrupted state and stragglers, and the response."""

    hang_seconds: float | None = 90.0
    """A rank that gives no sign of life for so long hangs: it is named with its stack, and killed. A part of a step that is
    slow by nature may take ten times the longest one so far. Less than a stop has to save in (120 s). None: nobody looks."""
    on_anomaly: Literal["stop", "skip", "rewind"] = "stop"
    """A loss or gradient that is not finite, or a spike: end the run; update nothing in that step; or go back to the newest
    checkpoint and do it once more, and skip it if that does not help. Replicas that differ: rewind goes back, others end."""
    spike_factor: float | None = None
    """A gradient norm of more than so many times the median of the last 64 is an anomaly. None: only what is not finite."""
    digest_every_steps: int | None = 100
    """Compare the bits of weights and optimizer state between ranks that hold the same after so many steps, and before each
    save. None: never."""
    repeat_every_steps: int | None = None
    """Compute the gradient of each multiple of so many steps twice, and compare the bits, on CPUs. It costs those steps' passes
    once more. None: never."""
    straggler_steps: int | None = 4
    """Steps in a window of which ranks compare their own speed; one that is slow three times in a row is named. None: never."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: Model
    name: str = "run"
    """The run's folder under `folder`; letters, digits, `.`, `_` and `-`."""
    folder: str = "out"
    """Folder in which run folders are made."""
    steps: int = 100
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of initial weights, the order of the data, and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA when there is one."""
    cluster: str = "auto"
    """A name of the catalogue (`8xh100`, `64xa100-80`, `cpu`); auto: this machine."""
    compile: bool = False
    """torch.compile each decoder block."""
    kernels: Literal["auto", "torch", "triton", "liger"] = "auto"
    """On CUDA without `compile`: norm, rotary positions, SwiGLU and loss as torch's operations, as our Triton kernels, or as
    Liger's where it has one; auto: each as it is fastest at the run's shapes. The compiler fuses torch's itself."""
    deterministic: bool = False
    """On CUDA the same bits every time, by kernels that add up in one order: slower. The CPU's bits are the same anyway."""
    collective_timeout_seconds: float = 100.0
    """A collective of a step that takes longer ends the run with an error; the first step and what is slow by nature may take
    more. Above `faults.hang_seconds`, so that the watchdog speaks first, and below the time that a stop has (120 s)."""
    layout: Layout = field(default_factory=Layout)
    islands: Islands = field(default_factory=Islands)
    batch: Batch = field(default_factory=Batch)
    data: Data = field(default_factory=Data)
    optimizer: Optimizer = field(default_factory=Optimizer)
    loss_scale: LossScale = field(default_factory=LossScale)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluation: Evaluation = field(default_factory=Evaluation)
    log: Log = field(default_factory=Log)
    faults: Faults = field(default_factory=Faults)

    @property
    def num_processes(self) -> int:
        """Processes of all islands."""
        return sum(self.worlds)

    @property
    def worlds(self) -> tuple[int, ...]:
        """Ranks of each island."""
        return tuple(self.layout.world_size // self.layout.dp * dp for dp in self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Degree of data parallelism of each island; the batch is shared in proportion to it."""
        return self.islands.degrees(self.layout.dp)


def run_of_island(run: Run) -> Run:
    """Run of one island between two outer steps, of the layout's dp: its share of the batch, without the other islands."""
    dp, total_dp, batch = run.layout.dp, sum(run.degrees), run.batch
    ramp = tuple(
        RampStage(-(-stage.until_tokens * dp // total_dp), stage.sequences_per_batch * dp // total_dp) for stage in batch.ramp
    )  # fmt: skip
    share = replace(batch, sequences_per_batch=batch.sequences_per_batch * dp // total_dp, ramp=ramp)
    return replace(run, batch=share, islands=Islands())
