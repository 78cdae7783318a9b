"""Rules of a run that involve several sections, and notes on settings without effect.

Divisibility: a layout must divide the dimensions of the model, but not sequence lengths. Problems name values that do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from math import frexp, inf

from ultrascale.config.ranges import MOST
from ultrascale.config.rules.early import STORE_URL, validation_folders
from ultrascale.config.rules.rule import Rule
from ultrascale.config.rules.time_limits import time_limit_notes
from ultrascale.config.rules.trainable import untrainable_layout, untrainable_model
from ultrascale.description.architecture.families import export_problems
from ultrascale.description.architecture.model import Model
from ultrascale.description.architecture.weights import score_biases
from ultrascale.description.attention_cores import core_requirements, unsupported_reason
from ultrascale.description.layout import EMBEDDING_AND_HEAD, NARROW, Layout
from ultrascale.description.problems import Problem, SpecError
from ultrascale.description.progress import tokens_after
from ultrascale.description.recomputed import SELECTIVE_MODULES, is_modules, modes_of, modules_name, parse_mode
from ultrascale.description.run import LossScale, Optimizer, Run
from ultrascale.description.schedules import USUAL, schedule_for
from ultrascale.description.sections.islands import Islands
from ultrascale.description.sections.trackers import tracker_notes, tracker_problems
from ultrascale.description.units import divisors, format_count
from ultrascale.work.fp8_slots import gathers_fp8, is_delayed
from ultrascale.work.recompute import available_modules

MOST_MICRO_BATCHES = 2**16
"""Most micro-batches of a rank per step, far above any run's: memory for schedule and data grows with it. Both the trainer and
the search keep to it."""
# Settings of an axis, unused if its degree is 1.
_READ_WITH = {
    "sequence_parallel": "tp", "tp_overlap": "tp", "cp_method": "cp", "cp_heads": "cp", "virtual_stages": "pp",
    "schedule": "pp", "layers_per_stage": "pp", "pipeline_runtime": "pp",
}  # fmt: skip
ALONE = "there is a single replica, which shares nothing with another"
_NO_HISTORY = ': only fp8_scaling = "delayed" keeps a history'


def run_problems(run: Run, *, require_data: bool = False, unreadable_keys: frozenset[str] = frozenset()) -> list[Problem]:
    """Every rule that `run` breaks across its sections.

    `unreadable_keys` have no valid value: rules that depend on them are skipped. `require_data` requires a corpus, and a model
    and layout that the trainer can run; training needs both, planning does not.
    """
    problems: list[Problem] = []
    for rule in (*RULES, *TRAINING_RULES) if require_data else RULES:
        if not any(bad == key or bad.startswith(f"{key}.") for bad in unreadable_keys for key in rule.reads):
            problems += rule.check(run)
    return problems


def _model(run: Run) -> list[Problem]:
    """The trainer supports the model's family."""
    return untrainable_model(run.model)


def _layout(run: Run) -> list[Problem]:
    """The trainer supports the layout, by the rules of `trainable.LAYOUT_RULES`."""
    return untrainable_layout(run.layout)


def _sources(run: Run) -> Iterator[Problem]:
    """There is a corpus to train on."""
    if not run.data.sources:
        remedy = 'Prepare text with `ultrascale data prepare` and name its folder: [data] sources = [{path = "..."}].'
        yield Problem("data.sources", "names no corpus to train on", remedy)


def run_notes(run: Run) -> list[str]:
    """Notes, one line each, on valid settings that have no effect in this layout, or that work against each other: a run made
    for many ranks may be tried on one."""
    layout = run.layout
    # A single replica computes in bf16 with its own copies: nothing is all-gathered, sharded or reduced in any precision.
    alone = layout.dp * layout.cp == 1
    precision, unread = f"(layout.precision = {layout.precision})", dict[str, str]()
    if alone:
        unread |= dict.fromkeys(("zero_stage", "layers_per_bucket"), f": {ALONE} (layout.dp = 1)")
        unread |= {"reduce_dtype": f": {ALONE} (layout.dp = 1)"} if layout.reduce_dtype != layout.master_dtype else {}
    unread |= {key: f" (layout.{axis} = 1)" for key, axis in _READ_WITH.items() if getattr(layout, axis) == 1}
    if layout.precision != "fp8":
        unread["fp8_scaling"] = f" {precision}"
    if layout.precision not in NARROW:
        unread |= dict.fromkeys(("fp8_keep_blocks", "fp8_all_gather"), f" {precision}")
    elif not gathers_fp8(layout):
        why = ALONE if alone else "every rank keeps whole weights"
        unread["fp8_all_gather"] = f": {why} (layout.zero_stage = {layout.zero_stage})"
    if not is_delayed(layout):
        unread |= dict.fromkeys(("fp8_amax_history_len", "fp8_amax_compute_algo"), _NO_HISTORY)
    notes = [*time_limit_notes(run), *_auxiliary_loss_notes(run.model), *tracker_notes(run.log)]
    for key, why in unread.items():
        if getattr(layout, key) != getattr(Layout, key):
            notes.append(f"layout.{key} = {getattr(layout, key)} has no effect{why}.")
    rate, name = run.optimizer, run.optimizer.name
    for is_unread, key, why in (
        (layout.precision != "fp16" and run.loss_scale != LossScale(), "loss_scale", f"only fp16 scales the loss {precision}"),
        (name != "muon" and rate.momentum != Optimizer.momentum, "optimizer.momentum",
         f"only muon reads it (optimizer.name = {name})"),
        (rate.schedule == "constant" and rate.min_learning_rate_ratio != Optimizer.min_learning_rate_ratio,
         "optimizer.min_learning_rate_ratio", "the rate stays at its peak (optimizer.schedule = constant)"),
        (run.islands.count == 1 and run.islands != Islands(), "islands", "there are none (islands.count = 1)"),
    ):  # fmt: skip
        if is_unread:
            notes.append(f"{key} has no effect: {why}.")
    if layout.dp > 1 and layout.zero_stage and layout.shard_size == 1:
        notes.append(
            f"layout.zero_stage = {layout.zero_stage} saves no memory: every rank keeps a whole copy (layout.dp_shard = 1)."
        )
    return notes


def _auxiliary_loss_notes(model: Model) -> Iterator[str]:
    """Notes on auxiliary losses: those that are in the gradient but not in the reported loss, and a coefficient that is not
    applied."""
    losses = [
        f"{name} = {value:g}{more}"
        for name, value, more in (
            ("router_aux_loss_coef", model.balance_loss_coef, f" over each {model.router_aux_loss_scope}"),
            ("router_z_loss_coef", model.router_z_loss_coef, ""),
            ("mtp_loss_coef", model.mtp_loss_coef if model.num_nextn_predict_layers else 0.0, ""),
        )
        if value
    ]
    if losses:
        yield f"auxiliary losses join the gradient and not the loss that is told: model.{', model.'.join(losses)}."
    if model.router_aux_loss_coef and not model.balance_loss_coef:
        note = f"model.router_aux_loss_coef = {model.router_aux_loss_coef:g} is kept for export and not applied"
        yield f'{note}; model.router_aux_loss_scope = "sequence" would add it to the loss of every token and layer.'


def _batch_sizes(run: Run) -> Iterator[tuple[str, int]]:
    """Sequences of the batch, and of each stage of the ramp, by key."""
    yield "batch.sequences_per_batch", run.batch.sequences_per_batch
    for index, stage in enumerate(run.batch.ramp):
        yield f"batch.ramp[{index}].sequences_per_batch", stage.sequences_per_batch


def _global_batch(run: Run) -> Iterator[Problem]:
    """Every optimizer step consists of whole micro-batches on every rank."""
    share, together = sum(run.degrees) * run.layout.micro_batch_size, run.islands.count > 1 and not run.islands.dp
    degree = "the sum of islands.dp" if run.islands.dp else "layout.dp"
    among = f"{degree} x layout.micro_batch_size" + " x islands.count" * together
    alternatives = "dp, micro_batch_size or islands.count" if together else "dp or micro_batch_size"
    for key, size in _batch_sizes(run):
        if size < 1:
            if "ramp" in key:  # `batch` has its own range
                yield Problem(key, f"must be at least 1, is {size}", "Give a positive number.")
        elif share > 0 and size % share:
            legal = [n for n in (size - size % share, size - size % share + share) if n]
            rule = f"must be a multiple of {among} = {share}, is {size}"
            yield Problem(key, rule, f"Nearest: {' or '.join(map(str, legal))}; or change {alternatives}.")


def micro_batch_problems(run: Run) -> Iterator[Problem]:
    """A rank has at most 65,536 micro-batches in a step: the trainer goes through each, and a search offers no more."""
    share = sum(run.degrees) * run.layout.micro_batch_size
    for key, size in _batch_sizes(run):
        if share > 0 and size // share > MOST_MICRO_BATCHES:
            rule = f"must be at most {MOST_MICRO_BATCHES} micro-batches on each rank, is {size // share} ({size} sequences)"
            yield Problem(key, rule, f"Give at most {MOST_MICRO_BATCHES * share}, or raise dp or micro_batch_size.")


def _total(run: Run) -> Iterator[Problem]:
    """A run has at most 2^53 tokens, which floating point counts exactly."""
    batch = run.batch
    if min(run.steps, batch.sequence_length, batch.sequences_per_batch, *(s.sequences_per_batch for s in batch.ramp)) < 1:
        return
    tokens = tokens_after(batch, run.steps)
    if run.steps <= MOST and tokens > MOST:
        rule = f"all {run.steps} steps must come to at most 2^53 tokens, are {format_count(tokens)}"
        yield Problem("steps", rule, "Give a smaller batch, or fewer steps.")


def _ramp(run: Run) -> Iterator[Problem]:
    """Stages of the batch-size ramp are in order of `until_tokens`."""
    previous = 0
    for index, stage in enumerate(run.batch.ramp):
        if stage.until_tokens <= previous:
            rule = f"must be above that of the stage before, {previous}" if index else "must be above 0"
            yield Problem(f"batch.ramp[{index}].until_tokens", f"{rule}, is {stage.until_tokens}", "Put the stages in order.")
        previous = max(previous, stage.until_tokens)


def _sequence_length(run: Run) -> Iterator[Problem]:
    """The model has a position for every token of a sequence."""
    length, limit = run.batch.sequence_length, run.model.max_position_embeddings
    if length > limit:
        rule = f"must be at most model.max_position_embeddings = {limit}, is {length}"
        yield Problem("batch.sequence_length", rule, f"Use {limit}, or --model.max-position-embeddings {length}.")


def _schedule(run: Run) -> Iterator[Problem]:
    """Warm-up and decay of the learning rate fit into the steps; only wsd has decay steps."""
    steps, optimizer = run.steps, run.optimizer
    if optimizer.warmup_steps >= steps:
        rule = f"must be below steps = {steps}, is {optimizer.warmup_steps}"
        yield Problem("optimizer.warmup_steps", rule, "Warm up for fewer steps, or train for more.")
    elif optimizer.decay_steps is not None and optimizer.schedule != "wsd":
        rule = f'is only for schedule = "wsd", but the schedule is {optimizer.schedule}'
        yield Problem("optimizer.decay_steps", rule, 'Leave it out, or set optimizer.schedule = "wsd".')
    elif optimizer.decay_steps is not None and optimizer.warmup_steps + optimizer.decay_steps > steps:
        rule = f"does not fit: warm-up {optimizer.warmup_steps} + decay {optimizer.decay_steps} is more than steps = {steps}"
        yield Problem("optimizer.decay_steps", rule, f"Use at most {steps - optimizer.warmup_steps}.")


def _loss_scale(run: Run) -> Iterator[Problem]:
    """Loss scales are powers of two within their range, so that scaling is exact."""
    scale = run.loss_scale
    limits = {"initial": (scale.lowest, 2.0**24), "growth_factor": (2.0, 2.0**8), "backoff_factor": (2.0**-8, 0.5),
              "lowest": (2.0**-24, 2.0**24)}  # fmt: skip
    for name, (low, high) in limits.items():
        value = getattr(scale, name)
        if not low <= value <= high or frexp(value)[0] != 0.5:
            rule = f"must be a power of two from {low:g} to {high:g}, is {value:g}"
            yield Problem(f"loss_scale.{name}", rule, f"{getattr(LossScale, name):g} is usual.")


def offloaded_optimizer(run: Run) -> Iterator[Problem]:
    """An optimizer offloaded to the host must be adamw."""
    if run.layout.offload_optimizer and run.optimizer.name != "adamw":
        rule = f"is {run.optimizer.name}, but layout.offload_optimizer updates on the host, by adamw alone"
        yield Problem("optimizer.name", rule, 'Set optimizer.name = "adamw", or leave offload_optimizer out.')


def _fp8_blocks(run: Run) -> Iterator[Problem]:
    """First and last blocks that stay in bf16 leave some blocks for narrow GEMMs."""
    bf16_blocks, blocks = run.layout.fp8_keep_blocks, run.model.num_hidden_layers
    if run.layout.precision in NARROW and 2 * bf16_blocks >= blocks:
        rule = f"{bf16_blocks} first and {bf16_blocks} last of {blocks} blocks in bf16 leave none for {run.layout.precision}"
        yield Problem("layout.fp8_keep_blocks", rule, f"Use at most {(blocks - 1) // 2}.")


def _checkpoints(run: Run) -> Iterator[Problem]:
    """Checkpoints that are kept permanently are among those that are saved."""
    every, forever = run.checkpoint.every_steps, run.checkpoint.keep_every_steps
    if forever is not None and (every is None or forever % every):
        rule = f"must be a multiple of checkpoint.every_steps = {every}, is {forever}: other steps are not saved"
        remedy = f"Use {every * max(1, round(forever / every))}." if every else "Set checkpoint.every_steps."
        yield Problem("checkpoint.keep_every_steps", rule, remedy)


def _recompute_every(run: Run) -> Iterator[Problem]:
    """The interval of recomputed blocks is set for every-k only."""
    recompute, every = run.layout.recompute, run.layout.recompute_every
    if recompute != "every-k" and every != Layout.recompute_every:
        rule = f'is {every}, which only recompute = "every-k" reads, but that is "{recompute}"'
        yield Problem("layout.recompute_every", rule, 'Leave it out, or set layout.recompute = "every-k".')


def _attention(run: Run) -> Iterator[Problem]:
    """The named attention kernel supports what the run needs."""
    core = run.layout.attention
    if core not in ("auto", "fastest") and (reason := unsupported_reason(core, core_requirements(run, run.device))):
        yield Problem("layout.attention", f'"{core}" {reason}', "Leave it out.")


def _evaluation(run: Run) -> Iterator[Problem]:
    """Evaluation has a corpus, and a corpus for evaluation is read."""
    held_out = validation_folders(run)  # which `train` takes
    if run.evaluation.every_steps is not None and not run.data.validation and not any(folder.is_dir() for folder in held_out):
        remedy = "Name a held-out corpus there, or leave evaluation.every_steps out."
        local = [name for name in map(str, held_out) if not STORE_URL.match(name)]
        nor = f", and there is no {' or '.join(local[:3] + ['others'] * (len(local) > 3))}" if local else ""
        yield Problem("evaluation.every_steps", f"is set, but data.validation names no corpus{nor}", remedy)
    if run.data.validation and run.evaluation.every_steps is None:
        remedy = "Set evaluation.every_steps, or leave data.validation out."
        yield Problem("data.validation", "names a corpus that is never read: evaluation.every_steps is not set", remedy)


def _held_out(run: Run) -> Iterator[Problem]:
    """Evaluation has at most 65,536 micro-batches per rank, all read before its first pass."""
    most = MOST_MICRO_BATCHES * run.layout.dp * run.layout.micro_batch_size
    if run.evaluation.sequences > most:
        rule = (
            f"must be at most {MOST_MICRO_BATCHES} micro-batches on each rank, {most} sequences, is {run.evaluation.sequences}"
        )
        yield Problem("evaluation.sequences", rule, "Give fewer; the error of the mean falls with their square root only.")


def _corpora(run: Run) -> Iterator[Problem]:
    """Every corpus is named once, with a path and a weight above 0."""
    for group, sources in (("data.sources", run.data.sources), ("data.validation", run.data.validation)):
        for index, source in enumerate(sources):
            if not source.path:
                yield Problem(f"{group}[{index}].path", "must not be empty", "Name a prepared corpus.")
            if not source.weight > 0 or source.weight == inf:
                rule = f"must be above 0 and finite, is {source.weight}"
                yield Problem(f"{group}[{index}].weight", rule, "Remove the source, or give it a share.")
        for path, times in Counter(source.path for source in sources).items():
            if times > 1:
                yield Problem(group, f"names {path!r} {times} times", "Name it once, with the sum of the weights.")


def _islands(run: Run) -> Iterator[Problem]:
    """Islands average whole layers of weights that are on devices, and never rewind alone."""
    islands, layers, layout = run.islands, run.model.num_hidden_layers, run.layout
    if islands.count == 1 and not islands.dp:
        return
    yield from islands.problems()
    if islands.dp and layout.dp not in islands.dp:
        rule = f"is {layout.dp}, and of islands.dp = {[*islands.dp]} none is"
        yield Problem("layout.dp", rule, "Give that of the island to be planned; each trains with its own.")
    for dp in {*islands.dp} - {layout.dp}:
        yield from (
            Problem("islands.dp", f"{dp}: {problem.key} {problem.rule}", problem.remedy)
            for problem in replace(layout, dp=dp).problems()
        )
    if islands.fragments > layers:
        rule = f"must be at most the model's {layers} layers, is {islands.fragments}"
        yield Problem("islands.fragments", rule, f"Use {layers} or fewer: a fragment is whole layers.")
    if run.layout.offload_optimizer:
        rule = "keeps the weights that are updated in the host's memory, where islands do not average them so far"
        yield Problem("layout.offload_optimizer", rule, "Leave it out, or set islands.count = 1.")
    if any(True for _ in score_biases(run.model)):
        rule = "balances experts by biases, which are no weights and which islands do not average so far"
        yield Problem("model.topk_method", rule, "Balance them by router_aux_loss_coef, or set islands.count = 1.")
    if run.faults.on_anomaly == "rewind":
        rule = "is rewind, but an island that goes back alone would never meet the others again"
        yield Problem("faults.on_anomaly", rule, 'Use "skip" or "stop".')


def _noise_scale(run: Run) -> Iterator[Problem]:
    """The noise scale compares unsharded gradients of two micro-batches or more."""
    if not run.log.gradient_noise_scale:
        return
    split_axes = [axis for axis in ("tp", "cp", "pp", "ep", "expert_tp") if getattr(run.layout, axis) > 1]
    if split_axes:
        rule = "needs a rank to have the whole gradient of one micro-batch"
        split = f"{' and '.join(f'layout.{axis}' for axis in split_axes)} leave{'s' * (len(split_axes) == 1)} it parts"
        yield Problem("log.gradient_noise_scale", f"{rule}; {split}", "Leave it out, or measure it once with dp alone.")
    sizes = [run.batch.sequences_per_batch, *(stage.sequences_per_batch for stage in run.batch.ramp)]
    if min(sizes) // run.layout.micro_batch_size < 2:
        rule = "compares gradients of at least two micro-batches a step, but some step has one"
        remedy = "Use a smaller micro_batch_size or a larger batch, or leave it out."
        yield Problem("log.gradient_noise_scale", rule, remedy)


def _compile(run: Run) -> Iterator[Problem]:
    """Compiled blocks have backward passes in one piece: no schedule splits them."""
    if run.compile and (known := run.layout.known_schedule) and known.splits_backward:
        yield compiled_halves(run.layout.schedule)


def _compiled_pieces(run: Run) -> Iterator[Problem]:
    """Compiled blocks are not computed in chunks."""
    if run.compile and run.layout.mlp_chunks > 1:
        rule = f"is {run.layout.mlp_chunks}, and pieces are computed again by hand, which does not go with compile"
        yield Problem("layout.mlp_chunks", rule, "Leave one of the two out.")


def _compiled_kinds(run: Run) -> Iterator[Problem]:
    """Compiled blocks are recomputed only as none, selective or full."""
    layout = run.layout
    for key, texts in (("recompute", (layout.recompute,)), ("recompute_blocks", layout.recompute_blocks)):
        if run.compile and any("+" in text or is_modules(text.partition(" x ")[0]) for text in texts):
            rule = "names parts of a block, and compiled blocks are recomputed as none, selective or full alone"
            yield Problem(f"layout.{key}", rule, "Name these alone, or leave compile out.")


def _kernels(run: Run) -> Iterator[Problem]:
    """Triton and Liger kernels run on CUDA, in fp32 or lower precision, without compile."""
    if run.kernels not in ("triton", "liger"):
        return
    if run.device == "cpu":
        yield Problem("kernels", f'"{run.kernels}" is for CUDA, and device = "cpu"', 'Leave it out: "torch" runs everywhere.')
    if run.compile:
        rule = f'"{run.kernels}" is not read with compile = true: the compiler fuses norm, rotary positions and SwiGLU itself'
        yield Problem("kernels", rule, "Leave one of the two out.")
    if run.layout.precision == "fp64":
        yield Problem("kernels", f'"{run.kernels}" computes in fp32; layout.precision is fp64', "Leave it out.")


def compiled_halves(schedule: str) -> Problem:
    """Problem: blocks cannot be compiled with a schedule that splits backward passes."""
    rule = f"does not go with layout.schedule = {schedule!r}: the backward pass of a compiled block is one piece"
    return Problem("compile", rule, f'Leave it out, or set layout.schedule = "{USUAL}" or "{schedule_for(2)}".')


def _sinks(run: Run) -> Iterator[Problem]:
    """Metric sinks are named once, and trackers have what they need."""
    for name, times in Counter(run.log.sinks).items():
        if times > 1:
            yield Problem("log.sinks", f"names {name!r} {times} times", "Name it once.")
    yield from tracker_problems(run.log)


def _parallelism(run: Run) -> Iterator[Problem]:
    """Heads, widths, experts, layers and sequences can be sharded as the layout says."""
    yield from parallelism_problems(run.model, run.layout, sequence_length=run.batch.sequence_length)


def _cluster(run: Run) -> Iterator[Problem]:
    """The named machines are known, and have a device for each rank."""
    if run.cluster == "auto":
        return
    from ultrascale.catalogue.cluster import parse_cluster  # imported here, so that a worker starts without the catalogue

    try:
        cluster = parse_cluster(run.cluster)
    except SpecError as error:
        yield from error.problems
        return
    ranks = run.layout.world_size
    if cluster.accelerator.name != "cpu" and ranks > cluster.num_accelerators:
        product = "" if ranks == run.layout.dp else " (dp x tp x cp x pp)"
        rule = f"must be at most the {cluster.num_accelerators} accelerators of cluster = {run.cluster!r}, is {ranks}{product}"
        larger = f"{ranks}x{cluster.accelerator.name}"
        with suppress(SpecError):  # machines in a file have a name that is not in the catalogue
            parse_cluster(larger)
            yield Problem("layout.dp", rule, f"Name a larger cluster, such as --cluster {larger}, or use fewer ranks.")
            return
        yield Problem("layout.dp", rule, "Name a larger cluster, or use fewer ranks.")


def _export(run: Run) -> Iterator[Problem]:
    """An exported model has a form in transformers."""
    if run.checkpoint.export and not untrainable_model(run.model):  # an untrainable model is refused by another rule
        yield from export_problems(run.model)


RULES: tuple[Rule[Run], ...] = (
    Rule(("batch.sequences_per_batch", "batch.ramp", "layout.dp", "layout.micro_batch_size", "islands"), _global_batch),
    Rule(("islands", "model", "layout", "faults.on_anomaly"), _islands),
    Rule(("batch.ramp",), _ramp),
    Rule(("steps", "batch"), _total),
    Rule(("batch.sequence_length", "model"), _sequence_length),
    Rule(("steps", "optimizer.warmup_steps", "optimizer.decay_steps", "optimizer.schedule"), _schedule),
    Rule(("loss_scale",), _loss_scale),
    Rule(("layout", "model"), _fp8_blocks),
    Rule(("optimizer.name", "layout.offload_optimizer"), offloaded_optimizer),
    Rule(("checkpoint.every_steps", "checkpoint.keep_every_steps"), _checkpoints),
    Rule(("layout.recompute", "layout.recompute_every"), _recompute_every),
    Rule(("layout.attention", "layout.cp", "layout.precision", "device", "data.document_mask", "model"), _attention),
    Rule(("evaluation.every_steps", "data"), _evaluation),
    Rule(("evaluation.sequences", "layout.dp", "layout.micro_batch_size"), _held_out),
    Rule(("data.sources", "data.validation"), _corpora),
    Rule(("log.gradient_noise_scale", "batch.sequences_per_batch", "batch.ramp", "layout"), _noise_scale),
    Rule(("compile", "layout.schedule", "layout.pp"), _compile),
    Rule(("compile", "layout.recompute", "layout.recompute_blocks"), _compiled_kinds),
    Rule(("compile", "layout.mlp_chunks"), _compiled_pieces),
    Rule(("kernels", "compile", "device", "layout.precision"), _kernels),
    Rule(("log",), _sinks),
    Rule(("model", "layout", "batch.sequence_length"), _parallelism),
    Rule(("cluster", "layout"), _cluster),
    Rule(("checkpoint.export", "model"), _export),
)
"""Rules for every run."""
TRAINING_RULES: tuple[Rule[Run], ...] = (
    Rule(("model",), _model),
    Rule(("layout",), _layout),
    Rule(("batch", "layout"), micro_batch_problems),
    Rule(("data.sources",), _sources),
)
"""Rules for runs that are to be trained, not only planned."""


_MOST_NAMED = 8


def parallelism_problems(model: Model, layout: Layout, *, sequence_length: int | None = None) -> list[Problem]:
    """Every rule that `layout` breaks for `model`, with keys in `layout`. `sequence_length` None: not checked."""
    problems = [*_tensor(model, layout), *_experts(model, layout), *_stages(model, layout), *_recomputed(model, layout)]
    if layout.cp > 1 and layout.cp_grid[1] > 1:
        problems += _heads_over_context(model, layout)
    return problems + (list(_sequence(layout, sequence_length)) if sequence_length is not None else [])


def _tensor(model: Model, layout: Layout) -> Iterator[Problem]:
    """Every rank of tp has whole heads (or replicas of key/value heads), and an equal share of feed-forward layers."""
    tp, heads, groups = layout.tp, model.num_attention_heads, model.num_key_value_heads
    for key in ("vocab_size", "hidden_size") if model.num_nextn_predict_layers else ("vocab_size",):
        if tp > (width := getattr(model, key)):
            rule = f"must be at most model.{key} = {width}, of which every rank has a part, is {tp}"
            yield Problem("layout.tp", rule, f"Use {width} or less.")
    widths = {"num_attention_heads": heads}
    if not model.num_experts or model.first_k_dense_replace:
        widths["intermediate_size"] = model.intermediate_size
    if model.shared_expert_intermediate_size:
        widths["shared_expert_intermediate_size"] = model.shared_expert_intermediate_size
    broken = {key: width for key, width in widths.items() if width % tp}
    if not broken and _shares_heads(tp, groups):
        return
    good = [n for n in range(1, heads + 1) if all(width % n == 0 for width in widths.values()) and _shares_heads(n, groups)]
    for key, width in broken.items():
        yield Problem("layout.tp", f"must divide model.{key} = {width}, is {tp}", _choose(good, tp))
    if heads % tp == 0 and not _shares_heads(tp, groups):
        rule = f"must divide model.num_key_value_heads = {groups}, or be a multiple of it (heads are then repeated), is {tp}"
        yield Problem("layout.tp", rule, _choose(good, tp))


def _shares_heads(tp: int, groups: int) -> bool:
    return groups % tp == 0 or tp % groups == 0


def _experts(model: Model, layout: Layout) -> Iterator[Problem]:
    if not model.num_experts:
        for key in ("ep", "expert_tp"):
            if getattr(layout, key) > 1:
                rule = f"cuts experts, but the model has none, is {getattr(layout, key)}"
                yield Problem(f"layout.{key}", rule, "Leave it out, or use tp.")
        return
    for key, field in (("ep", "num_experts"), ("expert_tp", "moe_intermediate_size")):
        ranks, width = getattr(layout, key), getattr(model, field)
        if width % ranks:
            rule = f"must divide model.{field} = {width}, is {ranks}"
            yield Problem(f"layout.{key}", rule, _choose([n for n in divisors(width) if n <= layout.world_size], ranks))


def _stages(model: Model, layout: Layout) -> Iterator[Problem]:
    layers, stages, layers_per_stage = model.num_hidden_layers, layout.num_stages, layout.layers_per_stage
    if layout.pp == 1:
        return
    most = layers + EMBEDDING_AND_HEAD
    if stages > most:
        parts = f"{layers} layers, with embedding and head {most} parts"
        rule = f"makes {layout.pp} x {layout.virtual_stages} = {stages} stages, but the model has {parts}"
        fewer = most // layout.virtual_stages
        remedy = f"Use pp = {fewer} or less." if fewer > 1 else f"Use at most {most // layout.pp or 1} virtual_stages."
        yield Problem("layout.pp", rule, remedy)
    elif layers_per_stage is not None and sum(layers_per_stage) != layers:
        rule = f"must sum to model.num_hidden_layers = {layers}, sums to {sum(layers_per_stage)}"
        yield Problem("layout.layers_per_stage", rule, "Change it, or leave it out for an even cut.")


def _recomputed(model: Model, layout: Layout) -> Iterator[Problem]:
    """Every block has a recomputation mode, and there is a layer to be computed in chunks."""
    if layout.mlp_chunks > 1 and model.num_experts and not model.first_k_dense_replace:
        rule = f"is {layout.mlp_chunks}, but the model has no dense feed-forward layer"
        yield Problem("layout.mlp_chunks", rule, "Leave it out: experts see their tokens in pieces already.")
    named = 0
    with suppress(ValueError):  # `Layout.problems` reports it
        named = len(modes_of(layout.recompute_blocks))
        yield from _unknown_modules(model, layout)
    if layout.recompute == "blocks" and named and named != model.num_hidden_layers:
        rule = f"must name a way for each of model.num_hidden_layers = {model.num_hidden_layers} blocks, names {named}"
        yield Problem("layout.recompute_blocks", rule, 'Change it, or let recompute = "auto" choose.')


def _unknown_modules(model: Model, layout: Layout) -> Iterator[Problem]:
    """Modules named for recomputation exist in the model."""
    available = available_modules(model)
    modes_by_key = {"recompute_blocks": modes_of(layout.recompute_blocks)}
    if is_modules(layout.recompute):
        modes_by_key["recompute"] = (layout.recompute,)
    for key, modes in modes_by_key.items():
        named = {
            name for mode in modes if (parsed := parse_mode(mode)) is not None for name in parsed.modules - {SELECTIVE_MODULES}
        }
        if missing := modules_name(named - {*available}).split("+") if named - {*available} else []:
            rule = f"names {' and '.join(missing)}, and this model has {', '.join(available)}"
            yield Problem(f"layout.{key}", rule, "Name modules that it has.")


def _heads_over_context(model: Model, layout: Layout) -> Iterator[Problem]:
    """All-to-all gives each rank of cp whole sequences of some heads (Jacobs et al. 2023, DeepSpeed-Ulysses)."""
    heads, local_heads, swap = model.num_attention_heads, model.num_attention_heads // layout.tp, layout.cp_grid[1]
    if heads % (layout.tp * swap) and heads % layout.tp == 0:
        key = "layout.cp" if swap == layout.cp else "layout.cp_heads"
        rule = f"must divide the {local_heads} heads of a rank (num_attention_heads / tp) for all-to-all, is {swap}"
        yield Problem(key, rule, f'{_choose(divisors(local_heads), swap)} Or cp_method = "ring", which cuts no heads.')


def _sequence(layout: Layout, length: int) -> Iterator[Problem]:
    """Shards of a sequence may be uneven, but none is empty."""
    pieces, why = _sequence_pieces(layout)
    if length < pieces:
        key = "layout.cp" if layout.cp > 1 else "layout.tp"
        rule = f"cuts sequences into {pieces} pieces ({why}), but batch.sequence_length = {length}"
        yield Problem(key, rule, f"Use sequences of {pieces} tokens or more, or fewer ranks.")


def _sequence_pieces(layout: Layout) -> tuple[int, str]:
    pieces, why = 1, []
    if layout.cp > 1:
        pieces *= layout.cp
        why.append("cp")
    if layout.tp > 1 and layout.sequence_parallel:
        pieces *= layout.tp
        why.append("tp with sequence_parallel")
    return pieces, ", ".join(why)


def _choose(options: Sequence[int], wrong: int) -> str:
    """Options nearest to the given value, in order."""
    nearest = sorted(sorted(options, key=lambda n: abs(n - wrong))[:_MOST_NAMED])
    return f"Choose one of {nearest}."
