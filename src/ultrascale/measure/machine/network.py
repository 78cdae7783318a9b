"""Measures collectives on this machine: seconds by kind, size and group of ranks, as nccl-tests does, next to planned seconds.

Groups are (size, stride), as in the planner: all groups of one shape that the ranks divide into communicate at once. Sizes are
those of `plan.laws.collectives`: the whole gathered or reduced buffer; for all_to_all, what a rank sends in total; for send,
one message to the next rank of the group. Every result is checked for correctness before it is timed.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.catalogue.machines import NODES, USUAL_NODE
from ultrascale.description.problems import SpecError, mistake
from ultrascale.description.units import format_bytes
from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.measure.machine.ceilings import device_name, this_gpu
from ultrascale.measure.machine.timed import Timed
from ultrascale.parallel.mesh import Ranks
from ultrascale.plan.laws.collectives import bus_bytes, collective_seconds

SMALLEST_BYTES = 1024
STEP = 4
"""Factor from one size to the next."""
ROUNDS = 5
ROUND_SECONDS = 0.05
"""Seconds of back-to-back calls; their mean is one measurement."""
MOST_CALLS = 200
ITEM_BYTES = 4
LARGEST_HOST = 16
"""Most accelerators of one host; a larger node is a rack, whose hosts start their ranks separately."""


class WrongResultError(RuntimeError):
    """A collective returned a wrong result: the network or its library is faulty."""


class MessageTooLargeError(RuntimeError):
    """The buffers of a message do not fit on the device."""


def default_groups(world: int, per_node: int) -> list[tuple[int, int]]:
    """Groups to measure: all ranks; with several equally full nodes also the ranks of a node, and one rank of each node."""
    if not 1 < per_node < world or world % per_node:
        return [(world, 1)]
    return [(world, 1), (per_node, 1), (world // per_node, per_node)]


def sizes_up_to(largest: int) -> list[int]:
    """1 KiB, 4 KiB, ... and `largest` itself."""
    count = max(0, math.ceil(math.log(largest / SMALLEST_BYTES, STEP)))
    return [*(SMALLEST_BYTES * STEP**n for n in range(count)), largest]


def expect_groups(groups: Sequence[tuple[int, int]], world: int) -> None:
    """Raises SpecError if the ranks do not divide into one of these groups."""
    for size, stride in groups:
        if size < 2 or stride < 1 or world % (size * stride):
            rule = f"{size}:{stride} (ranks of a group, and how far apart) does not cut {world} ranks into equal groups"
            raise mistake("--groups", rule, f"size x stride must divide {world}, size be at least 2.")


def measure_network(
    ranks: Ranks, groups: Sequence[tuple[int, int]], sizes: Sequence[int], kinds: Sequence[str], *,
    machine: str | None, report: Callable[[str], object] = lambda line: None,
) -> dict[str, Any]:  # fmt: skip
    """Time every kind in every group at every size. Collective; every rank returns the same JSON-able value.

    `machine`: cluster of the plan; None: as many of this device as there are ranks, if the catalogue has it. `report` is called
    on rank 0 for each group. Raises SpecError; and WrongResultError and MessageTooLargeError on the ranks that detect them.
    """
    expect_groups(groups, ranks.world)
    per_node = ranks_per_node(ranks)
    gpu = this_gpu(ranks.device)
    cluster = planned_cluster(ranks.world, per_node, None if gpu is None else gpu.name, machine)
    timings = []
    for size, stride in groups:
        if ranks.is_first:
            report(f"measuring groups of {size} ranks, {stride} apart, {ranks.world // size} at a time")
        group = _group_of_this_rank(ranks, size, stride)
        for kind in kinds:
            for num_bytes in sizes:
                seconds, spread = _timed(_call(kind, num_bytes, group, size, ranks), ranks)
                planned = None
                if cluster is not None:
                    planned = float(collective_seconds(cluster, kind, num_bytes, size=size, stride=stride))
                rate = float(bus_bytes(kind, num_bytes, size)) / seconds
                timings.append(Timed(kind, size, stride, num_bytes, seconds, spread, rate, planned))
    return {
        "device": device_name(ranks.device), "ranks": ranks.world, "per_node": per_node, "torch": torch.__version__,
        "backend": dist.get_backend(), "planned_for": None if cluster is None else cluster.name,
        "timed": [timing.__dict__ for timing in timings],
    }  # fmt: skip


def network_bytes_per_second(timings: Sequence[Timed], per_node: int) -> float | None:
    """Combined rate of a node's network cards in the largest all-gathers over one rank per node; None if none was timed."""
    across = [timing for timing in timings if timing.kind == "all_gather" and timing.stride == per_node]
    best = max(across, key=lambda timing: timing.num_bytes, default=None)
    return None if best is None else best.bus_bytes_per_second * per_node


def ranks_per_node(ranks: Ranks) -> int:
    """Ranks per node, from torchrun's variables; without them, the number of ranks on the host of rank 0. Collective."""
    hosts = ranks.gather_text(platform.node())
    return min(ranks.world, int(os.environ.get("LOCAL_WORLD_SIZE", hosts.count(hosts[0]))))


def planned_cluster(world: int, per_node: int, gpu: str | None, machine: str | None) -> Cluster | None:
    """Cluster of the plan: `machine`; else `world` of the catalogue's `gpu`, or None if its usual node differs from this one.

    Raises SpecError if `machine` has fewer accelerators than there are ranks.
    """
    if machine is not None:
        cluster = parse_cluster(machine)
        if cluster.num_accelerators < world:
            rule = f"{cluster.name} has {cluster.num_accelerators} accelerators, for {world} ranks"
            raise mistake("--machine", rule, "Name all the machines that the ranks are on.")
        return cluster
    if gpu is None:
        return None
    usual = NODES[USUAL_NODE[gpu]].num_accelerators
    other_node = per_node > usual or (per_node < min(world, usual) and usual <= LARGEST_HOST)
    try:
        return None if other_node else parse_cluster(f"{world}x{gpu}")
    except SpecError:  # this number does not fill machines of that kind
        return None


def _group_of_this_rank(ranks: Ranks, size: int, stride: int) -> dist.ProcessGroup:
    """This rank's process group. Each rank creates only its own: creating all of them in turn would take minutes for a thousand
    ranks."""
    first = ranks.rank // (size * stride) * size * stride + ranks.rank % stride
    members = [first + place * stride for place in range(size)]
    with gloo_threads_as_batch() if ranks.device.type == "cpu" else nullcontext():
        group = dist.new_group(members, timeout=ranks.timeout, use_local_synchronization=True, group_desc=f"{size}:{stride}")
    assert isinstance(group, dist.ProcessGroup)
    return group


def _call(kind: str, num_bytes: int, group: dist.ProcessGroup, size: int, ranks: Ranks) -> Callable[[], None]:
    """A function that runs one collective of this kind, after checking its result once. Rounds the size up to whole elements
    per rank."""
    part = max(1, -(-num_bytes // (ITEM_BYTES * size)))
    counts = (part * size, part, part * size if kind in ("all_to_all", "send") else 0)
    try:
        whole, piece, other = (torch.zeros(count, device=ranks.device) for count in counts)
    except torch.OutOfMemoryError:
        problem = f"rank {ranks.rank} has no memory for {kind} of {format_bytes(num_bytes)}"
        raise MessageTooLargeError(f"{problem}. Give a smaller --largest.") from None
    place, total = dist.get_rank(group), size * (size + 1) / 2
    contribution = place + 1.0
    after_rank, before_rank = (dist.get_global_rank(group, (place + step) % size) for step in (1, -1))

    def send() -> None:
        messages = [dist.P2POp(dist.isend, whole, after_rank, group), dist.P2POp(dist.irecv, other, before_rank, group)]
        for work in dist.batch_isend_irecv(messages):
            work.wait()

    first = dist.get_global_rank(group, 0)
    gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    calls: dict[str, tuple[Callable[[], Any], Tensor, Tensor, Sequence[float]]] = {
        "all_reduce": (lambda: dist.all_reduce(whole, group=group), whole, whole, [total] * size),
        "all_gather": (lambda: gather(whole, piece, group=group), piece, whole, [rank + 1.0 for rank in range(size)]),
        "reduce_scatter": (lambda: scatter(piece, whole, group=group), whole, piece, [total]),
        "all_to_all": (lambda: dist.all_to_all_single(other, whole, group=group), whole, other, [r + 1.0 for r in range(size)]),
        "broadcast": (lambda: dist.broadcast(whole, first, group=group), whole, whole, [1.0] * size),
        "send": (send, whole, other, [(place - 1) % size + 1.0] * size),
    }
    call, sent, received, expected = calls[kind]
    sent.fill_(contribution)
    call()
    ranks.settle()
    parts = received.view(len(expected), -1)
    if not torch.equal(parts, torch.tensor(expected, device=ranks.device)[:, None].expand_as(parts)):
        problem = f"rank {ranks.rank}: {kind} of {num_bytes:,} bytes over {size} ranks gave {float(parts.flatten()[0])}"
        raise WrongResultError(f"{problem} where {expected[0]} must be. Do not train on this network.")
    whole.zero_()  # so that repeated sums stay finite
    return call


def _timed(call: Callable[[], None], ranks: Ranks) -> tuple[float, float]:
    """Seconds of one call (median round) and the spread, on the slowest rank; equal on all ranks."""
    estimate = _round(call, 2, ranks)
    calls = max(1, min(MOST_CALLS, int(ROUND_SECONDS / estimate)))
    rounds = [_round(call, calls, ranks) for _ in range(ROUNDS)]
    middle = median(rounds)
    return middle, (max(rounds) - min(rounds)) / middle


def _round(call: Callable[[], None], calls: int, ranks: Ranks) -> float:
    ranks.settle()
    ranks.barrier()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    ranks.settle()
    seconds = (time.perf_counter() - started) / calls
    return max(map(float, ranks.gather_text(repr(seconds))))
