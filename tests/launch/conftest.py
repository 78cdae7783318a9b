"""How attempts end, without starting ranks."""

from collections.abc import Callable

import pytest

from ultrascale.launch import local
from ultrascale.launch.local import Ending


@pytest.fixture
def attempts_end(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Ending]], None]:
    """Has `launch_local` call what is given in place of an attempt, with the attempt and its folder."""
    return lambda attempt: monkeypatch.setattr(local, "_launch_once", attempt)
