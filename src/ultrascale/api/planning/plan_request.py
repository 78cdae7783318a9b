"""A question to the planner, from the command line or `ultrascale.plan`: its options, their defaults and meanings."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.api.keywords import VerbRequest


@dataclass(frozen=True)
class PlanOptions:
    """The best layouts of a model on a cluster, or memory and time of one run.

    For example:

        ultrascale plan --model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M

        ultrascale plan --model llama-3-70b --gpus 256xh100 --tp 4,8 --stack megatron --explain

        ultrascale plan run.toml --layout.zero-stage 3

        ultrascale plan far --help

    With a model and machines all legal layouts are searched; a setting that is given is kept. A run's file has its own.
    """

    run: tuple[str, ...] = ()
    """A run's TOML file or folder; or give a model."""
    model: str | None = None
    """A preset (`ultrascale show models`), or a Hugging Face config.json or its folder."""
    gpus: str | None = None
    """The machines: 64xh100, 2xaws-p5, 8xcpu (`ultrascale show clusters`)."""
    seq_len: int | None = None
    """Tokens of a sequence, such as 8192 or 128k (131,072). Default: what the model was made for, at most 8192."""
    tokens_per_batch: str | None = None
    """Tokens of a step over all GPUs, such as 4M. Default: one micro-batch for each GPU."""
    sequences_per_batch: int | None = None
    """Sequences of a step over all GPUs, in place of tokens."""
    dp: str | None = None
    """Data parallelism to search. Default: what the other axes leave of the GPUs."""
    tp: str | None = None
    """Tensor parallelism to search, such as 8 or 4,8."""
    cp: str | None = None
    """Context parallelism to search."""
    pp: str | None = None
    """Pipeline parallelism to search."""
    ep: str | None = None
    """Expert parallelism to search."""
    schedule: str | None = None
    """Pipeline schedules to search, such as 1f1b,interleaved."""
    zero_stage: str | None = None
    """State sharded over GPUs: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too; or several, such as 1,3."""
    dp_shard: int | None = None
    """GPUs that share one copy of the training state. Default: searched."""
    recompute: str | None = None
    """Activations computed again in the backward pass: none, selective, full, every-k, or several; of one layout also modules
    such as norm+moe_act."""
    micro_batch_size: int | None = None
    """Sequences in one forward pass of one GPU."""
    precision: str | None = None
    """Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16, fp16 where there is no bf16, fp32 on a
    CPU."""
    stack: str = "ultrascale"
    """The trainer that is planned for: ultrascale, torchtitan, megatron, nanotron, ... (`ultrascale show stacks`). What it does
    may be changed: --stack megatron --stack.dispatcher deepep."""
    optimizer: str | None = None
    """Optimizer of the run: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw."""
    expert_imbalance: float = 1.0
    """Tokens of the busiest rank's experts over the mean, such as 1.3."""
    checkpoint_minutes: float | None = None
    """Minutes of training between two blocking checkpoints; needs --storage-gbytes."""
    storage_gbytes: float | None = None
    """Storage bandwidth of all nodes together, GB/s. Default: storage costs nothing."""
    save_seconds: float | None = None
    """Seconds that a checkpoint blocks training. Default: the longest of the run's folder, else planned."""
    runnable: bool = False
    """Search only what `ultrascale train` runs today."""
    top: int = 10
    """Layouts to list."""
    explain: bool = False
    """Say what makes it fit and fast, what binds, what other machines would be worth, and what was left out."""
    print_flags: bool = False
    """Print the plan as the trainer's own settings, and nothing else."""
    svg: str | None = None
    """Draw the pipeline of the step into this file."""
    perfetto: str | None = None
    """Write the predicted step as a trace for ui.perfetto.dev into this file."""
    html: str | None = None
    """Write the plan, drawn, into this one file, to look at in a browser or to mail."""
    png: str | None = None
    """Draw the plan's charts into this folder, a PNG each: memory, time, roofline, what axes send, front. Needs matplotlib."""
    tokens: str | None = None
    """Say how long training on so many takes and what it costs, such as 15T."""
    budget: str | None = None
    """Money, time or a date: $1M, 30d, 2027-03-01. Says how many tokens that trains here, and how large a model it would do."""
    compare: str | None = None
    """Another run's file: both plans side by side, what differs most first; other flags hold for both."""
    brief: bool = False
    """Answer in 15 lines."""
    save: str | None = None
    """Write the run that is explained to this TOML file, for `check` and `train`."""
    json: bool = False
    """Print one JSON object."""

    @property
    def rows(self) -> int:
        """Rows of a ranking on a terminal."""
        return min(self.top, BRIEF_ROWS) if self.brief else self.top

    @property
    def file(self) -> str | None:
        """The run's file, if one is planned."""
        return self.run[0] if self.run else None


PlanRequest = VerbRequest[PlanOptions]
BRIEF_ROWS = 3
"""Rows of a short ranking."""

SHORT = {
    "seq_len": "batch.sequence_length", "tokens_per_batch": "batch.tokens_per_batch",
    "sequences_per_batch": "batch.sequences_per_batch", "zero_stage": "layout.zero_stage", "dp_shard": "layout.dp_shard",
    "recompute": "layout.recompute", "micro_batch_size": "layout.micro_batch_size", "precision": "layout.precision",
    "dp": "layout.dp", "tp": "layout.tp", "cp": "layout.cp", "pp": "layout.pp", "ep": "layout.ep",
    "schedule": "layout.schedule", "optimizer": "optimizer.name",
}  # fmt: skip
"""Settings of a run that have a short flag."""
