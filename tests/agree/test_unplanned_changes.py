"""Changes to the trainer that the planner does not know: each is seen by the agreement, and named with its line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from agree.test_trace_agrees import LENGTH, LIMIT_PERCENT, MODEL, Traced, compared
from torch import Tensor

from ultrascale.description.layout import Layout
from ultrascale.description.run import Batch, Data, Run
from ultrascale.models.decoder import Block
from ultrascale.parallel.share import Share
from ultrascale.train.trainer import Trainer

LAYOUT = Layout(dp=2, tp=2, zero_stage=2, precision="bf16", micro_batch_size=2)
ONE = Traced(
    Run(replace(MODEL, num_hidden_layers=2), layout=LAYOUT, batch=Batch(LENGTH, 8), data=Data(document_mask=False)), 0
)  # fmt: skip


class _Keeps(torch.autograd.Function):
    """The identity, with a copy of its input kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor) -> Tensor:
        ctx.save_for_backward(hidden.float().repeat(1, 1, 8))
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0]


def sum_again(share: Share) -> None:
    dist.all_reduce(torch.zeros(1000, device=share.mesh.device))


def saves_more(block: Block, hidden: Tensor, *rest: Any) -> tuple[Any, ...]:
    return (_Keeps.apply(hidden), *rest)


def keeps_a_buffer(trainer: Trainer) -> None:
    trainer.buffer = torch.empty(2**25, device=trainer.share.mesh.device)  # pyright: ignore[reportAttributeAccessIssue]


def multiplies_more(block: Block, hidden: Tensor, *rest: Any) -> tuple[Any, ...]:
    with torch.no_grad():
        torch.mm(hidden[0], hidden[0].t())
    return (hidden, *rest)


def before(owner: type, name: str, first: Callable[..., Any]) -> Callable[..., Any]:
    """`owner.name` behind `first`, which gives other arguments or none."""
    original = getattr(owner, name)

    def both(self: Any, *arguments: Any, **options: Any) -> Any:
        changed = first(self, *arguments)
        return original(self, *(arguments if changed is None else changed), **options)

    return both


@pytest.fixture
def does_first(monkeypatch: pytest.MonkeyPatch) -> Callable[[type, str, Callable[..., Any]], None]:
    """Puts something that the planner does not know before a part of a step."""
    return lambda owner, name, first: monkeypatch.setattr(owner, name, before(owner, name, first))


def test_without_a_change_plan_and_trace_agree() -> None:
    assert compared(ONE)[1] == []


@pytest.mark.parametrize(
    "owner, name, change, named",
    [
        (Share, "finish_gradients", sum_again, ("all_reduce", "4000 bytes", "train/")),
        (Block, "forward", saves_more, ("peak", "activations", "repeat", "models/decoder.py")),
        (Trainer, "train_step", keeps_a_buffer, ("peak", "empty", "128.0 MiB")),
        (Block, "forward", multiplies_more, ("products",)),
    ],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_change_that_the_planner_does_not_know_is_named(
    owner: type, name: str, change: Callable[..., Any], named: tuple[str, ...], does_first
) -> None:
    does_first(owner, name, change)
    _, wrong = compared(ONE)
    assert wrong
    for word in named:
        assert any(word in one for one in wrong), wrong


def test_a_saved_tensor_that_the_peak_does_not_show_is_seen_in_the_activations(does_first) -> None:
    does_first(Block, "forward", saves_more)
    apart, wrong = compared(ONE._replace(run=replace(ONE.run, batch=Batch(64, 8))))
    assert abs(apart.peak) < LIMIT_PERCENT  # of weights and gradients
    (told,) = wrong
    assert told.startswith(f"activations: {apart.activations:+.2f} %") and "repeat at models/decoder.py" in told
