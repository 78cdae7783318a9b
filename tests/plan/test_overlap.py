from __future__ import annotations

import numpy as np
import pytest

from ultrascale.plan.overlap import overlapped


def test_communication_that_fits_beside_compute_shows_only_as_what_it_slows() -> None:
    exposed, slowed = overlapped(10.0, 4.0, slowdown=0.15)
    assert exposed == 0
    assert slowed == pytest.approx(10 + 0.15 * 4)


def test_communication_that_does_not_fit_is_the_total() -> None:
    exposed, slowed = overlapped(3.0, 10.0, slowdown=0.25)
    assert slowed == pytest.approx(4)
    assert exposed + slowed == pytest.approx(10)


def test_the_total_lies_between_the_longer_and_the_sum() -> None:
    compute, comm = np.meshgrid(np.linspace(0, 5, 21), np.linspace(0, 5, 21))
    exposed, slowed = overlapped(compute, comm, slowdown=0.15)
    total = exposed + slowed
    assert (total >= np.maximum(compute, comm) - 1e-12).all()
    assert (total <= compute + comm + 1e-12).all()
    assert (np.diff(total, axis=0) >= -1e-12).all() and (np.diff(total, axis=1) >= -1e-12).all()
