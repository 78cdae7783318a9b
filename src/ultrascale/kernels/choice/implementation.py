"""Chooses the implementation (form) of norm, RoPE, SwiGLU, loss, experts' GEMMs and AdamW with narrow moments on CUDA.

Under torch.compile the plain form is traced and fused, and this choice is not used. Otherwise a run sets the forms once, when
it is built: one form for all, or the fastest of each (`kernels.choice.fused_contest`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ultrascale.description.problems import mistake
from ultrascale.kernels.choice.device_kind import is_cuda

Kernel = Literal["norm", "norm_of_sum", "rotary", "swiglu", "loss", "experts", "adamw-bf16", "adamw-8bit"]
FORMS: dict[str, tuple[str, ...]] = {
    "norm": ("torch", "triton", "liger"), "norm_of_sum": ("torch", "triton", "liger"), "rotary": ("torch", "triton"),
    "swiglu": ("torch", "triton"), "loss": ("torch", "compiled", "triton"), "experts": ("torch", "loop"),
    "adamw-bf16": ("torch", "triton"), "adamw-8bit": ("torch", "triton"),
}  # fmt: skip
"""Forms of each kernel, torch's first. Left out of Liger: its SwiGLU, which overwrites gate and up with gradients; its loss,
which accumulates the weight's gradient in 16 bits; its RoPE, which takes queries and keys together."""
PACKAGES = {"triton": "triton", "liger": "liger_kernel"}
_CHOSEN: dict[str, str] = dict.fromkeys(FORMS, "torch")
"""Global state, as in `kernels.choice.device_kind`: the functions have no argument that could carry it."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(forms: str | Mapping[str, str], device: torch.device) -> None:
    """Set the forms for this process: one form for all kernels that have it, or one for each by name.

    Raises SpecError if a form cannot run.
    """
    wanted = {forms} if isinstance(forms, str) else set(forms.values())
    for form in wanted & PACKAGES.keys():
        if device.type != "cuda":
            rule = f'"{form}" is for CUDA, and this run is on {device.type}'
            raise mistake("kernels", rule, 'Leave it out: "torch" runs everywhere.')
        if reason := not_installed(form):
            raise mistake("kernels", reason, f"pip install {PACKAGES[form].replace('_', '-')}, or leave it out.")
    for kernel, known in FORMS.items():
        form = forms if isinstance(forms, str) else forms.get(kernel, "torch")
        _CHOSEN[kernel] = form if form in known else "torch"


def not_installed(form: str) -> str:
    """Reason why a form cannot be imported; empty if it can."""
    package = PACKAGES.get(form)
    return "" if package is None or find_spec(package) is not None else f"{package} is not installed"


def form_of(kernel: Kernel, x: Tensor) -> str:
    """Form of `kernel` that runs for this tensor."""
    return _CHOSEN[kernel] if is_cuda(x) and not x.is_meta and x.dtype in TRITON_DTYPES else "torch"


@contextmanager
def chosen(kernel: Kernel, form: str) -> Iterator[None]:
    """Context in which this form of `kernel` is chosen."""
    before = _CHOSEN[kernel]
    _CHOSEN[kernel] = form
    try:
        yield
    finally:
        _CHOSEN[kernel] = before
