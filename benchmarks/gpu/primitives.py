"""What the planner takes this GPU to be, beside what it is: matrix products, attention, memory bandwidth.

    python benchmarks/gpu/primitives.py --output results.json [--toy]

Products are those of one block of three Llama shapes at 4096 and 16,384 tokens, forward and both gradients, each factor laid
out as a linear layer has it; in fp8, of one shape, with a scale for a tensor and for a row, with the tensor cores' fast sums
and without, beside what rounding costs. Attention is causal, forward and backward, by each of SDPA's kernels by name: what
SDPA takes by itself is cuDNN's on Hopper. Bandwidth is a copy and a sum of tensors of 2 GiB. Each is timed by device events
over several runs on inputs that take turns, and the median is held against `plan.laws.compute` (whose fp8 products include
rounding the left factor). The printed ratios are what a calibration of the catalogue would change.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from ultrascale.catalogue.cluster import Accelerator
from ultrascale.catalogue.models.model_presets import preset
from ultrascale.description.architecture.model import Model
from ultrascale.kernels.choice.contest import device_seconds
from ultrascale.kernels.fp8.fp8_matrices import FORWARD, Scaling, multiplies_fp8, narrow
from ultrascale.measure.machine.ceilings import device_name, this_gpu
from ultrascale.plan.laws.compute import Kernel, attention_seconds, elementwise_seconds, matmul_seconds

MODELS = ("llama-3.2-1b", "llama-3-8b", "llama-3-70b")
TOKENS = (4096, 16384)
FP8_MODEL = "llama-3-8b"
ATTENTION_KERNELS: dict[Kernel, SDPBackend] = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash-2": SDPBackend.FLASH_ATTENTION,
}  # fmt: skip
"""What the planner calls them, and SDPA."""
SETS = 3
"""Input sets that are used in turn, so that no product finds its operands in the cache."""
TIMED = 12


@dataclass(frozen=True)
class Case:
    """One operation."""

    kind: str
    """`product`, `input gradient`, `weight gradient`, `fp8 product`, `fp8 rounding`, `attention`, `attention backward`, `copy`,
    `add`."""
    name: str
    flops: float
    num_bytes: float
    make: Callable[[], Callable[[], object]]
    """Makes inputs, and gives what is timed on them."""
    predict: Callable[[Accelerator], float]
    """Seconds, by the planner."""


def cases(device: torch.device, *, toy: bool) -> Iterator[Case]:
    """Everything that is measured."""
    if toy:
        yield from products(device, "toy", 64, {"qkv": (96, 64)})
        yield from attention(device, "toy", (1, 64, 4, 2, 16))
        yield from streams(device, 2**16)
        return
    for name in MODELS:
        model = preset(name)
        for tokens in TOKENS:
            yield from products(device, name, tokens, weights_of(model))
            if name == FP8_MODEL and multiplies_fp8(device):
                yield from fp8_products(device, name, tokens, weights_of(model))
        for sequences, length in ((4, 4096), (1, 16384)):
            heads = (model.num_attention_heads, model.num_key_value_heads, model.head_dim)
            for kernel in ATTENTION_KERNELS:
                yield from attention(device, name, (sequences, length, *heads), kernel)
    yield from streams(device, 2**30)


def weights_of(model: Model) -> dict[str, tuple[int, int]]:
    """[outputs, inputs] of a block's products."""
    d, f = model.hidden_size, model.intermediate_size
    query, key = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    return {"qkv": (query + 2 * key, d), "out": (d, query), "gate up": (2 * f, d), "down": (d, f)}


def products(device: torch.device, model: str, m: int, weights: dict[str, tuple[int, int]]) -> Iterator[Case]:
    """[m, k] x [k, n] and its two gradients, for each weight [n, k]."""
    for name, (n, k) in weights.items():
        # As a linear layer has them: weights [n, k], activations [m, k] and gradients [m, n] row by row, turned where need be.
        sizes = {"product": ((m, k), (n, k)), "input gradient": ((m, n), (n, k)), "weight gradient": ((m, n), (m, k))}
        words: dict[str, Any] = {"product": "forward", "input gradient": "input-gradient", "weight gradient": "weight-gradient"}
        for kind, (left, right) in sizes.items():

            def make(left: tuple[int, int] = left, right: tuple[int, int] = right, kind: str = kind) -> Callable[[], object]:
                a, b = (torch.randn(size, device=device, dtype=torch.bfloat16) for size in (left, right))
                a, b = a.t() if kind == "weight gradient" else a, b.t() if kind == "product" else b
                return lambda: a @ b

            def predict(gpu: Accelerator, n: int = n, k: int = k, kind: str = words[kind]) -> float:
                return matmul_seconds(gpu, m, n, k, kind=kind)  # pyright: ignore[reportArgumentType]

            yield Case(kind, f"{model} {name} {m} x {n} x {k}", 2.0 * m * n * k, 2.0 * (m * k + n * k + m * n), make, predict)


def fp8_products(device: torch.device, model: str, m: int, weights: dict[str, tuple[int, int]]) -> Iterator[Case]:
    """[m, k] x [k, n] in e4m3 to bf16, both factors rounded before; and what rounding the left one takes."""
    for name, (n, k) in weights.items():
        for scaling, is_fast in product(get_args(Scaling), (False, True)):

            def make(n: int = n, k: int = k, scaling: Scaling = scaling, is_fast: bool = is_fast) -> Callable[[], object]:
                a, b = (torch.randn(rows, k, device=device, dtype=torch.bfloat16).to(FORWARD) for rows in (m, n))
                scales = [
                    torch.ones(shape if scaling == "row" else (), device=device) for shape in ((m, 1), (1, n))
                ]  # of tensors a number each
                return lambda: torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
                    a, b.t(), *scales, out_dtype=torch.bfloat16, use_fast_accum=is_fast
                )

            def predict(gpu: Accelerator, n: int = n, k: int = k) -> float:
                return matmul_seconds(gpu, m, n, k, dtype="fp8")

            told = f"{model} {name} {m} x {n} x {k}, {scaling}{', fast sums' * is_fast}"
            yield Case("fp8 product", told, 2.0 * m * n * k, 1.0 * (m * k + n * k) + 2.0 * m * n, make, predict)
    for k in sorted({k for _, k in weights.values()}):
        for scaling in get_args(Scaling):

            def rounding(k: int = k, scaling: Scaling = scaling) -> Callable[[], object]:
                wide, once = torch.randn(m, k, device=device, dtype=torch.bfloat16), torch.compile(narrow)
                return lambda: once(wide, scaling)

            moved = 5.0 * m * k  # read for the largest, read again, written
            yield Case(
                "fp8 rounding", f"{m} x {k}, {scaling}", 0.0, moved, rounding,
                lambda gpu, moved=moved: elementwise_seconds(gpu, moved, num_kernels=2),
            )  # fmt: skip


def attention(
    device: torch.device, model: str, sizes: tuple[int, int, int, int, int], kernel: Kernel | None = None
) -> Iterator[Case]:
    """Causal attention of `sizes` (sequences, length, heads, groups, width) through SDPA, forward and backward; by `kernel`, or
    by what SDPA takes."""
    batch, length, heads, groups, width = sizes
    flops = 2.0 * batch * heads * length * length * width  # two products over half of the square
    num_bytes = 2.0 * batch * length * width * (2 * heads + 2 * groups)
    name = f"{model} {batch} x {length}, {heads} heads of {width}, {groups} groups{f', {kernel}' if kernel else ''}"

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with nullcontext() if kernel is None else sdpa_kernel(ATTENTION_KERNELS[kernel]):
            return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    def inputs(needs_grad: bool) -> list[torch.Tensor]:
        counts = (heads, groups, groups)
        return [
            torch.randn(batch, length, count, width, device=device, dtype=torch.bfloat16, requires_grad=needs_grad)
            for count in counts
        ]  # [B, S, H, E], as a projection leaves them

    def forward() -> Callable[[], object]:
        query, key, value = inputs(False)
        return lambda: attend(*(one.transpose(1, 2) for one in (query, key, value)))

    def backward() -> Callable[[], object]:
        query, key, value = given = inputs(True)
        out = attend(*(one.transpose(1, 2) for one in (query, key, value)))
        gradient = torch.randn_like(out)
        return lambda: torch.autograd.grad(out, given, gradient, retain_graph=True)

    for kind, make in (("attention", forward), ("attention backward", backward)):

        def predict(gpu: Accelerator, is_backward: bool = kind != "attention") -> float:
            return attention_seconds(
                gpu, batch=batch, heads=heads, key_value_heads=groups, head_dim=width, queries=length, keys=length, share=0.5,
                backward=is_backward, kernel=kernel or "flash",
            )  # fmt: skip

        yield Case(kind, name, flops * (2.5 if kind != "attention" else 1.0), num_bytes, make, predict)


def streams(device: torch.device, count: int) -> Iterator[Case]:
    """What moves memory and computes next to nothing: `count` bf16 elements."""

    def copy() -> Callable[[], object]:
        source, target = (torch.randn(count, device=device).bfloat16() for _ in range(2))
        return lambda: target.copy_(source)

    def add() -> Callable[[], object]:
        left, right = (torch.randn(count, device=device).bfloat16() for _ in range(2))
        return lambda: left.add_(right)

    for kind, num_bytes, make in (("copy", 4.0 * count, copy), ("add", 6.0 * count, add)):
        yield Case(kind, f"{count} bf16", 0.0, num_bytes, make, lambda gpu, size=num_bytes: elementwise_seconds(gpu, size))


def seconds_of(case: Case, device: torch.device) -> list[float]:
    """Each timed run, on inputs that take turns."""
    runs = [case.make() for _ in range(SETS)]
    for run in runs:
        run()
    if device.type != "cuda":
        found = []
        for number in range(TIMED):
            start = time.perf_counter()
            runs[number % SETS]()
            found.append(time.perf_counter() - start)
        return found
    turns = itertools.count()
    return device_seconds(lambda: runs[next(turns) % SETS](), TIMED)


def measured(case: Case, device: torch.device, gpu: Accelerator | None) -> dict[str, Any]:
    """A row: seconds, rates, and the planner's seconds over the measured ones."""
    seconds = seconds_of(case, device)
    middle = statistics.median(seconds)
    row = {
        "kind": case.kind, "name": case.name, "seconds": middle, "spread": [min(seconds), max(seconds)],
        "flops_per_second": case.flops / middle, "bytes_per_second": case.num_bytes / middle,
    }  # fmt: skip
    if gpu is not None and not gpu.measured_at_run_time:
        planned = float(case.predict(gpu))
        row |= {"planned_seconds": planned, "planned_over_measured": planned / middle}
    return row


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    rate = f"{row['flops_per_second'] / 1e12:8.1f} TFLOP/s" if row["flops_per_second"] else " " * 16
    planned = f"  planned {row['planned_over_measured']:.2f}x of it" if "planned_over_measured" in row else ""
    moved = f"{row['bytes_per_second'] / 1e9:8.0f} GB/s"
    return f"{row['kind']:<18} {row['name']:<48} {row['seconds'] * 1e6:10.1f} us {rate} {moved}{planned}"


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--toy", action="store_true", help="tiny sizes, on the CPU")
    arguments = parser.parse_args()
    if not arguments.toy and not torch.cuda.is_available():
        parser.error("torch sees no CUDA device; --toy runs tiny sizes on the CPU")
    device = torch.device("cpu" if arguments.toy else "cuda")
    gpu = this_gpu(device)
    record: dict[str, Any] = {
        "device": device_name(device), "catalogued": None if gpu is None else gpu.name, "torch": torch.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "rows": [],
    }  # fmt: skip
    for case in cases(device, toy=arguments.toy):
        record["rows"].append(row := measured(case, device, gpu))
        print(line(row), flush=True)
        if arguments.output is not None:
            arguments.output.parent.mkdir(parents=True, exist_ok=True)
            arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
