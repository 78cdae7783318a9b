"""Which of two forms of norm, rotary positions, SwiGLU and loss runs on CUDA: torch's operations, or our Triton kernels.

Under torch.compile the plain form is traced and fused, and this is not asked. Without it, `kernels = "triton"` of a run says so
here, once, when the run is built.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
from torch import Tensor

from ultrascale.spec.problems import Problem, SpecError

Implementation = Literal["torch", "triton"]
_CHOSEN: dict[str, Implementation] = {"elementwise": "torch"}
"""The one state, as in `kernels.device_kind`: the functions have no other argument in which it could come to them."""
TRITON_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def choose(implementation: Implementation, device: torch.device) -> None:
    """Let it run from here on in this process. Raises SpecError where Triton cannot."""
    if implementation == "triton":
        if device.type != "cuda":
            rule = f'"triton" is for CUDA, and this run is on {device.type}'
            raise SpecError([Problem("kernels", rule, 'Leave it out: "torch" runs everywhere.')])
        if find_spec("triton") is None:
            raise SpecError([Problem("kernels", '"triton" is not installed', "pip install triton, or leave it out.")])
    _CHOSEN["elementwise"] = implementation


def runs_triton(x: Tensor) -> bool:
    """Whether this tensor's kernels are Triton's."""
    return x.is_cuda and _CHOSEN["elementwise"] == "triton" and x.dtype in TRITON_DTYPES
