from collections.abc import Callable

import pytest
from train.conftest import home

from ultrascale.train.observers import metrics

__all__ = ["home", "wait_at_the_end"]


@pytest.fixture
def wait_at_the_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Has runs wait so many seconds for what is sent of them, on a machine that does much else."""
    return lambda seconds: monkeypatch.setattr(metrics, "WAIT_SECONDS", seconds)
