"""Pipeline parallelism: each rank executes its actions of a schedule, one after the other.

A rank holds one stage. F takes the previous stage's output and sends its own to the next stage; B takes the gradient of that
output from the next stage and sends the gradient of its input to the previous one. A schedule only decides which of them comes
next (`schedules.kinds.one_f_one_b`).
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
    """Leave the gradients of the summed losses in `stage`. Returns the losses, on the last rank.

    `micro_batches`: the first stage's inputs. `loss`: of the last stage's output and the micro-batch number. `shape`: of the
    activations between stages.
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
            inputs, output = under_way.pop(number)  # frees the tensors saved for this micro-batch
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
