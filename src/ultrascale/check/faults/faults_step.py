"""Faults of a step as a whole: which sequences, divided by what, clipped by which norm, updated how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from ultrascale.check.faults.fault import Home, axis, fault, is_tied
from ultrascale.description.progress import StepSpan
from ultrascale.description.run import Run
from ultrascale.parallel.share import TIED, Held, Share, local
from ultrascale.train.trainer import Trainer


def _several(run: Run) -> bool:
    return run.layout.world_size > 1


def _shares_tokens(run: Run) -> bool:
    return run.layout.dp * run.layout.cp > 1


def _clips(run: Run) -> bool:
    return run.layout.world_size > 1 and run.optimizer.clip_grad_norm is not None


@fault("mean-of-means", "each rank divides by its own count of valid targets (transformers#34191, nanotron, DeepSpeed)",
       needs="dp or cp > 1", fits=_shares_tokens, home=Home(layout={"dp": 2}))  # fmt: skip
def _mean_of_means(trainer: Trainer) -> Iterator[None]:
    agree, ranks = trainer.agree_on_targets, trainer.run.layout.dp * trainer.run.layout.cp

    def own_mean(micro_batches: Any) -> int:
        agree(micro_batches)
        return sum(batch.num_targets for batch in micro_batches) * ranks

    with patch.object(trainer, "agree_on_targets", own_mean):
        yield


@fault("shifted-batch", "a rank reads its neighbour's sequences (picotron)", needs="dp > 1", fits=axis("dp"),
       home=Home(layout={"dp": 2}))  # fmt: skip
def _shifted_batch(trainer: Trainer) -> Iterator[None]:
    read = trainer.read_micro_batches

    def shifted(span: StepSpan) -> Any:
        shift = trainer.run.layout.micro_batch_size if trainer.share.mesh.at.dp == 1 else 0
        return read(StepSpan(span.first_sequence + shift, span.num_sequences))

    with patch.object(trainer, "read_micro_batches", shifted):
        yield


@fault("counted-twice", "the embedding's gradient is added once too often (pytorch#160285; tied embeddings)",
       needs="several ranks", fits=_several, home=Home(layout={"dp": 2}))  # fmt: skip
def _counted_twice(trainer: Trainer) -> Iterator[None]:
    train = trainer.passes.train

    def doubled(*arguments: Any) -> list[Tensor]:
        losses = train(*arguments)
        for one in trainer.share.held:
            if one.name == TIED and one.parameter.grad is not None:
                local(one.parameter.grad).mul_(2)
        return losses

    with patch.object(trainer.passes, "train", doubled):
        yield


@fault("local-clip", "each rank clips by the norm of the gradients it holds (torchtitan#596: of its own stage)",
       needs="several ranks that hold different parts, and clip_grad_norm", fits=_clips,
       home=Home(layout={"pp": 2}))  # fmt: skip
def _local_clip(trainer: Trainer) -> Iterator[None]:
    update = trainer.update

    def clipped(norm: float) -> float:
        own = [local(one.parameter.grad) for one in trainer.share.held if one.parameter.grad is not None]
        return update(float(torch.stack([gradient.norm() for gradient in own]).norm()))

    with patch.object(trainer, "update", clipped):
        yield


def _counting(trainer: Trainer, counts: Callable[[Share, Held], bool]) -> Any:
    return patch.object(Share, "_counts", counts)


@fault("norm-overcount", "the norm counts what several ranks of tp hold once for each of them", needs="tp > 1", fits=axis("tp"),
       home=Home(layout={"tp": 2}))  # fmt: skip
def _norm_overcount(trainer: Trainer) -> Iterator[None]:
    with _counting(trainer, lambda share, one: not one.is_second):
        yield


@fault("norm-of-replicas", "the norm counts every copy of the state (hybrid sharding)", needs="copies of the state",
       fits=lambda run: run.layout.dp_replicate > 1, home=Home(layout={"dp": 2}))  # fmt: skip
def _norm_of_replicas(trainer: Trainer) -> Iterator[None]:
    with _counting(trainer, lambda share, one: not one.is_second and not one.place.copy):
        yield


@fault("tied-norm-twice", "the norm counts a tied embedding on the first stage and on the last", needs="pp > 1, tied embedding",
       fits=lambda run: run.layout.pp > 1 and is_tied(run.model), home=Home(layout={"pp": 2}))  # fmt: skip
def _tied_norm_twice(trainer: Trainer) -> Iterator[None]:
    counts = Share._counts
    with _counting(trainer, lambda share, one: counts(share, one._replace(is_second=False))):
        yield


@fault("norm-without-experts", "the norm leaves out experts (Megatron#5916)", needs="ep > 1", fits=axis("ep"),
       home=Home("tiny-mixtral", {"dp": 2, "ep": 2}))  # fmt: skip
def _norm_without_experts(trainer: Trainer) -> Iterator[None]:
    counts = Share._counts
    with _counting(trainer, lambda share, one: counts(share, one) and not one.weight.is_expert):
        yield


@fault("norm-without-sinks", "the norm leaves out attention sinks, which tp cuts (Megatron#7452, 8)", needs="attention sinks",
       fits=lambda run: run.layout.world_size > 1 and run.model.attention_sinks,
       home=Home("tiny-gpt-oss", {"tp": 2}))  # fmt: skip
def _norm_without_sinks(trainer: Trainer) -> Iterator[None]:
    counts = Share._counts
    with _counting(trainer, lambda share, one: counts(share, one) and not one.name.endswith("sinks")):
        yield


@fault("initial-weights", "each rank draws its own initial weights (pytorch#168058; torchtitan#2387: routers)",
       needs="several ranks", fits=_several, home=Home(layout={"dp": 2}))  # fmt: skip
def _initial_weights(trainer: Trainer) -> Iterator[None]:
    one = next(one for one in trainer.share.held if one.name.endswith("_proj.weight"))
    if trainer.ranks.rank == trainer.ranks.world - 1:
        with torch.no_grad():
            local(one.parameter).copy_(local(one.parameter).flip(0))
    yield


@fault("stale-copy", "the forward pass reads the weights of the step before (FSDP shards not refreshed: Megatron#3510)",
       needs="several ranks", fits=_several, home=Home(layout={"dp": 2}))  # fmt: skip
def _stale_copy(trainer: Trainer) -> Iterator[None]:
    compute, previous = trainer.compute_gradients, [_values(trainer)]

    def stale() -> Any:
        current = _values(trainer)
        _set(trainer, previous.pop())
        result = compute()
        _set(trainer, current)
        previous.append(current)
        return result

    with patch.object(trainer, "compute_gradients", stale):
        yield


@fault("drifting-replica", "one rank rounds its copy of a weight otherwise: 1e-14 of it", needs="several copies",
       fits=lambda run: run.layout.dp_replicate > 1, home=Home(layout={"dp": 2}))  # fmt: skip
def _drifting_replica(trainer: Trainer) -> Iterator[None]:
    update = trainer.update

    def rounded(norm: float) -> float:
        rate = update(norm)
        if trainer.ranks.rank == trainer.ranks.world - 1:
            with torch.no_grad():
                local(trainer.share.held[-1].parameter).mul_(1 + 1e-14)
        return rate

    with patch.object(trainer, "update", rounded):
        yield


@fault("decayed-norms", "weight decay reaches norms and biases", needs="several ranks", fits=_several,
       home=Home(layout={"dp": 2}))  # fmt: skip
def _decayed_norms(trainer: Trainer) -> Iterator[None]:
    groups = trainer.optimizer.param_groups
    before = [group["weight_decay"] for group in groups]
    for group in groups:
        group["weight_decay"] = max(before)
    yield
    for group, decay in zip(groups, before, strict=True):
        group["weight_decay"] = decay


@fault("step-forgotten", "AdamW's count of updates starts again each step (accelerate#3971)", needs="several ranks",
       fits=_several, home=Home(layout={"dp": 2}))  # fmt: skip
def _step_forgotten(trainer: Trainer) -> Iterator[None]:
    update = trainer.update

    def forgetful(norm: float) -> float:
        for state in trainer.optimizer.state.values():
            state["step"].zero_()
        return update(norm)

    with patch.object(trainer, "update", forgetful):
        yield


def _values(trainer: Trainer) -> list[Tensor]:
    return [local(one.parameter).detach().clone() for one in trainer.share.held]


@torch.no_grad()
def _set(trainer: Trainer, values: list[Tensor]) -> None:
    for one, value in zip(trainer.share.held, values, strict=True):
        local(one.parameter).copy_(value)
