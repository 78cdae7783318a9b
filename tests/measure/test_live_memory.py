"""The memory counter: bytes that are there, in the right category, and gone when they are gone."""

from __future__ import annotations

import torch
from ranks import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from ultrascale.measure.memory import LiveMemory

MIB = 2**20
WEIGHT = 512 * 512 * 4
"""Bytes of one layer: 1 MiB."""


def build(layers: int = 3) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(layers)))


def test_parameters_gradients_and_moments_are_counted_to_the_byte() -> None:
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with LiveMemory(model, optimizer) as memory:
        model(torch.randn(1, 512)).sum().backward()
        assert memory.now["gradients"] == 3 * WEIGHT
        optimizer.step()
        assert memory.now["optimizer"] == 2 * 3 * WEIGHT + 3 * 4
        optimizer.zero_grad()
        assert memory.now["gradients"] == 0
        assert memory.now["parameters"] == 3 * WEIGHT
        assert memory.now["activations"] == memory.now["temporary"] == 0


def test_activations_live_from_forward_to_backward() -> None:
    model = build()
    batch = torch.randn(128, 512)
    with LiveMemory(model) as memory:
        loss = model(batch).sum()
        # Two results are inputs of a later layer; the third is only summed.
        assert memory.now["activations"] == 2 * batch.nbytes + 4
        assert memory.now["other"] == batch.nbytes
        loss.backward()
        assert memory.now["activations"] == 4


def test_storages_that_share_memory_count_once_and_resized_ones_change() -> None:
    model = build(1)
    with LiveMemory(model) as memory:
        made = torch.zeros(MIB, dtype=torch.uint8)
        views = [made[:10], made.view(2, -1)]
        assert memory.now["activations"] == MIB
        made.untyped_storage().resize_(0)
        assert memory.now["activations"] == 0
        made.untyped_storage().resize_(MIB // 2)
        assert memory.now["activations"] == MIB // 2
        del made, views
        assert memory.now["activations"] == 0


def test_sizes_are_rounded_up_when_asked() -> None:
    with LiveMemory(build(1), round_to=512) as memory:
        kept = [torch.zeros(1), torch.zeros(129)]
        assert memory.now["activations"] == 512 + 1024
        del kept


def test_marks_name_the_samples() -> None:
    with LiveMemory(build(1)) as memory:
        memory.mark("forward", 0)
        torch.zeros(4 * MIB, dtype=torch.uint8)
        memory.mark("backward", 1)
        torch.zeros(MIB, dtype=torch.uint8)
    first, second = (max(sample.total for sample in memory.samples if sample.step == step) for step in (0, 1))
    assert first - second == 3 * MIB
    assert {row["step"] for row in memory.timeline(max_points=2)} <= {1, 2}
    assert (memory.peak.step, memory.peak.phase) == (0, "forward")
    assert memory.samples[-1].phase == "backward"


def test_after_leaving_nothing_is_watched_and_nothing_is_patched() -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    before = (torch.UntypedStorage.resize_, FSDPParamGroup.unshard, FSDPParamGroup.post_backward)
    model = build(1)
    with LiveMemory(model) as memory:
        pass
    count = len(memory.samples)
    model(torch.randn(1, 512)).sum().backward()
    assert len(memory.samples) == count
    assert before == (torch.UntypedStorage.resize_, FSDPParamGroup.unshard, FSDPParamGroup.post_backward)


def sharded_step(rank: int) -> tuple[dict[str, int], dict[str, int]]:
    model, mesh = build(), init_device_mesh("cpu", (2,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    with LiveMemory(model) as memory:
        model(torch.randn(8, 512)).sum().backward()
        left = dict(memory.now)
    highest = {name: max(sample.by_category[name] for sample in memory.samples) for name in left}
    return left, highest


def test_under_fsdp2_gathered_copies_and_cut_gradients_are_told_apart() -> None:
    for left, highest in run_ranks(2, sharded_step):
        assert left["parameters"] == 3 * WEIGHT // 2
        assert left["gradients"] == 3 * WEIGHT // 2
        assert left["gathered"] == 0
        assert highest["gathered"] == WEIGHT // 2  # one layer, bf16
