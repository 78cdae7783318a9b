"""Planted bugs: a test that passes although its guard is taken out of the product tests nothing.

    @pytest.mark.catalogue(37)
    def test_control_...(tmp_path, monkeypatch):
        ...  # take the guard out, here the copy of what is saved
        fails(test_a_save_in_the_background_keeps_the_numbers_of_its_step, tmp_path)

The test itself is called, so that it and its control cannot drift apart. Forked ranks have what is patched before the fork.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ultrascale.checkpoint import Saver
from ultrascale.contact import names
from ultrascale.launch.forked import RankFailed
from ultrascale.parallel.share import Share

FAILURES = (AssertionError, pytest.fail.Exception, RankFailed)
"""An assertion here or on a rank, an error that did not come, a rank that died."""


def fails(test: Callable[..., None], *arguments: object, told: str | None = None, **named: object) -> None:
    """Expect `test` to fail, and not by its limit of time; `told`: a pattern of what it says then."""
    with pytest.raises(FAILURES, match=told) as caught:
        test(*arguments, **named)
    assert "from pytest-timeout" not in str(caught.value)


def moments_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: a restart does not load the first moments."""

    def forget(trainer: Any, tensors: object) -> None:
        for moments in trainer.optimizer.state.values():
            moments["exp_avg"].zero_()

    monkeypatch.setattr("ultrascale.train.folder.resume._take_back", forget)


def a_neighbour_is_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: of a rank that is lost the next one is named."""
    monkeypatch.setattr("ultrascale.parallel.lost.names", lambda ranks: names([rank + 1 for rank in ranks]))


def the_norm_is_of_scaled_gradients(monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
    """The bug: the gradient norm is taken before unscaling."""
    norm = Share.gradient_norm
    monkeypatch.setattr(Share, "gradient_norm", lambda share: norm(share) * scale)


def nobody_holds_the_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: a saver does not keep the folder open that it began with."""
    monkeypatch.setattr(Saver, "_open", lambda saving: None)
