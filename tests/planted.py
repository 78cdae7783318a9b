"""Planted bugs: a test that passes although its guard is taken out of the product tests nothing.

    @pytest.mark.catalogue(37)
    def test_control_...(tmp_path, monkeypatch):
        monkeypatch.setattr(saver, "copy_to_host", lambda plan: plan)
        fails(test_a_save_in_the_background_keeps_the_numbers_of_its_step, tmp_path)

The test itself is called, so that it and its control cannot drift apart. Forked ranks have what is patched before the fork.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ultrascale.launch.forked import RankFailed

FAILURES = (AssertionError, pytest.fail.Exception, RankFailed)
"""An assertion here or on a rank, an error that did not come, a rank that died."""


def fails(test: Callable[..., None], *arguments: object, told: str | None = None, **named: object) -> None:
    """Expect `test` to fail, and not by its limit of time; `told`: a pattern of what it says then."""
    with pytest.raises(FAILURES, match=told) as caught:
        test(*arguments, **named)
    assert "from pytest-timeout" not in str(caught.value)
