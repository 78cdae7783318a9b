"""Choice of GPU or interpreter for the primer, in a separate module: Triton decides on import, and half of torch imports it."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec

import torch

from ultrascale.description.problems import mistake


def choose_device() -> torch.device:
    """The GPU, or the CPU with Triton's interpreter enabled for kernels that are imported afterwards.

    Raises SpecError without triton.
    """
    if find_spec("triton") is None:
        rule = "is not installed, and the kernels of the primer are written in it"
        raise mistake("triton", rule, "pip install triton (on Linux; it also comes with torch for CUDA).")
    if torch.cuda.is_available():
        return torch.device("cuda")
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "triton was imported before this"
    os.environ["TRITON_INTERPRET"] = "1"
    return torch.device("cpu")
