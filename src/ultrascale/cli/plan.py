"""`ultrascale plan`: memory and time of a run, before it runs. Starts at once: no torch, no NumPy."""

from __future__ import annotations

import json as jsonlib
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal

import tyro

from ultrascale.cli.parse import parse_with_overrides
from ultrascale.plan.report import RunPlan, alternatives, first_that_fits, plan_run
from ultrascale.spec.cluster import Cluster, parse_cluster
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve, to_toml
from ultrascale.spec.run import Run
from ultrascale.spec.units import UnitError, parse_tokens

LONGEST_DEFAULT = 8192


def plan(
    run: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[RUN.TOML]")] = (),
    /,
    model: str | None = None,
    gpus: str | None = None,
    seq_len: int | None = None,
    tokens_per_batch: str | None = None,
    sequences_per_batch: int | None = None,
    zero_stage: Literal[0, 1, 2, 3] | None = None,
    dp_shard: int | None = None,
    recompute: Literal["none", "selective", "full", "every-k"] | None = None,
    micro_batch_size: int | None = None,
    precision: Literal["fp64", "fp32", "bf16"] | None = None,
    tokens: str | None = None,
    save: str | None = None,
    json: bool = False,
) -> dict[str, object]:
    """Memory and time of a run, before it runs.

        ultrascale plan --model llama-3-8b --gpus 64xh100 --seq-len 8192 --tokens-per-batch 4M

        ultrascale plan run.toml --layout.zero-stage 3

    Without a ZeRO stage and a way to recompute, all are compared and the first that fits is explained.

    Args:
        run: A run's TOML file or folder; or give a model.
        model: A preset (`ultrascale show models`), or a folder with a Hugging Face config.json.
        gpus: The machines: 64xh100, 2xaws-p5, 8xcpu (`ultrascale show clusters`).
        seq_len: Tokens of a sequence. Default: what the model was made for, at most 8192.
        tokens_per_batch: Tokens of a step over all GPUs, such as 4M. Default: one micro-batch for each GPU.
        sequences_per_batch: The same, in sequences.
        zero_stage: What is cut over GPUs: nothing, optimizer state, gradients too, parameters too.
        dp_shard: GPUs that share one copy of the training state. Default: all.
        recompute: Activations computed again in the backward pass.
        micro_batch_size: Sequences in one forward pass of one GPU.
        precision: Dtype of the passes. Default: bf16, or fp32 on a CPU.
        tokens: Say how long training on so many takes, such as 1T.
        save: Write the run that is explained to this TOML file, for `check` and `train`.
        json: Print one JSON object.
    """
    if len(run) > 1:
        raise SpecError([Problem("run", f"names {len(run)} files: {', '.join(run)}", "Plan one at a time.")])
    return {**locals(), "run": run[0] if run else None}  # of `str | None`, tyro makes "[]" beside words it does not know


def command(arguments: list[str]) -> int:
    """Run the verb: 0 if the run fits, 1 if it does not."""
    parsed, rest = parse_with_overrides(plan, "plan", arguments)
    path = None if parsed["run"] is None else str(parsed["run"])
    if path is None and parsed["dp_shard"] is not None and parsed["zero_stage"] is None:
        parsed["zero_stage"] = 1  # the others are compared below; stage 0 cuts nothing
    described = resolve(path, [*_overrides(parsed, rest), *rest]).run
    cluster = _cluster(described)
    any_stage = path is None and not _says(arguments, "zero-stage")
    any_way = path is None and not _says(arguments, "recompute")
    if any_stage or any_way:
        plans = alternatives(described, cluster, any_stage=any_stage, any_way=any_way)
    else:
        plans = [plan_run(described, cluster)]
    chosen = first_that_fits(plans) or min(plans, key=lambda candidate: candidate.memory.peak.total)
    if parsed["save"] is not None:
        _save(chosen.run, Path(str(parsed["save"])))
    if parsed["json"]:
        print(jsonlib.dumps(_as_json(chosen, plans), indent=2))
    else:
        _print(chosen, plans, parsed, arguments, rest)
    return 0 if chosen.fits else 1


def _unknown(words: list[str]) -> list[Problem]:
    """Flags that are neither the verb's nor settings of a run."""
    known = [name.replace("_", "-") for name in plan.__annotations__ if name not in ("run", "return")]
    flags = [word[2:].partition("=")[0] for word in words if word.startswith("--") and "." not in word]
    near = {flag: get_close_matches(flag, known, n=1) for flag in flags}
    return [
        Problem(f"--{flag}", "is no flag of plan", f"Did you mean --{found[0]}?" if found else "See `ultrascale plan --help`.")
        for flag, found in near.items()
    ]


def _overrides(parsed: dict[str, object], rest: list[str]) -> list[str]:
    """The short flags as dotted ones."""
    words: dict[str, object] = {}
    model = parsed["model"]
    if parsed["run"] is None and model is None:
        remedy = "Give a run's TOML file, or --model llama-3-8b --gpus 8xh100."
        raise SpecError([Problem("model", "is missing: nothing says what to plan", remedy), *_unknown(rest)])
    if model is not None:
        words["model.path" if Path(str(model)).is_dir() else "model.preset"] = model
    if parsed["gpus"] is not None:
        cluster = parse_cluster(str(parsed["gpus"]))
        words |= {"cluster": parsed["gpus"], "layout.dp": cluster.num_accelerators}
    elif parsed["run"] is None:
        raise SpecError([Problem("gpus", "is missing: nothing says on what", "Give --gpus 8xh100, or 2xcpu for this machine.")])
    if parsed["run"] is None:
        words |= _defaults(parsed, words)
    for flag, key in (
        ("seq_len", "batch.sequence_length"), ("tokens_per_batch", "batch.tokens_per_batch"),
        ("sequences_per_batch", "batch.sequences_per_batch"), ("zero_stage", "layout.zero_stage"),
        ("dp_shard", "layout.dp_shard"), ("recompute", "layout.recompute"), ("micro_batch_size", "layout.micro_batch_size"),
        ("precision", "layout.precision"),
    ):  # fmt: skip
        if parsed[flag] is not None:
            words[key] = parsed[flag]
            words.pop("batch.sequences_per_batch" if flag == "tokens_per_batch" else "", None)
    return [word for key, value in words.items() for word in (f"--{key}", str(value))]


def _defaults(parsed: dict[str, object], words: dict[str, object]) -> dict[str, object]:
    """What a run without a file takes."""
    source = {key: words[key] for key in ("model.preset", "model.path") if key in words}
    positions = resolve(None, source).run.model.max_position_embeddings
    on_cpu = "cpu" in str(parsed["gpus"])
    dp, micro = int(str(words["layout.dp"])), int(str(parsed["micro_batch_size"] or 1))
    return {
        "batch.sequence_length": min(positions, LONGEST_DEFAULT),
        "batch.sequences_per_batch": dp * micro,
        "layout.precision": "fp32" if on_cpu else "bf16",
    }


def _cluster(run: Run) -> Cluster:
    cluster = parse_cluster(f"{run.layout.dp}xcpu" if run.cluster == "auto" else run.cluster)
    if cluster.num_accelerators < run.layout.dp:
        rule = f"{run.layout.dp} ranks do not fit on {cluster.name}, which has {cluster.num_accelerators}"
        raise SpecError([Problem("layout.dp", rule, "Lower it, or plan for more (--gpus).")])
    return replace(cluster, num_accelerators=run.layout.dp)


def _says(arguments: list[str], *names: str) -> bool:
    """Whether one of these settings is given, as a short or a dotted flag."""
    given = {word.partition("=")[0].replace("_", "-").removeprefix("--").removeprefix("layout.") for word in arguments}
    return not given.isdisjoint(names)


def _as_json(chosen: RunPlan, plans: list[RunPlan]) -> dict[str, object]:
    answer: dict[str, object] = chosen.to_json()
    if len(plans) > 1:
        answer["compared"] = [
            {
                "zero_stage": one.run.layout.zero_stage,
                "recompute": one.run.layout.recompute,
                "fits": one.fits,
                "peak_bytes": one.memory.peak.total,
                "seconds_per_step": one.time and one.time.seconds_per_step,
            }
            for one in plans
        ]
    return answer


def _save(run: Run, path: Path) -> None:
    if path.exists():
        raise SpecError([Problem("save", f"{path} is there already", "Name another file, or remove it.")])
    path.write_text(to_toml(run))


def _print(chosen: RunPlan, plans: list[RunPlan], parsed: dict[str, object], arguments: list[str], rest: list[str]) -> None:
    from rich.console import Console

    from ultrascale.plan.view import show_alternatives, show_plan

    console = Console(highlight=False)
    if len(plans) > 1:
        show_alternatives(plans, console)
    show_plan(chosen, console, tokens=_tokens(parsed["tokens"]))
    console.print(f"\n[bold]next[/bold]  {_next_command(chosen, parsed, arguments, rest)}", soft_wrap=True)


def _tokens(text: object) -> int | None:
    try:
        return None if text is None else parse_tokens(str(text))
    except UnitError as error:
        raise SpecError([Problem("tokens", str(error), "Write 300B or 1T.")]) from error


def _next_command(chosen: RunPlan, parsed: dict[str, object], arguments: list[str], rest: list[str]) -> str:
    layout = chosen.run.layout
    words = ["ultrascale plan", *arguments]
    if not chosen.fits:
        if layout.zero_stage == 3 and layout.recompute == "full":
            return " ".join(words) + "   with more --gpus, or a shorter --seq-len"
        return " ".join([*words, "--layout.zero-stage 3 --layout.recompute full"])
    run = parsed["run"] or parsed["save"]
    if run is not None:
        settings = rest if parsed["run"] else []
        return " ".join(["ultrascale check", str(run), *settings, "  then  ultrascale train", str(run), *settings])
    open_words = [] if _says(arguments, "zero-stage") else ["--zero-stage", str(layout.zero_stage)]
    open_words += [] if _says(arguments, "recompute") else ["--recompute", layout.recompute]
    return " ".join([*words, *open_words, "--save run.toml"])
