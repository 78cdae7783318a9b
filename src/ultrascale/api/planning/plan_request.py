"""A request to the planner, from the command line or `ultrascale.plan`: its options, their defaults and meanings."""

from __future__ import annotations

from dataclasses import dataclass

from ultrascale.api.keywords import VerbRequest


@dataclass(frozen=True)
class PlanOptions:
    """Find the best layouts of a model on a cluster, or predict memory and time of one run.

    For example:

        ultrascale plan --model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M

        ultrascale plan --model llama-3-70b --gpus 256xh100 --tp 4,8 --stack megatron --explain

        ultrascale plan run.toml --layout.zero-stage 3

        ultrascale plan far --help

    With a model and machines, all legal layouts are searched; a setting that you give is fixed. A run's file has its own
    layout.
    """

    run: tuple[str, ...] = ()
    """TOML file or folder of a run; or give a model."""
    model: str | None = None
    """Preset (`ultrascale show models`), or a Hugging Face config.json or its folder."""
    gpus: str | None = None
    """Machines: 64xh100, 2xaws-p5, 8xcpu (`ultrascale show clusters`)."""
    seq_len: int | None = None
    """Sequence length in tokens, such as 8192 or 128k (131,072). Default: the model's own maximum, at most 8192."""
    tokens_per_batch: str | None = None
    """Global batch in tokens, such as 4M. Default: one micro-batch per GPU."""
    sequences_per_batch: int | None = None
    """Global batch in sequences, in place of tokens."""
    dp: str | None = None
    """Data-parallel degrees to search. Default: the GPUs that the other axes leave."""
    tp: str | None = None
    """Tensor-parallel degrees to search, such as 8 or 4,8."""
    cp: str | None = None
    """Context-parallel degrees to search."""
    pp: str | None = None
    """Pipeline-parallel degrees to search."""
    ep: str | None = None
    """Expert-parallel degrees to search."""
    schedule: str | None = None
    """Pipeline schedules to search, such as 1f1b,interleaved."""
    zero_stage: str | None = None
    """ZeRO stages to search, such as 3 or 1,3: 0 shards nothing, 1 optimizer state, 2 also gradients, 3 also parameters."""
    dp_shard: int | None = None
    """GPUs over which the training state is sharded (HSDP if fewer than dp). Default: searched."""
    recompute: str | None = None
    """Activation checkpointing to search: none, selective, full, every-k; for a single layout also modules, norm+moe_act."""
    micro_batch_size: int | None = None
    """Micro-batch size: sequences in one forward pass of a GPU."""
    precision: str | None = None
    """Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16; fp16 without bf16, fp32 on a CPU."""
    stack: str = "ultrascale"
    """Framework to plan for (`ultrascale show stacks`): torchtitan, megatron, ... Change its features by --stack.KEY VALUE.
    Others than ours are planned without intra-document masking, as they train by default."""
    optimizer: str | None = None
    """Optimizer: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw."""
    expert_imbalance: float = 1.0
    """Load of the busiest rank's experts over the mean load, such as 1.3."""
    checkpoint_minutes: float | None = None
    """Minutes of training between two blocking checkpoints; needs --storage-gbytes."""
    storage_gbytes: float | None = None
    """Storage bandwidth of all nodes together, in GB/s. Default: storage costs nothing."""
    save_seconds: float | None = None
    """Seconds that a checkpoint blocks training. Default: the longest in the run's folder, else planned."""
    runnable: bool = False
    """Search only layouts that `ultrascale train` can run today."""
    top: int = 10
    """Number of layouts to list."""
    explain: bool = False
    """Explain what makes the layout fit and fast, what limits it, what other machines would bring, and what was left out."""
    print_flags: bool = False
    """Print only the plan as settings of the framework."""
    svg: str | None = None
    """Draw the pipeline of the step to this file."""
    perfetto: str | None = None
    """Write the predicted step to this file, as a trace for ui.perfetto.dev."""
    html: str | None = None
    """Write the plan with its charts to one self-contained HTML file."""
    png: str | None = None
    """Draw the plan's charts into this folder as PNGs: memory, time, roofline, communication, front. Needs matplotlib."""
    tokens: str | None = None
    """Also print how long training on this many tokens takes and what it costs, such as 15T."""
    budget: str | None = None
    """Money, time or a date: $1M, 30d, 2027-03-01. Prints how many tokens it trains here, and the optimal model size."""
    compare: str | None = None
    """Second run to compare with: prints both plans side by side, largest differences first; other flags apply to both."""
    brief: bool = False
    """Print a brief answer, in 15 lines."""
    save: str | None = None
    """Save the planned run to this TOML file, for `check` and `train`."""
    json: bool = False
    """Print one JSON object."""

    @property
    def rows(self) -> int:
        """Number of layouts to print on a terminal."""
        return min(self.top, BRIEF_ROWS) if self.brief else self.top

    @property
    def file(self) -> str | None:
        """TOML file of the run, if one is planned."""
        return self.run[0] if self.run else None


PlanRequest = VerbRequest[PlanOptions]
BRIEF_ROWS = 3
"""Layouts in a brief answer."""

SHORT = {
    "seq_len": "batch.sequence_length", "tokens_per_batch": "batch.tokens_per_batch",
    "sequences_per_batch": "batch.sequences_per_batch", "zero_stage": "layout.zero_stage", "dp_shard": "layout.dp_shard",
    "recompute": "layout.recompute", "micro_batch_size": "layout.micro_batch_size", "precision": "layout.precision",
    "dp": "layout.dp", "tp": "layout.tp", "cp": "layout.cp", "pp": "layout.pp", "ep": "layout.ep",
    "schedule": "layout.schedule", "optimizer": "optimizer.name",
}  # fmt: skip
"""Settings of a run that have a short flag."""
