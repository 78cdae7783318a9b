from collections.abc import Callable
from pathlib import Path

import pytest
import torch._dynamo  # FSDP2 and optimizers load it at first use: seconds, here once and not on every forked rank
import torch.distributed.fsdp  # noqa: F401
from train.small_runs import make_corpus

from ultrascale.train.start import chosen_recompute


@pytest.fixture
def no_recomputation_is_chosen(monkeypatch) -> Callable[[], None]:
    """Call it where what is recomputed has been chosen, and nobody is to choose a second time."""
    return lambda: monkeypatch.setattr(chosen_recompute, "with_recomputation", None)


@pytest.fixture
def home(tmp_path, known_peak) -> Path:
    """A folder with a corpus, for `small_run`."""
    make_corpus(tmp_path / "tokens")
    return tmp_path
