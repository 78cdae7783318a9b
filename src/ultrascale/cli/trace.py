"""`ultrascale trace`: any rank of any cluster's job, on this machine, without a device."""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ultrascale.cli.parse import parse_with_overrides
from ultrascale.cli.plan import cluster_of, console_for_people
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.plan.report import device_of
from ultrascale.plan.search.recompute_choice import with_recomputation
from ultrascale.spec.cluster import Cluster
from ultrascale.spec.machines import free_bytes, usable_cores
from ultrascale.spec.problems import Problem, SpecError
from ultrascale.spec.resolve import resolve
from ultrascale.spec.run import Run
from ultrascale.spec.trainable import expect_trainable
from ultrascale.spec.units import format_bytes

if TYPE_CHECKING:  # imports torch
    from ultrascale.trace.record import RankTrace

ENDINGS = (".png", ".svg", ".json", ".pickle")
STEPS = 2
"""The second is like all that follow."""
BASE_BYTES = 0.5 * 2**30
"""Of a process with torch loaded."""
BYTES_PER_PASS = 120_000
"""Of one block's passes of one micro-batch: some 180 storages and as many changes (measured: 60 to 100 KB)."""


@dataclass(frozen=True)
class Asked:
    """The words of the command."""

    run: str
    world: int | None
    rank: int | None
    all_stages: bool
    steps: int
    device: Literal["cpu", "cuda"] | None
    out: tuple[Path, ...]
    explain_oom: bool
    json: bool


def trace(
    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")],
    /,
    world: int | None = None,
    rank: int | None = None,
    all_stages: bool = False,
    steps: int = STEPS,
    device: Literal["cpu", "cuda"] | None = None,
    out: tuple[Path, ...] = (),
    explain_oom: bool = False,
    json: bool = False,
) -> Asked:
    """Run any rank of a job on this machine, with shapes in place of numbers: memory, messages and FLOPs, to the byte.

        ultrascale trace run.toml --world 512 --rank 17
        ultrascale trace run.toml --cluster 64xh100 --layout.tp 8 --all-stages
        ultrascale trace run.toml --out memory.png trace.json memory.pickle

    The trainer's own model, parallelism, optimizer and schedule run two steps, and make the choices that they would make on the
    run's machines; no GPU, no network and none of the data is needed. Beside it stands what the planner says of the same rank.
    Any setting can follow as a dotted flag. Exit code 0: done; 1: with --explain-oom, the rank does not fit its device.

    Args:
        run: The run's TOML file, or the folder of a run.
        world: Ranks of the job. What tp, cp and pp leave of them shares the batch (layout.dp). Default: the run's own.
        rank: The rank to be. Default: 0.
        all_stages: The first rank of every pipeline stage, a line each.
        steps: Optimizer steps to run.
        device: Whose choices are made. Default: those of the run's cluster, cuda for GPUs.
        out: Files to write, by their ending: memory by category as .png or .svg, a trace for ui.perfetto.dev as .json, a
            snapshot for pytorch.org/memory_viz as .pickle.
        explain_oom: Say what takes most at the peak, and which changes of the layout would help.
        json: Print one JSON object.
    """
    return Asked(run, world, rank, all_stages, steps, device, out, explain_oom, json)


def command(arguments: list[str]) -> int:
    """Run the verb."""
    asked, rest = parse_with_overrides(trace, "trace", arguments)
    run = resolve(asked.run, rest, processes=asked.world, processes_flag="--world").run
    _expect_possible(asked, run)
    expect_trainable(run.model, run.layout)
    cluster = cluster_of(run)
    if run.layout.recompute == "auto":
        run = with_recomputation(run, cluster)
    device = asked.device or device_of(cluster.accelerator)
    if run.compile:
        print("ultrascale: blocks are traced uncompiled; compiled ones keep less between products", file=sys.stderr)
    if asked.all_stages:
        return _stages(asked, run, device)
    _expect_memory(run, asked.steps)
    from ultrascale.trace.rank import trace_rank

    return _one(asked, run, cluster, trace_rank(run, asked.rank or 0, device=device, steps=asked.steps))


def _expect_possible(asked: Asked, run: Run) -> None:
    """Raises SpecError with every mistake of the command."""
    world, problems = run.layout.world_size, []
    if asked.rank is not None and not 0 <= asked.rank < world:
        rule = f"must be from 0 to {world - 1}, the ranks of the job, is {asked.rank}"
        problems.append(Problem("--rank", rule, "Lower it, or give more ranks with --world."))
    if asked.steps < 1:
        problems.append(Problem("--steps", f"must be at least 1, is {asked.steps}", "2 shows a step like all that follow."))
    if asked.all_stages:
        beside = {"--out": asked.out, "--explain-oom": asked.explain_oom, "--rank": asked.rank is not None}
        for flag in [flag for flag, given in beside.items() if given] + ["--steps"] * (asked.steps != STEPS):
            rule = f"is a line a stage, of {STEPS} steps of its first rank, and does nothing with {flag}"
            problems.append(Problem("--all-stages", rule, "Leave one of the two out."))
    for path in asked.out:
        if path.suffix not in ENDINGS:
            problems.append(Problem("--out", f"{path} must end in one of {', '.join(ENDINGS)}", "Such as --out memory.png."))
        elif not path.parent.is_dir():
            problems.append(Problem("--out", f"there is no folder {path.parent}", "Make it, or name another."))
    if problems:
        raise SpecError(problems)


def _expect_memory(run: Run, steps: int, *, at_once: int = 1) -> None:
    """Raises SpecError if so many traces at once would not fit into this machine's memory."""
    needed, free = at_once * needed_bytes(run, steps), free_bytes()
    if free is not None and needed > free:
        rule = f"would take about {format_bytes(needed)} of this machine's memory, of which {format_bytes(free)} are free"
        raise SpecError(
            [Problem("trace", rule, "Trace fewer micro-batches (a smaller batch.sequences_per_batch), or one step.")]
        )


def needed_bytes(run: Run, steps: int) -> float:
    """What the record of a trace takes here, roughly: it grows with the passes that are traced."""
    layout, count = run.layout, num_micro_batches(run.layout, run.batch.sequences_per_batch)
    passes = min(count, 3) if layout.pp == 1 else count
    return BASE_BYTES + BYTES_PER_PASS * steps * passes * -(-run.model.num_hidden_layers // layout.pp)


def _stages(asked: Asked, run: Run, device: Literal["cpu", "cuda"]) -> int:
    _expect_memory(run, STEPS, at_once=min(run.layout.pp, usable_cores()))
    from ultrascale.trace.stages import trace_stages
    from ultrascale.trace.view import show_stages

    peaks = trace_stages(run, device=device)
    if asked.json:
        print(json_module.dumps([one._asdict() | {"percent": one.percent} for one in peaks], indent=1))
    else:
        show_stages(peaks, console_for_people())
    return 0


def _one(asked: Asked, run: Run, cluster: Cluster, found: RankTrace) -> int:
    from ultrascale.trace.allocator import reserved_bytes
    from ultrascale.trace.compare import compare
    from ultrascale.trace.explain import biggest_parts, edits
    from ultrascale.trace.files import write_file
    from ultrascale.trace.planned import planned_rank

    step = asked.steps - 1
    planned = planned_rank(run, found.rank, found.device) if asked.steps > 1 else None  # type: ignore[arg-type]
    comparison, reserved = compare(found, planned, step), reserved_bytes(found)
    for path in asked.out:
        write_file(found, path, planned_peak_bytes=None if planned is None else planned.peak.total)
    parts = biggest_parts(found, found.peak_at(step))
    changes = edits(run, cluster) if asked.explain_oom else []
    if asked.json:
        print(json_module.dumps(to_json(found, comparison.to_json(), reserved, step, tiers(found, cluster)) | {
            "alive_at_peak": [part._asdict() for part in parts], "edits": [edit._asdict() for edit in changes],
        }, indent=1))  # fmt: skip
    else:
        from ultrascale.trace.view import show_parts, show_trace

        console = console_for_people()
        show_trace(found, comparison, reserved, console, step=step, tier=tiers(found, cluster))
        if asked.explain_oom:
            show_parts(parts, changes, found.peak_bytes(step), console)
        for path in asked.out:
            console.print(f"written: {path}")
    device, capacity = cluster.accelerator.name, cluster.accelerator.memory_bytes.value
    if asked.explain_oom and reserved > capacity:
        needed = f"needs {format_bytes(reserved)} of torch's allocator, and a {device} has {format_bytes(capacity)}"
        print(f"ultrascale: rank {found.rank} {needed}.", file=sys.stderr)
        return 1
    return 0


def tiers(found: RankTrace, cluster: Cluster) -> dict[str, str]:
    """Of each group's size and stride, over what its messages go."""
    from ultrascale.trace.groups import crosses_nodes

    per_node = cluster.node.num_accelerators
    return {
        f"{sent.size}/{sent.stride}": "network" if crosses_nodes(found.rank, sent.size, sent.stride, per_node) else "node"
        for sent in found.sent
    }


def to_json(found: RankTrace, comparison: dict[str, Any], reserved: int, step: int, tier: dict[str, str]) -> dict[str, Any]:
    """Everything that was traced, but for single storages: those are in the snapshot (--out x.pickle)."""
    from ultrascale.trace.files import points

    return {
        "model": found.model.name, "rank": found.rank, "world": found.layout.world_size, "device": found.device, "step": step,
        "micro_batches_traced": found.micro_batches[0], "micro_batches": found.micro_batches[1],
        "peak_bytes": found.peak_bytes(step), "reserved_bytes": reserved, "comparison": comparison,
        "messages": [
            {name: getattr(sent, name) for name in sent.__dataclass_fields__} | {"tier": tier[f"{sent.size}/{sent.stride}"]}
            for sent in found.sent if sent.step == step
        ],
        "flops": [
            {"operation": op, "pass": when, "flops": flops} for (of, op, when), flops in found.flops.items() if of == step
        ],
        "actions": found.actions(step), "timeline": points(found),
    }  # fmt: skip
