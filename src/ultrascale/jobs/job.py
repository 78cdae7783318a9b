"""A run as a job: the number of nodes and ranks, the time limit, and the resulting time limits of the run.

All errors are reported here, before a script is written or submitted.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from pathlib import Path

from ultrascale.catalogue.cluster import parse_cluster
from ultrascale.config.rules.time_limits import grace_seconds
from ultrascale.description.problems import Problem, SpecError, mistake
from ultrascale.description.rank_environment import LAST_PORT
from ultrascale.description.run import Run
from ultrascale.description.sections.launch import Launch
from ultrascale.description.units import count_of, format_seconds
from ultrascale.launch.events import longest_seconds
from ultrascale.train.folder.island_folder import island_folder

SAFETY = 2.0
"""Safety factor over the longest step and save so far."""
FIRST_PORT, PORTS = 20_000, 10_000
"""Rendezvous ports, below the system's own range for outgoing connections (from 32,768)."""


@dataclass(frozen=True)
class Job:
    """One run on a number of nodes."""

    run: Run
    launch: Launch
    file: Path
    """The run's TOML, as the job will read it."""
    settings: tuple[str, ...]
    """Flags after the file."""
    nodes: int
    ranks_per_node: int
    command: str
    """The command as typed, for the head of the script."""
    notes: tuple[str, ...] = ()
    """Lines of the plan, for the head of the script."""
    island: int | None = None
    """Number of this job's island, for a run whose islands are started separately (`islands.quorum`)."""

    @property
    def name(self) -> str:
        return self.run.name if self.island is None else f"{self.run.name}-island-{self.island}"

    @property
    def on_gpus(self) -> bool:
        return self.run.device != "cpu" and not self.run.cluster.endswith("cpu")

    @property
    def folder(self) -> Path:
        """The folder of the run or of its island."""
        return island_folder(self.run, self.island or 0)

    @property
    def port(self) -> int:
        """Rendezvous port of the nodes, if no batch system numbers its jobs."""
        fixed_port = self.launch.port and self.launch.port + (self.island or 0)
        return fixed_port or FIRST_PORT + zlib.crc32(str(self.folder).encode()) % PORTS

    @cached_property
    def step_and_save_seconds(self) -> float | None:
        """Seconds of the longest step and save of this run so far; None before its first save."""
        metrics = self.folder / "metrics.jsonl"
        save = longest_seconds(metrics, "perf/save_s")
        return save + longest_seconds(metrics, "perf/step_s") if save else None

    @property
    def grace(self) -> int:
        """Seconds from a stop signal until the ranks are gone: the time limit of a collective, or more if a step and a save
        have taken more."""
        return ceil(max(grace_seconds(self.run), SAFETY * (self.step_and_save_seconds or 0.0)))

    @property
    def grace_reason(self) -> str:
        """Reason for the value of `grace`."""
        if self.step_and_save_seconds is None:
            return f"{self.grace} s until a first save is measured; write this script again then"
        return f"{self.grace} s: a step and a save of this run took up to {format_seconds(self.step_and_save_seconds)}"


def job_of(
    run: Run,
    launch: Launch,
    *,
    file: Path,
    settings: Sequence[str] = (),
    nodes: int | None,
    command: str,
    notes: Sequence[str] = (),
    island: int | None = None,
) -> Job:
    """The job of `run`, or of one `island` of it, on `nodes` (else `launch.nodes`). Raises SpecError if the nodes do not fit
    its layout."""
    num_nodes = num_nodes_of(nodes, launch)
    ranks = ranks_per_node(run, launch)
    together = island is None and run.islands.count > 1
    wanted = run.num_processes if together else run.worlds[island or 0]
    ports = [] if island is None else _ports(launch, run.islands.count)
    island_run = run if island is None else replace(run, layout=replace(run.layout, dp=run.degrees[island]))
    problems = [*_fit(island_run, num_nodes, ranks, wanted), *_time(run, launch), *ports]
    if problems:
        raise SpecError(problems)
    return Job(run, launch, file, tuple(settings), num_nodes, ranks, command, tuple(notes), island)


def num_nodes_of(nodes: int | None, launch: Launch) -> int:
    """`nodes`, else `launch.nodes`. Raises SpecError if neither is a valid number of machines."""
    num_nodes = nodes if nodes is not None else launch.nodes
    if num_nodes is None:
        raise mistake("--nodes", "is missing: nothing says how many", "Give --nodes N, or [launch] nodes = N.")
    if num_nodes < 1:
        raise mistake("--nodes", f"must be at least 1, is {num_nodes}", "Give the number of machines.")
    return num_nodes


def ranks_per_node(run: Run, launch: Launch) -> int:
    """Ranks of one node: as set in `launch`, or the accelerators of a node of the cluster. Raises SpecError if unknown."""
    if launch.gpus_per_node is not None:
        return launch.gpus_per_node
    if run.cluster != "auto" and not run.cluster.endswith("cpu"):
        return parse_cluster(run.cluster).node.num_accelerators
    rule = f"is not given, and cluster = {run.cluster!r} does not say how many GPUs a node has"
    raise mistake("launch.gpus_per_node", rule, 'Give it, or name the machines: cluster = "64xh100".')


def _fit(run: Run, nodes: int, ranks: int, wanted: int) -> list[Problem]:
    """Problems if nodes do not provide the `wanted` ranks: those of the layout, or of all islands that are started together."""
    layout, have = run.layout, nodes * ranks
    if have == wanted:
        return []
    sizes = {key: getattr(layout, key) for key in ("dp", "tp", "cp", "pp")}
    axes = " x ".join(f"{key} {size}" for key, size in sizes.items() if size > 1) or "dp 1"
    nodes_text = f"{count_of(nodes, 'node')} of {ranks} ranks" if ranks > 1 else count_of(nodes, "node")
    whose = f"the layout ({axes}) wants" if wanted == layout.world_size else f"{run.islands.count} islands of it ({axes}) want"
    rule = f"{nodes_text} {'is' if nodes == 1 else 'are'} {count_of(have, 'rank')}, and {whose} {wanted:,}"
    other_ranks = prod(size for key, size in sizes.items() if key != "dp") * (wanted // layout.world_size)
    ways = []
    if wanted % ranks == 0:
        ways.append(f"take --nodes {wanted // ranks}")
    if have % other_ranks == 0 and not run.islands.dp:
        ways.append(f"set layout.dp = {have // other_ranks}")
    remedy = " or ".join(ways) or f"change an axis: {other_ranks} ranks of tp, cp and pp do not divide {have}"
    return [Problem("--nodes", rule, f"{remedy[0].upper()}{remedy[1:]}.")]


def _time(run: Run, launch: Launch) -> list[Problem]:
    limit = launch.time_limit_seconds
    if limit is None or limit > 2 * grace_seconds(run):
        return []
    rule = f"{launch.time_limit} is too short to start, train and save in: saving alone is given {grace_seconds(run):.0f} s"
    return [Problem("launch.time_limit", rule, 'Give more, such as "1h", or leave it out for the cluster\'s own.')]


def _ports(launch: Launch, islands: int) -> list[Problem]:
    """Problems with ports: each island that is a separate job uses the port after the previous one's."""
    last = (launch.port or 0) + islands - 1
    if last <= LAST_PORT:
        return []
    rule = f"is {launch.port}, and {islands} islands, a port each, go up to {last}, past {LAST_PORT}"
    return [Problem("launch.port", rule, f"Give {LAST_PORT + 1 - islands} or less, or leave it out, and it is drawn.")]
