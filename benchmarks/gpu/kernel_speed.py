"""Kernels on one CUDA device: ours in Triton beside torch's eager and compiled forms and Liger's, and attention's cores.

    python benchmarks/gpu/kernel_speed.py --output benchmarks/gpu/results/NAME.json [--only norm]

Each row is one forward and backward pass, or one update of narrow moments. `share` is the bandwidth that it reaches, counting
only the bytes that any form must move, over what copying a large tensor reaches in the same call; of attention and experts the
FLOP/s over those of a large matrix product.
Every form is first held to the same in fp64; one that fails, or is too far from it, is a row that says so. Then come the peak
bytes of head and loss, and the lines of the contests by which a run of these shapes would choose (`kernels.choice.contest`).
Where there is no CUDA the script runs at toy sizes, Triton interpreted, and only checks: it is never broken when needed.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, cast

import torch
from claims import kernel_claims
from kernel_contests import contests, loss_peaks
from kernel_shapes import (
    DEVICE,
    DTYPE,
    FFN,
    HAS_CUDA,
    HEAD_DIM,
    HEADS,
    HIDDEN,
    KEY_HEADS,
    LENGTH,
    NUM_DOCUMENTS,
    NUM_EXPERTS,
    ROWS,
    VOCAB,
    random,
)  # fmt: skip
from torch import Tensor
from torch.nn import functional as F
from update_forms import MOVES, update_forms

from ultrascale.description.layout import AttentionCore
from ultrascale.kernels.attention.attention_core import attention, attention_mask
from ultrascale.kernels.choice.contest import ContestResult, device_seconds
from ultrascale.kernels.choice.fused_contest import UPDATES
from ultrascale.kernels.choice.implementation import chosen
from ultrascale.kernels.grouped_matmul import grouped_linear
from ultrascale.kernels.rotary import rotate
from ultrascale.kernels.swiglu import clamped_swiglu, swiglu
from ultrascale.measure.machine.ceilings import measure_matmul_ceiling

LIMIT = 2e-2
"""Relative distance from fp64, of bf16 that is rounded a few times."""
WARM_UP, TIMED = 3, 20
CACHE_BYTES = 1 << 28
"""More than the cache of any GPU."""
Form = Callable[..., Any]


@dataclass(frozen=True)
class Row:
    """One form of one kernel."""

    kernel: str
    form: str
    seconds: float | None
    share: float | None
    distance: float
    """From the same in fp64, of the worst result or gradient."""
    failed: str = ""
    """Why there is no time of it."""

    def line(self) -> str:
        """For people."""
        told = "checked" if self.seconds is None or self.share is None else f"{self.seconds * 1e3:8.3f} ms {self.share:6.1%}"
        return f"{self.kernel:24} {self.form:9} {self.failed or f'{told}   {self.distance:.0e} off'}"


@dataclass(frozen=True)
class Kernel:
    """A kernel's inputs, forms, and the least it does."""

    name: str
    inputs: list[Tensor]
    """Those of floating point get gradients."""
    forms: dict[str, Form]
    moves: float = 0.0
    """Bytes that forward and backward must move."""
    flops: float = 0.0


def triton_form(module: str, name: str) -> dict[str, Form]:
    if find_spec("triton") is None:
        return {}
    from importlib import import_module

    return {"triton": getattr(import_module(f"ultrascale.kernels.{module}"), name)}


def liger(name: str) -> dict[str, Form]:
    """A function of Liger's, where it is importable and there is a GPU for it."""
    if not HAS_CUDA or find_spec("liger_kernel") is None:
        return {}
    from importlib import import_module

    found = getattr(import_module("liger_kernel.transformers.functional"), name, None)
    return {} if found is None else {"liger": found}


def compiled(form: Form) -> dict[str, Form]:
    return {"compiled": torch.compile(form)} if HAS_CUDA else {}


def kernels() -> Iterator[Kernel]:
    yield from elementwise()
    yield from attentions()
    yield experts()


def elementwise() -> Iterator[Kernel]:
    size = DTYPE.itemsize

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, 1e-5)

    def norm_of_a_sum(x: Tensor, added: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return norm(x + added, weight), x + added

    x, added, weight = random(ROWS, HIDDEN), random(ROWS, HIDDEN, seed=1), random(HIDDEN, seed=2)
    ours = {name: lambda *a, f=form: f(*a, 1e-5) for name, form in triton_form("triton_norm", "rms_norm").items()}
    theirs = {name: lambda x, w, f=form: f(x, w, 1e-5) for name, form in liger("liger_rms_norm").items()}
    yield Kernel("norm", [x, weight], {"torch": norm, **compiled(norm), **ours, **theirs}, 5.0 * x.numel() * size)
    ours = {name: lambda *a, f=form: f(*a, 1e-5) for name, form in triton_form("triton_norm", "add_rms_norm").items()}
    theirs = {name: lambda x, a, w, f=form: f(x, a, w, 1e-5) for name, form in liger("liger_fused_add_rms_norm").items()}
    forms = {"torch": norm_of_a_sum, **compiled(norm_of_a_sum), **ours, **theirs}
    yield Kernel("norm of a sum", [x, added, weight], forms, 8.0 * x.numel() * size)
    gate, up = random(ROWS, FFN), random(ROWS, FFN, seed=1)
    plain: Form = lambda g, u: F.silu(g) * u  # noqa: E731
    forms = {"torch": plain, "ours": swiglu, **compiled(plain), **triton_form("triton_swiglu", "swiglu")}
    yield Kernel("swiglu", [gate, up], forms | liger("liger_swiglu"), 8.0 * gate.numel() * size)
    ours = {name: lambda *a, f=form: f(*a, clamped=True) for name, form in triton_form("triton_swiglu", "swiglu").items()}
    yield Kernel("clamped swiglu", [gate, up], {"ours": clamped_swiglu, **ours}, 8.0 * gate.numel() * size)
    heads = random(1, ROWS, HEADS, HEAD_DIM)
    angle = torch.rand(1, ROWS, 1, HEAD_DIM // 2, device=DEVICE)
    cos, sin = angle.cos(), angle.sin()

    def turned(form: Form) -> Form:
        return lambda x: form(x, (cos.to(x.dtype), sin.to(x.dtype)))

    ours = {name: turned(form) for name, form in triton_form("triton_rotary", "rotate").items()}
    yield Kernel("rotary", [heads], {"torch": turned(rotate), **compiled(turned(rotate)), **ours}, 4.0 * heads.numel() * size)


def experts() -> Kernel:
    """A projection of Mixtral's eight experts, of rows in their order, evenly."""
    counts = torch.full((NUM_EXPERTS,), ROWS // NUM_EXPERTS, device=DEVICE)

    def by(form: str) -> Form:
        def run(rows: Tensor, weight: Tensor) -> Tensor:
            with chosen("experts", form):
                return grouped_linear(rows, weight, counts)

        return run

    given = [random(ROWS, HIDDEN), random(NUM_EXPERTS, FFN, HIDDEN, seed=1)]
    return Kernel("experts", given, {form: by(form) for form in ("torch", "loop")}, flops=6.0 * ROWS * HIDDEN * FFN)


def attentions() -> Iterator[Kernel]:
    """Documents of one length, and a window, by each core. FLOPs are those of pairs that are seen."""
    document = LENGTH // NUM_DOCUMENTS
    ids = (torch.arange(LENGTH, device=DEVICE) // document)[None]
    given = [random(1, LENGTH, heads, HEAD_DIM, seed=heads) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    for name, documents, window in (
        ("attention, causal", None, None), ("attention, 8 documents", ids, None), ("attention, a window", None, document),
    ):  # fmt: skip
        is_masked = documents is not None or window is not None
        of_torch: tuple[AttentionCore, ...] = ("sdpa", "varlen") if is_masked else ("sdpa", "cudnn")
        cores: tuple[AttentionCore, ...] = (*of_torch, "flex") if HAS_CUDA else ("sdpa", "varlen")
        seen = LENGTH**2 / 2 if documents is None and window is None else LENGTH * document * (0.5 if window is None else 1)

        def form(core: AttentionCore, documents: Tensor | None = documents, window: int | None = window) -> Form:
            def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
                mask = masks.get(query.dtype)
                if query.dtype not in masks:
                    how: AttentionCore = "sdpa" if query.dtype == torch.float64 else core
                    mask = masks[query.dtype] = attention_mask(
                        LENGTH, LENGTH, document_ids=documents, window=window, dtype=query.dtype, device=DEVICE, core=how
                    )
                return attention(query, key, value, mask)

            masks: dict[torch.dtype, Any] = {}
            return run

        # Forward 2 products of 2 E FLOPs for each pair and head, backward 5.
        yield Kernel(name, given, {core: form(core) for core in cores}, flops=14.0 * seen * HEADS * HEAD_DIM)


def results(form: Form, inputs: list[Tensor]) -> tuple[list[Tensor], Callable[[], None]]:
    """What `form` makes and its gradients, and a function that does both again."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    grads: list[Tensor] = []

    def again() -> list[Tensor]:
        made = form(*leaves)
        made = [*made] if isinstance(made, tuple) else [made]
        if not grads:
            grads.extend(random(*one.shape, seed=7 + number).to(one.dtype) for number, one in enumerate(made))
        return [*made, *torch.autograd.grad(made, leaves, grads)]

    return again(), cast(Callable[[], None], again)


def distance(found: list[Tensor], expected: list[Tensor]) -> float:
    pairs = zip(found, expected, strict=True)
    return max(float(((one.double() - other).norm() / other.norm()).detach()) for one, other in pairs)


def too_far(far: float) -> str:
    """Of a distance that rounding does not explain, what a row says; else empty."""
    return "" if far <= LIMIT else f"failed: {far:.1e} from the reference, more than {LIMIT:.0e}"


def failed(kernel: str, form: str, error: Exception) -> Row:
    """Of a form that does not run here."""
    return Row(kernel, form, None, None, float("nan"), f"failed: {' '.join(str(error).split())[:200]}")


def measured(kernel: Kernel, copy: float, matmul: float) -> Iterator[Row]:
    first = next(iter(kernel.forms.values()))
    expected = None
    if not kernel.flops or not HAS_CUDA:  # attention in fp64 on CUDA makes all scores
        expected, _ = results(first, [tensor.double() for tensor in kernel.inputs])
    for name, form in kernel.forms.items():
        try:
            found, again = results(form, kernel.inputs)
        except Exception as error:  # whatever others' kernels raise: the rest is measured all the same
            yield failed(kernel.name, name, error)
            continue
        expected = found if expected is None else expected
        far = distance(found, [one.double() for one in expected])
        if reason := too_far(far):
            yield Row(kernel.name, name, None, None, far, reason)
            continue
        seconds = share = None
        if HAS_CUDA:
            seconds = timed(again)
            share = kernel.flops / seconds / matmul if kernel.flops else kernel.moves / seconds / copy
        yield Row(kernel.name, name, seconds, share, far)


def timed(run: Callable[[], Any]) -> float:
    """Seconds of the median repetition on the device, which has nothing of its inputs in its cache."""
    cache = torch.empty(CACHE_BYTES, dtype=torch.uint8, device=DEVICE)
    device_seconds(run, WARM_UP)  # clocks, and what is chosen at the first calls
    return median(device_seconds(run, TIMED, before_each=cache.zero_))


def losses(copy: float) -> Iterator[Row]:
    """The loss and its gradient in the logits' place, one pass of a program over each row."""
    forms = triton_form("loss.triton_loss", "loss_and_gradient_")
    rows = ROWS // 8  # a chunk: all logits of so large a vocabulary are what nobody makes

    def plain(logits: Tensor, targets: Tensor) -> Tensor:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        normalizer = torch.logsumexp(wide, 1, keepdim=True)
        found = (normalizer - wide.gather(1, targets[:, None])).squeeze(1)
        is_target = torch.arange(logits.shape[1], device=DEVICE) == targets[:, None]
        logits.copy_(torch.exp(wide - normalizer) - is_target.to(wide.dtype))
        return found

    targets = torch.randint(VOCAB, (rows,), device=DEVICE)
    exact = random(rows, VOCAB).double()
    expected = [plain(exact, targets), exact]
    for name, form in ({"torch": plain} | compiled(plain) | forms).items():
        logits = random(rows, VOCAB)
        try:
            far = distance([form(logits, targets), logits], expected)
        except Exception as error:
            yield failed("loss", name, error)
            continue
        seconds = timed(lambda: form(logits, targets)) if HAS_CUDA else None  # noqa: B023
        share = None if seconds is None else 2.0 * logits.nbytes / seconds / copy
        yield Row("loss", name, seconds, share, far, too_far(far))


def updates(copy: float) -> Iterator[Row]:
    """AdamW with narrow moments on one matrix, held to torch's form."""
    for name in UPDATES:
        expected: list[Tensor] = []
        for form, one in update_forms(name, FFN, HIDDEN, DEVICE).items():
            try:
                one.update()
                found = one.found()
            except Exception as error:
                yield failed(name, form, error)
                continue
            far = distance(found, [other.double() for other in expected or found])
            expected = expected or [other.clone() for other in found]
            seconds = timed(one.update) if HAS_CUDA else None
            share = None if seconds is None else MOVES[name] * FFN * HIDDEN / seconds / copy
            yield Row(name, form, seconds, share, far, too_far(far))


def left_out() -> str:
    """What is not measured here, and why."""
    if not HAS_CUDA:
        return (
            "no CUDA device: toy sizes, interpreted, held to the same in fp64. Left out: times, what only CUDA has (compiled "
            "forms, Liger's, cudnn, flex), peaks of head and loss, contests of all but attention"
        )
    missing = [name for name in ("triton", "liger_kernel") if find_spec(name) is None]
    return f"left out, not installed: {', '.join(missing)}" if missing else ""


def copy_rate() -> float:
    """Bytes per second, read and written, of copying 2 GiB."""
    source = torch.empty(2**30, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.nbytes / timed(lambda: target.copy_(source))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="where the JSON goes")
    parser.add_argument("--only", default="", help="kernels whose name holds this")
    options = parser.parse_args()
    copy = copy_rate() if HAS_CUDA else 0.0
    matmul = measure_matmul_ceiling("bf16", DEVICE).flops_per_second if HAS_CUDA else 0.0
    rows: list[Row] = []
    verdicts: list[ContestResult] = []
    report = {
        "device": torch.cuda.get_device_name() if HAS_CUDA else platform.processor() or "cpu", "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"), "left_out": left_out(),
        "copy_bytes_per_second": copy, "matmul_flops_per_second": matmul,
    }  # fmt: skip

    if reason := left_out():
        print(reason, flush=True)

    def save(**more: Any) -> None:
        report.update(rows=[asdict(row) for row in rows], contests=[asdict(one) for one in verdicts], **more)
        if options.output is not None:
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(report, indent=1) + "\n")

    for row in chain(
        (row for one in kernels() if options.only in one.name for row in measured(one, copy, matmul)),
        losses(copy) if options.only in "loss" else (),
        updates(copy) if any(options.only in name for name in UPDATES) else (),
    ):
        rows.append(row)
        print(row.line(), flush=True)
        save()
    peaks = loss_peaks() if options.only in "head and loss" else {}
    for name, peak in peaks.items():
        print(f"head and loss, {name}: {peak / 2**30:.2f} GiB", flush=True)
    save(head_and_loss_peak_bytes=peaks)
    for verdict in contests():
        if options.only in verdict.what:
            verdicts.append(verdict)
            print(verdict.line(), flush=True)
            save()
    if HAS_CUDA and not options.only:
        print("", *kernel_claims([asdict(row) for row in rows], peaks), sep="\n")
    return 1 if any(row.failed for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
