from pathlib import Path

import pytest
import torch._dynamo  # FSDP2 and optimizers load it at first use: seconds, here once and not on every forked rank
import torch.distributed.fsdp  # noqa: F401
from train.small_runs import make_corpus

from ultrascale.measure.machine import ceilings as machine
from ultrascale.measure.machine.ceilings import Peak


@pytest.fixture
def home(tmp_path, monkeypatch) -> Path:
    """A folder with a corpus, for `small_run`. Runs take a made-up peak, which need not be measured each time."""
    monkeypatch.setattr(machine, "peak_flops", lambda *arguments: Peak(1e10, "made up"))
    make_corpus(tmp_path / "tokens")
    return tmp_path
