"""Keys of every JSON output of a verb: the single source from which the package's JSON Schemas are generated.

Units are bytes, seconds, FLOPs and tokens unless a key says otherwise. The key `schema` is added to each document
(`api.stamp`).
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
from ultrascale.measure.summary import Summary
from ultrascale.plan.costs.budget import Bought
from ultrascale.plan.search.explain import Change, Marginal, Rung
from ultrascale.plan.search.space import Refusal
from ultrascale.primer.exercise import VariantOutcome
from ultrascale.sweep.accuracy import Held
from ultrascale.train.speed import Speed
from ultrascale.validation.scores import Errors


class Memory(TypedDict):
    """Memory of the fullest device at the peak of a step."""

    peak_bytes: NotRequired[int]
    """Live bytes at the peak."""
    peak_phase: NotRequired[str]
    """Phase of the step at the peak."""
    peak_bytes_by_category: dict[str, int]
    """Bytes at the peak by category: weights, gradients, optimizer state, activations, ..."""
    peak_bytes_by_part: NotRequired[dict[str, int]]
    """Bytes by finer parts, `category/part`; only in the plan, not in other layouts of a search."""
    between_steps_bytes: NotRequired[int]
    """Bytes that are kept between steps; only in the plan."""
    saved_bytes_by_layer: NotRequired[list[dict[str, int]]]
    """Bytes that each block saves for the backward pass of one micro-batch; only in the plan."""
    peak_allocated_bytes: NotRequired[int]
    """Live bytes at the peak, in layouts of a search."""
    peak_reserved_bytes: NotRequired[int]
    """Bytes reserved by the allocator, its cache included."""
    outside_torch_bytes: NotRequired[int]
    """Bytes of the CUDA context and NCCL."""
    needed_bytes: NotRequired[int]
    """Bytes needed on the device in total."""
    capacity_bytes: int
    """Memory of the device in bytes."""
    reserve_bytes: NotRequired[int]
    """Bytes that must stay free; only in the plan."""
    headroom_bytes: int
    """Usable bytes that remain: capacity minus reserve minus need; negative if the layout does not fit."""


class Time(TypedDict):
    """Time of a step."""

    seconds_per_step: float
    seconds_per_step_interval: list[float]
    """80% prediction interval: lower and upper end."""
    waterfall_seconds: dict[str, float]
    """Step time by component; the parts add up to it."""
    tokens_per_step: int
    tokens_per_second: float
    """Tokens per second of all devices together."""
    tokens_per_second_per_gpu: float
    mfu: float
    """Model FLOPs utilisation, with causal attention."""
    mfu_full: float
    """MFU with attention counted over the full square."""
    hfu: float
    """Hardware FLOPs utilisation: also counts recomputation."""
    model_flops_per_token: float
    hardware_flops_per_token: float
    peak_flops_per_second: float
    """Dense 16-bit peak of one device."""


class Prediction(TypedDict):
    """One layout of a search."""

    layout: Layout
    num_micro_batches: int
    """Micro-batches: forward passes of a rank per step."""
    fits: bool
    memory: Memory
    time: Time


class Ranked(Prediction):
    """A layout in the ranking."""

    out_of_memory_risk: float
    """Probability of running out of memory; the ranking is by step time divided by the probability of not doing so."""


class Scaled(TypedDict):
    """The best layout on another number of devices."""

    num_gpus: int
    brings: float | None
    """Marginal scaling efficiency: gain per added device, relative to the largest such gain."""
    pays: bool
    best: Prediction | None


class Explanation(TypedDict):
    """Explanation of the best layout; with `--explain`."""

    fit: list[Rung]
    changes: list[Change]
    worth: list[Marginal]
    scaling: list[Scaled]
    elsewhere: dict[str, Prediction]
    """Predictions on the same number of other devices."""


class Search(TypedDict):
    """The search that the layout was chosen from."""

    num_legal: int
    num_fitting: int
    """Number of layouts that fit, without those that are slower and larger than others: their memory is not computed."""
    num_priced: int
    seconds: float
    """Duration of the search."""
    tie_fraction: float
    """Relative difference of step times below which the model cannot distinguish two layouts."""
    num_tied: int
    ranked: list[Ranked]
    """The fastest layout of each way to shard the model, fastest first; as many as `--top`."""
    front: list[Prediction]
    """Pareto front: layouts that no other beats in both time and memory."""
    smallest: Prediction | None
    refused: list[Refusal]
    explanation: NotRequired[Explanation]


class Compared(TypedDict):
    """A layout compared on a machine whose speed is measured at run time."""

    zero_stage: int
    recompute: str
    fits: bool
    peak_bytes: int
    seconds_per_step: float | None


class Recomputed(TypedDict):
    """Savings and cost of a recomputation mode."""

    saved_bytes: float
    added_fraction: float
    """Added time as a fraction of the step."""


class Failures(TypedDict):
    """Cost of machine failures: failure rates of Llama 3 405B, checkpoint interval by Young and Daly."""

    between_seconds: float
    """Mean time between two failures."""
    per_day: float
    save_seconds: float
    """Seconds that a save blocks training."""
    save_is_measured: bool
    save_every_seconds: float
    """Optimal time between two saves."""
    restart_seconds: float
    spare_nodes: int
    """Number of spare nodes that suffices 99 percent of the time."""
    goodput: float
    """Fraction of the time that contributes to the model."""


class IslandsTraffic(TypedDict):
    """Communication between islands, and the memory that it needs."""

    count: int
    every_steps: int
    sent_bytes: int
    """Bytes that an island sends in `every_steps` steps."""
    sent_at_once_bytes: int
    """Bytes of the largest fragment."""
    host_bytes: int
    """Bytes of host memory per rank."""
    gradient_bytes: int
    """Bytes of gradients that the same steps would send without islands."""
    sent_bytes_per_step: float


class Plan(TypedDict):
    """Memory and time of one run, and the search that its layout was chosen from."""

    model: str
    num_parameters: int
    cluster: str
    nodes: int
    accelerators_per_node: int
    stack: str
    """Training framework that the plan is for."""
    layout: Layout
    sequence_length: int
    sequences_per_batch: int
    num_micro_batches: int
    document_mask: bool
    optimizer: str
    trainable: bool
    """True if `ultrascale train` can run it today."""
    fits: bool
    memory: Memory
    time: Time | None
    """null if the device's speed is measured at run time."""
    failures: Failures | None
    """null if `time` is."""
    time_convention: str
    """Convention by which FLOPs are counted."""
    recomputation: NotRequired[dict[str, Recomputed]]
    """Recomputation modes of a model with experts."""
    islands: NotRequired[IslandsTraffic]
    """Islands of the run, one of which the rest of the plan describes."""
    search: NotRequired[Search]
    compared: NotRequired[list[Compared]]
    budget: NotRequired[Bought]
    """Training that --budget buys."""
    notes: list[str]
    """Warnings, such as little headroom or a default that costs time."""


class StampedPlan(Plan):
    """A plan as a document of its own."""

    schema: str


class Setting(TypedDict):
    """A setting that differs between two plans."""

    name: str
    a: Any
    b: Any


class Quantity(TypedDict):
    """A quantity of two plans."""

    name: str
    unit: str
    a: float | None
    b: float | None
    b_over_a: float | None


class Compare(TypedDict):
    """Two plans compared."""

    settings: list[Setting]
    quantities: list[Quantity]
    """Quantities, largest differences first."""
    a: StampedPlan
    b: StampedPlan


class PlanFar(TypedDict):
    """A training run on distant data centres."""

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
    """A pipeline rank during a step."""

    rank: int
    stages: list[int]
    busy_seconds: float
    bubble_seconds: float
    in_flight: int
    """Peak number of live activations, in micro-batches of one stage."""
    in_flight_for_weights: int
    """Peak number of activations that wait only for weight gradients, in micro-batches of one stage."""
    actions: NotRequired[list[list[Any]]]
    """Name, start and end of each action, in order."""


class Timeline(TypedDict):
    """A pipeline step, in the time unit of the costs."""

    step_seconds: float
    bubble_fraction: float
    ranks: list[ScheduleRank]


class Schedule(Timeline):
    """A simulated schedule."""

    schedule: str
    pp: int
    micro_batches: int


class ScheduleExecuted(TypedDict):
    """A schedule run on this machine, with the simulated one."""

    schedule: str
    planned: Timeline
    executed: Timeline


class TraceRow(TypedDict):
    """A quantity traced and planned."""

    name: str
    traced: int
    planned: int | None
    percent: float | None
    """Difference of the planned from the traced value, in percent."""


class Traffic(TypedDict):
    """Counted messages."""

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
    """A rank's step, traced and planned."""

    memory: list[TraceRow]
    traffic: list[TraceTraffic]
    flops: list[TraceRow]
    islands: list[TraceRow]
    """Bytes that an outer step sends and keeps, for a run with islands."""


class TraceMessage(TypedDict):
    """A collective, or a message between two ranks."""

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
    """Storages of one kind that are live at the peak."""

    category: str
    what: str
    line: str
    count: int
    num_bytes: int


class TraceEdit(TypedDict):
    """A change of the layout that would reduce memory."""

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
    """The reported step; steps count from 1."""
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
    """Peak memory of the first rank of a stage."""

    pp: int
    rank: int
    traced_bytes: int
    planned_bytes: int | None
    reserved_bytes: int
    percent: float | None


class Verdict(TypedDict):
    """The verdict on one case."""

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
    """Properties of a run in which the fault can be planted."""


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
    """Measurements of many layouts of a run."""

    measured: list[dict[str, Any]]
    """`values` and `run` of a cell, and the output of `measure speed`, fastest first."""
    failed: list[SweepFailure]
    refused: list[SweepRefused]
    held: Held
    pictures: list[str]


class Report(TypedDict):
    """Keys that a report adds to the summary of the run's folder."""

    memory_percent: float | None
    """Difference of the planned from the measured value, in percent."""
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
    """A training framework that can be planned for."""

    title: str
    release: str
    settings: dict[str, StackSetting]  # type: ignore[valid-type]
    usual: dict[str, Any]
    can: dict[str, Any]


class Keys(TypedDict):
    """Configuration keys."""

    keys: list[Key]


class Rule(TypedDict):
    """A rule of the configuration."""

    of: str
    says: str
    reads: list[str]


class Rules(TypedDict):
    """Rules of the configuration."""

    rules: list[Rule]


class Validate(TypedDict):
    """Predictions compared with measured runs."""

    rows: int
    time: dict[str, list[Errors]]
    rate: list[Errors]
    memory: list[Errors]
    picks: list[dict[str, Any]]
    verdicts: list[dict[str, Any]]
    unrepresentable: list[list[str]]
    """Rows without a prediction, with the reason."""


class Doctor(TypedDict):
    """Findings about a machine, and what would prevent a run on it."""

    can_train: bool
    findings: list[Finding]


class Checkpoints(TypedDict):
    """Checkpoints in a folder."""

    whole: bool
    read_all: bool
    checkpoints: list[dict[str, Any]]


class Generated(TypedDict):
    """Sampled text."""

    source: str
    prompt: str
    text: str
    tokens: list[int]


class CorpusLoss(TypedDict):
    """Loss on one corpus; null if it is not finite, or nothing is predicted."""

    corpus: str
    sequences: int
    targets: int
    """Predicted tokens."""
    loss: float | None
    """Mean over them, nats."""
    perplexity: float | None
    bits_per_byte: float | None
    """Null without a tokenizer."""


class Evaluated(TypedDict):
    """Loss of trained weights on corpora."""

    source: str
    sequence_length: int
    corpora: list[CorpusLoss]


class Exported(TypedDict):
    """A checkpoint exported as a Hugging Face folder."""

    source: str
    folder: str
    num_parameters: int
    dtype: str
    tokenizer: bool
    pushed_to: str | None
    """Address on the Hugging Face Hub."""


class Imported(TypedDict):
    """A Hugging Face folder imported as a first checkpoint."""

    source: str
    checkpoint: str


class Demo(TypedDict):
    """Claims of the demo, and whether they held."""

    folder: str
    claims: list[dict[str, Any]]


class ShownModel(TypedDict):
    """Fields that `show models` adds to the model's configuration."""

    num_parameters: int
    num_active_parameters: int
    """Parameters active per token."""
    trainable: bool
    """True if `ultrascale train` can run it today."""


class ConvertedFolder(TypedDict):
    """A folder that `ultrascale convert` wrote."""

    folder: str
    files: int
    tensors: int
    left_out: list[str]
    """Entries that are not tensors."""
    confined_by: list[str]
    """Sandbox of the processes that read the pickles."""
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
    """Rate of a copy by torch, in bytes read and written per second."""
    product_flops: float | None
    """Rate of a large bf16 GEMM by torch, in FLOPs per second."""


class PrimerLesson(TypedDict):
    """A lesson and its variants."""

    lesson: str
    title: str
    variants: list[VariantOutcome]


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
    """Seconds per step in NCCL kernels of an axis, hidden or exposed."""
    top: list[list[Any]]
    """Name, category, seconds and count of the longest operations, over all profiled steps."""


class MeasuredStep(TypedDict):
    """Time of a step by category, on every rank."""

    steps: list[int]
    """Profiled steps, counted from 1."""
    ranks: list[RankSteps]
    planned: dict[str, float]
    """Seconds by category, for the categories that are predicted."""
    planned_origin: str
    """Source of the plan."""
    unprofiled_step_seconds: float
    """Median of as many steps without the profiler, on the first rank."""
    facts: dict[str, Any]
    """Machine, versions, run."""
    step_seconds: float
    """Mean over steps and ranks."""
    by_category: dict[str, float]
    """Seconds per step, mean over ranks; they add up to the step."""


class MeasuredNetwork(TypedDict):
    """Measured speed of messages."""

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
    """Outcome of injected faults."""

    holds: bool
    equal_losses: bool
    equal_state: bool
    steps: int
    seconds: float
    faults: int
    """Number of faults that struck."""
    kinds: dict[str, SoakKind]
    steps_lost: int
    goodput: float | None
    processes: int
    seed: int


class Trained(TypedDict):
    """Result of a training command."""

    finished: bool
    folder: str
    last: dict[str, Any] | None
    """Last row of metrics.jsonl."""


class TokenFiles(TypedDict):
    """Facts of prepared text."""

    documents: int
    tokens: int
    dtype: str
    num_shards: int
    skipped: dict[str, int]
    """Number of documents left out, by reason."""
    inexact_cuts: int
    """Number of splits of very long documents that may have changed a few ids."""
    content: str
    """Fingerprint of the whole content."""
    tokenizer: TokenizerFacts


class DataPrepared(TokenFiles):
    """Token files that were written."""

    output: str
    validation: TokenFiles | None
    """Held-out text."""


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
    """True if the document begins in this sequence."""
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
    """True with --verify: everything was read and is valid."""
    document: NotRequired[DocumentSample]
    sequence: NotRequired[SequenceSample]


DOCUMENTS: dict[str, tuple[Any, ...]] = {
    "plan": (Plan,), "compare": (Compare,), "plan-far": (PlanFar,), "schedule": (Schedule,), "schedules": (Timeline,),
    "schedule-executed": (ScheduleExecuted,), "trace": (Trace,), "trace-stages": (TraceStage,), "check": (Verdict,),
    "check-matrix": (MatrixCell,), "faults": (Faults,), "sweep": (Sweep,), "report": (Summary, Report), "run": (ShownRun,),
    "model": (Model, ShownModel), "clusters": (Clusters,), "stack": (Stack,), "keys": (Keys,), "validate": (Validate,),
    "doctor": (Doctor,), "checkpoints": (Checkpoints,), "generate": (Generated,), "evaluate": (Evaluated,),
    "export": (Exported,), "import": (Imported,),
    "demo": (Demo,), "rules": (Rules,), "convert": (ConvertedFolder,), "primer": (Primer,), "measure-step": (MeasuredStep,),
    "measure-speed": (Speed,), "measure-network": (MeasuredNetwork,), "soak": (Soak,), "train": (Trained,),
    "data-prepare": (DataPrepared,), "data-inspect": (DataInspected,),
}  # fmt: skip
"""Classes whose keys a document has, by the name in `schema`."""
