"""Benchmark of alternative kernels for one operation, at a run's shapes, forward and backward.

    a form that fails, or whose results differ from those of the first that runs, is excluded, with the reason
    the others run in turns for ROUNDS rounds, so that clocks and other load affect all alike; each form's median counts
    over ranks the slowest counts; among forms within CLOSE of the best the first one listed wins

All ranks decide from all ranks' times, so they decide the same. It happens once, before a run's memory is allocated: inputs
have the run's own shapes, with fewer sequences where `MOST_BYTES` would be exceeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

from ultrascale.torch_private import delay_on_device

Form = Callable[..., Tensor | tuple[Tensor, ...]]
Outcomes = dict[str, float | str]
"""Result of each form by name: seconds, or the reason why it is excluded."""
ROUNDS, PASSES = 5, 3
"""Number of measurements of a form, and of passes in each, run back to back."""
CLOSE = 0.02
"""Fraction of the best time within which two forms count as equally fast: clocks of one GPU vary by so much between
measurements."""
MOST_DELAY_SECONDS = 0.25
"""Longest delay on a GPU during which the host queues the timed launches."""
MOST_BYTES = 1 << 31
"""Most bytes of all inputs together; a pass takes about four times as much."""
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}
"""Largest relative distance of results: fp64 allows for the order of sums, fp32 for TF32 on CUDA."""
LIMIT_OF_16_BITS = 3e-2


@dataclass(frozen=True)
class ContestResult:
    """Result of a contest."""

    what: str
    chosen: str
    reason: str
    """Reason why there was no contest; empty if there was one."""
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def line(self) -> str:
        """One-line summary for people."""
        if not self.seconds:
            return f"{self.what}: {self.chosen}, {self.reason}"
        best, *rest = [f"{name} {value * 1e3:.3g} ms" for name, value in self._in_order()]
        clauses = [f"{self.what}: {best}" + (f", {self.reason}" if self.reason else ""), *rest]
        out: dict[str, list[str]] = {}
        for name, why in self.refused.items():
            out.setdefault(why, []).append(name)
        return "; ".join([*clauses, *(f"not {', '.join(names)}: {why}" for why, names in out.items())])

    def _in_order(self) -> list[tuple[str, float]]:
        """The chosen form, then the others by time."""
        return sorted(self.seconds.items(), key=lambda timing: (timing[0] != self.chosen, timing[1]))


def measure(
    forms: Mapping[str, Form | str], inputs: Sequence[Tensor], *, bitwise: bool = False, passes: int = PASSES
) -> Outcomes:
    """Time the forward and backward pass of each of `forms`, which take `inputs` and return one or several tensors; a string in
    place of a form is the reason why it is excluded. Floating-point inputs get gradients; under `torch.no_grad` there is no
    backward pass. `bitwise`: exclude a form whose gradients differ from one pass to the next.
    """
    outcomes: Outcomes = {name: form if isinstance(form, str) else 0.0 for name, form in forms.items()}
    running: dict[str, Form] = {}
    expected: list[Tensor] | None = None
    for name, form in forms.items():
        if isinstance(form, str):
            continue
        results = _try_form(form, inputs)
        if bitwise and not isinstance(results, str):
            repeated = _try_form(form, inputs)
            same = not isinstance(repeated, str) and all(map(torch.equal, results, repeated))
            results = results if same else "its gradients differ from one pass to the next"
        if isinstance(results, str):
            outcomes[name] = results
        elif (far := distance(results, expected)) is not None:
            outcomes[name] = far
        else:
            running[name] = form
            expected = results if expected is None else expected
    for name, seconds in _timed(running, inputs, passes).items():
        outcomes[name] = seconds
    return outcomes


def weighted_sum(parts: Sequence[tuple[float, Outcomes]]) -> Outcomes:
    """Weighted sum of the outcomes of several shapes; a form excluded in one is excluded."""
    total: Outcomes = {}
    for times, outcomes in parts:
        for name, result in outcomes.items():
            before = total.get(name, 0.0)
            total[name] = before if isinstance(before, str) else result if isinstance(result, str) else before + times * result
    return total


def decide(what: str, of_ranks: Sequence[Outcomes]) -> ContestResult:
    """Verdict from all ranks' outcomes, the same on each of them. Raises RuntimeError if no form ran everywhere."""
    seconds: dict[str, float] = {}
    refused: dict[str, str] = {}
    for name in of_ranks[0]:
        outcomes = [outcomes[name] for outcomes in of_ranks]
        reason = next((outcome for outcome in outcomes if isinstance(outcome, str)), None)
        if reason is not None:
            refused[name] = reason
        else:
            seconds[name] = max(outcome for outcome in outcomes if not isinstance(outcome, str))
    if not seconds:
        raise RuntimeError(f"{what}: no kernel runs here: " + "; ".join(f"{name}: {why}" for name, why in refused.items()))
    limit = min(seconds.values()) * (1 + CLOSE)
    chosen = next(name for name, value in seconds.items() if value <= limit)
    return ContestResult(what, chosen, "the only one that can" if len(seconds) == 1 else "", seconds, refused)


def distance(results: Sequence[Tensor], expected: Sequence[Tensor] | None) -> str | None:
    """Distance of results from the expected ones, as text; None if they are close enough."""
    if not all(bool(result.isfinite().all()) for result in results):
        return "its results are not finite"
    for result, other in zip(results, expected or (), strict=bool(expected)):
        limit = LIMITS.get(result.dtype, LIMIT_OF_16_BITS)
        size = float(other.double().norm())
        far = float((result.double() - other.double()).norm()) / (size or 1.0)
        if far > limit:
            return f"its results are {far:.0e} off"
    return None


def _try_form(form: Form, inputs: Sequence[Tensor]) -> list[Tensor] | str:
    """The result of `form` and its gradients, or the reason for failure."""
    try:
        return _forward_backward(form, inputs)
    except torch.OutOfMemoryError:
        return "out of memory"
    except Exception as error:  # any error of a third-party kernel excludes it, with the reason
        return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def _forward_backward(form: Form, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [tensor.detach().requires_grad_(tensor.is_floating_point()) for tensor in inputs]
    output = form(*leaves)
    outs = [output] if isinstance(output, Tensor) else [*output]
    if not torch.is_grad_enabled():
        return outs
    grads = [torch.ones_like(out) if out.dim() == 0 else _gradient(out) for out in outs]
    gradients = torch.autograd.grad(outs, [tensor for tensor in leaves if tensor.requires_grad], grads)
    return [*(out.detach() for out in outs), *gradients]


def _gradient(like: Tensor) -> Tensor:
    """Gradient of mixed signs, the same for every form: under a constant one, softmax would have no gradient."""
    flat = torch.arange(like.shape[-1], device=like.device, dtype=torch.float32).add_(0.5).cos_()
    return flat.to(like.dtype).expand_as(like).contiguous()


def _timed(forms: Mapping[str, Form], inputs: Sequence[Tensor], passes: int) -> dict[str, float]:
    rounds: dict[str, list[float]] = {name: [] for name in forms}
    for _ in range(ROUNDS if len(forms) > 1 else 1):
        for name, form in forms.items():
            rounds[name].append(seconds_of(form, inputs, passes))
    return {name: median(seconds) for name, seconds in rounds.items()}


def seconds_of(form: Form, inputs: Sequence[Tensor], passes: int) -> float:
    """Seconds of one pass, averaged over `passes` in a row: of device time on CUDA, of wall-clock time elsewhere."""
    if inputs[0].is_cuda:
        return sum(device_seconds(lambda: _forward_backward(form, inputs), passes)) / passes
    begun = time.perf_counter()
    for _ in range(passes):
        _forward_backward(form, inputs)
    return (time.perf_counter() - begun) / passes


def device_seconds(run: Callable[[], object], times: int, *, before_each: Callable[[], object] = lambda: None) -> list[float]:
    """Seconds that each of `times` calls keeps the GPU busy, excluding host launch time: calls are queued on the device, behind
    a delay, until all are launched. In a training step the host runs ahead of the device in the same way; timed one by one, a
    norm on an H200 was four times slower in a kernel of ours, which Python launches, than in several of torch's.

    `before_each`: untimed. If launching takes longer than MOST_DELAY_SECONDS, or a call synchronises with the device, the
    result includes some host time: such calls do not run ahead in a training step either.
    """
    torch.cuda.synchronize()
    begun = time.perf_counter()
    before_each()
    run()
    launching = time.perf_counter() - begun
    torch.cuda.synchronize()
    delay_on_device(min(MOST_DELAY_SECONDS, 2 * times * launching + 1e-4))
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(times)]
    for start, end in marks:
        before_each()
        start.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) * 1e-3 for start, end in marks]
