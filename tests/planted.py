"""Controls: a test that passes although what it asks for is not there tests nothing.

    @pytest.mark.catalogue(36)
    def test_control_...(tmp_path):
        fails(test_the_end_waits_for_a_save_in_the_background, tmp_path, EndsAtOnce)

The test itself is called, so that it and its control cannot drift apart. Bugs that change lines of the product are those of
`tests/mutations`.
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
