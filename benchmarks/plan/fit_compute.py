"""Fit the constants of `plan.laws.curves` to measured products and attention kernels; print held-out errors; write the
constants.

    python benchmarks/plan/fit_compute.py --tables FOLDER [--output src/ultrascale/plan/laws/computing.toml]

FOLDER holds gemm_<name>.csv.gz with columns gemm_dtype, m, n, k, latency_us: single products that NVIDIA's aiconfigurator
timed (TensorRT-LLM torch flow; its fp8 rows include the cast of the left operand). Attention is fitted to
attention_measured.csv beside this file, published numbers with their sources. Held out: every fifth of the values of n, then
of k, so that a shape is judged by a fit that has never seen its width. Robust least squares on log(time), with a weak pull to
ordinary constants.
"""

from __future__ import annotations

import csv
import gzip
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import tyro

from ultrascale.catalogue.machines import ACCELERATORS
from ultrascale.plan.laws import curves
from ultrascale.plan.laws.curves import AttentionCurve, MatmulCurve

HERE = Path(__file__).parent
TABLES = {"a100-80": "a100_sxm", "h100-sxm": "h100_sxm", "h200": "h200_sxm", "b200": "b200_sxm", "gb200": "gb200"}
DTYPES = {"bf16": "bfloat16", "fp8": "fp8"}
FITTED_FROM = (128, 256, 256)
"""Smallest m, n, k that are fitted: below, launches and reads decide, not what training runs."""
JUDGED_FROM, JUDGED_FLOPS = 512, 2e9
"""Smallest side and FLOPs of the products that errors are given for: what a training step spends its time on."""
FOLDS = 5
PULL = 1e-3
"""Weight of the pull to ordinary constants, per square root of a row: it decides only what the rows leave open."""
ATTENTION_SETS = {
    ("a100", "flash-2"): ({"a100-80"}, {"flash-2"}),
    ("hopper", "flash"): ({"h100-sxm", "h200"}, {"flash"}),
    ("hopper", "cudnn"): ({"h100-sxm", "h200"}, {"cudnn"}),
    ("hopper", "flash-2"): ({"h100-sxm"}, {"flash-2"}),
    ("blackwell", "flash"): ({"b200", "gb200"}, {"flash", "cudnn"}),
}
Vector = np.ndarray


def main(tables: Path, output: Path | None = None) -> None:
    """Fit everything, print the errors as Markdown, and write the constants if `output` is given."""
    matmul = dict(_fit_products(tables))
    attention = dict(_fit_attention())
    _compare_directions(matmul)
    if output:
        output.write_text(_source(matmul, attention))


# --- products


def _fit_products(folder: Path) -> Iterator[tuple[tuple[str, str], MatmulCurve]]:
    print("| device | dtype | held-out errors | MAPE % | p90 % | bias % | four constants, MAPE % | smaller ones, MAPE % |")
    print("|---|---|---|---|---|---|---|---|")
    for name, stem in TABLES.items():
        for dtype in DTYPES:
            rows = _read_products(folder / f"gemm_{stem}.csv.gz", DTYPES[dtype])
            if not len(rows):
                continue
            start = _start(name, dtype)
            judged = _judged(rows)
            law = _held_out(rows, lambda some, start=start: _fitted(some, start))
            four = _held_out(rows, lambda some, name=name, dtype=dtype: _four_constants(some, name, dtype))
            print(f"| {name} | {dtype} | {2 * judged.sum()} | {_errors(law[judged])} | {_mape(four[judged])} "
                  f"| {_mape(law[~judged])} |", flush=True)  # fmt: skip
            yield (name, dtype), _fitted(rows, start)[0]


def _read_products(path: Path, dtype: str) -> Vector:
    """Rows of m, n, k, seconds."""
    with gzip.open(path, "rt") as file:
        rows = [[float(row[key]) for key in ("m", "n", "k", "latency_us")] for row in csv.DictReader(file)
                if row["gemm_dtype"] == dtype]  # fmt: skip
    table = np.array(rows).reshape(-1, 4) * (1, 1, 1, 1e-6)
    return table[(table[:, :3] >= FITTED_FROM).all(1)]


def _start(name: str, dtype: str) -> MatmulCurve:
    """Ordinary constants, which the fit starts at and is weakly pulled to."""
    device = ACCELERATORS[name]
    assert device.memory_bytes_per_second
    fp8 = dtype.startswith("fp8")
    return MatmulCurve(
        efficiency=0.85, launch_seconds=3e-6, bandwidth_efficiency=0.8, ramp=120, fill=0.2, split=2000, partial_wave=0.2,
        padding=0.4, sharpness=3, power_flops=1e12, power=0.1, cast_efficiency=0.4 if fp8 else 0, operand_bytes=1 if fp8 else 2,
        multiprocessors=device.multiprocessors, peak_flops=device.peak_flops_per_second("fp8" if fp8 else "bf16"),
        bytes_per_second=device.memory_bytes_per_second.value,
    )  # fmt: skip


SHARES = ("efficiency", "bandwidth_efficiency", "partial_wave", "padding", "cast_efficiency")
POSITIVE = ("launch_seconds", "ramp", "fill", "split", "sharpness", "power_flops", "power")


def _encode(curve: MatmulCurve) -> Vector:
    shares = [getattr(curve, name) for name in SHARES if getattr(curve, name)]
    positive = [getattr(curve, name) - (name == "sharpness") for name in POSITIVE]
    return np.concatenate([[np.log(x / (1 - x)) for x in shares], np.log(positive)])


def _decode(x: Vector, start: MatmulCurve) -> MatmulCurve:
    shares = [name for name in SHARES if getattr(start, name)]
    values = {name: float(1 / (1 + np.exp(-y))) for name, y in zip(shares, x, strict=False)}
    values |= {name: float(np.exp(y)) + (name == "sharpness") for name, y in zip(POSITIVE, x[len(shares) :], strict=True)}
    return replace(start, **values)


def _fitted(rows: Vector, start: MatmulCurve) -> tuple[MatmulCurve, Callable[[Vector], Vector]]:
    prior, pull = _encode(start), PULL * np.sqrt(len(rows))

    def residuals(x: Vector) -> Vector:
        return np.concatenate([np.log(_product_seconds(_decode(x, start), rows) / rows[:, 3]), pull * (x - prior)])

    curve = _decode(_least_squares(residuals, prior), start)
    return curve, lambda some: _product_seconds(curve, some)


def _product_seconds(curve: MatmulCurve, rows: Vector) -> Vector:
    return curves.matmul_law(curve, rows[:, 0], rows[:, 1], rows[:, 2], ceil=np.ceil)


def _four_constants(rows: Vector, name: str, dtype: str) -> tuple[None, Callable[[Vector], Vector]]:
    """The usual formula, for comparison: half-quantised waves, one efficiency, a ramp, a launch, a sharp roofline."""
    start = _start(name, dtype)

    def seconds(x: Vector, some: Vector) -> Vector:
        m, n, k, _ = some.T
        tiles = np.ceil(m / 128) * np.ceil(n / 128)
        quantised = (np.ceil(tiles / start.multiprocessors) * start.multiprocessors + tiles) / 2
        compute = 2 * quantised * 128 * 128 * (k + np.exp(x[3])) / (start.peak_flops * np.exp(x[0]))
        num_bytes = start.operand_bytes * (m * k + k * n) + 2 * m * n
        return np.exp(x[1]) * 1e-6 + np.maximum(compute, num_bytes / (start.bytes_per_second * np.exp(x[2])))

    x = _least_squares(lambda x: np.log(seconds(x, rows) / rows[:, 3]), np.array([-0.2, 1.0, -0.4, 5.0]))
    return None, lambda some: seconds(x, some)


def _held_out(rows: Vector, fit: Callable[[Vector], tuple[object, Callable[[Vector], Vector]]]) -> Vector:
    """Relative errors [rows, 2]: every row predicted by a fit without its n, and by one without its k."""
    errors = np.empty((len(rows), 2))
    for side, column in enumerate((1, 2)):
        values = np.unique(rows[:, column])
        np.random.default_rng(0).shuffle(values)
        for fold in np.array_split(values, FOLDS):
            hidden = np.isin(rows[:, column], fold)
            _, law = fit(rows[~hidden])
            errors[hidden, side] = law(rows[hidden]) / rows[hidden, 3] - 1
    return errors


def _judged(rows: Vector) -> Vector:
    return (rows[:, :3].min(1) >= JUDGED_FROM) & (2 * rows[:, :3].prod(1) >= JUDGED_FLOPS)


# --- attention


def _fit_attention() -> Iterator[tuple[tuple[str, str, str], AttentionCurve]]:
    print("\n| devices | kernel | direction | kernels | MAPE % | p90 % | bias % | held out % |")
    print("|---|---|---|---|---|---|---|---|")
    with (HERE / "attention_measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    for (family, kernel), (devices, kernels) in ATTENTION_SETS.items():
        for direction in ("forward", "backward"):
            some = [row for row in rows if row["accelerator"] in devices and row["kernel"] in kernels
                    and row["pass"] == direction and row["dtype"] != "fp8" and "2025" not in row["source"]]  # fmt: skip
            curve = _attention_fitted(some)
            measured = np.array([float(row["latency_us"]) * 1e-6 for row in some])
            errors = np.array([_attention_seconds(curve, row) for row in some]) / measured - 1
            hidden = _attention_held_out(some)
            print(f"| {family} | {kernel} | {direction} | {len(some)} | {_errors(errors)} | {_mape(hidden)} |", flush=True)
            yield (family, kernel, direction), curve


ATTENTION_START = AttentionCurve((0.55, 0.65, 0.65, 0.6), ramp=55, tail=0.3, edge=90)


def _attention_fitted(rows: list[dict[str, str]]) -> AttentionCurve:
    measured = np.array([float(row["latency_us"]) * 1e-6 for row in rows])
    prior = np.log([*ATTENTION_START.efficiency, ATTENTION_START.ramp, ATTENTION_START.tail, ATTENTION_START.edge])

    def decode(x: Vector) -> AttentionCurve:
        y = [float(v) for v in np.exp(x)]
        return AttentionCurve((min(y[0], 0.98), min(y[1], 0.98), min(y[2], 0.98), min(y[3], 0.98)), y[4], y[5], y[6])

    def residuals(x: Vector) -> Vector:
        curve = decode(x)
        errors = np.log(np.array([_attention_seconds(curve, row) for row in rows]) / measured)
        # A head dim without measurements follows its neighbour, as the prior's do.
        steps = 0.3 * (np.diff(x[:4]) - np.diff(prior[:4]))
        return np.concatenate([errors, steps, 0.05 * (x[4:] - prior[4:])])

    return decode(_least_squares(residuals, prior, huber=0.15))


def _attention_held_out(rows: list[dict[str, str]]) -> Vector:
    """Errors of rows predicted without any row of their sequence length and number of heads."""
    groups = sorted({(row["sequence_length"], row["heads"]) for row in rows})
    errors = []
    for fold in range(FOLDS):
        hidden = set(groups[fold::FOLDS])
        curve = _attention_fitted([row for row in rows if (row["sequence_length"], row["heads"]) not in hidden])
        errors += [_attention_seconds(curve, row) / (float(row["latency_us"]) * 1e-6) - 1
                   for row in rows if (row["sequence_length"], row["heads"]) in hidden]  # fmt: skip
    return np.array(errors)


def _attention_seconds(curve: AttentionCurve, row: dict[str, str]) -> float:
    from ultrascale.plan.flops import mean_context
    from ultrascale.plan.laws.compute import flash_seconds

    length, window = int(row["sequence_length"]), int(row["window"] or 0)
    share = 1.0 if row["mask"] == "none" else mean_context(length, window or None) / length
    device = ACCELERATORS[row["accelerator"]]
    assert device.memory_bytes_per_second
    curve = replace(curve, multiprocessors=device.multiprocessors, peak_flops=device.peak_flops_per_second("bf16"),
                    bytes_per_second=device.memory_bytes_per_second.value)  # fmt: skip
    return flash_seconds(curve, int(row["batch"]), int(row["heads"]), int(row["key_value_heads"]), int(row["head_dim"]),
                         int(row["value_head_dim"]), length, length, share, 2, row["pass"] == "backward")  # fmt: skip


# --- directions and groups


def _compare_directions(matmul: dict[tuple[str, str], MatmulCurve]) -> None:
    """The law against another bench's backward and grouped products, whose own speed is taken out by its forward median."""
    from ultrascale.plan.laws.compute import direction_seconds

    with (HERE / "matmul_directions_measured.csv").open() as file:
        rows = list(csv.DictReader(file))
    print("\n| device | groups | direction | products | measured over law, median | MAPE % after the median of its forward |")
    print("|---|---|---|---|---|---|")
    for device in ("a100-80", "b200"):
        speed = 1.0
        for grouped in (False, True):
            some = [row for row in rows if row["accelerator"] == device and (int(row["count"]) > 1) == grouped]
            for kind in ("forward", "input-gradient", "weight-gradient"):
                law = [direction_seconds(matmul[device, "bf16"], int(row["m"]), int(row["n"]), int(row["k"]), int(row["count"]),
                                         kind, float(row["output_bytes"])) for row in some]  # fmt: skip
                ratio = np.array([float(row[f"{kind.replace('-', '_')}_us"]) * 1e-6 for row in some]) / law
                speed = float(np.median(ratio)) if kind == "forward" and not grouped else speed
                print(f"| {device} | {'many' if grouped else 'one'} | {kind} | {len(some)} | {np.median(ratio):.2f} "
                      f"| {_mape(speed / ratio - 1)} |")  # fmt: skip


# --- both


def _least_squares(residuals: Callable[[Vector], Vector], start: Vector, *, huber: float = 0.1, steps: int = 60) -> Vector:
    """Levenberg and Marquardt's method with Huber's weights: errors above `huber` count linearly."""

    def cost(r: Vector) -> float:
        a = np.abs(r)
        return float(np.where(a < huber, a * a / 2, huber * (a - huber / 2)).sum())

    x, damping = start.copy(), 1e-2
    r = residuals(x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + step) - r) / step.sum() for step in np.eye(len(x)) * 1e-4], axis=1)
        weighted = jacobian * np.minimum(1, huber / np.maximum(np.abs(r), 1e-12))[:, None]
        normal, gradient, before = weighted.T @ jacobian, weighted.T @ r, cost(r)
        while damping < 1e6:
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            trial = x + np.clip(step, -1, 1)
            rest = residuals(trial)
            if cost(rest) < before:
                x, r, damping = trial, rest, max(damping / 4, 1e-9)
                break
            damping *= 4
        if before - cost(r) < 1e-7 * before:
            break
    return x


def _errors(errors: Vector) -> str:
    e = np.abs(errors)
    return f"{100 * e.mean():.1f} | {100 * np.quantile(e, 0.9):.1f} | {100 * np.median(errors):+.1f}"


def _mape(errors: Vector) -> str:
    return f"{100 * np.abs(errors).mean():.1f}"


def _source(matmul: dict[tuple[str, str], MatmulCurve], attention: dict[tuple[str, str, str], AttentionCurve]) -> str:
    """The constants as the TOML file of `plan.laws`."""
    lines = [
        "# Constants of `plan.laws.curves`, written by `benchmarks/plan/fit_compute.py`: derived numbers, not measurements.",
        "#",
        "# Products: NVIDIA aiconfigurator's tables (TensorRT-LLM torch flow, 2026-08). Attention: figures of FlashAttention-3",
        "# (2024), cudnn-frontend's training benchmark (2026-09), SimuMax's files (2026). Errors: docs/compute-model.md.",
    ]
    for key, curve in matmul.items():
        names = [*(name for name in SHARES if getattr(curve, name)), *POSITIVE, "operand_bytes"]
        lines += ["", f"[products.{'.'.join(key)}]", *(f"{name} = {_digits(getattr(curve, name))}" for name in names)]
    for (family, kernel, direction), curve in attention.items():
        head, shares = f"[attention.{family}.{kernel}]", ", ".join(f"{share:.3f}" for share in curve.efficiency)
        lines += [] if head in lines else ["", head]
        others = f"ramp = {curve.ramp:.3g}, tail = {curve.tail:.3g}, edge = {curve.edge:.3g}"
        lines += [f"{direction} = {{ efficiency = [{shares}], {others} }}"]
    return "\n".join([*lines, ""])


def _digits(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.4g}"


if __name__ == "__main__":
    tyro.cli(main)
