from pathlib import Path

import pytest
import torch._dynamo  # FSDP2 and optimizers load it at first use: seconds, here once and not on every forked rank
import torch.distributed.fsdp  # noqa: F401
from train.small_runs import make_corpus


@pytest.fixture
def home(tmp_path) -> Path:
    """A folder with a corpus, for `small_run`."""
    make_corpus(tmp_path / "tokens")
    return tmp_path
