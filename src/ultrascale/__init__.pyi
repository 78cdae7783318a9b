"""Written by `python .ci/write_stub.py`."""

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal

from ultrascale.api.check import Check, CheckMatrix
from ultrascale.api.planning.plan_result import Comparison, Plan, Search
from ultrascale.api.report import Report
from ultrascale.api.schedule import Costs, ExecutedSchedule, Schedule, Schedules
from ultrascale.api.sweep import Sweep
from ultrascale.api.trace import StageTraces, Trace
from ultrascale.description.problems import SpecError as SpecError

__version__: str
_Words = str | int | float | PathLike[str] | Sequence[str | int]
__all__ = [
    "SpecError",
    "__version__",
    "check",
    "compare",
    "plan",
    "report",
    "schedule",
    "search",
    "sweep",
    "trace",
]

def plan(
    model: str | PathLike[str] | None = None,
    gpus: str | None = None,
    *,
    seq_len: int | str | None = None,
    tokens_per_batch: _Words | None = None,
    sequences_per_batch: int | str | None = None,
    dp: _Words | None = None,
    tp: _Words | None = None,
    cp: _Words | None = None,
    pp: _Words | None = None,
    ep: _Words | None = None,
    schedule: _Words | None = None,
    zero_stage: _Words | None = None,
    dp_shard: int | str | None = None,
    recompute: _Words | None = None,
    micro_batch_size: int | str | None = None,
    precision: _Words | None = None,
    stack: _Words = "ultrascale",
    optimizer: _Words | None = None,
    expert_imbalance: float = 1.0,
    checkpoint_minutes: float | None = None,
    storage_gbytes: float | None = None,
    save_seconds: float | None = None,
    runnable: bool = False,
    top: int | str = 10,
    explain: bool = False,
    print_flags: bool = False,
    svg: _Words | None = None,
    perfetto: _Words | None = None,
    html: _Words | None = None,
    png: _Words | None = None,
    tokens: _Words | None = None,
    budget: _Words | None = None,
    save: _Words | None = None,
    **settings: Any,
) -> Plan:
    """Find the best layout of a model on machines, `plan("llama-3-8b", "64xh100")`, or plan a run's own layout,
    `plan("run.toml")`.

    Returns a Plan: memory in bytes, step time in seconds with an 80% prediction interval, MFU. `settings` are the flags of
    `ultrascale plan` by name, `zero_stage=3`, `tp=[4, 8]`, `stack="megatron"`, and settings of a run,
    `layout={"attention": "sdpa"}`. Raises SpecError with every invalid argument.

    Args:
        seq_len: Sequence length in tokens, such as 8192 or 128k (131,072). Default: the model's own maximum, at most
            8192.
        tokens_per_batch: Global batch in tokens, such as 4M. Default: one micro-batch per GPU.
        sequences_per_batch: Global batch in sequences, in place of tokens.
        dp: Data-parallel degrees to search. Default: the GPUs that the other axes leave.
        tp: Tensor-parallel degrees to search, such as 8 or 4,8.
        cp: Context-parallel degrees to search.
        pp: Pipeline-parallel degrees to search.
        ep: Expert-parallel degrees to search.
        schedule: Pipeline schedules to search, such as 1f1b,interleaved.
        zero_stage: ZeRO stages to search, such as 3 or 1,3: 0 shards nothing, 1 optimizer state, 2 also gradients, 3
            also parameters.
        dp_shard: GPUs over which the training state is sharded (HSDP if fewer than dp). Default: searched.
        recompute: Activation checkpointing to search: none, selective, full, every-k; for a single layout also modules,
            norm+moe_act.
        micro_batch_size: Micro-batch size: sequences in one forward pass of a GPU.
        precision: Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16; fp16 without bf16,
            fp32 on a CPU.
        stack: Framework to plan for (`ultrascale show stacks`): torchtitan, megatron, ... Change its features by
            --stack.KEY VALUE. Others than ours are planned without intra-document masking, as they train by default.
        optimizer: Optimizer: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw.
        expert_imbalance: Load of the busiest rank's experts over the mean load, such as 1.3.
        checkpoint_minutes: Minutes of training between two blocking checkpoints; needs --storage-gbytes.
        storage_gbytes: Storage bandwidth of all nodes together, in GB/s. Default: storage costs nothing.
        save_seconds: Seconds that a checkpoint blocks training. Default: the longest in the run's folder, else planned.
        runnable: Search only layouts that `ultrascale train` can run today.
        top: Number of layouts to list.
        explain: Explain what makes the layout fit and fast, what limits it, what other machines would bring, and what
            was left out.
        print_flags: Print only the plan as settings of the framework.
        svg: Draw the pipeline of the step to this file.
        perfetto: Write the predicted step to this file, as a trace for ui.perfetto.dev.
        html: Write the plan with its charts to one self-contained HTML file.
        png: Draw the plan's charts into this folder as PNGs: memory, time, roofline, communication, front. Needs
            matplotlib.
        tokens: Also print how long training on this many tokens takes and what it costs, such as 15T.
        budget: Money, time or a date: $1M, 30d, 2027-03-01. Prints how many tokens it trains here, and the optimal
            model size.
        save: Save the planned run to this TOML file, for `check` and `train`.
    """
    ...

def search(
    model: str | PathLike[str] | None = None,
    gpus: str | None = None,
    *,
    seq_len: int | str | None = None,
    tokens_per_batch: _Words | None = None,
    sequences_per_batch: int | str | None = None,
    dp: _Words | None = None,
    tp: _Words | None = None,
    cp: _Words | None = None,
    pp: _Words | None = None,
    ep: _Words | None = None,
    schedule: _Words | None = None,
    zero_stage: _Words | None = None,
    dp_shard: int | str | None = None,
    recompute: _Words | None = None,
    micro_batch_size: int | str | None = None,
    precision: _Words | None = None,
    stack: _Words = "ultrascale",
    optimizer: _Words | None = None,
    expert_imbalance: float = 1.0,
    checkpoint_minutes: float | None = None,
    storage_gbytes: float | None = None,
    save_seconds: float | None = None,
    runnable: bool = False,
    top: int | str = 10,
    explain: bool = False,
    print_flags: bool = False,
    svg: _Words | None = None,
    perfetto: _Words | None = None,
    html: _Words | None = None,
    png: _Words | None = None,
    tokens: _Words | None = None,
    budget: _Words | None = None,
    save: _Words | None = None,
    **settings: Any,
) -> Search:
    """Rank all layouts of a model on machines; `plan` with the same arguments returns the first.

    Raises SpecError if an argument is invalid.

    Args:
        seq_len: Sequence length in tokens, such as 8192 or 128k (131,072). Default: the model's own maximum, at most
            8192.
        tokens_per_batch: Global batch in tokens, such as 4M. Default: one micro-batch per GPU.
        sequences_per_batch: Global batch in sequences, in place of tokens.
        dp: Data-parallel degrees to search. Default: the GPUs that the other axes leave.
        tp: Tensor-parallel degrees to search, such as 8 or 4,8.
        cp: Context-parallel degrees to search.
        pp: Pipeline-parallel degrees to search.
        ep: Expert-parallel degrees to search.
        schedule: Pipeline schedules to search, such as 1f1b,interleaved.
        zero_stage: ZeRO stages to search, such as 3 or 1,3: 0 shards nothing, 1 optimizer state, 2 also gradients, 3
            also parameters.
        dp_shard: GPUs over which the training state is sharded (HSDP if fewer than dp). Default: searched.
        recompute: Activation checkpointing to search: none, selective, full, every-k; for a single layout also modules,
            norm+moe_act.
        micro_batch_size: Micro-batch size: sequences in one forward pass of a GPU.
        precision: Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16; fp16 without bf16,
            fp32 on a CPU.
        stack: Framework to plan for (`ultrascale show stacks`): torchtitan, megatron, ... Change its features by
            --stack.KEY VALUE. Others than ours are planned without intra-document masking, as they train by default.
        optimizer: Optimizer: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw.
        expert_imbalance: Load of the busiest rank's experts over the mean load, such as 1.3.
        checkpoint_minutes: Minutes of training between two blocking checkpoints; needs --storage-gbytes.
        storage_gbytes: Storage bandwidth of all nodes together, in GB/s. Default: storage costs nothing.
        save_seconds: Seconds that a checkpoint blocks training. Default: the longest in the run's folder, else planned.
        runnable: Search only layouts that `ultrascale train` can run today.
        top: Number of layouts to list.
        explain: Explain what makes the layout fit and fast, what limits it, what other machines would bring, and what
            was left out.
        print_flags: Print only the plan as settings of the framework.
        svg: Draw the pipeline of the step to this file.
        perfetto: Write the predicted step to this file, as a trace for ui.perfetto.dev.
        html: Write the plan with its charts to one self-contained HTML file.
        png: Draw the plan's charts into this folder as PNGs: memory, time, roofline, communication, front. Needs
            matplotlib.
        tokens: Also print how long training on this many tokens takes and what it costs, such as 15T.
        budget: Money, time or a date: $1M, 30d, 2027-03-01. Prints how many tokens it trains here, and the optimal
            model size.
        save: Save the planned run to this TOML file, for `check` and `train`.
    """
    ...

def schedule(
    name: str | PathLike[str] | None = None,
    *,
    pp: int | str | None = None,
    micro_batches: int | str | None = None,
    virtual_stages: int | str | None = None,
    model: _Words | None = None,
    gpus: _Words | None = None,
    seq_len: int | str | None = None,
    tokens_per_batch: _Words | None = None,
    cost: Costs | Mapping[str, float] = ...,
    svg: str | PathLike[str] | None = None,
    perfetto: str | PathLike[str] | None = None,
    csv: str | PathLike[str] | None = None,
    executed: bool = False,
    pipeline_runtime: Literal["ultrascale", "torch"] = "ultrascale",
    **settings: Any,
) -> Schedule | Schedules | ExecutedSchedule:
    """Simulate a pipeline schedule, `schedule("1f1b", pp=4, micro_batches=8)`; without a name, all of them.

    `settings` are the flags of `ultrascale show schedule` by name; `cost` is a mapping such as {"forward": 2}, in any unit of
    time. With `executed=True` a small model runs it on this machine, which needs torch.

    Raises SpecError for an unknown schedule, or for numbers that do not suit it.

    Args:
        pp: Pipeline ranks. Default: 4, or as in the file.
        micro_batches: Micro-batches per step. Default: 8, or as in the file.
        virtual_stages: Virtual pipeline stages per rank, for schedules that allow any number, such as interleaved.
            Default: 2.
        model: Model, as for `ultrascale plan`: the pipeline of the best layout of this model, --pp and NAME as given...
        gpus: ... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3.
        seq_len: Sequence length in tokens, such as 8192 or 128k; with --model.
        tokens_per_batch: Global batch in tokens, such as 4M; with --model.
        cost: See `Costs`.
        svg: Also draw the step to this SVG file.
        perfetto: Also write a trace for ui.perfetto.dev.
        csv: Also write the actions to a file that `--layout.schedule FILE` reads, for editing.
        executed: Also run it on this machine's CPU with a small model, and show that below the simulation.
        pipeline_runtime: Runtime that runs the schedule with --executed, as `layout.pipeline_runtime`.
    """
    ...

def trace(
    run: str | PathLike[str] | None = None,
    *,
    model: _Words | None = None,
    gpus: _Words | None = None,
    seq_len: int | str | None = None,
    tokens_per_batch: _Words | None = None,
    world: int | str | None = None,
    rank: int | str | None = None,
    all_stages: bool = False,
    steps: int | str = 2,
    device: Literal["cpu", "cuda"] | None = None,
    out: str | PathLike[str] | Sequence[str | PathLike[str]] = ...,
    explain_oom: bool = False,
    html: str | PathLike[str] | None = None,
    **settings: Any,
) -> Trace | StageTraces:
    """Run any rank of a job on this machine with shapes in place of numbers: `trace("run.toml", world=512, rank=17)`.

    Returns live bytes, messages and FLOPs of the rank. `settings` are the flags of `ultrascale trace` by name, and settings of
    the run, `layout={"tp": 8}`. Needs torch. Raises SpecError if an argument or the run is invalid.

    Args:
        model: Model in place of a file, as for `ultrascale plan`: traces the best layout of this model...
        gpus: ... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3.
        seq_len: Sequence length in tokens, such as 8192 or 128k; with --model.
        tokens_per_batch: Global batch in tokens, such as 4M; with --model.
        world: Ranks of the job; dp = world / (tp x cp x pp) (layout.dp). Default: the run's own.
        rank: Rank to trace. Default: 0.
        all_stages: Trace the first rank of every pipeline stage, and print one line each.
        steps: Optimizer steps to run.
        device: Device whose kernels and choices are traced. Default: that of the run's cluster, cuda for GPUs.
        out: Files to write; the extension selects the content: .png or .svg, memory by category; .json, a trace for
            ui.perfetto.dev; .pickle, a snapshot for pytorch.org/memory_viz.
        explain_oom: Print what takes most memory at the peak, and which changes of the layout would help.
        html: Write the trace with its charts to one self-contained HTML file.
    """
    ...

def check(
    run: str | PathLike[str] | None = None,
    *,
    model: _Words | None = None,
    gpus: _Words | None = None,
    seq_len: int | str | None = None,
    tokens_per_batch: _Words | None = None,
    processes: int | str | None = None,
    own_layout: bool = False,
    plant: _Words | None = None,
    matrix: bool = False,
    markdown: _Words | None = None,
    against: Literal["transformers"] | None = None,
    steps: int | str = 3,
    **settings: Any,
) -> Check | CheckMatrix:
    """Prove that a run on N processes computes what one process computes: `check("run.toml", processes=2)`, or
    `check(matrix=True)` for all combinations.

    `settings` are the flags of `ultrascale check` by name, and settings of the run. Starts processes; needs torch. Raises
    SpecError if an argument or the run is invalid.

    Args:
        model: Model in place of a file, as for `ultrascale plan`: checks the best layout of this model...
        gpus: ... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3.
        seq_len: Sequence length in tokens, such as 8192 or 128k; with --model.
        tokens_per_batch: Global batch in tokens, such as 4M; with --model.
        processes: Processes. Default: the run's, up to 8, else the fewest with its axes. --matrix: most of any
            combination; default 8.
        own_layout: Prove only the run's own ZeRO stage and embedding (tied or untied).
        plant: Plant a fault that the proof must detect, or `all` that apply to the run; `list` names them. Exit code 0
            then means that each was detected. Without a run, each is planted where it is easiest to detect.
        matrix: Prove the combinations of axes, schedules, methods, model families and experts that `docs/support.md`
            lists.
        markdown: Write the tables to this file; with --matrix.
        against: Compare with a plain training loop around the model in transformers instead: loss, gradient norm and
            weights. It shares only the initial weights, so it detects what the program's own reference cannot: a wrong
            formula, weight decay or learning rate.
        steps: Optimizer steps to compare.
    """
    ...

def sweep(
    run: str | PathLike[str],
    *,
    steps: int | str = 8,
    warm: int | str = 4,
    processes: int | str | None = None,
    minutes: float = 10.0,
    out: str | PathLike[str] | None = None,
    store: _Words | None = None,
    list: bool = False,
    again: bool = False,
    top: int | str = 20,
    html: str | PathLike[str] | None = None,
    **settings: Any,
) -> Sweep:
    """Measure every combination of settings with several values on this machine.

    For example: `sweep("run.toml", layout={"zero_stage": [0, 1]})`.

    `settings` are the flags of `ultrascale sweep` by name, and settings of the run. Needs torch and the run's data. Raises
    SpecError if an argument or the run is invalid.

    Args:
        steps: Timed steps in each cell.
        warm: Warm-up steps before the timed ones.
        processes: Processes per cell; dp = processes / (tp x cp x pp) (layout.dp).
        minutes: Time limit of a cell in minutes; a longer one is ended.
        out: Folder for cells, table and pictures. Default: `sweeps/NAME` in the folder of runs.
        store: Bucket or folder that shares results with other machines, such as s3://BUCKET/sweeps/NAME.
        list: Measure nothing: write the run of each cell, and print the results so far.
        again: Measure failed cells again.
        top: Number of cells to list.
        html: Write the results with charts to one self-contained HTML file.
    """
    ...

def report(
    folder: str | PathLike[str],
    *,
    html: str | PathLike[str] | None = None,
    **settings: Any,
) -> Report:
    """Summarize a run's folder, and draw its plots into FOLDER/plots: `report("out/first")`.

    Needs matplotlib. Raises SpecError if the folder is not a run's. Where it cannot be written, the report has no pictures.

    Args:
        html: Write the report with its charts to one self-contained HTML file.
    """
    ...

def compare(a: Plan | str | PathLike[str], b: Plan | str | PathLike[str]) -> Comparison:
    """Compare two plans, largest differences first. A run's file stands for its plan. Raises SpecError if it is invalid."""
    ...
