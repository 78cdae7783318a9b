"""`ultrascale trace` as a function: traces any rank of a job on any cluster, on this machine, without a device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ultrascale.api.displays import Rows, TableRow, bars, figure, html
from ultrascale.api.extras import naming_extras
from ultrascale.api.keywords import VerbRequest, read_keywords
from ultrascale.api.planning.plan_request import SHORT
from ultrascale.api.planning.run_of import ModelAndMachines, cluster_of, planned_run
from ultrascale.api.stamp import stamped
from ultrascale.catalogue.cluster import Cluster
from ultrascale.catalogue.machines import free_bytes, usable_cores
from ultrascale.config.resolve import resolve
from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.problems import Problem, expect_none, mistake
from ultrascale.description.run import Run
from ultrascale.description.units import count_of, format_bytes, format_percent
from ultrascale.page.documents import stages_document, trace_document
from ultrascale.page.html_file import expect_writable, write_document
from ultrascale.plan.memory.replay import num_micro_batches
from ultrascale.plan.report import device_of
from ultrascale.plan.search.recompute_choice import with_recomputation

if TYPE_CHECKING:  # imports torch
    from ultrascale.trace.recording.record import RankTrace
    from ultrascale.trace.stages import StagePeak
    from ultrascale.trace.views.compare import StepComparison
    from ultrascale.trace.views.explain import Edit, Part

ENDINGS = (".png", ".svg", ".json", ".pickle")
STEPS = 2
"""The second step is like all that follow."""
BASE_BYTES = 0.5 * 2**30
"""Bytes of a process with torch loaded."""
BYTES_PER_PASS = 120_000
"""Bytes of one block's passes of one micro-batch: some 180 storages and as many changes (measured: 60 to 100 KB)."""
MANY_PASSES = 32
"""Forward passes of a step from which a trace takes long enough, on a small machine, to say so."""
UNCOMPILED = "blocks are traced uncompiled; compiled ones keep less between products"


@dataclass(frozen=True)
class TraceOptions:
    """Run any rank of a job on this machine, with shapes in place of numbers: memory, messages and FLOPs are exact.

        ultrascale trace run.toml --world 512 --rank 17
        ultrascale trace run.toml --cluster 64xh100 --layout.tp 8 --all-stages
        ultrascale trace --model llama-3-8b --gpus 64xh100 --seq-len 8k
        ultrascale trace run.toml --out memory.png trace.json memory.pickle

    The trainer's own model, parallelism, optimizer and schedule run two steps, and make the choices that they would make on the
    run's machines; no GPU, network or data is needed. The planner's prediction for the same rank is printed beside it. Any
    setting can follow as a dotted flag. Exit code 0: done; 1: with --explain-oom, the rank does not fit its device.
    """

    run: str | None = None
    """TOML file of the run, or the folder of a run; or give a model and machines."""
    model: str | None = None
    """Model in place of a file, as for `ultrascale plan`: traces the best layout of this model..."""
    gpus: str | None = None
    """... on these machines, such as 64xh100. Give degrees as for `plan`: --tp 8 --zero-stage 3."""
    seq_len: int | None = None
    """Sequence length in tokens, such as 8192 or 128k; with --model."""
    tokens_per_batch: str | None = None
    """Global batch in tokens, such as 4M; with --model."""
    world: int | None = None
    """Ranks of the job; dp = world / (tp x cp x pp) (layout.dp). Default: the run's own."""
    rank: int | None = None
    """Rank to trace. Default: 0."""
    all_stages: bool = False
    """Trace the first rank of every pipeline stage, and print one line each."""
    steps: int = STEPS
    """Optimizer steps to run."""
    device: Literal["cpu", "cuda"] | None = None
    """Device whose kernels and choices are traced. Default: that of the run's cluster, cuda for GPUs."""
    out: tuple[Path, ...] = ()
    """Files to write; the extension selects the content: .png or .svg, memory by category; .json, a trace for ui.perfetto.dev;
    .pickle, a snapshot for pytorch.org/memory_viz."""
    explain_oom: bool = False
    """Print what takes most memory at the peak, and which changes of the layout would help."""
    html: Path | None = None
    """Write the trace with its charts to one self-contained HTML file."""
    json: bool = False
    """Print one JSON object."""


@dataclass(frozen=True, repr=False)
class Trace(Rows):
    """Steps of one rank, with the planner's prediction."""

    rank_trace: RankTrace
    comparison: StepComparison
    """Memory, messages and FLOPs, traced and planned."""
    cluster: Cluster
    reserved_bytes: int
    """Bytes reserved by torch's allocator at its peak."""
    step: int
    """Reported step, counted from 0; `to_dict` and all printed output count steps from 1."""
    parts: tuple[Part, ...]
    """Largest storages at the peak."""
    edits: tuple[Edit, ...]
    """Changes of the layout that would help, if requested."""
    options: TraceOptions

    @property
    def peak_bytes(self) -> int:
        """Live bytes at the peak."""
        return self.rank_trace.peak_bytes(self.step)

    @property
    def fits(self) -> bool:
        """True if the device can hold what the allocator reserves."""
        return self.reserved_bytes <= self.cluster.accelerator.memory_bytes.value

    @property
    def tiers(self) -> dict[str, str]:
        """Tier that carries the messages of a group, by the group's size and stride: `node` or `network`."""
        from ultrascale.trace.groups import crosses_nodes

        per_node, rank = self.cluster.node.num_accelerators, self.rank_trace.rank
        return {
            f"{sent.size}/{sent.stride}": "network" if crosses_nodes(rank, sent.size, sent.stride, per_node) else "node"
            for sent in self.rank_trace.sent
        }

    def to_dict(self) -> dict[str, Any]:
        """The output of `ultrascale trace --json`: everything but single storages, which are in the snapshot (x.pickle)."""
        from ultrascale.trace.views.files import points

        traced, step, tier = self.rank_trace, self.step, self.tiers
        return stamped("trace", {
            "model": traced.model.name, "rank": traced.rank, "world": traced.layout.world_size, "device": traced.device,
            "step": step + 1,
            "micro_batches_traced": traced.micro_batches[0], "micro_batches": traced.micro_batches[1],
            "peak_bytes": self.peak_bytes, "reserved_bytes": self.reserved_bytes, "comparison": self.comparison.to_json(),
            "messages": [
                {name: getattr(sent, name) for name in sent.__dataclass_fields__}
                | {"step": step + 1, "tier": tier[f"{sent.size}/{sent.stride}"]}
                for sent in traced.sent if sent.step == step
            ],
            "flops": [
                {"operation": op, "pass": when, "flops": flops} for (of, op, when), flops in traced.flops.items() if of == step
            ],
            "actions": traced.actions(step), "timeline": points(traced),
            "alive_at_peak": [part._asdict() for part in self.parts], "edits": [edit._asdict() for edit in self.edits],
        })  # fmt: skip

    def rows(self) -> list[TableRow]:
        """Memory by category and FLOPs by operation, traced and planned, with the difference in percent."""
        compared = (("memory", "bytes", self.comparison.memory), ("work", "flops", self.comparison.flops))
        return [
            {"of": of, "name": row.name, "unit": unit, "traced": row.traced, "planned": row.planned, "percent": row.percent}
            for of, unit, rows in compared
            for row in rows
        ]

    def plot(self) -> Any:
        """A matplotlib figure: live bytes by category, operation after operation. Raises NotInstalledError without
        matplotlib."""
        from ultrascale.trace.views.files import points

        timeline = points(self.rank_trace)
        drawn = figure(repr(self), width=9)
        axes = drawn.add_subplot()
        categories = list(dict.fromkeys(name for row in timeline for name in row["bytes"]))
        layers = [[row["bytes"].get(name, 0) / 2**20 for row in timeline] for name in categories]
        axes.stackplot(range(len(timeline)), layers, labels=categories, step="post", linewidth=0)
        axes.set_xlabel("operations, in order")
        axes.set_ylabel("MiB")
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.01, 0.5))
        return drawn

    def __repr__(self) -> str:
        traced, layout = self.rank_trace, self.rank_trace.layout
        peak = f"{format_bytes(self.peak_bytes)} live, {format_bytes(self.reserved_bytes)} reserved at the peak"
        model = traced.model.name or traced.model.model_type
        return f"Trace({model}, rank {traced.rank} of {layout.world_size} on {self.cluster.name}: {peak})"

    def _repr_html_(self) -> str:
        def words(value: Any, unit: str) -> str:
            return "" if value is None else format_bytes(value) if unit == "bytes" else f"{value:,}"

        return html(repr(self), [
            {"of": row["of"], "name": row["name"], "traced": words(row["traced"], row["unit"]),
             "planned": words(row["planned"], row["unit"]),
             "planned over traced": format_percent(row["percent"])} for row in self.rows()
        ])  # fmt: skip


@dataclass(frozen=True, repr=False)
class StageTraces(Rows):
    """Peak memory of the first rank of every pipeline stage."""

    peaks: tuple[StagePeak, ...]

    def to_dict(self) -> list[dict[str, Any]]:
        """The output of `ultrascale trace --all-stages --json`: one object per stage."""
        return [stamped("trace-stages", row) for row in self.rows()]

    def rows(self) -> list[TableRow]:
        """One row per stage."""
        return [peak._asdict() | {"percent": peak.percent} for peak in self.peaks]

    def plot(self) -> Any:
        """A matplotlib figure: one bar per stage. Raises NotInstalledError without matplotlib."""
        return bars(repr(self), [(f"stage {peak.pp}", peak.traced_bytes / 2**20) for peak in self.peaks], label="live, MiB")

    def __repr__(self) -> str:
        return (
            f"StageTraces({', '.join(format_bytes(peak.traced_bytes) for peak in self.peaks)} live at the peak of each stage)"
        )


def trace(run: str | PathLike[str] | None = None, **settings: Any) -> Trace | StageTraces:
    """Run any rank of a job on this machine with shapes in place of numbers: `trace("run.toml", world=512, rank=17)`.

    Returns live bytes, messages and FLOPs of the rank. `settings` are the flags of `ultrascale trace` by name, and settings of
    the run, `layout={"tp": 8}`. Needs torch. Raises SpecError if an argument or the run is invalid.
    """
    request = read_keywords(TraceOptions, "trace", {"run": run, **settings}, positional=("run",), short=SHORT)
    with naming_extras("trace"):
        return answer(request)


def answer(
    request: VerbRequest[TraceOptions],
    *,
    report: Callable[[str], None] = lambda note: None,
    progress: Callable[[str], None] = lambda phase: None,
) -> Trace | StageTraces:
    """Make the requested trace, and write the requested files. `report` is called with notes beforehand, `progress` with what
    is traced now."""
    options = request.options
    run = _described(options, request.settings)
    _expect_possible(options, run)
    expect_trainable(run.model, run.layout)
    expect_writable(options.html)
    cluster = cluster_of(run)
    if run.layout.recompute == "auto":
        run = with_recomputation(run, cluster)
    device = options.device or device_of(cluster.accelerator)
    if run.compile:
        report(UNCOMPILED)
    if options.all_stages:
        _expect_memory(run, STEPS, at_once=min(run.layout.pp, usable_cores()))
        from ultrascale.trace.stages import trace_stages

        stages = StageTraces(tuple(trace_stages(run, device=device)))
        if options.html is not None:
            write_document(options.html, stages_document(stages.to_dict()), ["trace", *request.words])
        return stages
    _expect_memory(run, options.steps)
    from ultrascale.trace.rank import MOST_ALIKE, trace_rank

    rank, count = options.rank or 0, num_micro_batches(run.layout, run.batch.sequences_per_batch)
    passes = count * run.layout.virtual_stages if run.layout.pp > 1 else min(count, MOST_ALIKE)
    if passes >= MANY_PASSES:
        fewer = "--steps 1 or a smaller batch takes less"
        report(f"traces all {count} micro-batches of {count_of(options.steps, 'step')}, in the schedule's order; {fewer}")

    def on_pass(number: int) -> None:
        progress(f"tracing rank {rank}, forward pass {number} of {options.steps} x {passes}")

    traced = trace_rank(run, rank, device=device, steps=options.steps, on_pass=on_pass)
    trace = _rank_result(options, run, cluster, traced)
    if options.html is not None:
        write_document(options.html, trace_document(trace.to_dict()), ["trace", *request.words])
    return trace


def _described(options: TraceOptions, settings: tuple[str, ...]) -> Run:
    """The run of the file, or of the given model and machines."""
    described = ModelAndMachines.of(options)
    if not described.is_given:
        if options.run is None:
            raise mistake("RUN.TOML", "is missing", "Name a run, or give --model llama-3-8b --gpus 64xh100.")
        return resolve(options.run, settings, processes=options.world, processes_flag="--world").run
    if options.world is not None:
        raise mistake("--world", "is what --gpus says already", "Keep one of the two.")
    return planned_run(described, settings, run=options.run, verb="trace")


def _rank_result(options: TraceOptions, run: Run, cluster: Cluster, rank_trace: RankTrace) -> Trace:
    from ultrascale.trace.allocator import reserved_bytes
    from ultrascale.trace.planned import planned_rank
    from ultrascale.trace.views.compare import compare
    from ultrascale.trace.views.explain import biggest_parts, edits
    from ultrascale.trace.views.files import write_file

    step = options.steps - 1
    planned = planned_rank(run, rank_trace.rank, rank_trace.device) if options.steps > 1 else None  # type: ignore[arg-type]
    comparison, reserved = compare(rank_trace, planned, step), reserved_bytes(rank_trace)
    for path in options.out:
        write_file(rank_trace, path, planned_peak_bytes=None if planned is None else planned.peak.total)
    parts = tuple(biggest_parts(rank_trace, rank_trace.peak_at(step)))
    changes = tuple(edits(run, cluster)) if options.explain_oom else ()
    return Trace(rank_trace, comparison, cluster, reserved, step, parts, changes, options)


def _expect_possible(options: TraceOptions, run: Run) -> None:
    """Raises SpecError with every mistake in the command."""
    world, problems = run.layout.world_size, []
    if options.rank is not None and not 0 <= options.rank < world:
        rule = f"must be from 0 to {world - 1}, the ranks of the job, is {options.rank}"
        problems.append(Problem("--rank", rule, "Lower it, or give more ranks with --world."))
    if options.steps < 1:
        problems.append(Problem("--steps", f"must be at least 1, is {options.steps}", "2 shows a step like all that follow."))
    if options.all_stages:
        beside = {"--out": options.out, "--explain-oom": options.explain_oom, "--rank": options.rank is not None}
        for flag in [flag for flag, given in beside.items() if given] + ["--steps"] * (options.steps != STEPS):
            rule = f"is a line a stage, of {STEPS} steps of its first rank, and does nothing with {flag}"
            problems.append(Problem("--all-stages", rule, "Leave one of the two out."))
    for path in options.out:
        if path.suffix not in ENDINGS:
            problems.append(Problem("--out", f"{path} must end in one of {', '.join(ENDINGS)}", "Such as --out memory.png."))
        elif not path.parent.is_dir():
            problems.append(Problem("--out", f"there is no folder {path.parent}", "Make it, or name another."))
    expect_none(problems)


def _expect_memory(run: Run, steps: int, *, at_once: int = 1) -> None:
    """Raises SpecError if `at_once` simultaneous traces would not fit into this machine's memory."""
    needed, free = at_once * needed_bytes(run, steps), free_bytes()
    if free is not None and needed > free:
        rule = f"would take about {format_bytes(needed)} of this machine's memory, of which {format_bytes(free)} are free"
        raise mistake("trace", rule, "Trace fewer micro-batches (a smaller batch.sequences_per_batch), or one step.")


def needed_bytes(run: Run, steps: int) -> float:
    """Approximate bytes that recording a trace takes on this machine: proportional to the traced passes."""
    layout, count = run.layout, num_micro_batches(run.layout, run.batch.sequences_per_batch)
    passes = min(count, 3) if layout.pp == 1 else count
    return BASE_BYTES + BYTES_PER_PASS * steps * passes * -(-run.model.num_hidden_layers // layout.pp)
