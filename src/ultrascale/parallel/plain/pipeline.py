"""Pipeline parallelism: the actions of a schedule, executed one after the other by the rank that they are for.

A rank holds one stage. F takes what the stage before made, and hands on its own; B takes the gradient of that from the stage
after, and hands back the gradient of its input. Which of them comes next is all that a schedule says
(`schedules.kinds.one_f_one_b`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ultrascale.schedules.actions import Action, Kind


def run_schedule(
    actions: Sequence[Action],
    stage: nn.Module,
    micro_batches: Sequence[Tensor],
    loss: Callable[[Tensor, int], Tensor],
    shape: Sequence[int],
) -> list[float]:
    """Leave the gradients of the losses' sum in `stage`. Returns the losses, on the last rank.

    `micro_batches`: the first stage's inputs. `loss`: of the last stage's output of a micro-batch. `shape`: of what stages
    hand on.
    """
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    under_way: dict[int, tuple[Tensor, Tensor]] = {}
    losses: list[float] = []
    sent: list[tuple[dist.Work | None, Tensor]] = []  # a tensor must live until it has gone
    dtype = next(stage.parameters()).dtype
    for action in actions:
        number = action.micro_batch
        if action.kind is Kind.FORWARD:
            inputs = micro_batches[number] if rank == 0 else _receive(shape, dtype, rank - 1)
            output = stage(inputs.requires_grad_(inputs.is_floating_point()))
            if rank == last:
                output = loss(output, number)
                losses.append(output.item())
            else:
                sent.append((dist.isend(output.detach(), rank + 1), output))
            under_way[number] = inputs, output
        else:
            inputs, output = under_way.pop(number)  # what the stage kept of this micro-batch goes with it
            output.backward(None if rank == last else _receive(shape, dtype, rank + 1))
            if rank > 0 and inputs.grad is not None:
                sent.append((dist.isend(inputs.grad, rank - 1), inputs.grad))
    for work, _ in sent:
        if work is not None:
            work.wait()
    return losses


def _receive(shape: Sequence[int], dtype: torch.dtype, source: int) -> Tensor:
    received = torch.empty(*shape, dtype=dtype)
    dist.recv(received, source)
    return received
