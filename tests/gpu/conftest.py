"""What one test leaves on the device or in the compiler is no matter of the next."""

from __future__ import annotations

import gc
import sys
from typing import Any

import pytest
import torch

from ultrascale.kernels.rotary import Angles
from ultrascale.models import decoder


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Memory that nobody holds goes back, so that peaks are a test's own. The compiler forgets what it has: it gives up on a
    function after eight forms of it, says so in a log, and runs it uncompiled."""
    gc.collect()
    torch.cuda.empty_cache()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()


@pytest.fixture
def angles_of_the_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rotary positions are cosines in fp32, as in transformers, and a GPU's differ from the CPU's in the last bit, 6e-8: more
    than everything else of a run in fp64 together. For proofs in fp64 both take the CPU's."""
    if request.node.callspec.params.get("dtype", torch.float64) is not torch.float64:
        return
    plain = decoder.rotary_angles

    def on_the_cpu(model: Any, positions: torch.Tensor, dtype: torch.dtype, **options: Any) -> Angles:
        cos, sin = plain(model, positions.cpu(), dtype, **options)
        return cos.to(positions.device), sin.to(positions.device)

    monkeypatch.setattr(decoder, "rotary_angles", on_the_cpu)
