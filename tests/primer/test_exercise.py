"""What needs no triton: a wrong result is seen, shares are of the right peak, one sentence says what to install."""

from __future__ import annotations

import sys

import pytest
import torch

from ultrascale.cli.main import main
from ultrascale.primer import exercise
from ultrascale.primer.exercise import Variant, outcome
from ultrascale.primer.lessons import LESSONS

CPU = torch.device("cpu")
NUMBERS = torch.arange(1.0, 9.0)


def variant(found: torch.Tensor, num_bytes: int = 0, flops: int = 0) -> Variant:
    return Variant("x", lambda: found, lambda: NUMBERS, num_bytes, flops)


def test_a_wrong_result_is_wrong():
    assert outcome(variant(NUMBERS), device=CPU, peak_bytes=None, peak_flops=None).is_right
    off = outcome(variant(NUMBERS.flip(0)), device=CPU, peak_bytes=None, peak_flops=None)
    assert not off.is_right and off.error > 0.5


def test_nan_is_wrong():
    assert not outcome(variant(NUMBERS / 0 * 0), device=CPU, peak_bytes=None, peak_flops=None).is_right


@pytest.mark.parametrize(("what", "unit", "share"), [({"num_bytes": 100}, "B/s", 0.5), ({"flops": 300}, "FLOP/s", 0.3)])
def test_rates_are_shares_of_their_own_peak(monkeypatch, what, unit, share):
    monkeypatch.setattr(exercise, "timed", lambda run: 2.0)
    device = type("Device", (), {"type": "cuda"})()
    found = outcome(variant(NUMBERS, **what), device=device, peak_bytes=100.0, peak_flops=500.0)  # pyright: ignore
    assert (found.unit, found.share) == (unit, share)


def test_without_triton_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert main(["primer"]) == 2
    assert "pip install triton" in capsys.readouterr().err


def test_an_unknown_lesson_is_a_usage_error(capsys):
    assert main(["primer", "magic"]) == 2
    assert "must be one of" in capsys.readouterr().err


def test_no_kernel_is_imported_before_the_interpreter_is_chosen():
    own = {f"ultrascale.primer.{name}" for name in LESSONS}
    assert own & set(sys.modules) == set()
