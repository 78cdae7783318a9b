"""Derive the constants of `plan/laws/collectives.toml` from a table of measured collectives inside a node, and say how
far off they are.

    python benchmarks/plan/fit_collectives.py --table nccl_intranode.csv [--print-table]

The table has the columns `gpu, version, op_name, num_gpus, bytes, latency_us`, bytes of the whole buffer (all_to_all: what
one rank sends). It holds public measurements (NVIDIA aiconfigurator's NCCL tables) and is not part of this project: only what
is derived from it is. It ends at 512 MB; `PUBLISHED` adds what others measured above.

    t = a + b w + c sqrt(w)          w: bytes of the whole buffer, a in us, b in us/MB, c in us/sqrt(MB)

The root is what a pipeline of chunks costs whose size grows with the message: (steps + m) chunks of w/m bytes cost least at
steps x latency + w/B + 2 sqrt(steps x latency x w/B). A straight line misses by 7 to 18 percent. One fit covers 2, 4 and 8
ranks together, with a, b and c that never fall with the number of ranks, so that time never does; errors are relative.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from dataclasses import dataclass

import numpy as np
import tyro

OPS = {"all_gather": "all_gather", "reduce_scatter": "reduce_scatter", "all_reduce": "all_reduce", "alltoall": "all_to_all"}
IN_SWITCH = {"h100_sxm", "h200_sxm", "b200_sxm"}
"""GPUs whose all-reduce of eight ranks is reduced inside the NVLink switch: an algorithm of its own, fitted on its own."""
MEGABYTE = 1e6
PUBLISHED = {
    ("h100_sxm", "all_reduce_in_switch"): {2**30: 467, 2**33: 478},
    ("h100_sxm", "all_gather"): {2**33: 357},
    ("h100_sxm", "reduce_scatter"): {2**33: 359},
    ("h100_sxm", "all_to_all"): {2**33: 346},
    ("b200_sxm", "all_reduce_in_switch"): {2**30: 723, 2**34: 846},
    ("a100_sxm", "all_reduce"): {2**30: 229},
}
"""Bus bandwidth in GB/s of eight ranks by bytes: nccl-tests in SimuMax (H100, 2025), ml-engineering (B200, 2025), vTrain (A100,
2024)."""
LARGE_BYTES, LARGE_WEIGHT = 2**25, 2.0
"""Messages of 32 MB and more decide the time of a step; they count this many times in the fit."""

Curve = dict[int, float]
Fit = dict[int, tuple[float, float, float]]


@dataclass
class Args:
    """Fit collectives inside a node."""

    table: str
    """The CSV of measurements."""
    print_table: bool = False
    """Print the constants as the TOML of `plan/laws/collectives.toml`."""


def read(path: str) -> dict[tuple[str, str], dict[int, Curve]]:
    """Microseconds by (gpu, kind), ranks and bytes of the whole buffer."""
    found: dict[tuple[str, str], dict[int, Curve]] = defaultdict(lambda: defaultdict(dict))
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            key = (row["gpu"], OPS[row["op_name"]])
            found[key][int(row["num_gpus"])][int(row["bytes"])] = float(row["latency_us"])
    return {key: dict(value) for key, value in found.items()}


def split_by_algorithm(tables: dict[tuple[str, str], dict[int, Curve]]) -> dict[tuple[str, str], dict[int, Curve]]:
    """The same with eight ranks of an in-switch all-reduce as a kind of their own."""
    found: dict[tuple[str, str], dict[int, Curve]] = {}
    for (gpu, kind), curves in tables.items():
        if kind == "all_reduce" and gpu in IN_SWITCH:
            found[gpu, "all_reduce_in_switch"] = {8: curves[8]}
            curves = {ranks: curve for ranks, curve in curves.items() if ranks != 8}
        found[gpu, kind] = curves
    for (gpu, kind), points in PUBLISHED.items():
        for num_bytes, bus in points.items():
            found[gpu, kind][8][num_bytes] = _bus(kind, 8) * num_bytes / (bus * 1e3)
    return found


def fit(curves: dict[int, Curve]) -> Fit:
    """(a, b, c) by number of ranks, none of which falls with it. Least squares of the relative error."""
    ranks = sorted(curves)
    rows, ones = [], []
    for index, number in enumerate(ranks):
        for num_bytes, taken in curves[number].items():
            megabytes = num_bytes / MEGABYTE
            row = np.zeros((3, len(ranks)))
            row[:, : index + 1] = np.array([1.0, megabytes, megabytes**0.5])[:, None]
            weight = LARGE_WEIGHT if num_bytes >= LARGE_BYTES else 1.0
            rows.append(weight * row.ravel() / taken)
            ones.append(weight)
    steps = non_negative_least_squares(np.array(rows), np.array(ones)).reshape(3, len(ranks)).cumsum(axis=1)
    return {number: (float(steps[0, i]), float(steps[1, i]), float(steps[2, i])) for i, number in enumerate(ranks)}


def non_negative_least_squares(matrix: np.ndarray, target: np.ndarray, sweeps: int = 20_000) -> np.ndarray:
    """x >= 0 that makes |matrix x - target| least, by coordinate descent. matrix [R, C], target [R]."""
    scale = np.linalg.norm(matrix, axis=0)
    scaled = matrix / scale
    gram, right = scaled.T @ scaled, scaled.T @ target
    x = np.zeros(len(right))
    for _ in range(sweeps):
        before = x.copy()
        for i in range(len(x)):
            x[i] = max(0.0, x[i] + right[i] - gram[i] @ x)
        if np.abs(x - before).max() < 1e-12:
            break
    return x / scale


def predict(constants: tuple[float, float, float], num_bytes: float) -> float:
    """Microseconds."""
    a, b, c = constants
    megabytes = num_bytes / MEGABYTE
    return a + b * megabytes + c * megabytes**0.5


def errors(found: Fit, curves: dict[int, Curve]) -> np.ndarray:
    """Relative errors of every point."""
    return np.array([predict(found[n], w) / t - 1 for n, curve in curves.items() for w, t in curve.items()])


def held_out_errors(curves: dict[int, Curve]) -> np.ndarray:
    """Relative errors on the sizes left out, when every second one is, both ways."""
    found = []
    for parity in (0, 1):
        kept = {n: {w: t for i, (w, t) in enumerate(sorted(curve.items())) if i % 2 == parity} for n, curve in curves.items()}
        left = {n: {w: t for i, (w, t) in enumerate(sorted(curve.items())) if i % 2 != parity} for n, curve in curves.items()}
        found.append(errors(fit(kept), left))
    return np.concatenate(found)


def main(args: Args) -> None:
    print(f"{'gpu':10} {'kind':22} {'MAPE':>6} {'held out':>9} {'p90':>6} {'bias':>6} {'>=1MB':>6}   bus GB/s at the largest")
    table: dict[str, dict[str, Fit]] = defaultdict(dict)
    for (gpu, kind), curves in sorted(split_by_algorithm(read(args.table)).items()):
        found, held = fit(curves), held_out_errors(curves)
        large = np.concatenate([errors(found, {n: {w: t for w, t in c.items() if w >= MEGABYTE}}) for n, c in curves.items()])
        seen = errors(found, curves)
        limits = ", ".join(f"{n}: {_bus(kind, n) / found[n][1] * 1e3:.0f}" for n in found if found[n][1])
        print(
            f"{gpu:10} {kind:22} {np.abs(seen).mean():6.1%} {np.abs(held).mean():9.1%} {np.quantile(np.abs(held), 0.9):6.1%} "
            f"{held.mean():+6.1%} {np.abs(large).mean():6.1%}   {limits}"
        )
        table[gpu][kind] = found
    if args.print_table:
        for gpu, kinds in table.items():
            if 8 not in kinds["all_gather"]:
                continue  # GB200 was measured on 2 and 4; B200 stands for it
            print(f"\n[{gpu}]")
            for kind, found in kinds.items():
                cells = ", ".join(f"{n} = [{a:.3g}, {b:.4g}, {c:.3g}]" for n, (a, b, c) in found.items())
                print(f"{kind} = {{ {cells} }}")


def _bus(kind: str, ranks: int) -> float:
    """Share of the buffer that crosses a link: bus bandwidth over algorithm bandwidth."""
    return (2 if kind.startswith("all_reduce") else 1) * (ranks - 1) / ranks


if __name__ == "__main__":
    main(tyro.cli(Args))
