"""Keys of every JSON output of a verb: the single description from which the package's JSON Schemas are generated.

Bytes, seconds, FLOPs and tokens unless a key says otherwise. The key `schema` is added to each document (`api.schemas.stamp`).
"""

# No `from __future__ import annotations`: what is NotRequired would not be seen in strings.
from typing import Any, Literal, NotRequired, TypedDict

from ultrascale.check.compare import Difference
from ultrascale.config.reference import Key
from ultrascale.data.manifest import TokenizerFacts
from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import Problem
from ultrascale.description.run import Run
from ultrascale.description.sections.launch import Launch
from ultrascale.measure.machine.doctor import Finding
from ultrascale.measure.machine.timed import Timed
from ultrascale.plan.costs.budget import Bought
from ultrascale.plan.search.explain import Change, Marginal, Rung
from ultrascale.plan.search.space import Refusal
from ultrascale.sweep.accuracy import Held
from ultrascale.train.speed import Speed
from ultrascale.validation.scores import Errors


class Memory(TypedDict):
    """Memory of the fullest device at the moment of a step when it holds most."""

    peak_bytes: NotRequired[int]
    """Live at the peak."""
    peak_phase: NotRequired[str]
    """Phase of the step at the peak."""
    peak_bytes_by_category: dict[str, int]
    """Weights, gradients, optimizer state, activations, ..."""
    peak_bytes_by_part: NotRequired[dict[str, int]]
    """Bytes by finer parts, `category/part`; of the plan, not of what a search lists beside it."""
    between_steps_bytes: NotRequired[int]
    """Bytes that stay from one step to the next; of the plan."""
    saved_bytes_by_layer: NotRequired[list[dict[str, int]]]
    """Bytes that a micro-batch saves of each block for the backward pass; of the plan."""
    peak_allocated_bytes: NotRequired[int]
    """Live at the peak, of what a search lists."""
    peak_reserved_bytes: NotRequired[int]
    """Bytes reserved by the allocator, its cache included."""
    outside_torch_bytes: NotRequired[int]
    """Bytes of CUDA's context and NCCL."""
    needed_bytes: NotRequired[int]
    """Bytes needed of the device, in all."""
    capacity_bytes: int
    """Memory of the device."""
    reserve_bytes: NotRequired[int]
    """Bytes that must stay free; of the plan."""
    headroom_bytes: int
    """Bytes left of those that may be used: capacity less reserve and need; negative where it does not fit."""


class Time(TypedDict):
    """A step's time."""

    seconds_per_step: float
    seconds_per_step_interval: list[float]
    """80% prediction interval: its ends."""
    waterfall_seconds: dict[str, float]
    """The step by what takes it; the parts add up to it."""
    tokens_per_step: int
    tokens_per_second: float
    """Tokens per second of all devices together."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs utilisation, attention counted as causal."""
    mfu_full: float
    """MFU with attention counted over the whole square."""
    hfu: float
    """Hardware FLOPs utilisation: with what is computed again."""
    model_flops_per_token: float
    hardware_flops_per_token: float
    peak_flops_per_second: float
    """Peak of one device, dense, in 16 bits."""


class Prediction(TypedDict):
    """One layout of a search."""

    layout: Layout
    num_micro_batches: int
    """Forward passes of a rank in a step."""
    fits: bool
    memory: Memory
    time: Time


class Ranked(Prediction):
    """A layout of the ranking."""

    out_of_memory_risk: float
    """Chance that it runs out of memory; the ranking is by the step's time over the chance that it does not."""


class Scaled(TypedDict):
    """The best layout on another number of devices."""

    num_gpus: int
    brings: float | None
    """Marginal scaling efficiency: gain of each added device, over the gain where each brings most."""
    pays: bool
    best: Prediction | None


class Explanation(TypedDict):
    """Why the best layout is the best; with `--explain`."""

    fit: list[Rung]
    changes: list[Change]
    worth: list[Marginal]
    scaling: list[Scaled]
    elsewhere: dict[str, Prediction]
    """Predictions on as many other devices."""


class Search(TypedDict):
    """The search that a layout was chosen from."""

    num_legal: int
    num_fitting: int
    """Layouts that fit, without those that are slower and larger than others: their memory is not computed."""
    num_priced: int
    seconds: float
    """Duration of the search."""
    tie_fraction: float
    """Difference of step times below which the model cannot tell two layouts apart."""
    num_tied: int
    ranked: list[Ranked]
    """The fastest of each way to cut the model, the fastest first; as many as `--top`."""
    front: list[Prediction]
    """Layouts that no other beats in both time and memory."""
    smallest: Prediction | None
    refused: list[Refusal]
    explanation: NotRequired[Explanation]


class Compared(TypedDict):
    """A layout that was compared on a machine whose speed is measured at run time."""

    zero_stage: int
    recompute: str
    fits: bool
    peak_bytes: int
    seconds_per_step: float | None


class Recomputed(TypedDict):
    """Savings and cost of a recomputation mode."""

    saved_bytes: float
    added_fraction: float
    """Added fraction of the step's time."""


class Failures(TypedDict):
    """Cost of machine failures: rates of Llama 3 405B's, saves by Young and Daly."""

    between_seconds: float
    """Mean time between two."""
    per_day: float
    save_seconds: float
    """Seconds that a save blocks training."""
    save_is_measured: bool
    save_every_seconds: float
    """Seconds of training between two saves, at best."""
    restart_seconds: float
    spare_nodes: int
    """Enough for 99 percent of the time."""
    goodput: float
    """Share of the time that ends up in the model."""


class IslandsTraffic(TypedDict):
    """Communication between islands, and the memory kept for it."""

    count: int
    every_steps: int
    sent_bytes: int
    """Bytes that an island sends in one round of so many steps."""
    sent_at_once_bytes: int
    """Bytes of the largest fragment."""
    host_bytes: int
    """Bytes of host memory, for a rank."""
    gradient_bytes: int
    """Bytes that gradients of the same steps would be."""
    sent_bytes_per_step: float


class Plan(TypedDict):
    """Memory and time of one run, and the search it was chosen from."""

    model: str
    num_parameters: int
    cluster: str
    nodes: int
    accelerators_per_node: int
    stack: str
    """The trainer that is planned for."""
    layout: Layout
    sequence_length: int
    sequences_per_batch: int
    num_micro_batches: int
    document_mask: bool
    optimizer: str
    trainable: bool
    """True if `ultrascale train` runs it today."""
    fits: bool
    memory: Memory
    time: Time | None
    """null: the device's speed is measured at run time."""
    failures: Failures | None
    """null where time is."""
    time_convention: str
    """Convention by which FLOPs are counted."""
    recomputation: NotRequired[dict[str, Recomputed]]
    """Recomputation modes of a model with experts."""
    islands: NotRequired[IslandsTraffic]
    """Islands of the run, of which the rest of the plan is one."""
    search: NotRequired[Search]
    compared: NotRequired[list[Compared]]
    budget: NotRequired[Bought]
    """Training that --budget buys."""
    notes: list[str]
    """Notes not to miss: little headroom, a default that costs time."""


class StampedPlan(Plan):
    """A plan as its own document has it."""

    schema: str


class Setting(TypedDict):
    """A setting that differs between two plans."""

    name: str
    a: Any
    b: Any


class Quantity(TypedDict):
    """A number of two plans."""

    name: str
    unit: str
    a: float | None
    b: float | None
    b_over_a: float | None


class Compare(TypedDict):
    """Two plans side by side."""

    settings: list[Setting]
    quantities: list[Quantity]
    """Quantities, those that differ most first."""
    a: StampedPlan
    b: StampedPlan


class PlanFar(TypedDict):
    """One training on data centres far apart."""

    num_parameters: int
    bits_per_parameter: float
    num_sites: int
    distance_metres: float
    line_bytes_per_second: float
    switching_seconds: float
    step_seconds: float
    outer_every: int
    overlap: bool
    uplink: bool
    num_bytes: float
    bytes_per_line: float
    flight_seconds: float
    num_messages: int
    latency_seconds: float
    transfer_seconds: float
    all_reduce_seconds: float
    exposed_seconds: float
    seconds_per_step: float
    utilisation: float
    bytes_in_flight: float


class ScheduleRank(TypedDict):
    """A rank of a pipeline over a step."""

    rank: int
    stages: list[int]
    busy_seconds: float
    bubble_seconds: float
    in_flight: int
    """Activations that live at once, in micro-batches of one stage."""
    in_flight_for_weights: int
    """Activations that wait for gradients of weights alone, in micro-batches of one stage."""
    actions: NotRequired[list[list[Any]]]
    """Name, start and end of each, in order."""


class Timeline(TypedDict):
    """A step of a pipeline, in the unit of the costs."""

    step_seconds: float
    bubble_fraction: float
    ranks: list[ScheduleRank]


class Schedule(Timeline):
    """A schedule played."""

    schedule: str
    pp: int
    micro_batches: int


class ScheduleExecuted(TypedDict):
    """A schedule run on this machine, and as it was planned."""

    schedule: str
    planned: Timeline
    executed: Timeline


class TraceRow(TypedDict):
    """A quantity traced and planned."""

    name: str
    traced: int
    planned: int | None
    percent: float | None
    """Planned over traced, off by so much."""


class Traffic(TypedDict):
    """Messages counted."""

    count: int
    num_bytes: int


class TraceTraffic(TypedDict):
    """Messages of one kind along one axis."""

    axis: str
    kind: str
    size: int
    stride: int
    traced: Traffic
    planned: Traffic | None


class TraceComparison(TypedDict):
    """A rank's step traced and planned."""

    memory: list[TraceRow]
    traffic: list[TraceTraffic]
    flops: list[TraceRow]
    islands: list[TraceRow]
    """Bytes that an outer step sends and keeps, of a run on islands."""


class TraceMessage(TypedDict):
    """A collective, or a message of one rank to another."""

    tick: int
    step: int
    kind: str
    axis: str
    size: int
    stride: int
    num_bytes: int
    line: str
    during: str
    is_host: bool
    times: int
    tier: str
    """`node` or `network`."""


TraceFlops = TypedDict("TraceFlops", {"operation": str, "pass": str, "flops": int})


class TraceMoment(TypedDict):
    """Live bytes at one moment."""

    tick: int
    step: int
    phase: str
    bytes: dict[str, int]


class TracePart(TypedDict):
    """Storages of one sort that live at the peak."""

    category: str
    what: str
    line: str
    count: int
    num_bytes: int


class TraceEdit(TypedDict):
    """A change of the layout that would help."""

    setting: str
    needed_bytes: int
    saved_bytes: int
    fits: bool
    slower: float | None
    at_once: int


class Trace(TypedDict):
    """A step of one rank, traced without a device."""

    model: str
    rank: int
    world: int
    device: str
    step: int
    """The one that is told of; steps count from 1."""
    micro_batches_traced: int
    micro_batches: int
    peak_bytes: int
    reserved_bytes: int
    comparison: TraceComparison
    messages: list[TraceMessage]
    flops: list[TraceFlops]  # type: ignore[valid-type]
    actions: list[str]
    timeline: list[TraceMoment]
    alive_at_peak: list[TracePart]
    edits: list[TraceEdit]


class TraceStage(TypedDict):
    """The peak of the first rank of a stage."""

    pp: int
    rank: int
    traced_bytes: int
    planned_bytes: int | None
    reserved_bytes: int
    percent: float | None


class Verdict(TypedDict):
    """The outcome of one case."""

    case: str
    tolerance: float
    worst: dict[str, Difference]
    beyond: list[Difference]
    failure: str
    holds: bool
    not_seen: NotRequired[list[str]]
    """Blind spots of such a proof."""


class MatrixCell(TypedDict):
    """A combination of axes, schedules, methods, families and experts."""

    name: str
    state: Literal["proven", "refused", "untried", "DIFFERS"]
    reason: str
    verdict: Verdict | None


class Fault(TypedDict):
    """A fault that can be planted."""

    name: str
    what: str
    needs: str
    """Properties of a run in which it can be planted."""


class Faults(TypedDict):
    """Faults that `check --plant` knows."""

    faults: list[Fault]


class SweepFailure(TypedDict):
    """A cell without a result."""

    values: dict[str, str]
    run: str
    outcome: str
    text: str
    exit_code: int | None


class SweepRefused(TypedDict):
    """A cell that cannot run."""

    values: dict[str, str]
    problems: list[Problem]


class Sweep(TypedDict):
    """Layouts of a run, each measured."""

    measured: list[dict[str, Any]]
    """`values` and `run` of a cell, and what `measure speed` says of it, the fastest first."""
    failed: list[SweepFailure]
    refused: list[SweepRefused]
    held: Held
    pictures: list[str]


class Report(TypedDict):
    """A run's folder summed up. null: the folder does not tell."""

    steps: int
    tokens: int | None
    first_loss: float | None
    last_loss: float | None
    validation_loss: dict[str, float]
    tokens_per_second: float | None
    mfu: float | None
    hfu: float | None
    timed_since: int
    planned_peak_bytes: int | None
    measured_peak_bytes: int | None
    noise_scale_tokens: float | None
    tokens_per_batch: int | None
    memory_percent: float | None
    """Planned over measured, off by so much."""
    pictures: list[str]


class ShownRun(TypedDict):
    """A run as it would be trained."""

    run: Run
    launch: Launch
    """Launch on a cluster."""
    provenance: dict[str, str]
    """Source of each key's value."""
    notes: list[str]


class Clusters(TypedDict):
    """The catalogue of machines."""

    accelerators: dict[str, Any]
    nodes: dict[str, Any]
    usual_node: dict[str, str]


StackSetting = TypedDict("StackSetting", {"value": Any, "from": str | None})


class Stack(TypedDict):
    """A trainer that can be planned for."""

    title: str
    release: str
    settings: dict[str, StackSetting]  # type: ignore[valid-type]
    usual: dict[str, Any]
    can: dict[str, Any]


class Keys(TypedDict):
    """Keys of a description."""

    keys: list[Key]


class Rule(TypedDict):
    """A rule of a description."""

    of: str
    says: str
    reads: list[str]


class Rules(TypedDict):
    """Rules of a description."""

    rules: list[Rule]


class Validate(TypedDict):
    """Predictions held to measured runs."""

    rows: int
    time: dict[str, list[Errors]]
    rate: list[Errors]
    memory: list[Errors]
    picks: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]
    unrepresentable: list[list[str]]
    """Rows without a prediction, and why."""


class Doctor(TypedDict):
    """Findings about a machine, and what would stop a run on it."""

    can_train: bool
    findings: list[Finding]


class Checkpoints(TypedDict):
    """Checkpoints of a folder."""

    whole: bool
    read_all: bool
    checkpoints: list[dict[str, Any]]


class Generated(TypedDict):
    """Sampled text."""

    source: str
    prompt: str
    text: str
    tokens: list[int]


class Exported(TypedDict):
    """A checkpoint as a Hugging Face folder."""

    source: str
    folder: str
    num_parameters: int
    dtype: str
    tokenizer: bool
    pushed_to: str | None
    """Address on the Hugging Face Hub."""


class Imported(TypedDict):
    """A Hugging Face folder as a first checkpoint."""

    source: str
    checkpoint: str


class Demo(TypedDict):
    """Claims of the demo, and whether they held."""

    folder: str
    claims: list[dict[str, Any]]


class ShownModel(TypedDict):
    """Fields that `show models` adds to a model's own."""

    num_parameters: int
    num_active_parameters: int
    """Parameters that one token meets."""
    trainable: bool
    """True if `ultrascale train` runs it today."""


class ConvertedFolder(TypedDict):
    """A folder that `ultrascale convert` wrote."""

    folder: str
    files: int
    tensors: int
    left_out: list[str]
    """Entries that are no tensors."""
    confined_by: list[str]
    """Confinement of the processes that read the pickles."""
    has_config: bool


class PrimerPlace(TypedDict):
    """The device of the lessons, and its ceilings per second."""

    device: str
    name: str
    peak_bytes: float | None
    peak_flops: float | None
    origin: str
    """Source of the peaks."""
    copy_bytes: float | None
    """Rate that a copy by torch reaches, bytes read and written."""
    product_flops: float | None
    """Rate that a large bf16 GEMM by torch reaches."""


class PrimerVariant(TypedDict):
    """Result of a variant of a kernel."""

    name: str
    error: float
    """Norm of the difference from torch's result in fp64, over the norm of that."""
    is_right: bool
    seconds: float | None
    """null in the interpreter, which has no speed."""
    rate: float | None
    """Bytes or FLOPs per second of what must move or be computed."""
    unit: str
    """`B/s` or `FLOP/s`."""
    share: float | None
    """Fraction of the device's peak."""
    note: str


class PrimerLesson(TypedDict):
    """A lesson and its variants."""

    lesson: str
    title: str
    variants: list[PrimerVariant]


class Primer(TypedDict):
    """Measurements of the primer's lessons."""

    place: PrimerPlace
    lessons: list[PrimerLesson]
    all_right: bool


class RankSteps(TypedDict):
    """Profiled steps of one rank."""

    rank: int
    step_seconds: list[float]
    mean: dict[str, float]
    """Seconds of a step by category."""
    communication: dict[str, float]
    """Seconds of a step that NCCL's kernels of an axis took, hidden or not."""
    top: list[list[Any]]
    """Name, category, seconds and count of the longest operations, of all profiled steps together."""


class MeasuredStep(TypedDict):
    """Time of a step by category, on every rank."""

    steps: list[int]
    """Profiled steps, counted from 1."""
    ranks: list[RankSteps]
    planned: dict[str, float]
    """Seconds by category, those that are priced."""
    planned_origin: str
    """Basis of the plan."""
    unprofiled_step_seconds: float
    """The median of as many steps without the profiler, on the first rank."""
    facts: dict[str, Any]
    """Machine, versions, run."""
    step_seconds: float
    """The mean over steps and ranks."""
    by_category: dict[str, float]
    """Seconds of a step, the mean over ranks; they add up to it."""


class MeasuredNetwork(TypedDict):
    """Speed of messages."""

    device: str
    ranks: int
    per_node: int
    torch: str
    backend: str
    planned_for: str | None
    timed: list[Timed]


class Spread(TypedDict):
    """Median and maximum."""

    median: float
    max: float


class SoakKind(TypedDict):
    """Faults of one kind."""

    row: int
    """Row of the table of faults in docs."""
    struck: int
    survived: int
    without_effect: int
    detect_seconds: Spread | None
    recover_seconds: Spread | None
    steps_lost: Spread | None
    detected_by: list[str]


class Soak(TypedDict):
    """Effects of a storm of faults."""

    holds: bool
    equal_losses: bool
    equal_state: bool
    steps: int
    seconds: float
    faults: int
    """Faults that struck."""
    kinds: dict[str, SoakKind]
    steps_lost: int
    goodput: float | None
    processes: int
    seed: int


class Trained(TypedDict):
    """End of a run."""

    finished: bool
    folder: str
    last: dict[str, Any] | None
    """The last row of metrics.jsonl."""


class TokenFiles(TypedDict):
    """Facts of prepared text."""

    documents: int
    tokens: int
    dtype: str
    num_shards: int
    skipped: dict[str, int]
    """Documents left out, by reason."""
    inexact_cuts: int
    """Cuts of very long documents that may have changed a few ids."""
    content: str
    """Fingerprint of all of it."""
    tokenizer: TokenizerFacts


class DataPrepared(TokenFiles):
    """Token files that were made."""

    output: str
    validation: TokenFiles | None
    """Text held out."""


class ShardFacts(TypedDict):
    """A shard of token files."""

    name: str
    dtype: str
    sequences: int
    documents: int
    tokens: int


class DocumentSample(TypedDict):
    """A document of token files."""

    document: int
    tokens: int
    ids: list[int]
    text: str | None
    """null without a tokenizer."""


class SequencePart(TypedDict):
    """A part of a document in a sequence."""

    position: int
    tokens: int
    begins: bool
    """True if the document begins there."""
    ids: list[int]
    text: str | None


class SequenceSample(TypedDict):
    """A sequence of token files, in stored order."""

    sequence: int
    sequence_length: int
    parts: list[SequencePart]


class DataInspected(TypedDict):
    """Contents of token files."""

    path: str
    documents: int
    tokens: int
    shards: list[ShardFacts]
    manifest: NotRequired[TokenFiles]
    verified: NotRequired[bool]
    """True with --verify: everything was read and is right."""
    document: NotRequired[DocumentSample]
    sequence: NotRequired[SequenceSample]


DOCUMENTS: dict[str, tuple[Any, ...]] = {
    "plan": (Plan,), "compare": (Compare,), "plan-far": (PlanFar,), "schedule": (Schedule,), "schedules": (Timeline,),
    "schedule-executed": (ScheduleExecuted,), "trace": (Trace,), "trace-stages": (TraceStage,), "check": (Verdict,),
    "check-matrix": (MatrixCell,), "faults": (Faults,), "sweep": (Sweep,), "report": (Report,), "run": (ShownRun,),
    "model": (Model, ShownModel), "clusters": (Clusters,), "stack": (Stack,), "keys": (Keys,), "validate": (Validate,),
    "doctor": (Doctor,), "checkpoints": (Checkpoints,), "generate": (Generated,), "export": (Exported,), "import": (Imported,),
    "demo": (Demo,), "rules": (Rules,), "convert": (ConvertedFolder,), "primer": (Primer,), "measure-step": (MeasuredStep,),
    "measure-speed": (Speed,), "measure-network": (MeasuredNetwork,), "soak": (Soak,), "train": (Trained,),
    "data-prepare": (DataPrepared,), "data-inspect": (DataInspected,),
}  # fmt: skip
"""Classes whose keys a document has, by the name in `schema`."""
