"""Every planted fault: its name, the mistake and its source, the runs it can occur in, and the smallest run that shows it.

The code that plants a fault is a function of its name in a module `faults_*`, which needs torch; this file needs none.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ultrascale.description.problems import did_you_mean, mistake
from ultrascale.description.run import Run
from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.ends import has_mirrors

Plant = AbstractContextManager[Any]
"""Context in which a trainer has a fault."""


@dataclass(frozen=True)
class SmallestRun:
    """The smallest run in which a fault can be detected."""

    preset: str = "tiny-llama"
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    """Fields of the model that differ from the preset's."""
    micro_batches: int = 3


@dataclass(frozen=True)
class Fault:
    """A mistake that the proof must detect."""

    name: str
    what: str
    """Description of the mistake, with the trainer or issue it was reported in."""
    needs: str
    """Description of the runs that it applies to."""
    fits: Callable[[Run], bool]
    smallest_run: SmallestRun


def axis(name: str) -> Callable[[Run], bool]:
    """Predicate of runs: true if the layout has more than one rank along the axis `name`, such as `tp`."""
    return lambda run: getattr(run.layout, name) > 1


def _several(run: Run) -> bool:
    return run.layout.world_size > 1


def _shares_tokens(run: Run) -> bool:
    return run.layout.dp * run.layout.cp > 1


def _clips(run: Run) -> bool:
    return run.layout.world_size > 1 and run.optimizer.clip_grad_norm is not None


def _drops(run: Run) -> bool:
    return run.model.dropout > 0


def _repeats(run: Run) -> bool:
    """True if gradients are all-reduced over replicas: hybrid sharding (HSDP), or unsharded data parallelism."""
    return run.layout.group("replicate")[0] > 1


def _shards_state(run: Run) -> bool:
    return run.layout.group("shard")[0] > 1


def micro_batches(run: Run) -> int:
    """Micro-batches of a step on a rank."""
    return run.batch.sequences_per_batch // (run.layout.dp * run.layout.micro_batch_size)


def _shards_sequences(run: Run) -> bool:
    return run.layout.tp > 1 and run.layout.sequence_parallel


def _rings(run: Run) -> bool:
    """True if partial results of attention are merged: the ring of context parallelism has more than one rank."""
    return run.layout.cp > 1 and run.layout.cp_grid[0] > 1


def _mirrored(run: Run) -> bool:
    return has_mirrors(run.layout)


def _is_tied(run: Run) -> bool:
    """True if the head shares the embedding's weights, or the last stage holds the embedding too (multi-token prediction)."""
    return run.model.tie_word_embeddings or run.model.num_nextn_predict_layers > 0


def _tied_ends(run: Run) -> bool:
    return run.layout.pp > 1 and _is_tied(run)


def _has_experts(run: Run) -> bool:
    return run.model.num_experts > 0


def _balances(run: Run) -> bool:
    """True if the router has biases that balance load (DeepSeek-V3), and more than one rank counts it."""
    return run.layout.world_size > 1 and run.model.topk_method == "noaux_tc"


def _has_balance_loss(run: Run) -> bool:
    return run.layout.tp * run.layout.cp > 1 and _has_experts(run) and run.model.balance_loss_coef > 0


def _travels(run: Run) -> bool:
    return run.layout.ep * run.layout.expert_tp > 1


COPIES, TENSOR, CONTEXT = SmallestRun(layout={"dp": 2}), SmallestRun(layout={"tp": 2}), SmallestRun(layout={"cp": 2})
STAGES = SmallestRun(layout={"pp": 2, "layers_per_stage": (2, 1)})
MIRRORED = SmallestRun(layout=STAGES.layout | {"schedule": next(name for name, spec in SCHEDULES.items() if spec.copies > 1)})
ZERO_BUBBLE = next(name for name, spec in SCHEDULES.items() if spec.splits_backward)
MIXTRAL, DEEPSEEK = SmallestRun("tiny-mixtral", {"dp": 2, "ep": 2}), SmallestRun("tiny-deepseek-v3", {"dp": 2})
DROPS = {"dropout": 0.2}
TIED_ENDS, MIRRORS = "pp > 1, tied embedding", "a schedule with two copies of the weights"
_ALL = [
    # a step as a whole: which sequences, divided by what, clipped by which norm, updated how often
    Fault("mean-of-means", "each rank divides by its own count of valid targets (transformers#34191, nanotron, DeepSpeed)",
          "dp or cp > 1", _shares_tokens, COPIES),
    Fault("shifted-batch", "a rank reads its neighbour's sequences (picotron)", "dp > 1", axis("dp"), COPIES),
    Fault("counted-twice", "the embedding's gradient is added once too often (pytorch#160285; tied embeddings)",
          "several ranks", _several, COPIES),
    Fault("local-clip", "each rank clips by the norm of the gradients it holds (torchtitan#596: of its own stage)",
          "several ranks that hold different parts, and clip_grad_norm", _clips, SmallestRun(layout={"pp": 2})),
    Fault("norm-overcount", "the norm counts what several ranks of tp hold once for each of them", "tp > 1", axis("tp"),
          TENSOR),
    Fault("norm-of-replicas", "the norm counts every copy of the state (hybrid sharding)", "copies of the state",
          lambda run: run.layout.dp_replicate > 1, COPIES),
    Fault("tied-norm-twice", "the norm counts a tied embedding on the first stage and on the last", TIED_ENDS,
          _tied_ends, SmallestRun(layout={"pp": 2})),
    Fault("norm-without-experts", "the norm leaves out experts (Megatron#5916)", "ep > 1", axis("ep"), MIXTRAL),
    Fault("norm-without-sinks", "the norm leaves out attention sinks, which tp cuts (Megatron#7452, 8)", "attention sinks",
          lambda run: run.layout.world_size > 1 and run.model.attention_sinks, SmallestRun("tiny-gpt-oss", {"tp": 2})),
    Fault("initial-weights", "each rank draws its own initial weights (pytorch#168058; torchtitan#2387: routers)",
          "several ranks", _several, COPIES),
    Fault("stale-copy", "the forward pass reads the weights of the step before (FSDP shards not refreshed: Megatron#3510)",
          "several ranks", _several, COPIES),
    Fault("drifting-replica", "one rank rounds its copy of a weight otherwise: 1e-14 of it", "several copies",
          lambda run: run.layout.dp_replicate > 1, COPIES),
    Fault("decayed-norms", "weight decay reaches norms and biases", "several ranks", _several, COPIES),
    Fault("step-forgotten", "AdamW's count of updates starts again each step (accelerate#3971)", "several ranks", _several,
          COPIES),
    # dropout
    Fault("dropout-own-places", "a rank drops by its own count of tokens, not by their place in the sequence (Megatron#1256)",
          "cp > 1 and dropout", lambda run: _drops(run) and run.layout.cp > 1, SmallestRun(layout={"cp": 2}, model=DROPS)),
    Fault("dropout-same-on-ranks", "every rank draws the bits of the first", "dp > 1 and dropout",
          lambda run: _drops(run) and run.layout.dp > 1, SmallestRun(layout={"dp": 2}, model=DROPS)),
    Fault("dropout-drawn-again", "recomputation drops other elements than the forward pass did", "recomputation and dropout",
          lambda run: _drops(run) and run.layout.recompute == "full", SmallestRun(layout={"recompute": "full"}, model=DROPS)),
    # data parallelism and accumulation: gradients summed over too few, too many, or the wrong ones
    Fault("missing-reduce", "gradients are never summed over the ranks (picotron: cp > 1 at dp = 1)", "dp or cp > 1",
          _shares_tokens, COPIES),
    Fault("missing-scatter", "gradients are summed over copies of the state, but not over the ranks that cut it",
          "a ZeRO stage", _shards_state, SmallestRun(layout={"dp": 2, "zero_stage": 2})),
    Fault("missing-replicas", "gradients are summed over the ranks that cut the state, but not over its copies",
          "copies of the state", _repeats, SmallestRun(layout={"dp": 4, "dp_shard": 2, "zero_stage": 1})),
    Fault("reduced-twice", "gradients that are whole are summed over the ranks once more (DeepSpeed#7718, Megatron#7160)",
          "copies of the state", _repeats, COPIES),
    Fault("averaged", "gradients of sums are averaged over the ranks, as FSDP2 does unless told", "dp or cp > 1",
          _shares_tokens, SmallestRun(layout={"dp": 2, "zero_stage": 3})),
    Fault("accumulation-reset", "only the last micro-batch's gradient is kept (Fast-LLM#550)", "several micro-batches",
          lambda run: _shares_tokens(run) and micro_batches(run) > 1 and run.layout.pp == 1,
          SmallestRun(layout={"dp": 2, "zero_stage": 2})),
    Fault("moving-average", "each micro-batch divides what was accumulated before (torchtitan#1733, torch's scale_grads)",
          "several micro-batches", lambda run: run.layout.world_size > 1 and micro_batches(run) > 1,
          SmallestRun(layout={"pp": 2})),
    # tensor and sequence parallelism
    Fault("tp-sum-missing", "products cut by rows are not summed over tp", "tp > 1", axis("tp"), TENSOR),
    Fault("tp-input-gradient", "gradients of a column product's input are not summed over tp", "tp > 1", axis("tp"), TENSOR),
    Fault("tp-input-gradient-twice", "gradients of a column product's input are summed over tp twice", "tp > 1", axis("tp"),
          TENSOR),
    Fault("tp-bias-everywhere", "the bias of a row product is added on every rank of tp", "tp > 1 and such biases",
          lambda run: run.layout.tp > 1 and (run.model.mlp_bias or run.model.attention_output_bias),
          SmallestRun("tiny-gpt2", {"tp": 2})),
    Fault("tp-vocabulary-offset", "ranks of tp take the vocabulary to be cut one row further on", "tp > 1", axis("tp"), TENSOR),
    Fault("tp-normaliser", "the loss takes every rank's logits for the whole vocabulary's: log(tp) too high (Megatron#7452, 2)",
          "tp > 1", axis("tp"), TENSOR),
    Fault("tp-copies", "gradients of norms are not summed over tp (torchtitan#1373, Megatron's sequence parallelism)",
          "tp > 1 with sequence_parallel", _shards_sequences, TENSOR),
    Fault("tp-copies-twice", "gradients that every rank of tp has whole are summed over tp", "tp > 1, no sequence_parallel",
          lambda run: run.layout.tp > 1 and not run.layout.sequence_parallel,
          SmallestRun(layout={"tp": 2, "sequence_parallel": False})),
    Fault("tp-key-heads", "copies of a head of keys or values that several ranks hold go their own ways (bigcode Megatron#35)",
          "tp > num_key_value_heads", lambda run: run.layout.tp > run.model.num_key_value_heads,
          SmallestRun(layout={"tp": 2}, model={"num_key_value_heads": 1})),
    Fault("tp-shared-key", "the gradient of latent attention's shared rope key is not summed over tp (torchtitan#1373)",
          "tp > 1 and latent attention", lambda run: run.layout.tp > 1 and run.model.latent_attention,
          SmallestRun("tiny-deepseek-v3", {"tp": 2})),
    Fault("tp-positions", "a rank adds the learned positions of another rank's part of the sequence (Megatron#7452, 7)",
          "tp > 1 with sequence_parallel, learned positions",
          lambda run: _shards_sequences(run) and run.model.position_embedding == "learned",
          SmallestRun("tiny-gpt2", {"tp": 2})),
    # context parallelism
    Fault("cp-rope-restarted", "rotary positions are counted from the start of each rank's part", "cp > 1, rotary positions",
          lambda run: run.layout.cp > 1 and run.model.position_embedding == "rotary", CONTEXT),
    Fault("cp-order", "tokens are dealt out one place further on than masks take them to be (zigzag off by one)", "cp > 1",
          axis("cp"), CONTEXT),
    Fault("cp-targets", "each rank makes its targets from its own tokens (Megatron#673: labels rolled over the border)",
          "cp > 1", axis("cp"), CONTEXT),
    Fault("cp-weights-of-parts", "parts of attention are joined without their log-sum-exp", "cp > 1 over a ring", _rings,
          CONTEXT),
    Fault("cp-own-lse", "the backward pass of a part takes its own log-sum-exp for all parts' (TransformerEngine#1557)",
          "cp > 1 over a ring", _rings, CONTEXT),
    Fault("cp-gradients-lost", "gradients of keys and values never come home from other ranks", "cp > 1 over a ring", _rings,
          CONTEXT),
    Fault("cp-documents-seen", "masks leave out documents where queries and keys are on several ranks", "cp > 1, documents",
          lambda run: run.layout.cp > 1 and run.data.document_mask, CONTEXT),
    # pipeline parallelism
    Fault("pp-order", "the last stage takes the targets of another micro-batch", "pp > 1, several micro-batches",
          lambda run: run.layout.pp > 1 and run.batch.sequences_per_batch > run.layout.dp * run.layout.micro_batch_size,
          STAGES),
    Fault("pp-gradient-dropped", "the gradient of the first micro-batch never reaches the stage before", "pp > 1", axis("pp"),
          STAGES),
    Fault("pp-documents", "stages after the first do not know the documents (torchtitan)", "pp > 1, documents",
          lambda run: run.layout.pp > 1 and run.data.document_mask, STAGES),
    Fault("pp-tied", "gradients of a tied embedding on first and last stage are not added up", TIED_ENDS, _tied_ends, STAGES),
    Fault("pp-tied-twice", "gradients of a tied embedding are added up twice (Megatron#844)", TIED_ENDS, _tied_ends, STAGES),
    Fault("pp-tied-updated-twice", "the last stage updates its copy of a tied embedding once more", TIED_ENDS, _tied_ends,
          STAGES),
    Fault("pp-weights-dropped", "a zero-bubble W forgets one matrix", "a zero-bubble schedule",
          lambda run: bool((known := run.layout.known_schedule) and known.splits_backward),
          SmallestRun(layout=STAGES.layout | {"schedule": ZERO_BUBBLE})),
    Fault("pp-mirror", "the two copies of a stage do not add up their gradients (DualPipe)", MIRRORS, _mirrored, MIRRORED),
    Fault("pp-mirror-twice", "the two copies of a stage add up their gradients twice (DualPipe)", MIRRORS, _mirrored, MIRRORED),
    Fault("pp-mirror-drifts", "one of the two copies of a stage is updated with its own half of the gradient (DualPipe)",
          MIRRORS, _mirrored, MIRRORED),
    Fault("norm-of-mirrors", "the norm counts both copies of a stage (DualPipe)", MIRRORS, _mirrored, MIRRORED),
    # mixtures of experts
    Fault("expert-gradients-doubled", "gradients of experts are ep times too large (pytorch#160285)", "ep > 1", axis("ep"),
          MIXTRAL),
    Fault("expert-gradients-mixed", "gradients of different experts are summed, as if all ranks held the same (Megatron#5916)",
          "ep > 1", axis("ep"), MIXTRAL),
    Fault("expert-gradients-averaged", "gradients of experts are averaged over the ranks that repeat them (Megatron#7165)",
          "ep or expert_tp > 1 and several copies of experts",
          lambda run: _has_experts(run) and _travels(run) and run.layout.expert_dp > 1,
          SmallestRun("tiny-mixtral", {"dp": 4, "ep": 2})),
    Fault("router-detached", "weights of choices get no gradient through the dispatch (transformers#48687, Automodel#2995)",
          "ep or expert_tp > 1", _travels, MIXTRAL),
    Fault("expert-rows-unsorted", "results go home in the order in which experts computed them", "ep > 1", axis("ep"), MIXTRAL),
    Fault("expert-bias-everywhere", "the bias of an expert's last product is added on every rank of expert_tp",
          "expert_tp > 1 and biases", lambda run: run.layout.expert_tp > 1 and run.model.mlp_bias,
          SmallestRun("tiny-gpt-oss", {"dp": 2, "expert_tp": 2})),
    Fault("router-counts-overwritten", "only the last micro-batch's choices are counted", "experts, several ranks",
          lambda run: run.layout.world_size > 1 and _has_experts(run), DEEPSEEK),
    Fault("router-counts-twice", "choices are counted again where blocks are recomputed", "experts, recomputation",
          lambda run: run.layout.world_size > 1 and _has_experts(run) and run.layout.recompute != "none",
          SmallestRun("tiny-deepseek-v3", {"dp": 2, "recompute": "full"})),
    Fault("expert-bias-local", "each rank moves the biases that even out the load by its own counts (torchtitan#2416)",
          "several ranks, a bias that balances", _balances, DEEPSEEK),
    Fault("auxiliary-scale", "losses for balance are weighted by the number of ranks (Megatron#5047)", "a loss for balance",
          _has_balance_loss, SmallestRun("tiny-olmoe", {"tp": 2})),
    Fault("auxiliary-counts", "a loss for balance counts only the choices of this rank's part of the sequence",
          "a loss for balance, cp > 1 or tp > 1 with sequence_parallel",
          lambda run: _has_balance_loss(run) and (run.layout.cp > 1 or run.layout.sequence_parallel),
          SmallestRun("tiny-olmoe", {"cp": 2})),
]  # fmt: skip
FAULTS: dict[str, Fault] = {fault.name: fault for fault in _ALL}
"""Every fault, by name."""


def suitable(run: Run) -> list[str]:
    """The faults that a run can have; a single process shows nothing about faults between processes."""
    return [name for name, fault in FAULTS.items() if fault.fits(run)]


def expect_known(name: str) -> None:
    """Raise SpecError unless `name` is a fault, or `all`."""
    if name != "all" and name not in FAULTS:
        remedy = did_you_mean(name, FAULTS, "`ultrascale check --plant list` names them.", most=3, cutoff=0.4)
        raise mistake("--plant", f"knows no fault {name!r}", remedy)


def expect_fault(name: str, run: Run) -> None:
    """Raise SpecError unless `name` is a fault (or `all`) that can be planted into `run`."""
    expect_known(name)
    if name != "all" and not FAULTS[name].fits(run):
        remedy = f"Choose one of {', '.join(suitable(run))}, or all."
        raise mistake("--plant", f"{name} needs {FAULTS[name].needs}", remedy)
