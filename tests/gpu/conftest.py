"""What one test leaves on the device or in the compiler is no matter of the next."""

from __future__ import annotations

import gc
import sys

import pytest
import torch


@pytest.fixture(autouse=True)
def nothing_left() -> None:
    """Memory that nobody holds goes back, so that peaks are a test's own. The compiler forgets what it has: it gives up on a
    function after eight forms of it, says so in a log, and runs it uncompiled."""
    gc.collect()
    torch.cuda.empty_cache()
    if (dynamo := sys.modules.get("torch._dynamo")) is not None:
        dynamo.reset()
