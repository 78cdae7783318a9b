"""AdamW on local parts: the bits of torch's fused AdamW, on whole and on cut parameters, without a dispatch of DTensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.optim import AdamW
from torch.utils._python_dispatch import TorchDispatchMode

from ultrascale.description.layout import Layout
from ultrascale.launch.forked import run_forked
from ultrascale.parallel.mesh import process_group
from ultrascale.train.optimizers.host_optimizer import LocalAdamW

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1, "fused": True}


def groups(wrap) -> list[dict[str, Any]]:
    numbers = torch.Generator().manual_seed(3)
    sizes = [[(8, 3), (5, 4)], [(7,), (1, 2)]]  # 7, 5 and 1 rows are not even over two ranks
    parameters = [[nn.Parameter(wrap(torch.randn(size, generator=numbers))) for size in one] for one in sizes]
    return [{"params": parameters[0]}, {"params": parameters[1], "weight_decay": 0.0}]


def trained(kind: type[AdamW], wrap, steps: int = 3) -> list[torch.Tensor]:
    """Parameters and moments after some steps, in which one parameter has no gradient."""
    optimizer = kind(groups(wrap), **SETTINGS)
    every = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in every:
        optimizer.state[parameter] = {
            "step": torch.zeros(()),
            **{n: torch.zeros_like(parameter) for n in ("exp_avg", "exp_avg_sq")},
        }
    numbers = torch.Generator().manual_seed(4)
    for _ in range(steps):
        for parameter in every[:-1]:
            parameter.grad = wrap(torch.randn(parameter.shape, generator=numbers))
        optimizer.step()
    return [one for parameter in every for one in (parameter.detach(), *optimizer.state[parameter].values())]


def same_bits(mine: list[torch.Tensor], torchs: list[torch.Tensor]) -> bool:
    whole = [[one.full_tensor() if isinstance(one, DTensor) else one for one in every] for every in (mine, torchs)]
    return all(torch.equal(a, b) for a, b in zip(*whole, strict=True))


def test_whole_parameters_get_the_bits_of_torchs() -> None:
    mine, torchs = (trained(kind, lambda tensor: tensor) for kind in (LocalAdamW, AdamW))
    assert same_bits(mine, torchs)
    assert not same_bits(mine, trained(AdamW, lambda tensor: tensor, steps=2))


def cut_rank(rendezvous: str) -> None:
    with process_group(Layout(dp=2), device="cpu", timeout_seconds=60, rendezvous=rendezvous):
        mesh = init_device_mesh("cpu", (2,))

        def cut(tensor: torch.Tensor) -> DTensor:
            return DTensor.from_local(tensor, mesh, run_check=False).redistribute(placements=[Shard(0)])

        with Updates() as updates:
            mine = trained(LocalAdamW, cut)
        assert all(isinstance(one, DTensor) for one in (mine[0], mine[2])) and updates.seen == {torch.Tensor}
        with Updates() as updates:
            torchs = trained(AdamW, cut)
        assert same_bits(mine, torchs) and DTensor in updates.seen


def test_cut_parameters_get_the_bits_of_torchs_and_no_operation_sees_a_distributed_tensor() -> None:
    run_forked(2, cut_rank)


class Updates(TorchDispatchMode):
    """On what kind of tensors the fused update was called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[type] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "_fused_adamw_" in str(func):
            self.seen |= {DTensor if isinstance(one, DTensor) else torch.Tensor for one in args[0]}
        if any(issubclass(one, DTensor) for one in types):
            return NotImplemented  # DTensor's own dispatch takes it
        return func(*args, **(kwargs or {}))
