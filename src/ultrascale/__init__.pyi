"""Written by `python -m ultrascale.api.schemas.stub`."""

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
    """The best layout of a model on machines, `plan("llama-3-8b", "64xh100")`; or the plan of a run, `plan("run.toml")`.

    `settings` are the flags of `ultrascale plan` by their names, `zero_stage=3`, `tp=[4, 8]`, `stack="megatron"`, and settings
    of a run, `layout={"attention": "sdpa"}`. Raises SpecError with everything that is wrong with them.

    Args:
        seq_len: Tokens of a sequence, such as 8192 or 128k (131,072). Default: what the model was made for, at most
            8192.
        tokens_per_batch: Tokens of a step over all GPUs, such as 4M. Default: one micro-batch for each GPU.
        sequences_per_batch: Sequences of a step over all GPUs, in place of tokens.
        dp: Data parallelism to search. Default: what the other axes leave of the GPUs.
        tp: Tensor parallelism to search, such as 8 or 4,8.
        cp: Context parallelism to search.
        pp: Pipeline parallelism to search.
        ep: Expert parallelism to search.
        schedule: Pipeline schedules to search, such as 1f1b,interleaved.
        zero_stage: State sharded over GPUs: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too; or several,
            such as 1,3.
        dp_shard: GPUs that share one copy of the training state. Default: searched.
        recompute: Activations computed again in the backward pass: none, selective, full, every-k, or several; of one
            layout also modules such as norm+moe_act.
        micro_batch_size: Sequences in one forward pass of one GPU.
        precision: Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16, fp16 where there is no
            bf16, fp32 on a CPU.
        stack: The trainer that is planned for: ultrascale, torchtitan, megatron, nanotron, ... (`ultrascale show
            stacks`). What it does may be changed: --stack megatron --stack.dispatcher deepep.
        optimizer: Optimizer of the run: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw.
        expert_imbalance: Tokens of the busiest rank's experts over the mean, such as 1.3.
        checkpoint_minutes: Minutes of training between two blocking checkpoints; needs --storage-gbytes.
        storage_gbytes: Storage bandwidth of all nodes together, GB/s. Default: storage costs nothing.
        save_seconds: Seconds that a checkpoint blocks training. Default: the longest of the run's folder, else planned.
        runnable: Search only what `ultrascale train` runs today.
        top: Layouts to list.
        explain: Say what makes it fit and fast, what binds, what other machines would be worth, and what was left out.
        print_flags: Print the plan as the trainer's own settings, and nothing else.
        svg: Draw the pipeline of the step into this file.
        perfetto: Write the predicted step as a trace for ui.perfetto.dev into this file.
        html: Write the plan, drawn, into this one file, to look at in a browser or to mail.
        png: Draw the plan's charts into this folder, a PNG each: memory, time, roofline, what axes send, front. Needs
            matplotlib.
        tokens: Say how long training on so many takes and what it costs, such as 15T.
        budget: Money, time or a date: $1M, 30d, 2027-03-01. Says how many tokens that trains here, and how large a
            model it would do.
        save: Write the run that is explained to this TOML file, for `check` and `train`.
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
    """All layouts of a model on machines, ranked: what `plan` of the same words chooses from. Raises SpecError.

    Args:
        seq_len: Tokens of a sequence, such as 8192 or 128k (131,072). Default: what the model was made for, at most
            8192.
        tokens_per_batch: Tokens of a step over all GPUs, such as 4M. Default: one micro-batch for each GPU.
        sequences_per_batch: Sequences of a step over all GPUs, in place of tokens.
        dp: Data parallelism to search. Default: what the other axes leave of the GPUs.
        tp: Tensor parallelism to search, such as 8 or 4,8.
        cp: Context parallelism to search.
        pp: Pipeline parallelism to search.
        ep: Expert parallelism to search.
        schedule: Pipeline schedules to search, such as 1f1b,interleaved.
        zero_stage: State sharded over GPUs: 0 none, 1 optimizer state, 2 gradients too, 3 parameters too; or several,
            such as 1,3.
        dp_shard: GPUs that share one copy of the training state. Default: searched.
        recompute: Activations computed again in the backward pass: none, selective, full, every-k, or several; of one
            layout also modules such as norm+moe_act.
        micro_batch_size: Sequences in one forward pass of one GPU.
        precision: Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16, fp16 where there is no
            bf16, fp32 on a CPU.
        stack: The trainer that is planned for: ultrascale, torchtitan, megatron, nanotron, ... (`ultrascale show
            stacks`). What it does may be changed: --stack megatron --stack.dispatcher deepep.
        optimizer: Optimizer of the run: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw.
        expert_imbalance: Tokens of the busiest rank's experts over the mean, such as 1.3.
        checkpoint_minutes: Minutes of training between two blocking checkpoints; needs --storage-gbytes.
        storage_gbytes: Storage bandwidth of all nodes together, GB/s. Default: storage costs nothing.
        save_seconds: Seconds that a checkpoint blocks training. Default: the longest of the run's folder, else planned.
        runnable: Search only what `ultrascale train` runs today.
        top: Layouts to list.
        explain: Say what makes it fit and fast, what binds, what other machines would be worth, and what was left out.
        print_flags: Print the plan as the trainer's own settings, and nothing else.
        svg: Draw the pipeline of the step into this file.
        perfetto: Write the predicted step as a trace for ui.perfetto.dev into this file.
        html: Write the plan, drawn, into this one file, to look at in a browser or to mail.
        png: Draw the plan's charts into this folder, a PNG each: memory, time, roofline, what axes send, front. Needs
            matplotlib.
        tokens: Say how long training on so many takes and what it costs, such as 15T.
        budget: Money, time or a date: $1M, 30d, 2027-03-01. Says how many tokens that trains here, and how large a
            model it would do.
        save: Write the run that is explained to this TOML file, for `check` and `train`.
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
    """A pipeline schedule played, `schedule("1f1b", pp=4, micro_batches=8)`; without a name all of them.

    `settings` are the flags of `ultrascale show schedule`; `cost` is a mapping such as {"forward": 2}. With `executed=True` a
    small model runs it on this machine, which needs torch.

    Raises SpecError for an unknown schedule, or numbers that do not suit it.

    Args:
        pp: Ranks of the pipeline. Default: 4, or what the file says.
        micro_batches: Micro-batches of a step. Default: 8, or what the file says.
        virtual_stages: Stages a rank, for schedules that take any number, such as interleaved; 2 if not given.
        model: Model, as `ultrascale plan` takes it: the pipeline of the best layout of this model, --pp and NAME as
            given...
        gpus: ... on these machines, such as 64xh100. Axes are kept as `plan` keeps them: --tp 8 --zero-stage 3.
        seq_len: Tokens of a sequence, such as 8192 or 128k; with --model.
        tokens_per_batch: Tokens of a step, such as 4M; with --model.
        cost: See `Costs`.
        svg: Also write a picture.
        perfetto: Also write a trace for ui.perfetto.dev.
        csv: Also write the actions as the file that `--layout.schedule FILE` reads, to be changed.
        executed: Also run it on this machine's CPU, with a small model, and show that below what is planned.
        pipeline_runtime: Runtime whose loop --executed runs it with, as `layout.pipeline_runtime`.
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
    """Any rank of a run's job, run here with shapes in place of numbers: `trace("run.toml", world=512, rank=17)`.

    `settings` are the flags of `ultrascale trace`, and settings of the run, `layout={"tp": 8}`. Needs torch. Raises SpecError.

    Args:
        model: Model in place of a file, as `ultrascale plan` takes it: the best layout of this model...
        gpus: ... on these machines, such as 64xh100. Axes are kept as `plan` keeps them: --tp 8 --zero-stage 3.
        seq_len: Tokens of a sequence, such as 8192 or 128k; with --model.
        tokens_per_batch: Tokens of a step, such as 4M; with --model.
        world: Ranks of the job. What tp, cp and pp leave of them shares the batch (layout.dp). Default: the run's own.
        rank: The rank to be. Default: 0.
        all_stages: The first rank of every pipeline stage, a line each.
        steps: Optimizer steps to run.
        device: Device whose choices are made. Default: the run's cluster's, cuda for GPUs.
        out: Files to write, by their ending: memory by category as .png or .svg, a trace for ui.perfetto.dev as .json,
            a snapshot for pytorch.org/memory_viz as .pickle.
        explain_oom: Say what takes most at the peak, and which changes of the layout would help.
        html: Write what is found, drawn, into this one file, to look at in a browser or to mail.
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
    """Proof that a run's processes compute what one does: `check("run.toml", processes=2)`; `check(matrix=True)` for all.

    `settings` are the flags of `ultrascale check`, and settings of the run. Starts processes; needs torch. Raises SpecError.

    Args:
        model: Model in place of a file, as `ultrascale plan` takes it: the best layout of this model...
        gpus: ... on these machines, such as 64xh100. Axes are kept as `plan` keeps them: --tp 8 --zero-stage 3.
        seq_len: Tokens of a sequence, such as 8192 or 128k; with --model.
        tokens_per_batch: Tokens of a step, such as 4M; with --model.
        processes: Number of processes. Default: the run's own up to 8, else the least that has its axes. With --matrix:
            the most of any combination; default 8.
        own_layout: Prove only the run's own ZeRO stage and embedding.
        plant: Plant a fault that the proof must see, or `all` that the run can have; `list` names them. Exit code 0
            then means that each was seen. Without a run each is planted where it can be seen best.
        matrix: Prove the combinations of axes, schedules, methods, families and experts that `docs/support.md` lists.
        markdown: File to write the tables into; with --matrix.
        against: Compare with a plain training loop around transformers' model instead: loss, gradient norm and weights.
            It shares only the initial weights, so it sees what the program's own reference cannot: a wrong formula,
            decay or learning rate.
        steps: Optimizer steps that are compared.
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
    """Every combination of settings with several values measured here: `sweep("run.toml", layout={"zero_stage": [0, 1]})`.

    `settings` are the flags of `ultrascale sweep`, and settings of the run. Needs torch, and the run's data. Raises SpecError.

    Args:
        steps: Timed steps in each cell.
        warm: Warm-up steps before them.
        processes: Processes of each cell; dp = processes / (tp x cp x pp) shares the batch (layout.dp).
        minutes: A cell that takes longer is ended.
        out: Folder for cells, table and pictures. Default: `sweeps/NAME` in the folder of the runs.
        store: Bucket or folder that also keeps each result, and has those of other machines, such as
            s3://BUCKET/sweeps/NAME.
        list: Measure nothing: write each cell's run, and say what is known so far.
        again: Measure cells that failed once more.
        top: Cells to list.
        html: Write what is found, drawn, into this one file, to look at in a browser or to mail.
    """
    ...

def report(
    folder: str | PathLike[str],
    *,
    html: str | PathLike[str] | None = None,
    **settings: Any,
) -> Report:
    """A run's folder summed up, its pictures drawn into FOLDER/plots: `report("out/first")`.

    Needs matplotlib. Raises SpecError.

    Args:
        html: Write what is found, drawn, into this one file, to look at in a browser or to mail.
    """
    ...

def compare(a: Plan | str | PathLike[str], b: Plan | str | PathLike[str]) -> Comparison:
    """Two plans side by side, what differs first. A run's file stands for its plan. Raises SpecError."""
    ...
