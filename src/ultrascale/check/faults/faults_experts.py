"""Faults of mixtures of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.check.faults.fault import Home, axis, fault, with_experts
from ultrascale.description.run import Run
from ultrascale.models.experts import GroupedLinear, Seen, moe_layers
from ultrascale.parallel.expert import expert_dispatch
from ultrascale.parallel.share import local
from ultrascale.train import passes
from ultrascale.train.trainer import Trainer

MIXTRAL = Home("tiny-mixtral", {"dp": 2, "ep": 2})
DEEPSEEK = Home("tiny-deepseek-v3", {"dp": 2})


def _balances(run: Run) -> bool:
    """True if the router has biases that balance load (DeepSeek-V3), and more than one rank counts it."""
    return run.layout.world_size > 1 and run.model.topk_method == "noaux_tc"


def _has_balance_loss(run: Run) -> bool:
    return run.layout.tp * run.layout.cp > 1 and with_experts(run) and run.model.balance_loss_coef > 0


def _travels(run: Run) -> bool:
    return run.layout.ep * run.layout.expert_tp > 1


def _after_backward(trainer: Trainer, change: Callable[[Tensor], Any]) -> Any:
    """Let `change` have each expert weight's gradient before gradients are finished."""
    finish = trainer.share.finish_gradients

    def changed() -> None:
        for one in trainer.share.held:
            if one.weight.is_expert and one.parameter.grad is not None:
                change(local(one.parameter.grad))
        finish()

    return patch.object(trainer.share, "finish_gradients", changed)


@fault("expert-gradients-doubled", "gradients of experts are ep times too large (pytorch#160285)", needs="ep > 1",
       fits=axis("ep"), home=MIXTRAL)  # fmt: skip
def _gradients_doubled(trainer: Trainer) -> Iterator[None]:
    with _after_backward(trainer, lambda gradient: gradient.mul_(trainer.run.layout.ep)):
        yield


@fault("expert-gradients-mixed", "gradients of different experts are summed, as if all ranks held the same (Megatron#5916)",
       needs="ep > 1", fits=axis("ep"), home=MIXTRAL)  # fmt: skip
def _gradients_mixed(trainer: Trainer) -> Iterator[None]:
    group = trainer.share.mesh.group("ep")
    with _after_backward(trainer, lambda gradient: dist.all_reduce(gradient, group=group)):
        yield


@fault("expert-gradients-averaged", "gradients of experts are averaged over the ranks that repeat them (Megatron#7165)",
       needs="ep or expert_tp > 1 and several copies of experts",
       fits=lambda run: with_experts(run) and _travels(run) and run.layout.expert_dp > 1,
       home=Home("tiny-mixtral", {"dp": 4, "ep": 2}))  # fmt: skip
def _gradients_averaged(trainer: Trainer) -> Iterator[None]:
    # What a rank alone had is gone after the sum; the mean over ranks is as wrong.
    with _after_backward(trainer, lambda gradient: gradient.div_(trainer.run.layout.expert_dp)):
        yield


@fault("router-detached", "weights of choices get no gradient through the dispatch (transformers#48687, Automodel#2995)",
       needs="ep or expert_tp > 1", fits=_travels, home=MIXTRAL)  # fmt: skip
def _router_detached(trainer: Trainer) -> Iterator[None]:
    weighted_sum = expert_dispatch.weighted_sum

    def detached(rows: Tensor, pairs: Tensor, weights: Tensor) -> Tensor:
        return weighted_sum(rows, pairs, weights.detach())

    with patch.object(expert_dispatch, "weighted_sum", detached):
        yield


@fault("expert-rows-unsorted", "results go home in the order in which experts computed them", needs="ep > 1", fits=axis("ep"),
       home=MIXTRAL)  # fmt: skip
def _rows_unsorted(trainer: Trainer) -> Iterator[None]:
    with patch.object(expert_dispatch, "put_back", lambda rows, order: rows):
        yield


@fault("expert-bias-everywhere", "the bias of an expert's last product is added on every rank of expert_tp",
       needs="expert_tp > 1 and biases", fits=lambda run: run.layout.expert_tp > 1 and run.model.mlp_bias,
       home=Home("tiny-gpt-oss", {"dp": 2, "expert_tp": 2}))  # fmt: skip
def _bias_everywhere(trainer: Trainer) -> Iterator[None]:
    modules = [module for stage in trainer.share.stages.values() for module in stage.modules()]
    quiet = [module for module in modules if isinstance(module, GroupedLinear) and not module.adds_bias]
    with torch.no_grad():  # biases begin at zero, where it makes no difference
        for one in trainer.share.held:
            if one.weight.is_expert and one.name.endswith("down_proj.bias"):
                local(one.parameter).add_(0.01)
    for module in quiet:
        module.adds_bias = True
    yield
    for module in quiet:
        module.adds_bias = False


@fault("router-counts-overwritten", "only the last micro-batch's choices are counted", needs="experts, several ranks",
       fits=lambda run: run.layout.world_size > 1 and with_experts(run), home=DEEPSEEK)  # fmt: skip
def _counts_overwritten(trainer: Trainer) -> Iterator[None]:
    def overwrite(seen: Seen, counts: Tensor, auxiliary: Tensor | None) -> None:
        seen.counts, seen.auxiliary = counts, auxiliary

    with patch.object(Seen, "add", overwrite):
        yield


@fault("router-counts-twice", "choices are counted again where blocks are recomputed", needs="experts, recomputation",
       fits=lambda run: run.layout.world_size > 1 and with_experts(run) and run.layout.recompute != "none",
       home=Home("tiny-deepseek-v3", {"dp": 2, "recompute": "full"}))  # fmt: skip
def _counts_twice(trainer: Trainer) -> Iterator[None]:
    add = Seen.add

    def twice(seen: Seen, counts: Tensor, auxiliary: Tensor | None) -> None:
        add(seen, counts, auxiliary)
        add(seen, counts, None)

    with patch.object(Seen, "add", twice):
        yield


@fault("expert-bias-local", "each rank moves the biases that even out the load by its own counts (torchtitan#2416)",
       needs="several ranks, a bias that balances", fits=_balances, home=DEEPSEEK)  # fmt: skip
def _bias_local(trainer: Trainer) -> Iterator[None]:
    apply = trainer.apply

    def alone(gradients: Any) -> Any:
        with patch.object(type(trainer.ranks), "sum", lambda ranks, values: values):
            return apply(gradients)

    with patch.object(trainer, "apply", alone):
        yield


@fault("auxiliary-scale", "losses for balance are weighted by the number of ranks (Megatron#5047)", needs="a loss for balance",
       fits=_has_balance_loss, home=Home("tiny-olmoe", {"tp": 2}))  # fmt: skip
def _auxiliary_scale(trainer: Trainer) -> Iterator[None]:
    scale = passes.scale_auxiliary_losses
    ranks = trainer.run.layout.tp * trainer.run.layout.cp

    with patch.object(passes, "scale_auxiliary_losses", lambda stage, factor: scale(stage, factor * ranks)):
        yield


@fault("auxiliary-counts", "a loss for balance counts only the choices of this rank's part of the sequence",
       needs="a loss for balance, cp > 1 or tp > 1 with sequence_parallel",
       fits=lambda run: _has_balance_loss(run) and (run.layout.cp > 1 or run.layout.sequence_parallel),
       home=Home("tiny-olmoe", {"cp": 2}))  # fmt: skip
def _auxiliary_counts(trainer: Trainer) -> Iterator[None]:
    layers = [layer for stage in trainer.share.stages.values() for _, layer in moe_layers(stage)]
    before = [layer.router.sum_counts for layer in layers]
    for layer in layers:
        layer.router.sum_counts = lambda counts: counts
    yield
    for layer, sums in zip(layers, before, strict=True):
        layer.router.sum_counts = sums
