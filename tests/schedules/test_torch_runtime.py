"""torch's own pipeline runtime takes the schedules as they are: the lists are the field's, whoever executes them."""

import pytest
import torch
from ranks import run_ranks
from torch import nn

from ultrascale.description.schedules import SCHEDULES
from ultrascale.schedules.build import build_schedule, stages_of_ranks
from ultrascale.schedules.kinds.custom import to_csv

PP, MICRO_BATCHES, ROWS, WIDTH = 2, 4, 3, 8
# Copies of a stage on two ranks are what DualPipe is, and torch's runtime knows one rank of each stage.
ONE_RANK_A_STAGE = [name for name in SCHEDULES if name != "dualpipe"]


def stage_modules(count: int) -> list[nn.Module]:
    generator = torch.Generator().manual_seed(1)
    modules: list[nn.Module] = []
    for _ in range(count):
        linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)
        with torch.no_grad():
            for parameter in linear.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        modules.append(nn.Sequential(linear, nn.Tanh()))
    return modules


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x, y = (torch.randn(MICRO_BATCHES * ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def loss_of(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (out - target).square().sum()


def gradients_of(module: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


def step_of_torch(rank: int, name: str, file: str) -> dict[int, list[torch.Tensor]]:
    """One step of the schedule in `file` by torch's runtime; the gradients of each stage that this rank holds."""
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

    held = stages_of_ranks(name, PP)
    count = sum(map(len, held))
    modules = stage_modules(count)
    stages = [PipelineStage(modules[index], index, count, torch.device("cpu")) for index in held[rank]]
    where = {index: holder for holder, indices in enumerate(held) for index in indices}
    for stage in stages:
        stage.stage_index_to_group_rank = where
    runtime = _PipelineScheduleRuntime(stages, MICRO_BATCHES, loss_fn=loss_of, scale_grads=False)
    runtime.stage_index_to_group_rank = where
    runtime._load_csv(file)
    x, y = batch()
    given = (x,) if 0 in held[rank] else ()
    if count - 1 in held[rank]:
        runtime.step(*given, target=y)
    else:
        runtime.step(*given)
    return {index: gradients_of(modules[index]) for index in held[rank]}


@pytest.mark.parametrize("name", ONE_RANK_A_STAGE)
def test_torchs_runtime_executes_the_list_to_the_gradients_of_one_process(name, tmp_path):
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(build_schedule(name, PP, MICRO_BATCHES)))
    found = {index: grads for part in run_ranks(PP, step_of_torch, name, str(file)) for index, grads in part.items()}

    alone = stage_modules(len(found))
    x, y = batch()
    for part, target in zip(x.chunk(MICRO_BATCHES), y.chunk(MICRO_BATCHES), strict=True):
        loss_of(nn.Sequential(*alone)(part), target).backward()
    for index, module in enumerate(alone):
        for theirs, own in zip(found[index], gradients_of(module), strict=True):
            torch.testing.assert_close(theirs, own, rtol=1e-12, atol=1e-12)
