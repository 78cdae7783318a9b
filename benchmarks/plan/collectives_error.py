"""Collectives across nodes against published measurements: the tables of docs/communication-model.md.

python benchmarks/plan/collectives_error.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
from plan.published_collectives import (
    GIB,
    MIB,
    PLAYBOOK_ALL_GATHER_95,
    PLAYBOOK_ALL_REDUCE,
    SIZE_RATIOS,
    SWEEPS,
)

from ultrascale.catalogue.cluster import Cluster, parse_cluster
from ultrascale.plan.laws.collectives import bus_bytes, collective_seconds, explain_collective


def bus(cluster: Cluster, kind: str, num_bytes: float) -> float:
    """GB/s of a collective over all ranks."""
    size = cluster.num_accelerators
    return float(bus_bytes(kind, num_bytes, size) / collective_seconds(cluster, kind, num_bytes, size=size, stride=1)) / 1e9


def print_sweeps() -> None:
    print("| cluster | collective | sizes | mean error | bias | largest: published, ours GB/s | chosen | source |")
    print("|---|---|---|---|---|---|---|---|")
    everything: list[float] = []
    judged: list[float] = []
    for sweep in SWEEPS:
        found = {w: explain_collective(sweep.cluster, sweep.kind, w, size=sweep.size, stride=1) for w in sweep.microseconds}
        errors = np.array([found[w]["seconds"] * 1e6 / t - 1 for w, t in sweep.microseconds.items()])
        everything.extend(errors)
        judged.extend(() if sweep.calibrated else errors)
        name = f"{sweep.cluster.name}{' (used)' if sweep.calibrated else ''}"
        small, large = min(found), max(found)
        published = float(bus_bytes(sweep.kind, large, sweep.size)) / sweep.microseconds[large] / 1e3
        chosen = " ".join(dict.fromkeys(e["algorithm"] for e in found.values()))
        sizes = f"{_size(small)} to {_size(large)}" if small != large else _size(large)
        print(
            f"| {name} | {sweep.kind} | {sizes} | {np.abs(errors).mean():.0%} | {errors.mean():+.0%} "
            f"| {published:.0f}, {found[large]['bus_bytes_per_second'] / 1e9:.0f} | {chosen} | {sweep.source} |"
        )
    print()
    for name, errors in (("all points", everything), ("points of sweeps that no constant comes from", judged)):
        absolute = np.abs(errors)
        print(
            f"{len(errors)} {name}: median error {np.median(absolute):.1%}, mean {absolute.mean():.1%}, "
            f"p90 {np.quantile(absolute, 0.9):.0%}, bias {np.mean(errors):+.1%}"
        )
    print()


def print_ratios() -> None:
    print("| bytes | " + " | ".join(f"{nodes} nodes" for nodes in SIZE_RATIOS[GIB]) + " |")
    print("|---|" + "---|" * len(SIZE_RATIOS[GIB]))
    for num_bytes, row in SIZE_RATIOS.items():
        cells = []
        for nodes, published in row.items():
            cluster = parse_cluster(f"{nodes}xdgx-h100")
            ratio = bus(cluster, "all_gather", num_bytes) / bus(cluster, "all_gather", 16 * GIB)
            cells.append(f"{published:.3g}, {ratio:.2g}")
        print(f"| {_size(num_bytes)} | {' | '.join(cells)} |")
    print()


def print_playbook() -> None:
    print("| nodes | all-reduce, 5 % to 95 % (median) | ours, 256 MiB | all-gather, 95 % | ours, 256 MiB |")
    print("|---|---|---|---|---|")
    for nodes, (median, low, high) in PLAYBOOK_ALL_REDUCE.items():
        cluster = parse_cluster(f"{nodes}xaws-p5")
        reduced, gathered = bus(cluster, "all_reduce", 256 * MIB), bus(cluster, "all_gather", 256 * MIB)
        best = PLAYBOOK_ALL_GATHER_95[nodes]
        print(f"| {nodes} | {low:.0f} to {high:.0f} ({median:.0f}) | {reduced:.0f} | {best:.0f} | {gathered:.0f} |")


def _size(num_bytes: int) -> str:
    units = ((GIB, "GiB"), (MIB, "MiB"), (2**10, "KiB"))
    return next(f"{num_bytes // size} {unit}" for size, unit in units if num_bytes >= size)


if __name__ == "__main__":
    print_sweeps()
    print_ratios()
    print_playbook()
