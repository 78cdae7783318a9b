"""Choice of the form of norm, RoPE, SwiGLU, loss, experts' GEMMs and AdamW with narrow moments that runs on CUDA.

Under torch.compile the plain form is traced and fused, and this is not asked. Without it a run says so here, once, when it is
built: one form for all, or what was fastest of each (`kernels.choice.fused_contest`).
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
"""Forms of each kernel, torch's first. Not Liger's SwiGLU, which writes gradients over gate and up, nor its loss, which adds up
the weight's gradient in 16 bits, nor its rotary positions, which take queries and keys at once."""
PACKAGES = {"triton": "triton", "liger": "liger_kernel"}
_CHOSEN: dict[str, str] = dict.fromkeys(FORMS, "torch")
"""The one state, as in `kernels.choice.device_kind`: the functions have no other argument in which it could come to them."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(forms: str | Mapping[str, str], device: torch.device) -> None:
    """Let these run from here on in this process: one form of all kernels that have it, or one by name of each.

    Raises SpecError where a form cannot.
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
    """Why a form cannot be imported; empty if it can."""
    package = PACKAGES.get(form)
    return "" if package is None or find_spec(package) is not None else f"{package} is not installed"


def form_of(kernel: Kernel, x: Tensor) -> str:
    """The form of `kernel` that runs for this tensor."""
    return _CHOSEN[kernel] if is_cuda(x) and not x.is_meta and x.dtype in TRITON_DTYPES else "torch"


@contextmanager
def chosen(kernel: Kernel, form: str) -> Iterator[None]:
    """Inside, this form of `kernel` is the one that was chosen."""
    before = _CHOSEN[kernel]
    _CHOSEN[kernel] = form
    try:
        yield
    finally:
        _CHOSEN[kernel] = before
