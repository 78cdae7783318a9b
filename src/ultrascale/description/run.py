"""A run: all settings that decide what a training run computes, as plain data.

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
    """A stage of the batch-size ramp."""

    until_tokens: int
    """The stage ends when this many tokens have been trained on; the step that reaches it is the last."""
    sequences_per_batch: int


@dataclass(frozen=True)
class Batch:
    """The global batch: all sequences of one optimizer step, independent of the layout."""

    sequence_length: int = 1024
    """Sequence length: tokens per sequence that are predicted (one more is read)."""
    sequences_per_batch: int = 8
    """Global batch size: sequences per step over all ranks and micro-batches. TOML and flags also take `tokens_per_batch`."""
    ramp: tuple[RampStage, ...] = ()
    """Batch-size ramp (GPT-3, Llama 3, DeepSeek): stages in order of `until_tokens`, followed by `sequences_per_batch`."""


@dataclass(frozen=True)
class Source:
    """One prepared corpus and its share of the batch."""

    path: str
    """Folder written by `ultrascale data prepare`, or a Megatron prefix (`x` for `x.bin` and `x.idx`)."""
    weight: float = 1.0
    """Relative share of the sequences."""


@dataclass(frozen=True)
class Data:
    """Training and validation data. The order of sequences is a pure function of (seed, step)."""

    sources: tuple[Source, ...] = ()
    """Training corpora, each with its share of the sequences."""
    validation: tuple[Source, ...] = ()
    """Validation corpora, each measured separately; weights are not used. If omitted, see `evaluation.every_steps`."""
    document_mask: bool = True
    """Intra-document masking: attention stays within a document packed into a sequence, positions restart at each document, and
    the last token of a document predicts nothing. False: one stream of tokens."""
    tokenizer: str | None = None
    """`tokenizer.json` that is kept with checkpoints and exports. None: the one in the first source's folder, if any."""


@dataclass(frozen=True)
class Optimizer:
    """Optimizer, learning rate schedule, and gradient clipping."""

    name: Literal["adamw", "adamw-bf16", "adamw-8bit", "muon"] = "adamw"
    """adamw: Loshchilov and Hutter 2019. adamw-bf16, adamw-8bit: its moments in bf16, or in 8 bits with a scale per 256
    elements, rounded stochastically. muon: hidden matrices by Jordan et al. 2024, all other parameters by adamw."""
    learning_rate: float = 3e-4
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """Learning rate after warm-up. cosine, linear: decays to `min_learning_rate_ratio`; wsd: stays at the peak and decays
    linearly over the last `decay_steps`; constant: stays at the peak."""
    warmup_steps: int = 0
    """Steps over which the learning rate rises from 0 to its peak. If neither this nor `decay_steps` is set, `train` uses a
    twentieth of the run, at most 2000."""
    decay_steps: int | None = None
    """wsd: steps of the final decay. None: a tenth of the run."""
    min_learning_rate_ratio: float = 0.1
    """Final learning rate as a fraction of the peak."""
    momentum: float = 0.95
    """Momentum of Muon, for hidden matrices. Read only if name = "muon"."""
    beta1: float = 0.9
    """Decay rate of AdamW's running mean of gradients (first moment)."""
    beta2: float = 0.95
    """Decay rate of AdamW's running mean of squared gradients (second moment)."""
    eps: float = 1e-8
    """Epsilon, added to the root of AdamW's second moment."""
    weight_decay: float = 0.1
    """Weight decay of matrices; norms and biases have none."""
    clip_grad_norm: float | None = 1.0
    """Gradients are scaled down to this global L2 norm. None: no clipping."""


@dataclass(frozen=True)
class LossScale:
    """Dynamic loss scale (`train.optimizers.loss_scale`). Read only if layout.precision = "fp16"."""

    initial: float = 65536.0
    """Scale at the first step. It and both factors are powers of two, so that scaling does not round."""
    growth_steps: int = 2000
    """Updates without overflow after which the scale grows."""
    growth_factor: float = 2.0
    """Factor by which the scale grows."""
    backoff_factor: float = 0.5
    """Factor applied to the scale after an overflow; that step updates nothing."""
    lowest: float = 1.0
    """Lowest scale: an overflow that needs a lower one ends the run, since its gradients are wrong rather than small."""


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints: when and where they are saved, and how many are kept."""

    every_steps: int | None = 100
    """Save after each multiple of this many steps. None: only at the end and on SIGTERM or Ctrl-C."""
    keep: int = 2
    """Number of newest valid checkpoints to keep; older ones are deleted. 0 keeps all."""
    keep_every_steps: int | None = None
    """Checkpoints at multiples of this many steps are never deleted."""
    asynchronous: bool = False
    """Copy the state to memory, continue training, and write in the background."""
    store: str | None = None
    """Also keep the run here: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `hf://USER/NAME`, `file://` or a folder. Each checkpoint
    is uploaded in the background once it is on disk under `folder`, and a machine with an empty disk resumes from here.
    Credentials come from the environment. None: on disk only."""
    failures_allowed: int = 10
    """Consecutive failed saves that the run survives; each is reported and tried again after a tenth of `every_steps`. 0: the
    first failure ends the run."""
    export: bool = True
    """Export a Hugging Face folder at the end of the run."""


@dataclass(frozen=True)
class Evaluation:
    """Loss on validation data."""

    every_steps: int | None = None
    """Steps between evaluations. None: never. If `data.validation` is not set and `data prepare` held out text, `train` reads
    that, and if this is not set either, a tenth of the run lies between."""
    sequences: int = 32
    """Sequences of each validation source, at most all that it has; the same ones at every evaluation, whatever the seed."""


@dataclass(frozen=True)
class Faults:
    """Detection of and response to hangs, anomalies, corrupted state and stragglers."""

    hang_seconds: float | None = 90.0
    """A rank without a sign of life for this long hangs: it is reported with its stack, and killed. Phases that are slow by
    nature may take ten times their longest so far. Less than the time to save at a stop (120 s). None: not detected."""
    on_anomaly: Literal["stop", "skip", "rewind"] = "stop"
    """Response to a loss or gradient that is not finite, or to a spike of its norm: end the run; skip the update; or rewind to
    the newest checkpoint, repeat the step, skip it if that fails. If replicas differ, rewind goes back, else it ends."""
    spike_factor: float | None = None
    """A gradient norm above this multiple of the median of the last 64, once there are 16, is an anomaly. None: only non-finite
    values are."""
    digest_every_steps: int | None = 100
    """After each multiple of this many steps, and before each save, compare the bits of weights and optimizer state between
    replicas. None: never."""
    repeat_every_steps: int | None = None
    """At each multiple of this many steps, compute the gradient twice and compare the bits, on CPUs. It doubles the passes of
    those steps. None: never."""
    straggler_steps: int | None = 4
    """Steps per window in which ranks compare speed; a rank that is slow in the mean of four is reported. None: never."""


@dataclass(frozen=True)
class Run:
    """One training run."""

    model: Model
    name: str = "run"
    """Name of the run's folder under `folder`; letters, digits, `.`, `_` and `-`."""
    folder: str = "out"
    """Folder for run folders."""
    steps: int = 100
    """Optimizer steps of the run."""
    seed: int = 0
    """Seed of initial weights, data order, and dropout."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA if available."""
    cluster: str = "auto"
    """Cluster in the catalogue (`8xh100`, `64xa100-80`, `cpu`); auto: this machine."""
    compile: bool = False
    """Compile each decoder block with torch.compile."""
    kernels: Literal["auto", "torch", "triton", "liger"] = "auto"
    """On CUDA without `compile`: norms, RoPE, SwiGLU and loss as PyTorch operations, as this package's Triton kernels, or as
    Liger's if it has one; auto: the fastest at the run's shapes. The compiler fuses PyTorch's operations itself."""
    deterministic: bool = False
    """Bit-identical results on CUDA, by kernels with a fixed order of summation: slower. The CPU's are bit-identical anyway."""
    collective_timeout_seconds: float = 100.0
    """Timeout of a collective, after which the run ends with an error; the first step and phases that are slow by nature may
    take longer. Above `faults.hang_seconds`, so that the watchdog reports first, and below the time that a stop has (120 s)."""
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
        """Number of processes over all islands."""
        return sum(self.worlds)

    @property
    def worlds(self) -> tuple[int, ...]:
        """Number of ranks of each island."""
        return tuple(self.layout.world_size // self.layout.dp * dp for dp in self.degrees)

    @property
    def degrees(self) -> tuple[int, ...]:
        """Data-parallel degree of each island; the batch is shared in proportion."""
        return self.islands.degrees(self.layout.dp)


def run_of_island(run: Run) -> Run:
    """Run of one island between two outer steps, with the layout's dp: its share of the batch, without the other islands."""
    dp, total_dp, batch = run.layout.dp, sum(run.degrees), run.batch
    ramp = tuple(
        RampStage(-(-stage.until_tokens * dp // total_dp), stage.sequences_per_batch * dp // total_dp) for stage in batch.ramp
    )  # fmt: skip
    share = replace(batch, sequences_per_batch=batch.sequences_per_batch * dp // total_dp, ramp=ramp)
    return replace(run, batch=share, islands=Islands())
