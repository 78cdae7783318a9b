"""The processes of a run: a process's rank, groups and device.

torchrun (or `ultrascale train --processes N`) starts the processes and passes each its rank in the environment; a single
process is rank 0 of 1 and needs no network.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from ultrascale.description.architecture.model import Model
from ultrascale.description.layout import Layout
from ultrascale.description.problems import mistake
from ultrascale.description.rank_environment import env_rank, env_world_size, expect_rank_environment
from ultrascale.description.units import count_of
from ultrascale.gloo_threads import gloo_threads_as_batch
from ultrascale.kernels.choice.device_kind import kind_of
from ultrascale.parallel.arrival import meet
from ultrascale.parallel.groups import copies_axis, groups_of, warm_up
from ultrascale.parallel.lost import waiting
from ultrascale.parallel.time_limits import START_SECONDS, limit_waits
from ultrascale.torch_private import PrefixStore, Store
from ultrascale.work.sharding.places import Coordinates

MeshAxis = Literal["tp", "cp", "dp", "pp", "ep", "expert_tp"]


@dataclass(frozen=True)
class Ranks:
    """This process's rank among the processes of the run."""

    rank: int
    world: int
    device: torch.device
    host_group: dist.ProcessGroup | None = None
    """gloo group of all ranks, for what the CPUs agree on; None with a single process."""
    timeout: timedelta | None = None
    """Timeout of collectives until the first step is done (`Mesh.limit_waits`); None: torch's default."""
    island: int = 0
    """Island of the run that these ranks belong to. Ranks are numbered within it, and torch knows only these."""
    store: Store | None = None
    """Store of all islands that were started together, by which ranks of different islands find each other."""
    meeting: str | None = None
    """URL of the store through which separately started islands communicate."""
    before: int = 0
    """Number of ranks in earlier islands of those that were started together."""

    @property
    def process(self) -> int:
        """Rank of this process among those that were started together."""
        return self.before + self.rank

    @property
    def is_first(self) -> bool:
        """True on rank 0, which prints and writes."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Sum of a CPU tensor over all ranks, on every rank."""
        if self.host_group is not None:
            with waiting("a sum over all ranks", self.host_group, tensor=values):
                dist.all_reduce(values, group=self.host_group)
        return values

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        if self.host_group is not None:
            with waiting("a barrier of all ranks", self.host_group):
                dist.barrier(group=self.host_group)

    def settle(self) -> None:
        """Wait until the device has finished its queue, so that a step's kernels fall within that step."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def gather_text(self, text: str) -> list[str]:
        """Every rank's `text`, on every rank, without pickle."""
        if self.host_group is None:
            return [text]
        data = torch.tensor(list(text.encode()), dtype=torch.uint8)
        with waiting("a gather of words from all ranks", self.host_group):
            lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world)]
            dist.all_gather(lengths, torch.tensor([data.numel()]), group=self.host_group)
            longest = max(1, *(int(length) for length in lengths))
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: data.numel()] = data
            parts = [torch.zeros_like(padded) for _ in range(self.world)]
            dist.all_gather(parts, padded, group=self.host_group)
        return [bytes(p[: int(n)].numpy()).decode() for p, n in zip(parts, lengths, strict=True)]

    def gather_json(self, value: Any) -> list[Any]:
        """Every rank's JSON value, on every rank; each a copy."""
        return [json.loads(text) for text in self.gather_text(json.dumps(value))]


def choose_device(device: str) -> torch.device:
    """Device of this process for `auto`, `cpu` or `cuda`. Raises SpecError if no CUDA device is available."""
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "cpu" or (device == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        rule = f"asks for CUDA, but torch {torch.__version__} sees no CUDA device"
        raise mistake("device", rule, 'Use device = "cpu", or install a CUDA build of torch.')
    if local_rank >= torch.cuda.device_count():
        rule = f"local rank {local_rank} has no GPU of its own: this node has {torch.cuda.device_count()}"
        raise mistake("layout.dp", rule, "Start as many processes per node as it has GPUs.")
    return torch.device("cuda", local_rank)


@contextmanager
def process_group(
    layout: Layout,
    *,
    worlds: Sequence[int] = (),
    apart: tuple[int, str] | None = None,
    device: str = "auto",
    timeout_seconds: float = START_SECONDS,
    rendezvous: str = "env://",
) -> Iterator[Ranks]:
    """Join the process group of the run, and leave it at the end. The processes meet at `rendezvous`, a URL torch understands.

    With several islands, the process group contains only the ranks of this island. `worlds`: number of ranks of each island, if
    there may be several. `apart`: the island's number and the meeting URL, if each island was started separately.

    Raises SpecError if the number of processes is not the layout's.
    """
    together = worlds if apart is None and len(worlds) > 1 else (layout.world_size,)
    world, wanted = _world_size(rendezvous), sum(together)
    if world != wanted:
        whose = "the layout is" if len(together) == 1 else f"{len(together)} islands of the layout are"
        rule = f"{whose} for {count_of(wanted, 'process')}, but {world} {'was' if world == 1 else 'were'} started"
        dp, rest = divmod(world * layout.dp, wanted)
        other = f"`--layout.dp {dp}`" if dp and not rest and len({*together}) == 1 else "a layout for so many"
        raise mistake("layout.dp", rule, f"Start {wanted} (`--processes {wanted}`), or give {other}.")
    chosen_device = choose_device(device)
    if chosen_device.type == "cuda":
        torch.cuda.set_device(chosen_device)
    this_island, meeting = (0, None) if apart is None else apart
    if world == 1:
        yield Ranks(0, 1, chosen_device, island=this_island, meeting=meeting)
        return
    timeout = timedelta(seconds=timeout_seconds)
    store, process, _ = meet(rendezvous, env_rank(), env_world_size(), timeout)
    island, rank = this_island, process
    while apart is None and rank >= together[island]:
        rank -= together[island]
        island += 1
    shared = store if len(together) > 1 else None
    if layout.world_size == 1:
        yield Ranks(0, 1, chosen_device, None, timeout, island, shared, before=process)
        return
    _join(chosen_device, timeout, store if shared is None else PrefixStore(f"island {island}", store), rank, layout.world_size)
    try:
        yield Ranks(
            rank, layout.world_size, chosen_device, _host_group(timeout), timeout, island, shared, meeting, process - rank
        )
    finally:
        dist.destroy_process_group()


def _world_size(rendezvous: str) -> int:
    """WORLD_SIZE from the environment. Raises SpecError if the environment lacks something that a rank needs."""
    expect_rank_environment(with_address=rendezvous == "env://")
    return env_world_size()


class Mesh:
    """This rank's coordinates in the grid of ranks, and its groups along the axes (`parallel.groups`). All ranks build theirs
    at the same time.

    `data` and `expert_data`: (dp_replicate, dp_shard) grids of the ranks over which FSDP2 replicates and shards ordinary
    weights, and experts. None where there is nothing to replicate or shard; `expert_data` is also None where experts use
    `data`.
    """

    def __init__(self, model: Model, layout: Layout, ranks: Ranks):
        self.layout, self.rank, self.device = layout, ranks.rank, ranks.device
        self.coordinates = Coordinates.of(layout, ranks.rank)
        self._groups: dict[str, dist.ProcessGroup] = {}
        self.data: DeviceMesh | None = None
        self.expert_data: DeviceMesh | None = None
        if layout.world_size == 1:
            return
        self.axes = groups_of(model, layout)
        self._make_groups(ranks.timeout)
        if self.device.type == "cuda":
            self.warm_up()
        self.data = self._data_grid("data")
        self.expert_data = self._data_grid("expert data")

    def group(self, axis: MeshAxis) -> dist.ProcessGroup | None:
        """This rank's group along `axis`; None if it has one rank."""
        return self._groups.get(axis)

    def pipeline_groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """Two groups of this rank's pipeline, for messages to higher ranks and to lower ones: in a single group NCCL would
        queue both directions together, where they could deadlock."""
        return self._groups["pp"], self._groups["pp, downwards"]

    def neighbours(self, count: int) -> dist.ProcessGroup:
        """Group of the `count` consecutive ranks, this one included, that hold the same part of some weight."""
        return self._groups[copies_axis(count)]

    def limit_waits(self, ranks: Ranks, seconds: float) -> None:
        """Limit every later wait for another rank (`parallel.time_limits`). All ranks call it at the same point."""
        groups = {group.group_name: group for group in (dist.group.WORLD, ranks.host_group, *self._groups.values()) if group}
        limit_waits(groups.values(), seconds)

    def warm_up(self) -> None:
        """Make NCCL create all communicators while all ranks are present. Collective."""
        warm_up([(axis, self._groups[axis.name]) for axis in self.axes], self.device)

    def _make_groups(self, timeout: timedelta | None) -> None:
        made: dict[tuple[str, range], dist.ProcessGroup] = {}
        backend = "nccl" if self.device.type == "cuda" else None
        for axis in self.axes:
            ranks = axis.ranks_with(self.rank)
            key = ("" if kind_of(self.device) == "cpu" else axis.queue, ranks)
            if key not in made:
                made[key] = self._make(ranks, backend, timeout, axis.name)
            self._groups[axis.name] = made[key]

    def _make(self, ranks: range, backend: str | None, timeout: timedelta | None, name: str) -> dist.ProcessGroup:
        group = dist.group.WORLD
        if len(ranks) < self.layout.world_size or backend is not None:
            with gloo_threads_as_batch() if backend is None else nullcontext():
                group = dist.new_group(
                    list(ranks), timeout=timeout, backend=backend, use_local_synchronization=True, group_desc=name
                )
        assert isinstance(group, dist.ProcessGroup)
        return group

    def _data_grid(self, name: str) -> DeviceMesh | None:
        """Ranks that hold the same weights as this one, as a grid: replicas x shards."""
        axes = {axis.name: axis for axis in self.axes}
        names = [f"{name} replicate", f"{name} shard"]
        if names[0] not in axes:
            return None
        copies, parts = (axes[axis_name] for axis_name in names)
        grid = [list(parts.ranks_with(rank)) for rank in copies.ranks_with(parts.ranks_with(self.rank)[0])]
        groups = [self._groups[axis_name] for axis_name in names]
        return DeviceMesh.from_group(groups, self.device.type, mesh=grid, mesh_dim_names=("dp_replicate", "dp_shard"))


def _join(device: torch.device, timeout: timedelta, store: Store, rank: int, world: int) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"  # CPUs communicate in a separate group, `Ranks.host_group`
    with gloo_threads_as_batch() if backend == "gloo" else nullcontext():
        dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=timeout)


def _host_group(timeout: timedelta) -> dist.ProcessGroup:
    with gloo_threads_as_batch():
        group = dist.new_group(backend="gloo", timeout=timeout)
    assert isinstance(group, dist.ProcessGroup)
    return group
