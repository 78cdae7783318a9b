"""offload_optimizer: the same bits as an update on the device, for every ZeRO stage, and checkpoints of either kind."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL
from agree.small_models import DEMO
from agree.test_memory_agrees import difference_percent
from ranks import run_ranks
from train.small_runs import curve, same, small_run, state, stop_at, train_here, train_in_turn

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.catalogue.models.model_presets import PRESETS
from ultrascale.description.layout import Layout
from ultrascale.description.run import Optimizer
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.activations.host_memory import is_on_host
from ultrascale.parallel.share import local
from ultrascale.plan.time.price import predict
from ultrascale.plan.workload import Workload
from ultrascale.train.optimizers.host_optimizer import HostAdamW
from ultrascale.train.optimizers.optimizer import build_optimizer

LAYOUTS = {
    "one process": Layout(micro_batch_size=2),
    "one process, bf16": Layout(micro_batch_size=2, precision="bf16"),
    "ZeRO 0": Layout(dp=2, micro_batch_size=2),
    "ZeRO 1": Layout(dp=2, zero_stage=1, micro_batch_size=2),
    "ZeRO 2": Layout(dp=2, zero_stage=2, micro_batch_size=2),
    "ZeRO 3, bf16": Layout(dp=2, zero_stage=3, micro_batch_size=2, precision="bf16"),
    "tp": Layout(tp=2, micro_batch_size=2, precision="fp64"),
}  # fmt: skip


def steps_of(rank: int, case: Case) -> tuple[list[torch.Tensor], int]:
    """The rank's parameters and moments after three updates, and the bytes it keeps on the host."""
    step = RankStep(case, rank)
    optimizer = build_optimizer(step.share, Optimizer(learning_rate=1e-2))
    kept = sum(
        local(value).untyped_storage().nbytes()
        for one in optimizer.state.values()
        for name, value in one.items()
        if name != "step" and is_on_host(local(value).untyped_storage())
    )
    for number in range(3):
        step.train(step.batches())
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + number)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    moments = [local(one[name]) for one in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    return [local(one.detach()).clone() for one in step.share.parameters()] + moments, kept


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_an_update_on_the_host_gives_the_bits_of_one_on_the_device(layout: Layout) -> None:
    model = EXPERTS if layout.zero_stage in (1, 3) else MODEL
    here = run_ranks(layout.world_size, steps_of, Case(model, layout))
    there = run_ranks(layout.world_size, steps_of, Case(model, replace(layout, offload_optimizer=True)))
    for (expected, none), (found, kept) in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        itemsize = 8 if layout.precision == "fp64" else 4
        assert none == 0 and kept == 4 * itemsize * sum(one.numel() for one in found[: len(found) // 3])


def test_a_run_goes_on_from_a_checkpoint_of_the_other_kind_to_the_same_bits(home: Path) -> None:
    layouts = [Layout(dp=2, zero_stage=2, offload_optimizer=offload) for offload in (False, True)]
    whole = small_run(home, name="whole", layout=layouts[0])
    trainings = [(whole, None)]
    for name, (first, then) in {"down": layouts, "up": layouts[::-1]}.items():
        trainings += [(small_run(home, name=name, layout=first), stop_at(5)), (small_run(home, name=name, layout=then), None)]
    train_in_turn(trainings)
    for name in ("down", "up"):
        run = replace(whole, name=name)
        assert curve(run) == curve(whole) and same(state(run), state(whole)), name


def test_a_gradient_that_is_not_there_moves_nothing(home: Path) -> None:
    step = RankStep(Case(MODEL, Layout(offload_optimizer=True)), 0)
    optimizer = build_optimizer(step.share, Optimizer(learning_rate=1e-2))
    assert isinstance(optimizer, HostAdamW)
    before = [one.detach().clone() for one in step.share.parameters()]
    optimizer.step()
    assert all(torch.equal(one, other) for one, other in zip(before, step.share.parameters(), strict=True))
    assert all(float(one["step"]) == 0 for one in optimizer.state.values())


@pytest.mark.parametrize(("dp", "zero_stage"), [(1, 0), (2, 1), (2, 3)])
def test_the_planned_peak_leaves_out_what_is_on_the_host(dp: int, zero_stage: Literal[0, 1, 3]) -> None:
    layout = Layout(dp=dp, zero_stage=zero_stage, micro_batch_size=2, offload_optimizer=True)
    assert abs(difference_percent(DEMO, layout, 128, 2)) < 0.5


def test_what_is_on_the_host_is_counted_beside_the_device(home: Path) -> None:
    step = RankStep(Case(MODEL, Layout(offload_optimizer=True)), 0)
    optimizer = build_optimizer(step.share, Optimizer())
    with LiveMemory(step.share.decoder, optimizer) as memory:
        step.train(step.batches())
        optimizer.step()
    parameters = sum(one.numel() * 4 for one in step.share.parameters())
    counts = 4 * len(step.share.parameters())
    assert memory.peak_on_host == 4 * parameters + counts and memory.now["optimizer"] == 0


def test_the_planner_prices_an_update_on_the_host_by_its_slowest_part() -> None:
    workload = Workload(PRESETS["llama-3-8b"], parse_cluster("8xh100"), 8192, 64)
    layout = Layout(dp=8, zero_stage=1, precision="bf16", recompute="full")
    here, there = predict(workload, layout), predict(workload, replace(layout, offload_optimizer=True))
    own = 8_030_261_248 / 8
    update, one_way = 2 * own * 12 / 25e9, own * 4 / 50e9
    assert there.waterfall["optimizer"] == pytest.approx(update + 2 * one_way / 32, rel=1e-3)
    assert float(here.memory.allocated - there.memory.allocated) == pytest.approx(8 * own, rel=0.02)


def test_a_small_run_trains_with_its_optimizer_on_the_host(home: Path) -> None:
    runs = [small_run(home, name=str(offload), layout=Layout(offload_optimizer=offload)) for offload in (False, True)]
    for run in runs:
        train_here(run)
    assert curve(runs[0]) == curve(runs[1])
