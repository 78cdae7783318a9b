"""offload_activations: gradients to the bit, on the device what is planned, on the host the rest, parameters never."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from agree.axes import Case, RankStep
from agree.layouts import EXPERTS, MODEL
from agree.small_models import DEMO
from agree.test_axes_memory_agrees import differences
from agree.test_memory_agrees import difference_percent
from ranks import run_ranks

from ultrascale.config.rules.trainable import expect_trainable
from ultrascale.description.layout import OFFLOAD_FROM_BYTES, Layout
from ultrascale.description.problems import SpecError
from ultrascale.measure.memory import LiveMemory
from ultrascale.parallel.activations import host_memory, offload
from ultrascale.parallel.share import local
from ultrascale.plan.memory.replay import plan_memory

SMALL = replace(MODEL, num_hidden_layers=5)
LAYOUTS = {
    "one process": (SMALL, Layout()),
    "recomputed": (SMALL, Layout(recompute="full")),
    "in part": (SMALL, Layout(recompute="blocks", recompute_blocks=("full x 2", "none x 3"), precision="bf16")),
    "experts": (EXPERTS, Layout(precision="fp64")),
    "ZeRO 1": (SMALL, Layout(dp=2, zero_stage=1)),
    "ZeRO 3, bf16, every-k": (SMALL, Layout(dp=2, zero_stage=3, precision="bf16", recompute="every-k")),
    "ZeRO 3, ep": (EXPERTS, Layout(dp=2, ep=2, zero_stage=3)),
    "tp": (SMALL, Layout(tp=2)),
    "cp": (SMALL, Layout(cp=2)),
    "pp, 1f1b": (SMALL, Layout(pp=2)),
    "pp, zb-v": (SMALL, Layout(pp=2, schedule="zb-v", virtual_stages=2, layers_per_stage=(1, 1, 2, 1))),
}  # fmt: skip


def gradients_of(rank: int, case: Case) -> tuple[list[torch.Tensor], int]:
    """The rank's gradients of a step, and the bytes that were sent to the host."""
    offload.OFFLOAD_FROM_BYTES = 1024  # as small as the models here
    sent, step = 0, RankStep(case, rank)
    take = host_memory.host_tensor

    def counted(like: torch.Tensor) -> torch.Tensor:
        nonlocal sent
        sent += like.numel() * like.itemsize
        return take(like)

    offload.host_tensor = counted
    try:
        step.train(step.batches())
    finally:
        offload.host_tensor, offload.OFFLOAD_FROM_BYTES = take, OFFLOAD_FROM_BYTES
    return [local(one.grad).clone() for one in step.share.parameters() if one.grad is not None], sent


@pytest.mark.parametrize(("model", "layout"), LAYOUTS.values(), ids=LAYOUTS)
def test_gradients_are_the_bits_of_those_without_offload(model, layout: Layout) -> None:
    count = 4 if layout.pp > 1 else 2
    cases = [Case(model, replace(layout, micro_batch_size=2, offload_activations=away), num_micro_batches=count)
             for away in (False, True)]  # fmt: skip
    here, there = (run_ranks(layout.world_size, gradients_of, case) for case in cases)
    for (expected, none), (found, sent) in zip(here, there, strict=True):
        assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
        assert none == 0 < sent


def test_views_of_a_storage_that_was_away_begin_where_they_did() -> None:
    """Halves of one tensor, of which the second has an offset; that of the first block is away when it is read."""

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        first, second = (hidden * 3).chunk(2)
        return torch.cat((first.sin(), second.cos()))

    found, expected = (torch.linspace(0, 1, OFFLOAD_FROM_BYTES, requires_grad=True) for _ in range(2))
    travel, block = offload.ActivationOffload(), torch.nn.Identity()
    first = travel.run(block, forward, found, is_first=True, input_is_kept=False)
    travel.run(block, forward, first, is_first=False, input_is_kept=False).sum().backward()
    forward(forward(expected)).sum().backward()
    assert found.grad is not None and expected.grad is not None and torch.equal(found.grad, expected.grad)


DEEP = replace(DEMO, num_hidden_layers=6, vocab_size=512)


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "none"), ("bf16", "every-k"), ("bf16", "full")])
def test_the_planned_peak_of_the_device_is_the_measured_one(precision, recompute) -> None:
    layout = Layout(micro_batch_size=4, precision=precision, recompute=recompute, offload_activations=True)
    assert abs(difference_percent(DEEP, layout, 128, 2)) < 0.2


def test_a_pipeline_s_ranks_peak_at_the_planned_bytes() -> None:
    model = replace(DEMO, vocab_size=256, num_hidden_layers=6)
    layout = Layout(pp=2, micro_batch_size=2, offload_activations=True)
    found = differences(Case(model, layout, length=64, num_micro_batches=4))
    assert max(map(abs, found)) < 1.5, found


def test_the_device_keeps_two_blocks_of_many_and_the_host_the_rest_as_planned() -> None:
    peaks, hosts = [], []
    for away in (False, True):
        case = Case(DEEP, Layout(micro_batch_size=4, offload_activations=away), length=128, num_micro_batches=1)
        step = RankStep(case, 0)
        with LiveMemory(step.share.decoder) as memory:
            step.train(step.batches())
        planned = plan_memory(case.model, case.layout, sequence_length=128, sequences_per_batch=4, device="cpu")
        peaks.append(memory.peak.by_category["activations"])
        hosts.append((memory.peak_on_host, planned.host_bytes))
    block = (peaks[0] - peaks[1]) / (DEEP.num_hidden_layers - 2)
    assert peaks[1] < 3.2 * block
    assert hosts[0] == (0, 0) and hosts[1][0] == hosts[1][1] > 3 * block


def test_selective_recomputation_keeps_what_offload_does_not_see_and_is_refused_beside_it() -> None:
    for layout in (Layout(recompute="selective"), Layout(recompute="blocks", recompute_blocks=("none", "selective+mlp"))):
        with pytest.raises(SpecError, match=r"layout\.recompute: keeps results apart"):
            expect_trainable(MODEL, replace(layout, offload_activations=True))
