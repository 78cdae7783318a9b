"""`ultrascale plan`: which layout, what memory, how long, before anything runs. No torch."""

from __future__ import annotations

import json as jsonlib
import shlex
import sys
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from ultrascale.cli.parse import parse_with_overrides, take_settings
from ultrascale.cli.plan_conflicts import refuse_conflicts, refuse_imbalance, refuse_on_measured_device, refuse_precision
from ultrascale.plan.report import DEFAULT_OPTIMIZER, RunPlan, alternatives, first_that_fits, has_rates, not_trainable, plan_run
from ultrascale.plan.storage import Storage
from ultrascale.spec.cluster import Cluster, parse_cluster
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve, to_toml
from ultrascale.spec.run import Run
from ultrascale.spec.stack import Stack, with_optimizer
from ultrascale.spec.stack_files import changed_settings, changed_stack
from ultrascale.spec.units import count_of, parse_tokens

if TYPE_CHECKING:
    from rich.console import Console

LONGEST_DEFAULT = 8192
"""Tokens of a sequence where nobody says how many: fewer if the model has fewer positions."""


def plan(
    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN.TOML]")] = (),
    /,
    model: str | None = None,
    gpus: str | None = None,
    seq_len: int | None = None,
    tokens_per_batch: str | None = None,
    sequences_per_batch: int | None = None,
    tp: str | None = None,
    cp: str | None = None,
    pp: str | None = None,
    ep: str | None = None,
    schedule: str | None = None,
    zero_stage: str | None = None,
    dp_shard: int | None = None,
    recompute: str | None = None,
    micro_batch_size: int | None = None,
    precision: str | None = None,
    stack: str = "ultrascale",
    optimizer: str | None = None,
    expert_imbalance: float = 1.0,
    checkpoint_minutes: float | None = None,
    storage_gbytes: float | None = None,
    runnable: bool = False,
    top: int = 10,
    explain: bool = False,
    print_flags: bool = False,
    svg: str | None = None,
    perfetto: str | None = None,
    html: str | None = None,
    tokens: str | None = None,
    save: str | None = None,
    json: bool = False,
) -> dict[str, Any]:
    """The best layouts of a model on a cluster, or memory and time of one run.

    For example:

        ultrascale plan --model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M

        ultrascale plan --model llama-3-70b --gpus 256xh100 --tp 4,8 --stack megatron --explain

        ultrascale plan run.toml --layout.zero-stage 3

        ultrascale plan far --help

    With a model and machines all legal layouts are searched; a setting that is given is kept. A run's file has its own.

    Args:
        run: A run's TOML file or folder; or give a model.
        model: A preset (`ultrascale show models`), or a Hugging Face config.json or its folder.
        gpus: The machines: 64xh100, 2xaws-p5, 8xcpu (`ultrascale show clusters`).
        seq_len: Tokens of a sequence. Default: what the model was made for, at most 8192.
        tokens_per_batch: Tokens of a step over all GPUs, such as 4M. Default: one micro-batch for each GPU.
        sequences_per_batch: The same, in sequences.
        tp: Tensor parallelism to search, such as 8 or 4,8.
        cp: Context parallelism to search.
        pp: Pipeline parallelism to search.
        ep: Expert parallelism to search.
        schedule: Pipeline schedules to search, such as 1f1b,interleaved.
        zero_stage: What is cut over GPUs: 0 nothing, 1 optimizer state, 2 gradients too, 3 parameters too; or such as 1,3.
        dp_shard: GPUs that share one copy of the training state. Default: searched.
        recompute: Activations computed again in the backward pass: none, selective, full, every-k, or several; of one layout
            also modules such as norm+moe_act.
        micro_batch_size: Sequences in one forward pass of one GPU.
        precision: Dtype of the passes: fp64, fp32, bf16, fp16, fp8, mxfp8, nvfp4. Default: bf16, fp16 where there is no
            bf16, fp32 on a CPU.
        stack: The trainer that is planned for: ultrascale, torchtitan, megatron, nanotron, ... (`ultrascale show stacks`). What
            it does may be changed: --stack megatron --stack.dispatcher deepep.
        optimizer: Its optimizer: adamw, adamw-bf16, adamw-8bit, muon. Default: adamw.
        expert_imbalance: Tokens of the busiest rank's experts over the mean, such as 1.3.
        checkpoint_minutes: Of training between two checkpoints that the step waits for; needs --storage-gbytes.
        storage_gbytes: What the storage of all nodes together takes or gives, in GB/s. Default: storage costs nothing.
        runnable: Search only what `ultrascale train` runs today.
        top: Layouts to list.
        explain: Say what makes it fit and fast, what binds, what other machines would be worth, and what was left out.
        print_flags: Print the plan as the trainer's own settings, and nothing else.
        svg: Draw the pipeline of the step into this file.
        perfetto: Write the predicted step as a trace for ui.perfetto.dev into this file.
        html: Write the plan, drawn, into this one file, to look at in a browser or to mail.
        tokens: Say how long training on so many takes and what it costs, such as 15T.
        save: Write the run that is explained to this TOML file, for `check` and `train`.
        json: Print one JSON object.
    """
    if len(run) > 1:
        raise SpecError([Problem("run", f"names {len(run)} files: {', '.join(run)}", "Plan one at a time.")])
    return {**locals(), "run": run[0] if run else None}  # of `str | None`, tyro makes "[]" beside words it does not know


def command(arguments: list[str]) -> int:
    """Run the verb: 0 if the run fits, 1 if it does not."""
    if arguments[:1] == ["far"]:
        from ultrascale.cli import plan_far

        return plan_far.command(arguments[1:])
    settings, words = take_settings(arguments, "stack")
    parsed, rest = parse_with_overrides(plan, "plan", words)
    stack = changed_stack(parsed["stack"], settings)
    if parsed["optimizer"] is not None:
        stack = with_optimizer(stack, parsed["optimizer"])
    refuse_conflicts(parsed, arguments)
    if parsed["html"] is not None:
        from ultrascale.cli.page import write_html

        write_html(parsed["html"], parsed, rest, arguments, stack)
    if parsed["run"] is not None:
        return _one(parsed, rest, arguments, stack)
    cluster = _machines(parsed, rest)
    refuse_precision(parsed, cluster)
    has = cluster.accelerator.peak_flops
    if parsed["precision"] is None and "fp16" in has and "bf16" not in has:
        parsed["precision"] = "fp16"
    if not has_rates(cluster.accelerator, parsed["precision"] or "bf16"):
        refuse_on_measured_device(parsed, arguments)
        return _compared(parsed, rest, arguments)
    from ultrascale.cli.plan_search import searched

    return searched(parsed, rest, arguments, cluster, stack)


def _one(parsed: dict[str, Any], rest: list[str], arguments: list[str], stack: Stack) -> int:
    """Plan the layout of a run's file."""
    run = resolve(parsed["run"], [*_overrides(parsed, {}), *rest]).run
    if parsed["gpus"] is not None:
        words: dict[str, Any] = {"cluster": parsed["gpus"]}
        if "layout.dp" not in _given(rest):
            words["layout.dp"] = _ranks_left(run, parsed["gpus"])
        run = resolve(parsed["run"], [*_overrides(parsed, words), *rest]).run
    cluster = cluster_of(run)
    refuse_imbalance(parsed, run.model)
    if cluster.accelerator.measured_at_run_time:
        refuse_on_measured_device(parsed, arguments)
    chosen = plan_run(run, cluster, stack, **conditions(parsed))
    _refuse_what_the_trainer_lacks(chosen)
    finish(chosen, [chosen], parsed, arguments, rest)
    return 0 if chosen.fits else 1


def conditions(parsed: dict[str, Any]) -> dict[str, Any]:
    """What of the circumstances is said: how uneven experts are, and the storage."""
    gbytes, minutes = parsed["storage_gbytes"], parsed["checkpoint_minutes"]
    storage = None if gbytes is None else Storage(gbytes * 1e9, None if minutes is None else minutes * 60)
    return {"expert_imbalance": parsed["expert_imbalance"], "storage": storage}


def _refuse_what_the_trainer_lacks(chosen: RunPlan) -> None:
    """Raises SpecError if the run's layout is none that its trainer can be asked for."""
    from ultrascale.plan.flags.trainers import cannot_express
    from ultrascale.plan.report import workload_of

    if chosen.stack.name == "ultrascale":
        return
    found = cannot_express(workload_of(chosen.run, chosen.cluster, chosen.stack), chosen.run.layout)
    remedy = f"Change the run, such as --{{}}, or search: --model ... --gpus ... --stack {chosen.stack.name}."
    if found:
        raise SpecError([replace(one, remedy=remedy.format(one.key.replace("_", "-"))) for one in found])


def _ranks_left(run: Run, gpus: str) -> int:
    """Data-parallel ranks of as many devices, the other axes as the run has them."""
    count, others = parse_cluster(gpus).num_accelerators, run.layout.world_size // run.layout.dp
    if count % others:
        rule = f"{count_of(count, 'GPU')} {'is' if count == 1 else 'are'} not a multiple of the run's tp x cp x pp = {others}"
        raise SpecError([Problem("gpus", rule, f"Give {max(1, round(count / others)) * others}, or change the axes.")])
    return count // others


def _compared(parsed: dict[str, Any], rest: list[str], arguments: list[str]) -> int:
    """Compare ZeRO stages and ways to recompute on devices whose speed nobody has listed."""
    if parsed["dp_shard"] is not None and parsed["zero_stage"] is None:
        parsed["zero_stage"] = 1  # the others are compared below; stage 0 cuts nothing
    defaults = run_defaults(parsed, dp=parse_cluster(parsed["gpus"]).num_accelerators)
    run = resolve(None, [*_overrides(parsed, {"cluster": parsed["gpus"]}), *rest], defaults=defaults).run
    any_stage, any_way = not says(arguments, "zero-stage"), not says(arguments, "recompute")
    plans = alternatives(run, cluster_of(run), any_stage=any_stage, any_way=any_way)
    chosen = first_that_fits(plans) or min(plans, key=lambda candidate: candidate.peak_bytes)
    finish(chosen, plans, parsed, arguments, rest)
    return 0 if chosen.fits else 1


def _machines(parsed: dict[str, Any], rest: list[str]) -> Cluster:
    """The machines that are named. Raises SpecError with everything that is missing."""
    if parsed["model"] is None:
        remedy = "Give a run's TOML file, or --model llama-3-8b --gpus 8xh100."
        raise SpecError([Problem("model", "is missing: nothing says what to plan", remedy), *_unknown(rest)])
    if parsed["gpus"] is None:
        raise SpecError([Problem("gpus", "is missing: nothing says on what", "Give --gpus 8xh100, or 2xcpu for this machine.")])
    return parse_cluster(parsed["gpus"])


def _unknown(words: list[str]) -> list[Problem]:
    """Flags that are neither the verb's nor settings of a run."""
    known = [name.replace("_", "-") for name in plan.__annotations__ if name not in ("run", "return")]
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--") and "." not in word]
    near = {flag: get_close_matches(flag, known, n=1) for flag in flags}
    return [
        Problem(f"--{flag}", "is no flag of plan", f"Did you mean --{found[0]}?" if found else "See `ultrascale plan --help`.")
        for flag, found in near.items()
    ]


def run_defaults(parsed: dict[str, Any], *, dp: int) -> dict[str, Any]:
    """What a run without a file takes where nothing is said; `dp` data-parallel ranks."""
    return {
        "batch.sequence_length": LONGEST_DEFAULT,
        "batch.sequences_per_batch": dp * (parsed["micro_batch_size"] or 1),
        "layout.dp": dp,
        "layout.precision": "fp32" if "cpu" in parsed["gpus"] else "bf16",
    }


def source_of(model: str) -> dict[str, Any]:
    """A folder, its config.json, or a preset's name."""
    path = Path(model).expanduser()
    return {"model.path": str(path)} if path.is_dir() or path.is_file() else {"model.preset": model}


SHORT = {
    "seq_len": "batch.sequence_length", "tokens_per_batch": "batch.tokens_per_batch",
    "sequences_per_batch": "batch.sequences_per_batch", "zero_stage": "layout.zero_stage", "dp_shard": "layout.dp_shard",
    "recompute": "layout.recompute", "micro_batch_size": "layout.micro_batch_size", "precision": "layout.precision",
    "tp": "layout.tp", "cp": "layout.cp", "pp": "layout.pp", "ep": "layout.ep", "schedule": "layout.schedule",
    "optimizer": "optimizer.name",
}  # fmt: skip


def _overrides(parsed: dict[str, Any], words: dict[str, Any]) -> list[str]:
    """The short flags as dotted ones, over `words`."""
    if parsed["model"] is not None:
        words |= source_of(parsed["model"])
    words |= {key: parsed[flag] for flag, key in SHORT.items() if parsed[flag] is not None}
    return as_flags(words)


def as_flags(words: dict[str, Any]) -> list[str]:
    """Dotted settings as words of a command line."""
    return [word for key, value in words.items() for word in (f"--{key}", str(value))]


def cluster_of(run: Run) -> Cluster:
    """The machines of a run, as many as its layout has ranks. Raises SpecError if there are fewer."""
    world = run.layout.world_size
    cluster = parse_cluster(f"{world}xcpu" if run.cluster == "auto" else run.cluster)
    if cluster.num_accelerators < world:
        rule = f"{world} ranks do not fit on {cluster.name}, which has {cluster.num_accelerators}"
        raise SpecError([Problem("layout.dp", rule, "Lower it, or plan for more (--gpus).")])
    return replace(cluster, num_accelerators=world)


def says(arguments: list[str], *names: str) -> bool:
    """Whether one of these settings is given, as a short or a dotted flag."""
    return not {name.removeprefix("layout.") for name in _given(arguments)}.isdisjoint(names)


def _given(arguments: list[str]) -> set[str]:
    """Names of the flags among these words."""
    return {word.partition("=")[0].replace("_", "-").removeprefix("--") for word in arguments if word.startswith("--")}


def finish(chosen: RunPlan, plans: list[RunPlan], parsed: dict[str, Any], arguments: list[str], rest: list[str]) -> None:
    """Save, write and print what is asked of one plan; `plans` are those it was compared with."""
    write_files(chosen, parsed)
    if parsed["print_flags"]:
        print_flags(chosen)
    elif parsed["json"]:
        print(jsonlib.dumps(_as_json(chosen, plans), indent=2))
    else:
        from ultrascale.plan.view.plan_view import show_alternatives, show_plan

        console = console_for_people()
        if len(plans) > 1:
            show_alternatives(plans, console)
        show_plan(chosen, console, tokens=num_tokens(parsed["tokens"]))
        console.print(f"\n[bold]next[/bold]  {_next_command(chosen, parsed, arguments, rest)}", soft_wrap=True)


def console_for_people() -> Console:
    """A terminal that colours what we colour, and no numbers by itself."""
    from rich.console import Console

    return Console(highlight=False)


def write_files(chosen: RunPlan, parsed: dict[str, Any]) -> None:
    """The run and the pictures that are asked for; `refuse_conflicts` has seen to it that they replace nothing."""
    if parsed["save"] is not None:
        Path(parsed["save"]).write_text(to_toml(chosen.run))
    if parsed["svg"] is not None or parsed["perfetto"] is not None:
        from ultrascale.plan.view.step_timeline import write_step

        write_step(chosen, svg=parsed["svg"], perfetto=parsed["perfetto"])


def print_flags(chosen: RunPlan) -> None:
    """Print the plan as settings of its trainer; that it does not fit is said on stderr, which a script leaves out."""
    from ultrascale.plan.flags.trainers import trainer_flags
    from ultrascale.plan.report import workload_of

    print(trainer_flags(workload_of(chosen.run, chosen.cluster, chosen.stack), chosen.run.layout))
    if not chosen.fits:
        print("ultrascale: this layout does not fit; the same command without --print-flags says why.", file=sys.stderr)


def _as_json(chosen: RunPlan, plans: list[RunPlan]) -> dict[str, Any]:
    answer = chosen.to_json()
    if len(plans) > 1:
        answer["compared"] = [
            {
                "zero_stage": one.run.layout.zero_stage,
                "recompute": one.run.layout.recompute,
                "fits": one.fits,
                "peak_bytes": one.peak_bytes,
                "seconds_per_step": one.prediction and one.prediction.step_seconds,
            }
            for one in plans
        ]
    return answer


def num_tokens(text: str | None) -> int | None:
    """`15T` as a number; `refuse_conflicts` has read it before."""
    return None if text is None else parse_tokens(text)


def _next_command(chosen: RunPlan, parsed: dict[str, Any], arguments: list[str], rest: list[str]) -> str:
    layout = chosen.run.layout
    words = ["ultrascale plan", shlex.join(arguments)]
    if not chosen.fits:
        if layout.zero_stage == 3 and layout.recompute == "full":
            return " ".join(words) + "   with more --gpus, or a shorter --seq-len"
        return " ".join([*words, "--layout.zero-stage 3 --layout.recompute full"])
    run = parsed["run"] or parsed["save"]
    if run is not None:
        return next_of_run(chosen, [run, *(rest if parsed["run"] else [])])
    open_words = [] if says(arguments, "zero-stage") else ["--zero-stage", str(layout.zero_stage)]
    open_words += [] if says(arguments, "recompute") else ["--recompute", layout.recompute]
    return " ".join([*words, *open_words, "--save run.toml"])


def next_of_run(chosen: RunPlan, words: list[str]) -> str:
    """What to do with a run's file (and settings over it): train it, hand it to its trainer, or look at its step."""
    optimizer = chosen.stack.optimizer
    said = [] if optimizer == DEFAULT_OPTIMIZER or "--optimizer.name" in words else ["--optimizer.name", optimizer]
    told = shlex.join([*words, *said])
    if chosen.stack.name != "ultrascale":
        changed = changed_settings(chosen.stack).items()
        stack = shlex.join([chosen.stack.name, *(word for key, value in changed for word in (f"--stack.{key}", str(value)))])
        return f"ultrascale plan {told} --stack {stack} --print-flags"
    if not_trainable(chosen.run):
        return f"ultrascale plan {told} --perfetto step.json   (our trainer does not run it yet)"
    return f"ultrascale check {told}   then  ultrascale train {told}"
